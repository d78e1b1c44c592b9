"""What is proven, and what is measured."""

import keras
import numpy as np
import pytest

from keras_auxref import Glow, ops
from keras_auxref.invertible import Invertible
from tests.flows.support import disturb, images

SHAPE = (4, 4, 3)


def small(mixing, **kwargs):
    return Glow(SHAPE, levels=1, steps=2, hidden=4, mixing=mixing, seed=1, **kwargs)


@pytest.mark.parametrize(
    "mixing", ["aux_factored", "aux_factored_right", "aux_spectral", "aux_relaxed_cayley", "householder", "conv", "fixed"]
)
def test_mixings_with_a_promise_keep_it_away_from_the_start(mixing):
    certificates = disturb(small(mixing), size=1.0).certificates()
    assert len(certificates) == (4 if mixing == "aux_spectral" else 2)
    assert all(certificate.invertible for certificate in certificates.values()), certificates


def test_free_auxiliary_reflections_start_proven_and_lose_it():
    model = small("aux")
    assert all(certificate.invertible for certificate in model.certificates().values())
    assert not any(certificate.invertible for certificate in disturb(model, size=1.0).certificates().values())


def test_a_singular_convolution_is_not_called_invertible():
    model = small("conv")
    (kernel,) = (w for w in model.weights if w.name == "mixing_kernel")
    for wrong in (np.ones((12, 12)), np.full((12, 12), np.nan)):
        kernel.assign(np.stack([np.eye(12), wrong]))
        certificates = model.certificates()
        assert certificates["level_1_step_1_mixing"].invertible
        assert not certificates["level_1_step_2_mixing"].invertible


def test_a_mixing_that_proves_nothing_is_not_called_invertible():
    class Unknown(Invertible, keras.layers.Layer):
        def forward_and_log_det(self, x, training=None):
            return 0 * x, 0 * x[..., 0]

    model = small(Unknown())
    with pytest.raises(NotImplementedError, match="Nothing is known about the invertibility of layer 'mixing'"):
        model.certificates()


@pytest.mark.parametrize("mixing", ["aux_relaxed_cayley", "aux_factored", "aux_factored_right"])
def test_branches_of_certified_layers_are_one_to_one(mixing):
    found = disturb(small(mixing), size=0.3).branches(images(3, SHAPE), counted=5)
    assert [b.layer for b in found] == ["level_1_step_1_mixing", "level_1_step_2_mixing"]
    for branch in found:
        assert branch.invertible
        assert branch.preimages == 1
        assert branch.most_preimages == 1
        assert branch.returned == 1
        assert branch.vectors == 3 * 4
        assert branch.counted == 5


def test_branches_count_what_the_pencil_counts_and_see_what_is_not_returned():
    model = small("aux", dtype="float64")
    (kernel,) = (w for w in model.weights if w.name == "mixing_kernel")
    w = np.random.default_rng(0).normal(size=(12, 12))
    kernel.assign(np.stack([w, w]))
    x = images(8, SHAPE)
    inputs = []
    model.flow.walk_mixings(x / 255, lambda name, layer, x: inputs.append(np.asarray(x).reshape(-1, 12)))
    counts = [len(ops.preimages(y, w)) for y in np.asarray(ops.reflect(inputs[0], w))]
    branch = model.branches(x, counted=len(counts))[0]
    assert not branch.invertible
    assert branch.counted == len(counts)
    assert branch.preimages == pytest.approx(np.mean(counts))
    assert branch.most_preimages == max(counts) > 1
    with model.flow.steps_of_levels[0].copy(0) as step:
        back = np.asarray(step.layers[1].inverse(ops.reflect(inputs[0], w)))
    returned = np.linalg.norm(back - inputs[0], axis=-1) < 1e-3 * np.linalg.norm(inputs[0], axis=-1)
    assert branch.returned == pytest.approx(returned.mean())
    assert branch.returned < 1


def test_linear_mixings_have_no_branches():
    assert small("conv").branches(images(1, SHAPE)) == []
