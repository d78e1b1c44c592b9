"""ModReLU: sign(x) · relu(|x| + b) with a trained b."""

from pathlib import Path

import keras
import numpy as np
import pytest

from keras_auxref.layers import ModReLU
from tests.keras_contract import run_layer_test
from tests.support import assert_agree


def test_contract() -> None:
    run_layer_test(
        ModReLU,
        init_kwargs={"bias_regularizer": "l2"},
        input_shape=(2, 3, 4),
        expected_output_shape=(2, 3, 4),
        expected_num_trainable_weights=1,
        expected_num_losses=1,
        supports_masking=True,
    )


@pytest.mark.parametrize(("bias", "expected"), [(-1.0, [-2, 0, 0, 0, 2]), (0.0, [-3, -1, 0, 1, 3]), (1.0, [-4, -2, 0, 2, 4])])
def test_values(bias: float, expected: list[float], dtype: str) -> None:
    layer = ModReLU(bias_initializer=keras.initializers.Constant(bias), dtype=dtype)
    y = layer(np.array([[-3, -1, 0, 1, 3]], dtype))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y[0], expected)


def test_default_start_is_nearly_the_identity() -> None:
    layer = ModReLU()
    layer.build((None, 500))
    bias = layer.bias.numpy()
    assert 0.0095 < np.abs(bias).max() <= 0.01
    assert bias.min() < 0 < bias.max()


def test_learns_its_bias(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
    y = np.sign(x) * np.maximum(np.abs(x) + np.array([-0.5, 0.2, 0.0], "float32"), 0)
    model = keras.Sequential([keras.Input((3,)), ModReLU(name="shrink")])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(x, y, epochs=40, batch_size=64, verbose=0)
    np.testing.assert_allclose(model.layers[0].bias, [-0.5, 0.2, 0.0], atol=0.02)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"Expected shape \(batch, ..., d\)"):
        ModReLU().build((None, None))
