import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, initializers, kernels, ops
from tests.keras_contract import run_layer_test
from tests.support import assert_agree, orthogonal, relative

KERNELS = ["free", "spectral", "relaxed_cayley"]


@pytest.mark.parametrize(
    ("kernel", "shape"), [("free", (2, 4)), ("spectral", (1, 4)), ("relaxed_cayley", (3, 5, 4)), ("free", (2, 3, 2, 4))]
)
def test_keras_own_layer_contract(kernel, shape):
    run_layer_test(
        AuxReflection,
        init_kwargs={"kernel": kernel, "kernel_regularizer": "l2"},
        input_shape=shape,
        expected_output_shape=shape,
        expected_num_trainable_weights=2 if kernel == "relaxed_cayley" else 1,
        expected_num_non_trainable_weights=0,
        expected_num_losses=2 if kernel == "relaxed_cayley" else 1,
        supports_masking=True,
    )


def test_keras_own_layer_contract_with_a_network():
    run_layer_test(
        AuxReflection,
        init_kwargs={"network": keras.layers.Dense(4, activation="tanh")},
        input_shape=(3, 4),
        expected_output_shape=(3, 4),
        expected_num_trainable_weights=2,
        supports_masking=True,
        run_training_check=True,
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_is_the_op_with_the_kernel(rng, dtype, kernel):
    layer = AuxReflection(kernel, dtype=dtype)
    x = rng.normal(size=(6, 5)).astype(dtype)
    assert_agree(layer(x), ops.reflect(x, layer.kernel))
    np.testing.assert_allclose(layer.log_det_jacobian(x), ops.log_det_jacobian(x, layer.kernel), atol=1e-5)
    assert layer.kernel.dtype == dtype
    y, tolerance = layer(x), 1e-4 if dtype == "float32" else 1e-10
    back = layer.inverse(tf.identity(y))
    assert layer.certificate().invertible == (kernel != "free")
    # A free W may have more than one preimage of y: any of them will do.
    assert relative(*((ops.reflect(back, layer.kernel), y) if kernel == "free" else (back, x))) < tolerance


@pytest.mark.parametrize("determinant", [1, -1])
def test_drop_in_for_dense_trains_saves_and_loads(rng, tmp_path, determinant):
    """Any orthogonal map is learnt to the last digit, and the model survives the disk with its optimiser."""
    u = orthogonal(8, rng, determinant)
    x = rng.normal(size=(1024, 8)).astype("float32")
    model = keras.Sequential([keras.Input((8,)), AuxReflection()])
    model.compile(keras.optimizers.Adam(0.02), "mse")
    history = model.fit(x, x @ u.T, epochs=15, verbose=0).history["loss"]
    assert history[0] > 0.1
    assert history[-1] < 1e-9
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert_agree(again.predict(x, verbose=0), model.predict(x, verbose=0))
    target = x[:, ::-1]
    continued, resumed = (m.fit(x, target, shuffle=False, verbose=0).history["loss"][0] for m in (model, again))
    assert resumed == pytest.approx(continued, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_functional_subclassed_and_compiled_by_xla(rng, kernel):
    x, y = rng.normal(size=(32, 6)).astype("float32"), rng.normal(size=(32, 1)).astype("float32")

    class Subclass(keras.Model):
        def __init__(self):
            super().__init__()
            self.reflection = AuxReflection(kernel)
            self.head = keras.layers.Dense(1)

        def call(self, inputs):
            return self.head(self.reflection(inputs))

    inputs = keras.Input((6,))
    functional = keras.Model(inputs, keras.layers.Dense(1)(AuxReflection(kernel)(inputs)))
    for model in (Subclass(), functional):
        model.compile("adam", "mse", jit_compile=True)
        losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
        assert losses[-1] < losses[0]


def test_xla_and_plain_training_agree(rng):
    x = rng.normal(size=(64, 6)).astype("float32")
    losses = []
    for jit in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), AuxReflection("spectral")])
        model.compile("sgd", "mse", jit_compile=jit)
        losses.append(model.fit(x, x[:, ::-1], epochs=2, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "kernel"), [("mixed_bfloat16", "free"), ("mixed_float16", "spectral"), ("mixed_bfloat16", "relaxed_cayley")]
)
def test_mixed_precision(rng, policy, kernel):
    half = policy.removeprefix("mixed_")
    layer = AuxReflection(kernel, dtype=policy)
    x = rng.normal(size=(4, 64)).astype("float32")
    y = layer(x)
    assert y.dtype == half
    assert all(weight.dtype == "float32" for weight in layer.weights)
    assert layer.kernel.dtype == "float32"
    exact = ops.reflect(tf.cast(tf.cast(x, half), "float64"), tf.cast(layer.kernel, "float64"))
    assert relative(tf.cast(y, "float64"), exact) < (0.02 if half == "float16" else 0.08)
    model = keras.Sequential([keras.Input((64,)), layer, keras.layers.Dense(1, dtype="float32")])
    model.compile("adam", "mse")
    assert np.isfinite(model.fit(x, x[:, :1], verbose=0).history["loss"][0])


