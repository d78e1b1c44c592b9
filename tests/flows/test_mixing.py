"""The maps between channels."""

import keras
import numpy as np
import pytest

from keras_auxref import kernels
from keras_auxref.flows.mixing import MIXINGS, check_mixing, mixing_template
from keras_auxref.initializers import FixedPointFree
from keras_auxref.layers import OrthogonalDense

SEED = 3


@pytest.mark.parametrize("d", [1, 2, 5, 12])
@pytest.mark.parametrize(
    "mixing", [*(m for m in MIXINGS if m != "permutation"), kernels.Spectral(0.9), kernels.RelaxedCayley(margin=0.1)]
)
def test_every_mixing_starts_as_the_orthogonal_map_of_its_seed(mixing, d):
    q = np.asarray(FixedPointFree(SEED)((d, d), dtype="float64"))
    # RelaxedCayley moves eigenvalues of Q that are within 0.02 radians of 1: none are, with this seed.
    assert np.abs(np.linalg.eigvals(q) - 1).min() > 0.03
    x = np.random.default_rng(d).normal(size=(6, 3, d))
    y = mixing_template(mixing, SEED, "float64")(x)
    # The paper's symmetric W = 3/2 I reflects every vector along itself.
    sign = -1 if mixing == "aux_spectral" or isinstance(mixing, kernels.Spectral) else 1
    np.testing.assert_allclose(y, sign * x @ q.T, atol=1e-9)


def test_permutation_reverses_channels_whatever_the_seed():
    layer = mixing_template("permutation", SEED, "float64")
    x = np.random.default_rng(0).normal(size=(2, 3, 5))
    np.testing.assert_array_equal(layer(x), x[..., ::-1])
    assert layer.certificate().invertible


def test_only_what_should_train_is_trainable():
    trainable = {}
    for mixing in MIXINGS:
        layer = mixing_template(mixing, 0, "float32")
        layer.build((None, 4))
        trainable[mixing] = sum(int(np.prod(v.shape)) for v in layer.trainable_variables)
    assert trainable == {
        "aux_factored": 36,
        "aux_factored_right": 20,
        "aux": 16,
        "aux_spectral": 16,
        "aux_relaxed_cayley": 32,
        "householder": 16,
        "conv": 16,
        "aux_conv": 36,
        "qr": 26,
        "aux_factored_qr": 46,
        "fixed": 0,
        "permutation": 0,
    }


def test_names_are_checked():
    with pytest.raises(ValueError, match=r"Expected one of .*'aux'.* Received: 'lu'"):
        check_mixing("lu")
    with pytest.raises(ValueError, match="Received"):
        check_mixing(kernels.Free())
    with pytest.raises(ValueError, match=r"The layer must be invertible.*Received: <Dense"):
        check_mixing(keras.layers.Dense(3))
    layer = OrthogonalDense()
    layer.build((None, 3))
    with pytest.raises(ValueError, match=r"Expected a layer that has not been built. Received: 'orthogonal_dense"):
        check_mixing(layer)
    with pytest.warns(DeprecationWarning, match="give a layer"):
        kernel = check_mixing(keras.saving.serialize_keras_object(kernels.Spectral(0.7)))
    assert isinstance(kernel, kernels.Spectral)
    assert kernel.bound == 0.7


def test_xla_is_for_mixings_that_it_can_factor():
    assert {mixing: mixing_template(mixing, 0, "float32").supports_xla for mixing in MIXINGS} == {
        "aux_factored": True,
        "aux_factored_right": True,
        "aux": False,
        "aux_spectral": True,
        "aux_relaxed_cayley": False,
        "householder": True,
        "conv": True,
        "aux_conv": True,
        "qr": True,
        "aux_factored_qr": True,
        "fixed": True,
        "permutation": True,
    }
