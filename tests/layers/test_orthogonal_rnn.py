"""OrthogonalRNN: the fused loop and the general one compute the same, and everything Keras promises holds."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import OrthogonalRNN, kernels
from keras_auxref.layers import ModReLU, orthogonal_rnn
from tests.keras_contract import run_layer_test
from tests.support import assert_agree, pairwise, reflect, relative

TRANSITIONS = ["aux", "householder", "cayley", "exp"]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def general(layer: OrthogonalRNN) -> keras.layers.RNN:
    """The same cell and weights in Keras' own loop, which calls the cell and nothing else."""
    names = ("return_sequences", "return_state", "go_backwards")
    return keras.layers.RNN(layer.cell, **{name: getattr(layer, name) for name in names}, dtype=layer.dtype_policy)


def value_and_gradients(layer: Any, x: Any, weights: list[Any]) -> list[np.ndarray]:
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = tf.nest.flatten(layer(x, training=True))
        rng = np.random.default_rng(2)
        loss = tf.add_n([tf.reduce_sum(y * rng.normal(size=y.shape)) for y in outputs])
    return [y.numpy() for y in (*outputs, *tape.gradient(loss, [x, *weights]))]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which activations went through the fused loop."""
    seen: list[str] = []
    fused = orthogonal_rnn.recurrence
    monkeypatch.setattr(orthogonal_rnn, "recurrence", lambda *a, **k: (seen.append(k["activation"]), fused(*a, **k))[1])
    return seen


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_contract(transition: str) -> None:
    sequences = transition in ("aux", "exp")
    run_layer_test(
        OrthogonalRNN,
        init_kwargs={"units": 6, "transition": transition, "return_sequences": sequences},
        input_shape=(3, 4, 2),
        expected_output_shape=(3, 4, 6) if sequences else (3, 6),
        expected_num_trainable_weights=5,
        expected_num_non_trainable_weights=0,
        expected_num_seed_generators=1,
        supports_masking=True,
    )


ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"return_sequences": True},
    {"return_sequences": True, "return_state": True, "go_backwards": True},
    {"use_bias": False},
]


@pytest.mark.parametrize(
    ("activation", "arguments", "transition"),
    pairwise(["modrelu", "tanh", "relu", "sigmoid", None], ARGUMENTS, ["aux", "exp"]),
)
def test_fused_and_general_loop_agree(transition: str, activation: Any, arguments: dict[str, Any], calls: list[str]) -> None:
    layer = OrthogonalRNN(6, transition, activation=activation, bias_initializer="normal", dtype="float64", **arguments)
    x = random(4, 7, 3).astype("float64")
    layer.build(x.shape)
    weights = [w.value for w in layer.trainable_weights]
    found = value_and_gradients(layer, x, weights)
    assert calls == [activation or "linear"]
    expected = value_and_gradients(general(layer), x, weights)
    assert len(calls) == 1
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-12


def test_the_general_loop_is_used_where_it_has_to_be(calls: list[str]) -> None:
    x = random(2, 5, 3)
    mask = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], bool)
    OrthogonalRNN(4)(x, mask=mask)
    OrthogonalRNN(4, unroll=True)(x)
    OrthogonalRNN(4, recurrent_dropout=0.5)(x, training=True)
    OrthogonalRNN(4, activation="gelu")(x)
    OrthogonalRNN(4, activation=keras.layers.PReLU())(x)
    OrthogonalRNN(4, dtype="mixed_bfloat16")(x)
    assert calls == []
    OrthogonalRNN(4, recurrent_dropout=0.5, dropout=0.5)(x)
    OrthogonalRNN(4, dropout=0.5, activation=ModReLU())(x, training=True)
    assert calls == ["modrelu", "modrelu"]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_what_does_not_depend_on_the_state_is_computed_once(transition: str, masked: bool) -> None:
    """Only what multiplies the state is inside the loop: one product for any number of steps."""
    layer = OrthogonalRNN(4, transition)
    layer.build((2, 5, 3))
    mask = np.ones((2, 5), bool) if masked else None
    graph = tf.function(lambda x: layer(x, mask=mask)).get_concrete_function(tf.TensorSpec((2, 5, 3))).graph
    bodies = [node for node in graph.as_graph_def().library.function if "while_body" in node.signature.name]
    products = [[node.op for node in body.node_def if "MatMul" in node.op] for body in bodies]
    assert ["MatMul"] in products
    assert all(len(found) <= 1 for found in products)


def test_masked_steps_keep_the_state() -> None:
    layer = OrthogonalRNN(4, return_sequences=True)
    x = random(3, 6, 2)
    mask = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 0, 1, 0, 1, 0]], bool)
    y, plain = layer(x, mask=mask).numpy(), layer(x).numpy()
    np.testing.assert_allclose(y[0], plain[0], atol=1e-6)
    np.testing.assert_allclose(y[1, 3:], np.tile(plain[1, 2], (3, 1)), atol=1e-6)
    np.testing.assert_allclose(y[2, 1::2], y[2, ::2], atol=1e-6)
    np.testing.assert_allclose(y[2, ::2], layer(x[2:, ::2])[0], atol=1e-6)
    zeros = OrthogonalRNN(4, return_sequences=True, zero_output_for_mask=True)(x, mask=mask).numpy()
    assert not zeros[~mask].any()
    assert zeros[mask].any()


def test_masking_layer_in_a_model() -> None:
    inputs = keras.Input((None, 2))
    model = keras.Model(inputs, OrthogonalRNN(4)(keras.layers.Masking()(inputs)))
    x = random(2, 6, 2)
    x[:, 4:] = 0
    np.testing.assert_allclose(model(x), model(x[:, :4]), atol=1e-6)


def test_unrolled() -> None:
    layer = OrthogonalRNN(4, return_sequences=True)
    x = random(3, 5, 2)
    expected = layer(x)
    unrolled = OrthogonalRNN(4, return_sequences=True, unroll=True)
    unrolled.build(x.shape)
    unrolled.set_weights(layer.get_weights())
    np.testing.assert_allclose(unrolled(x), expected, atol=1e-6)


def streaming_pair(**arguments: Any) -> tuple[OrthogonalRNN, OrthogonalRNN, np.ndarray]:
    """A stateful layer with the weights of another that is not, both built, and a batch of sequences."""
    x = random(3, 8, 2)
    stream, plain = OrthogonalRNN(4, stateful=True, **arguments), OrthogonalRNN(4, **arguments)
    stream.build(x.shape)
    plain.build(x.shape)
    stream.set_weights(plain.get_weights())
    return stream, plain, x


@pytest.mark.parametrize("arguments", [{}, {"train_initial_state": False}, {"transition": "exp", "unroll": True}])
def test_train_stateless_and_stream_stateful(arguments: dict[str, Any]) -> None:
    stream, plain, x = streaming_pair(**arguments)
    names = [[w.path.split("/", 1)[1] for w in layer.weights] for layer in (stream, plain)]
    assert names[0] == names[1]
    assert len(stream.trainable_weights) == len(plain.trainable_weights)
    for _ in range(2):
        stream(x[:, :5])
        np.testing.assert_allclose(stream(x[:, 5:]), plain(x), atol=1e-6)
        stream.reset_state()


def test_a_stream_follows_weights_that_change_before_it_begins() -> None:
    stream, plain, x = streaming_pair()
    stream.reset_state()
    for layer in (stream, plain):
        layer.cell.initial_state.assign([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(stream(x), plain(x), atol=1e-6)


def test_the_first_batch_of_a_stream_trains_the_first_state() -> None:
    stream, plain, x = streaming_pair()
    gradients = []
    for layer in (plain, stream, stream):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(x, training=True)))
        gradients.append(tape.gradient(loss, layer.cell.initial_state.value).numpy())
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    assert np.abs(gradients[0]).max() > 0
    assert not gradients[2].any()


def test_a_given_state_begins_a_stream() -> None:
    stream, plain, x = streaming_pair()
    h = random(3, 4, seed=3)
    stream(x[:, :5], initial_state=h)
    np.testing.assert_allclose(stream(x[:, 5:]), plain(x, initial_state=h), atol=1e-6)


def test_models_stream_save_load_and_export(tmp_path: Path) -> None:
    x = random(3, 8, 2)
    plain = keras.Sequential([keras.Input((None, 2)), OrthogonalRNN(4)])
    stream = keras.Sequential([keras.Input((None, 2), batch_size=3), OrthogonalRNN(4, stateful=True)])
    plain.save_weights(tmp_path / "w.weights.h5")
    stream.load_weights(tmp_path / "w.weights.h5")
    stream.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    stream.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(tmp_path / "saved")
    for model in (stream.predict_on_batch, loaded.predict_on_batch, served.serve):
        model(x[:, :5])
        np.testing.assert_allclose(model(x[:, 5:]), plain(x), atol=1e-6)


def test_weights_of_a_layer_that_starts_from_zero_load(tmp_path: Path) -> None:
    """As stateful layers did in earlier versions, whose files hold no first state."""
    x = random(3, 8, 2)
    old = keras.Sequential([keras.Input((None, 2), batch_size=3), OrthogonalRNN(4, stateful=True, train_initial_state=False)])
    old.save(tmp_path / "m.keras")
    old.save_weights(tmp_path / "w.weights.h5")
    new = keras.Sequential([keras.Input((None, 2), batch_size=3), OrthogonalRNN(4, stateful=True)])
    new.load_weights(tmp_path / "w.weights.h5")
    expected = old(x)
    np.testing.assert_allclose(new(x), expected, atol=1e-6)
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "m.keras")(x), expected, atol=1e-6)


def test_given_initial_state() -> None:
    layer = OrthogonalRNN(4, return_state=True)
    x = random(3, 8, 2)
    whole, _ = layer(x)
    _, state = layer(x[:, :5])
    np.testing.assert_allclose(layer(x[:, 5:], initial_state=state)[0], whole, atol=1e-6)
    np.testing.assert_allclose(layer(x[:, 5:], initial_state=[state])[0], whole, atol=1e-6)


def test_every_weight_gets_a_gradient() -> None:
    layer = OrthogonalRNN(5)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(layer(random(3, 6, 2), training=True)))
    for gradient in tape.gradient(loss, [w.value for w in layer.trainable_weights]):
        assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("activation", ["modrelu", "tanh"])
def test_dropout(activation: str) -> None:
    """One mask per sequence, the same in the fused loop and in the general one."""
    x = random(4, 6, 3)
    layer = OrthogonalRNN(5, activation=activation, dropout=0.4, seed=1)
    plain = layer(x)
    dropped = layer(x, training=True)
    assert np.abs(dropped - plain).max() > 1e-3
    assert np.abs(layer(x, training=True) - dropped).max() > 1e-3
    outputs = []
    for mask in (None, np.ones((4, 6), bool)):
        keras.utils.set_random_seed(0)
        fresh = OrthogonalRNN(5, activation=activation, dropout=0.4, seed=1)
        outputs.append(fresh(x, mask=mask, training=True))
    np.testing.assert_allclose(*outputs, atol=1e-5)
    recurrent = OrthogonalRNN(5, activation=activation, recurrent_dropout=0.4)
    assert np.abs(recurrent(x, training=True) - recurrent(x)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("transition", "jit"), [*((name, False) for name in TRANSITIONS), ("aux", True), ("householder", True)])
def test_trains_with_and_without_xla(transition: str, jit: bool) -> None:
    keras.utils.set_random_seed(0)
    x = random(64, 8, 2)
    y = x[:, 0] - x[:, 5]
    model = keras.Sequential([keras.Input((8, 2)), OrthogonalRNN(16, transition), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit)
    losses = model.fit(x, y, epochs=15, batch_size=16, verbose=0).history["loss"]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.slow
def test_bidirectional_time_distributed_and_saving(tmp_path: Path) -> None:
    inputs = keras.Input((4, 6, 3))
    inner = keras.layers.TimeDistributed(OrthogonalRNN(5, "householder", reflections=2))(inputs)
    both = keras.layers.Bidirectional(OrthogonalRNN(4, activation="tanh", return_sequences=True))(inner)
    outputs = OrthogonalRNN(3, "exp", recurrent_regularizer="l2")(both)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    x = random(5, 4, 6, 3)
    assert np.isfinite(model.fit(x, random(5, 3), verbose=0).history["loss"][0])
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_agree(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert loaded.layers[-1].get_config() == model.layers[-1].get_config()
    assert both.shape == (None, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("transition", ["aux", "householder"])
def test_export(transition: str, tmp_path: Path) -> None:
    layers = [keras.layers.Masking(), OrthogonalRNN(5, transition, return_sequences=True), keras.layers.Dense(2)]
    for chosen in (layers, layers[1:]):
        model = keras.Sequential([keras.Input((None, 3)), *chosen])
        model.compile("sgd", "mse")
        model.fit(random(2, 6, 3), random(2, 6, 2), verbose=0)
        model.export(tmp_path / "saved", verbose=False)
        served = tf.saved_model.load(tmp_path / "saved")
        for batch, steps in ((1, 4), (3, 6)):
            x = random(batch, steps, 3)
            np.testing.assert_allclose(served.serve(x), model(x), atol=1e-6)


def test_configuration_round_trip() -> None:
    layer = OrthogonalRNN(
        5,
        "householder",
        reflections=3,
        activation="tanh",
        recurrent_dropout=0.1,
        return_sequences=True,
        go_backwards=True,
        zero_output_for_mask=True,
        train_initial_state=False,
        dtype="float64",
        name="turn",
    )
    again = OrthogonalRNN.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.cell.compute_dtype == "float64"
    assert again.units == 5


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("transition", ["aux", "exp"])
def test_mixed_precision(transition: str, policy: str) -> None:
    layer = OrthogonalRNN(6, transition, dtype=policy)
    x = random(3, 5, 2)
    y = layer(x)
    assert y.dtype == layer.compute_dtype
    plain = OrthogonalRNN(6, transition)
    plain.build(x.shape)
    plain.set_weights(layer.get_weights())
    np.testing.assert_allclose(tf.cast(y, "float32"), plain(x), atol=0.1)


def test_unknown_batch_and_length() -> None:
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, OrthogonalRNN(4, return_sequences=True)(inputs))
    model.compile("sgd", "mse")
    for batch, steps in ((2, 5), (1, 1), (3, 9)):
        x = random(batch, steps, 3)
        assert model.predict(x, verbose=0).shape == (batch, steps, 4)
        assert np.isfinite(model.train_on_batch(x, random(batch, steps, 4)))


def gradient_norms(layer: Any, steps: int, units: int) -> np.ndarray:
    """‖∂(gᵀh_T)/∂h_t‖/‖g‖ for every t, for inputs like the pixels of an image, one row per t.

    V x_t + b enters h_t as h_t's own cotangent does (through an activation that is nearly the identity): with V = I the gradient
    of the inputs is that of the states.
    """
    x = 0.05 * random(4, steps, units)
    inputs = tf.constant(x)

    @tf.function
    def gradient(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(layer(inputs, training=True) * random(4, units, seed=1))
        return tape.gradient(loss, inputs)

    return np.linalg.norm(gradient(inputs), axis=-1).T / np.linalg.norm(random(4, units, seed=1), axis=-1)


# Every transition starts as the same map from either start: see the tests of the cell.
@pytest.mark.parametrize(("transition", "start"), [*((name, "cayley") for name in TRANSITIONS), ("aux", "henaff")])
def test_gradients_neither_vanish_nor_explode_over_784_steps(transition: str, start: str) -> None:
    arguments: dict[str, Any] = {"kernel_initializer": "identity", "recurrent_initializer": start}
    for activation in (None, ModReLU(bias_initializer="zeros")):
        norms = gradient_norms(OrthogonalRNN(32, transition, activation=activation, **arguments), 784, 32)
        np.testing.assert_allclose(norms, 1, atol=2e-3)
    # With the default bias of modReLU, U(−0.01, 0.01), some entries are set to zero on the way.
    norms = gradient_norms(OrthogonalRNN(32, transition, **arguments), 784, 32)
    assert norms.max() < 1.001
    assert norms.min() > 0.05


def test_gradients_of_a_plain_network_do_vanish() -> None:
    """So that the test above is known to be able to fail."""
    layer = keras.layers.SimpleRNN(32, kernel_initializer="identity", recurrent_initializer="glorot_uniform")
    assert gradient_norms(layer, 784, 32)[0].max() < 1e-3


def test_one_reflection_starts_without_vanishing_too() -> None:
    layer = OrthogonalRNN(32, "householder", reflections=1, activation=None, kernel_initializer="identity")
    np.testing.assert_allclose(gradient_norms(layer, 784, 32), 1, atol=2e-3)


def test_errors() -> None:
    with pytest.raises(ValueError, match="Unknown transition"):
        OrthogonalRNN(4, "svd")
    with pytest.raises(ValueError, match=r"Expected shape \(batch, time, features\), features ≥ 1. Received: \(2, 3\)"):
        OrthogonalRNN(4)(random(2, 3))


def test_a_given_first_state_leaves_no_weight_without_gradient(rng, tmp_path, recwarn):
    x, h = rng.normal(size=(4, 5, 3)).astype("float32"), rng.normal(size=(4, 6)).astype("float32")
    inputs, state = keras.Input((5, 3)), keras.Input((6,))
    layer = OrthogonalRNN(6)
    model = keras.Model([inputs, state], layer(inputs, initial_state=state))
    assert layer.cell.initial_state is None
    model.compile("sgd", "mse")
    model.fit([x, h], h, verbose=0)
    assert not [warning for warning in recwarn if "Gradients do not exist" in str(warning.message)]
    model.save(tmp_path / "m.keras")
    assert_agree(keras.models.load_model(tmp_path / "m.keras")([x, h]), model([x, h]))
    assert_agree(layer(x), layer(x, initial_state=np.zeros((4, 6), "float32")))
    assert OrthogonalRNN.from_config(layer.get_config()).cell.train_initial_state


@pytest.mark.parametrize("kernel", ["spectral", kernels.RelaxedCayley(lipschitz=1.1, max_skew=5.0)])
def test_a_kernel_with_a_proof_is_the_reflection_of_its_w(kernel, tmp_path):
    """Against the steps written out, through both loops, saved and loaded; the certificate is that of the transition."""
    x = np.random.default_rng(0).normal(size=(3, 7, 2)).astype("float32")
    layer = OrthogonalRNN(5, kernel=kernel, activation="tanh")
    y = layer(x)
    cell, h = layer.cell, np.tile(layer.cell.initial_state, (3, 1))
    w = cell.transition_map.kernel.numpy()
    for t in range(7):
        h = np.tanh(reflect(h, w) + x[:, t] @ cell.kernel.numpy() + cell.bias.numpy())
    np.testing.assert_allclose(y, h, atol=1e-5)
    np.testing.assert_allclose(layer(x, mask=np.ones((3, 7), bool)), h, atol=1e-5)
    certificate = cell.transition_map.certificate()
    assert certificate.invertible
    assert kernel == "spectral" or certificate.lipschitz <= 1.1
    model = keras.Sequential([keras.Input((7, 2)), layer])
    model.compile("sgd", "mse")
    model.fit(x, np.zeros((3, 5)), verbose=0)
    model.save(tmp_path / "m.keras")
    assert_agree(keras.models.load_model(tmp_path / "m.keras")(x), model(x))


def test_half_precision_does_not_round_a_w_with_a_proof():
    layer = OrthogonalRNN(4, kernel="relaxed_cayley", dtype="mixed_bfloat16")
    y = layer(np.ones((2, 3, 2), "float32"))
    assert y.dtype == "bfloat16"
    assert layer.cell.transition_kernel().dtype == "float32"


def test_kernels_are_for_auxiliary_reflections():
    with pytest.raises(ValueError, match=r"Expected transition=.aux.. Received: transition=.exp., kernel=.free."):
        OrthogonalRNN(4, "exp", kernel="free")
    with pytest.raises(ValueError, match="Unknown kernel"):
        OrthogonalRNN(4, kernel="proven")