def test_masks_pass_through(rng):
    x = np.array([[1, 2, 0], [3, 0, 0]])
    inputs = keras.Input((3,), dtype="int32")
    outputs = AuxReflection()(keras.layers.Embedding(5, 4, mask_zero=True)(inputs))
    np.testing.assert_array_equal(outputs._keras_mask is not None, True)
    pooled = keras.layers.GlobalAveragePooling1D()(outputs)
    model = keras.Model(inputs, [outputs, pooled])
    y, mean = (np.asarray(t) for t in model(x))
    np.testing.assert_allclose(mean[1], y[1, 0], rtol=1e-5)


def test_arbitrary_network(rng, tmp_path):
    network = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(5)])
    model = keras.Sequential([keras.Input((5,)), AuxReflection(network=network)])
    x = rng.normal(size=(10, 5)).astype("float32")
    y = model(x)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(y, ops.householder(network(x), x), rtol=1e-5)
    assert len(model.trainable_weights) == 4
    model.save(tmp_path / "model.keras")
    assert_agree(keras.models.load_model(tmp_path / "model.keras")(x), y)
    layer = model.layers[0]
    for call in (
        lambda: layer.inverse(x),
        lambda: layer.log_det_jacobian(x),
        layer.certificate,
        layer.bijector,
        lambda: layer.kernel,
    ):
        with pytest.raises(NotImplementedError, match=r"needs a linear n\(x\) = Wx"):
            call()


def test_starts_as_an_orthogonal_map(rng):
    layer = AuxReflection(kernel_initializer=initializers.ReflectionOf(initializers.Cayley(seed=1)))
    x = rng.normal(size=(5, 6)).astype("float32")
    u = np.asarray(initializers.Cayley(seed=1)((6, 6)))
    np.testing.assert_allclose(layer(x), x @ u.T, atol=1e-5)


def test_zero_rows_and_one_dimension(rng):
    layer = AuxReflection()
    x = tf.Variable(np.concatenate([np.zeros((1, 4)), rng.normal(size=(1, 4))]).astype("float32"))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x) ** 3)
    for gradient in tape.gradient(loss, [x, *[w.value for w in layer.weights]]):
        assert np.isfinite(gradient).all()
    for kernel in KERNELS:
        np.testing.assert_allclose(AuxReflection(kernel)(np.ones((2, 1), "float32")), -1, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AuxReflection(kernel="cayley"), r"Expected.*'free', 'relaxed_cayley', 'spectral'.*Received: 'cayley'"),
        (lambda: AuxReflection(kernel=kernels.Spectral(bound=2)), "0 < bound < 1. Received: 2"),
        (lambda: AuxReflection(network=np.tanh), r"Expected a `keras.layers.Layer`. Received"),
        (lambda: AuxReflection(network=keras.layers.Dense(3)).build((None, 4)), r"Expected \(None, 4\). Received: \(None, 3\)"),
        (lambda: AuxReflection().build((4,)), r"Expected shape \(batch, ..., d\). Received: \(4,\)"),
        (lambda: AuxReflection().build((2, None)), r"known last axis.*Received: \(2, None\)"),
        (lambda: AuxReflection(dtype="int32"), "floating-point dtype. Received: int32"),
        (lambda: AuxReflection()(np.ones((2, 3), complex)), "Expected floats or integers. Received: complex128"),
        (lambda: AuxReflection().kernel, "has not been built"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_another_last_axis_than_at_build_is_refused():
    layer = AuxReflection()
    layer(np.ones((2, 3), "float32"))
    with pytest.raises(ValueError, match="expected axis -1"):
        layer(np.ones((2, 4), "float32"))


def test_branch_follows_the_training_data(rng, tmp_path):
    layer = AuxReflection(track_branch=True, kernel_initializer=initializers.ReflectionOf(orthogonal(6, rng)), dtype="float64")
    x = rng.normal(size=(50, 6))
    layer.build(x.shape)
    assert float(layer.branch) == pytest.approx(1)  # exact for W = I − U
    layer.trainable_variables[0].assign(layer.kernel + 0.3 * rng.normal(size=(6, 6)))
    u = x @ np.asarray(layer.kernel).T
    c = 2 * np.sum(u * x, -1) / np.sum(u * u, -1)
    np.testing.assert_allclose(layer.coefficient(x), c, rtol=1e-12)
    layer(x)
    assert float(layer.branch) == pytest.approx(1)
    layer(x, training=True)
    assert float(layer.branch) == pytest.approx(0.9 + 0.1 * c.mean())
    layer.forward_and_log_det(x, training=True)
    assert float(layer.branch) == pytest.approx(0.9 * (0.9 + 0.1 * c.mean()) + 0.1 * c.mean())
    before = float(layer.branch)
    layer(np.full((1, 6), np.nan), training=True)  # a batch that went wrong
    assert float(layer.branch) == before
    model = keras.Sequential([layer])
    model.save(tmp_path / "m.keras")
    assert float(keras.models.load_model(tmp_path / "m.keras").layers[0].branch) == before


def test_inverse_takes_the_branch_of_the_data():
    layer = AuxReflection(track_branch=True, dtype="float64")
    layer.build((None, 4))
    w = np.random.default_rng(4).normal(size=(4, 4))
    layer.trainable_variables[0].assign(w)
    y = next(y for y in np.random.default_rng(5).normal(size=(12, 4)) if len(ops.preimages(y, w)) == 3)
    for x in ops.preimages(y, w)[[0, -1]]:
        layer.branch.assign(float(layer.coefficient(x[None])[0]))
        np.testing.assert_allclose(layer.inverse(y[None])[0], x, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
def test_forward_and_log_det_are_the_two_at_once(rng, kernel):
    layer, x = AuxReflection(kernel=kernel, dtype="float64"), rng.normal(size=(3, 2, 5))
    y, log_det = layer.forward_and_log_det(layer(x))
    np.testing.assert_allclose(y, layer(layer(x)), rtol=1e-12)
    np.testing.assert_allclose(log_det, layer.log_det_jacobian(layer(x)), rtol=1e-12)


def test_a_frozen_layer_keeps_its_branch(rng):
    """As BatchNormalization keeps its statistics."""
    layer = AuxReflection(track_branch=True)
    x = rng.normal(size=(64, 4)).astype("float32")
    layer(x, training=True)
    before = layer.branch.numpy()
    layer.trainable = False
    layer(x, training=True)
    layer.forward_and_log_det(x, training=True)
    model = keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], verbose=0)
    assert layer.branch.numpy() == before
    layer.trainable = True
    layer(x, training=True)
    assert layer.branch.numpy() != before


