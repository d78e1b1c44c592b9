import keras
import numpy as np
import pytest

from keras_auxref.regularizers import MODES, SoftOrthogonal
from tests.support import differences, gradients, orthogonal, relative

SHAPES = [(5, 5), (7, 3), (3, 7), (3, 3, 2, 4), (1, 1, 2, 6), (4, 1)]


def _formula(mode, kernel):
    w = kernel.reshape(-1, kernel.shape[-1])
    columns, rows = (g - np.eye(len(g)) for g in (w.T @ w, w @ w.T))
    small = columns if len(columns) <= len(rows) else rows
    return {
        "so": np.sum(small**2),
        "dso": np.sum(columns**2) + np.sum(rows**2),
        "mc": np.abs(small).max(),
        "srip": np.linalg.norm(small, 2),
    }[mode]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_is_the_formula(rng, dtype, mode, shape):
    kernel = rng.normal(size=shape).astype(dtype)
    value = SoftOrthogonal(mode, 0.3, iterations=60)(kernel)
    assert value.dtype == dtype
    assert float(value) == pytest.approx(0.3 * _formula(mode, kernel.astype("float64")), rel=1e-3 if dtype == "float32" else 1e-6)


def test_power_iteration_comes_from_below(rng):
    kernel = rng.normal(size=(9, 9))
    values = [float(SoftOrthogonal("srip", 1.0, iterations=k)(kernel)) for k in (1, 2, 4, 8)]
    assert values == sorted(values)
    assert 0.8 * _formula("srip", kernel) < values[2] <= _formula("srip", kernel) * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_that_of_central_differences(rng, mode, shape):
    penalty, kernel = SoftOrthogonal(mode, 1.0, iterations=200), rng.normal(size=shape)
    (computed,) = gradients(penalty, [kernel], 1.0)[1:]
    (expected,) = differences(lambda w: _formula(mode, w), [kernel], np.ones(()))
    assert relative(computed, expected) < 1e-5


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (3, 6)])
@pytest.mark.parametrize("mode", MODES)
def test_orthogonal_kernels_cost_nothing(rng, mode, shape):
    kernel = orthogonal(6, rng)[: shape[0], : shape[1]] if shape[0] != 4 else np.eye(4)
    value, gradient = gradients(SoftOrthogonal(mode), [kernel], 1.0)
    if mode != "dso" or shape[0] == shape[1]:  # WᵀW and WWᵀ are the identity only where W is square
        assert float(value) < 1e-12
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("mode", MODES)
def test_trains_towards_orthogonal_columns_and_loads(rng, tmp_path, mode):
    layer = keras.layers.Dense(4, kernel_regularizer=SoftOrthogonal(mode, 1.0), use_bias=False)
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile(keras.optimizers.SGD(0.02), loss=lambda y_true, y: 0 * keras.ops.sum(y))
    before = _formula("so", layer.kernel.numpy())
    model.fit(np.ones((8, 6)), np.ones((8, 4)), batch_size=1, epochs=6, verbose=0)
    assert _formula("so", layer.kernel.numpy()) < 0.7 * before
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras", compile=False).layers[0].kernel_regularizer
    assert loaded.get_config() == {"mode": mode, "strength": 1.0, "iterations": 4}


def test_half_precision(rng):
    kernel = keras.ops.cast(rng.normal(size=(4, 4)), "bfloat16")
    for mode in MODES:
        assert np.isfinite(float(SoftOrthogonal(mode)(kernel)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SoftOrthogonal("frobenius"), r"Expected one of \['so', 'dso', 'mc', 'srip'\]. Received: 'frobenius'"),
        (lambda: SoftOrthogonal(strength=-1.0), "Expected 0 ≤ strength < ∞. Received: -1.0"),
        (lambda: SoftOrthogonal(strength=float("nan")), "Received: nan"),
        (lambda: SoftOrthogonal(iterations=0), "positive integer.*Received: 0"),
        (lambda: SoftOrthogonal()(np.ones(3)), r"Expected shape \(..., n, m\). Received: \(3,\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
