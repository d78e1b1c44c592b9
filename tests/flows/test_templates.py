"""Layers as mixings and couplings of a flow: templates, of which every step gets a copy."""

import keras
import numpy as np
import pytest

from keras_auxref import AuxReflection, FactoredReflection, Glow
from keras_auxref.certificate import proven
from keras_auxref.flows import AffineCoupling
from keras_auxref.invertible import Invertible
from tests.flows.support import images
from tests.support import assert_agree

SHAPE = (4, 4, 2)


def small(**kwargs):
    return Glow(SHAPE, **{"levels": 1, "steps": 2, "hidden": 4, "seed": 1, **kwargs})


def test_layers_are_trained_saved_and_loaded(tmp_path):
    model, x = small(mixing=FactoredReflection(margin=0.3), coupling=AffineCoupling(hidden=6, bound=1.0)), images(8, SHAPE)
    model.fit(x, verbose=0)
    model.save(tmp_path / "flow.keras")
    again = keras.models.load_model(tmp_path / "flow.keras")
    assert_agree(again.log_prob(x), model.log_prob(x))
    assert again.mixing.margin == 0.3
    assert again.flow.coupling.bound == 1.0
    for flow in (model, again):
        with flow.flow.steps_of_levels[0].copy(1) as step:
            assert [layer.name for layer in step.layers] == ["act_norm", "mixing", "coupling"]
            assert step.layers[1].margin == 0.3
            assert step.layers[2].hidden == 6
    assert list(again.certificates()) == ["level_1_step_1_mixing", "level_1_step_2_mixing"]
    assert {w.shape[0] for w in again.flow.weights} == {2}


def test_xla_follows_the_layer():
    assert small(mixing=AuxReflection("spectral")).supports_jit
    assert not small(mixing=AuxReflection("relaxed_cayley")).supports_jit


class Scale(Invertible, keras.layers.Layer):
    """y = e^s x with two methods and nothing else, not even registered."""

    def build(self, input_shape):
        self.log_scale = self.add_weight(shape=(input_shape[-1],), initializer="zeros", name="log_scale")

    def forward_and_log_det(self, x, training=None):
        return x * keras.ops.exp(self.log_scale), keras.ops.zeros_like(x[..., 0]) + keras.ops.sum(self.log_scale)

    def inverse(self, y):
        return y * keras.ops.exp(-self.log_scale)

    def compute_output_shape(self, input_shape):
        return input_shape


class CertifiedScale(Scale):
    def certificate(self):
        return proven("a positive scale")


def test_two_methods_make_a_layer():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    layer = Scale()
    y = layer(x)
    layer.log_scale.assign([0.1, 0.2, 0.3, -0.4])
    np.testing.assert_allclose(layer(x), x * np.exp([0.1, 0.2, 0.3, -0.4]), rtol=1e-6)
    np.testing.assert_allclose(layer.log_det_jacobian(x), np.full(3, 0.2), rtol=1e-5)
    np.testing.assert_allclose(layer.bijector().inverse(layer(x)), x, rtol=1e-5)
    assert y.shape == (3, 4)


def test_a_layer_of_ones_own_is_trained_in_a_flow():
    model, x = small(mixing=CertifiedScale()), images(8, SHAPE)
    model.compile(optimizer=Glow.optimizer(1e-2, 0))
    before = model.flow.get_weights()
    model.fit(x, epochs=2, verbose=0)
    moved = {w.name for w, b in zip(model.flow.weights, before, strict=True) if np.abs(np.asarray(w) - b).max() > 0}
    assert "mixing_log_scale" in moved
    np.testing.assert_allclose(model.decode(model.encode(x)[0]), x / 255, atol=1e-4)
    assert all(certificate.invertible for certificate in model.certificates().values())
    with pytest.raises(NotImplementedError, match="Nothing is known about the invertibility of layer 'mixing'"):
        small(mixing=Scale()).certificates()


def test_without_the_two_methods_it_is_said_which_is_missing():
    class Nothing(Invertible, keras.layers.Layer):
        pass

    for call in (Nothing().forward_and_log_det, Nothing().log_det_jacobian):
        with pytest.raises(NotImplementedError, match="Nothing lacks `forward_and_log_det`, which an invertible layer must have"):
            call(np.ones((2, 3)))
    with pytest.raises(NotImplementedError, match="Nothing lacks `inverse`"):
        Nothing().inverse(np.ones((2, 3)))


def test_layers_of_another_precision_are_refused():
    with pytest.raises(ValueError, match=r"Expected a layer with dtype='float64'. Received: .* with dtype='float32'"):
        small(mixing=FactoredReflection(), dtype="float64")
    assert small(mixing=FactoredReflection(dtype="float64"), dtype="float64").compute_dtype == "float64"


def test_built_layers_and_other_layers_are_refused():
    layer = AffineCoupling(hidden=2)
    layer.build((None, 4, 4, 2))
    with pytest.raises(ValueError, match=r"`coupling` is a template.*Received: 'affine_coupling.*', which has weights"):
        small(coupling=layer)
    with pytest.raises(ValueError, match=r"The layer must be invertible.*Received: <Dense"):
        small(coupling=keras.layers.Dense(3))