@pytest.mark.parametrize("kernel", KERNELS)
def test_constraints_hold_after_a_step(rng, tmp_path, kernel):
    model = keras.Sequential([keras.Input((4,)), AuxReflection(kernel, kernel_constraint=keras.constraints.MaxNorm(0.5))])
    model.compile(keras.optimizers.SGD(10.0), "mse")
    x = rng.normal(size=(8, 4)).astype("float32")
    model.fit(x, x[:, ::-1], verbose=0)
    for weight in model.trainable_weights:
        assert np.linalg.norm(weight, axis=0).max() < 0.5 + 1e-5
    model.save(tmp_path / "m.keras")
    assert keras.models.load_model(tmp_path / "m.keras").layers[0].kernel_constraint.max_value == 0.5


USES = {
    "inverse": lambda layer, x: layer.inverse(x),
    "log_det_jacobian": lambda layer, x: layer.log_det_jacobian(x),
    "forward_and_log_det": lambda layer, x: layer.forward_and_log_det(x),
    "bijector": lambda layer, x: layer.bijector(),
}


@pytest.mark.parametrize("name", USES)
def test_without_a_certificate_it_warns_once(rng, name):
    x = rng.normal(size=(3, 4)).astype("float32")
    layer = AuxReflection(name="mine")
    layer(x)
    with pytest.warns(UserWarning, match=f"Nothing proves that layer 'mine' is one-to-one, and `{name}` is used. Not proven"):
        USES[name](layer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for use in USES.values():
            use(layer, x)


@pytest.mark.parametrize("arguments", [{"strict": False}, {"kernel": "spectral"}, {"kernel_initializer": "fixed_point_free"}])
def test_silent_where_told_so_or_certified(rng, arguments):
    x = rng.normal(size=(3, 4)).astype("float32")
    layer = AuxReflection(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        layer(x)
        for use in USES.values():
            use(layer, x)


def test_strict_refuses_also_when_a_graph_is_traced(rng):
    x = rng.normal(size=(3, 4)).astype("float32")
    layer = AuxReflection.from_config(AuxReflection(strict=True).get_config())
    layer(x)
    for use in USES.values():
        with pytest.raises(ValueError, match="Expected a certificate, because of strict=True"):
            use(layer, x)
    with pytest.raises(ValueError, match="strict=True"):
        tf.function(layer.inverse)(x)
    with pytest.raises(ValueError, match="Expected None, True or False"):
        AuxReflection(strict="yes")


def test_weights_that_are_nodes_of_a_graph_are_not_certified(rng):
    """As in a loop over stacked weights: nothing can be told, and nothing breaks."""
    x, w = rng.normal(size=(3, 4)).astype("float32"), rng.normal(size=(4, 4)).astype("float32")
    layer = AuxReflection(strict=True)
    layer.build((None, 4))

    @tf.function
    def log_det(w):
        with keras.StatelessScope(state_mapping=[(layer.weights[0], w)]):
            return layer.log_det_jacobian(x)

    np.testing.assert_allclose(log_det(tf.constant(w)), ops.log_det_jacobian(x, w), rtol=1e-4, atol=1e-5)
