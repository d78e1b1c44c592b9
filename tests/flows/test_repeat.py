"""Equal layers in one loop: what it computes is what its copies compute one after the other."""

import io
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, FactoredReflection, OrthogonalDense
from keras_auxref.certificate import proven
from keras_auxref.flows import ActNorm, AffineCoupling, Chain, InvertibleDense, Permutation, Repeat, Squeeze
from keras_auxref.initializers import FixedPointFree
from keras_auxref.invertible import Invertible
from tests.flows.support import disturb
from tests.support import assert_agree

TIMES = 3


def step(dtype="float64", seed=1):
    parts = [ActNorm(dtype=dtype), FactoredReflection(kernel_initializer=FixedPointFree(seed), dtype=dtype)]
    return Chain([*parts, AffineCoupling(hidden=4, dtype=dtype)], dtype=dtype)


def built(dtype="float64", shape=(6,), **kwargs):
    layer = Repeat(step(dtype), TIMES, **kwargs)
    layer.build((None, *shape))
    return disturb(layer)


def by_hand(layer, x):
    """(y, log|det|) and the layers, each with its weights."""
    total = 0.0
    for k in range(layer.times):
        with layer.copy(k) as copy:
            x, log_det = copy.forward_and_log_det(x)
            total = total + log_det
    return x, total


@pytest.mark.parametrize(("shape", "dtype", "tolerance"), [((2, 2, 6), "float32", 1e-6), ((6,), "float64", 1e-12)])
def test_loop_and_steps_written_out_are_the_copies_one_after_the_other(shape, dtype, tolerance):
    layer = built(dtype, shape)
    x = np.random.default_rng(0).normal(size=(4, *shape)).astype(dtype)
    y, log_det = by_hand(layer, x)
    assert log_det.shape == (4,)
    for layer.unroll in (False, True):
        answers = tf.function(lambda x: (*layer.forward_and_log_det(x), layer(x), layer.inverse(y)), autograph=False)(x)
        for found, expected in zip(answers, (y, log_det, y, x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=20 * tolerance, atol=20 * tolerance)
    np.testing.assert_allclose(layer.log_det_jacobian(x), log_det, rtol=20 * tolerance)


def coupling(network=None):
    return AffineCoupling(network, hidden=4, dtype="float64")


def test_where_convolutions_in_a_loop_are_slow_those_of_others_are_written_out(monkeypatch):
    asked = []
    monkeypatch.setattr("keras_auxref.ops.backend.prefers_loops", lambda x, convolves: asked.append(convolves) or False)
    for network in (None, keras.layers.Conv2D(2, 1, dtype="float64"), keras.layers.Dense(2, dtype="float64")):
        Repeat(Repeat(coupling(network), 2), 2)(np.zeros((1, 4, 4, 2)))
    assert asked == [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [None, True])
def test_convolutions_and_their_derivatives_under_xla_are_those_without(unroll):
    layer = Repeat(coupling(), 2, unroll=unroll)
    layer.build((None, 4, 4, 2))
    disturb(layer)
    x = np.random.default_rng(0).normal(size=(3, 4, 4, 2))

    def first(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 3)
        return tape.gradient(loss, [x, *(variable.value for variable in layer.trainable_variables)])

    def second(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.add_n([tf.reduce_sum(g**2) for g in first(x)])
        return tape.gradient(total, x)

    # TensorFlow cannot differentiate a loop twice under XLA.
    wanted = (first, second) if unroll else (first,)
    for function in wanted:
        found, expected = (tf.function(function, jit_compile=xla, autograph=False)(tf.constant(x)) for xla in (True, False))
        for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def gradients(layer, x):
    @tf.function(autograph=False)
    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, log_det = layer.forward_and_log_det(x, training=True)
            back = layer.inverse(0.9 * y)
            loss = tf.reduce_sum(y**3) + tf.reduce_sum(log_det) + tf.reduce_sum(back**2)
        return tape.gradient(loss, [x, *(variable.value for variable in layer.trainable_variables)])

    return compute(tf.constant(x))


def test_gradients_of_loop_recomputed_loop_and_steps_agree_with_differences():
    layer = built()
    x = np.random.default_rng(0).normal(size=(4, 6))
    found = []
    for layer.unroll, layer.remat in ((True, False), (False, False), (False, True), (False, "inverse")):
        found.append(gradients(layer, x))
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)

    def loss(x):
        y, log_det = by_hand(layer, x)
        return float(tf.reduce_sum(y**3) + tf.reduce_sum(log_det) + tf.reduce_sum(layer.inverse(0.9 * y) ** 2))

    direction = np.random.default_rng(1).normal(size=x.shape)
    slope = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
    assert float(np.sum(found[0][0] * direction)) == pytest.approx(slope, rel=1e-6)


def of_loss(layer, x):
    """Gradients for the weights."""
    with tf.GradientTape() as tape:
        y, log_det = layer.forward_and_log_det(x, training=True)
        loss = tf.reduce_mean(y**2) - tf.reduce_mean(log_det)
    return tape.gradient(loss, [variable.value for variable in layer.trainable_variables])


def test_gradients_by_the_inverse_hold_in_single_precision_after_training():
    layer = Repeat(step("float32"), TIMES, remat="inverse")
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32") ** 3
    layer.initialize(x)
    optimizer, compute = keras.optimizers.Adam(0.03), tf.function(of_loss, autograph=False)
    start = compute(layer, x)
    for _ in range(10):
        optimizer.apply(compute(layer, x), layer.trainable_variables)
    found = compute(layer, x)
    layer.remat = False
    expected = of_loss(layer, x)
    assert max(np.abs(a - b).max() for a, b in zip(start, expected, strict=True)) > 0.1
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_gradients_by_the_inverse_are_nan_where_the_way_back_is_lost():
    layer = Repeat(InvertibleDense(), 2, remat="inverse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    layer.build((None, 4))
    assert np.isfinite(of_loss(layer, x)[0]).all()
    layer.weights[0].assign(np.asarray(layer.weights[0]) * [1e-5, 1, 1, 1])  # within the precision of one step, not of two
    assert np.isnan(of_loss(layer, x)[0]).all()
    layer.remat = True
    assert np.isfinite(of_loss(layer, x)[0]).all()


def test_weights_are_stacked_and_copies_start_apart():
    layer = built()
    single = step()
    single.build((None, 6))
    assert [(TIMES, *w.shape) for w in single.trainable_variables] == [tuple(w.shape) for w in layer.trainable_variables]
    with pytest.raises(ValueError, match="has not been built"), Repeat(step(), 2).copy(0):
        pass


def test_a_seed_gives_every_copy_a_start_of_its_own_the_same_every_time():
    def kernels(**kwargs):
        layer = Repeat(InvertibleDense(**kwargs), TIMES)
        layer.build((None, 4))
        return np.asarray(layer.weights[0])

    for initializer in (FixedPointFree(5), keras.initializers.RandomNormal(seed=5), keras.initializers.Orthogonal(seed=5)):
        first = kernels(kernel_initializer=initializer)
        assert_agree(first, kernels(kernel_initializer=initializer))
        assert min(np.abs(first[i] - first[j]).max() for i in range(TIMES) for j in range(i)) > 0.1
        alone = InvertibleDense(kernel_initializer=initializer)
        alone.build((None, 4))
        assert_agree(first[0], alone.kernel)
    free = kernels()  # no seed
    assert min(np.abs(free[i] - free[j]).max() for i in range(TIMES) for j in range(i)) > 0.1
    given = kernels(kernel_initializer=np.eye(4))
    np.testing.assert_array_equal(given, np.stack([np.eye(4)] * TIMES))


def test_training_moves_states_in_a_loop_as_written_out():
    found = []
    for unroll in (False, True):
        layer = Repeat(AuxReflection(kernel_initializer=FixedPointFree(2), track_branch=True), TIMES, unroll=unroll)
        layer.build((None, 4))
        disturb(layer)
        (branch,) = layer.non_trainable_variables
        start = np.asarray(branch).copy()
        x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
        run = tf.function(layer.forward_and_log_det, autograph=False)
        run(x)
        assert_agree(branch, start)
        run(x, training=True)
        assert np.abs(np.asarray(branch) - start).min() > 1e-5
        found.append(np.asarray(branch))
        layer.trainable = False
        tf.function(layer.forward_and_log_det, autograph=False)(x, training=True)
        np.testing.assert_allclose(branch, found[-1], rtol=1e-6)
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_a_start_from_data_goes_through_the_copies():
    layer = Repeat(step(), TIMES)
    x = 3 + 5 * np.random.default_rng(0).normal(size=(200, 6))
    assert not layer.initialized
    y = layer.initialize(x)
    assert layer.initialized
    np.testing.assert_allclose(y, layer(x), rtol=1e-9)
    for k in range(TIMES):
        with layer.copy(k) as copy:
            normal = np.asarray(copy.layers[0](x))
            np.testing.assert_allclose([normal.mean(0), normal.std(0)], [np.zeros(6), np.ones(6)], atol=1e-6)
            x = np.asarray(copy(x))
    plain = Repeat(OrthogonalDense(), 2)
    np.testing.assert_allclose(plain.initialize(x.astype("float32")), plain(x), rtol=1e-5)


def test_certificate_and_proof_are_those_of_all_copies():
    layer = Repeat(AuxReflection(kernel_initializer=FixedPointFree(2)), TIMES)
    layer.build((None, 4))
    assert layer.certificate().invertible
    assert bool(layer.proof())
    kernel = keras.ops.convert_to_numpy(layer.weights[0]).copy()
    kernel[1] = np.random.default_rng(0).normal(size=(4, 4))
    layer.weights[0].assign(kernel)
    certificate = layer.certificate()
    assert not certificate.invertible
    assert f"of '{layer.name}_2'" in certificate.reason
    assert not bool(layer.proof())
    assert not bool(tf.function(layer.proof, autograph=False)())
    with layer.copy(0) as copy:
        assert copy.certificate().invertible
    assert Repeat(OrthogonalDense(), 2).supports_xla
    assert not layer.supports_xla


def uncertified(**kwargs):
    layer = Repeat(AuxReflection(kernel_initializer=FixedPointFree(2), **kwargs), 2, unroll=False)
    layer.build((None, 4))
    kernel = keras.ops.convert_to_numpy(layer.weights[0]).copy()
    kernel[1] = np.random.default_rng(0).normal(size=(4, 4))
    layer.weights[0].assign(kernel)
    return layer


def test_a_free_w_in_a_loop_is_asked_for_its_certificate():
    x, strict = tf.ones((2, 4)), uncertified(strict=True)
    for method in ("inverse", "forward_and_log_det"):
        with pytest.raises(ValueError, match=r"`" + method + r"` is used.* because of strict=True. Received: none"):
            tf.function(getattr(strict, method), autograph=False).get_concrete_function(x)
    with pytest.warns(UserWarning, match=r"Nothing proves that layer '.*' is one-to-one"):
        tf.function(uncertified().forward_and_log_det, autograph=False).get_concrete_function(x)


def test_saves_loads_and_is_a_bijector(tmp_path):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, Repeat(step("float32"), TIMES, unroll=False, remat="inverse")(inputs))
    disturb(model).save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file, h5py.File(io.BytesIO(file.read("model.weights.h5"))) as content:
        shapes = []
        content.visititems(lambda name, item: shapes.append(item.shape) if isinstance(item, h5py.Dataset) else None)
    assert sorted(shapes) == sorted(tuple(w.shape) for w in model.weights)  # the stacked weights, and none of the template
    again = keras.models.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    assert_agree(again(x), model(x))
    layer = again.layers[1]
    assert (layer.times, layer.unroll, layer.remat) == (TIMES, False, "inverse")
    assert len(layer.weights) == len(model.layers[1].weights)
    bijector = layer.bijector()
    y = bijector.forward(x)
    np.testing.assert_allclose(bijector.inverse(tf.identity(y)), x, atol=1e-4)
    np.testing.assert_allclose(bijector.forward_log_det_jacobian(x), layer.log_det_jacobian(x), rtol=1e-5)
    assert len(bijector.trainable_variables) == len(layer.trainable_variables)


def test_regularizers_and_constraints_are_for_each_copy():
    layer = Repeat(InvertibleDense(kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1)), 2)
    layer.build((None, 3))
    layer.weights[0].assign(np.stack([np.eye(3), np.ones((3, 3))]))
    single = keras.regularizers.OrthogonalRegularizer(0.1)
    total = float(sum(layer.losses))
    assert total == pytest.approx(float(single(np.eye(3, dtype="float32")) + single(np.ones((3, 3), "float32"))))
    layer = Repeat(AuxReflection(kernel_constraint=keras.constraints.UnitNorm(axis=0)), 2)
    layer.build((None, 3))
    weight = layer.trainable_variables[0]
    constrained = np.asarray(weight.constraint(weight))
    np.testing.assert_allclose(np.linalg.norm(constrained, axis=1), np.ones((2, 3)), rtol=1e-5)


def test_nothing_to_stack_is_no_obstacle():
    layer = Repeat(Permutation(), 3)
    x = np.arange(8.0, dtype="float32").reshape(2, 4)
    np.testing.assert_array_equal(tf.function(layer, autograph=False)(x), x[:, ::-1])


def test_a_loop_in_a_loop():
    inner = Repeat(InvertibleDense(kernel_initializer=FixedPointFree(1)), 2)
    layer = Repeat(inner, 2, unroll=False)
    layer.build((None, 4))
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    y = tf.function(layer, autograph=False)(x)
    assert layer.weights[0].shape == (2, 2, 4, 4)
    matrices = np.asarray(layer.weights[0]).reshape(4, 4, 4)
    np.testing.assert_allclose(y, x @ np.linalg.multi_dot(matrices[::-1]).T, atol=1e-5)
    np.testing.assert_allclose(layer.inverse(y), x, atol=1e-5)


def test_is_built_inside_of_a_function():
    layer = Repeat(Repeat(InvertibleDense(), 2), 2, unroll=False)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    y = tf.function(lambda x: layer(x), autograph=False)(x)
    matrices = np.asarray(layer.weights[0]).reshape(4, 4, 4)
    np.testing.assert_allclose(y, x @ np.linalg.multi_dot(matrices[::-1]).T, atol=1e-5)


class Shift(Invertible, keras.layers.Layer):
    """y = x + context, without anything that Keras would save by itself."""

    def forward_and_log_det(self, x, training=None, context=None):
        return (x if context is None else x + context), keras.ops.zeros_like(x[..., 0])

    def inverse(self, y, context=None):
        return y if context is None else y - context

    def certificate(self):
        return proven("it can be subtracted")


@pytest.mark.parametrize("remat", [False, True, "inverse"])
def test_context_reaches_the_layers_that_take_it(remat):
    layer = Repeat(Chain([Shift(), InvertibleDense(kernel_initializer=np.eye(3))]), TIMES, unroll=False, remat=remat)
    x, context = np.ones((2, 3), "float32"), tf.constant([[1.0, 2.0, 3.0]] * 2)

    @tf.function(autograph=False)
    def run(context):
        with tf.GradientTape() as tape:
            tape.watch(context)
            y, _ = layer.forward_and_log_det(x, context=context)
        return y, layer(x, context=context), layer.inverse(y, context=context), tape.gradient(y, context)

    layer.build((None, 3))
    y, again, back, gradient = run(context)
    np.testing.assert_allclose(y, x + TIMES * context, rtol=1e-6)
    np.testing.assert_allclose(again, y, rtol=1e-6)
    np.testing.assert_allclose(back, x, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.full((2, 3), TIMES), rtol=1e-6)


class Counted(Shift):
    """A layer with a state that training changes."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def forward_and_log_det(self, x, training=None, context=None):
        if training:
            self.count.assign_add(1.0)
        return super().forward_and_log_det(x)


class Unknown(Shift):
    certificate = Invertible.certificate


def test_recomputation_by_the_inverse_refuses_what_may_have_none():
    with pytest.raises(ValueError, match=r"Received: layer 'free' of 'steps'. W is free, .* `remat=True` takes any layer."):
        Repeat(Chain([ActNorm(), AuxReflection(name="free")]), 2, remat="inverse", name="steps").build((None, 4))
    singular = InvertibleDense(kernel_initializer="ones", name="singular")
    with pytest.raises(ValueError, match=r"Received: layer 'singular' of 'steps'. Not proven"):
        Repeat(singular, 2, remat="inverse", name="steps").build((None, 4))
    with pytest.raises(ValueError, match=r"Received: layer 'mine' of 'steps'. Nothing is known"):
        Repeat(Unknown(name="mine"), 2, remat="inverse", name="steps").build((None, 4))
    counted = Repeat(Counted(), 2, remat="inverse")
    x = np.ones((2, 4), "float32")
    counted.forward_and_log_det(x)
    with pytest.raises(ValueError, match=r"Expected steps that change no state in training. Received: a change of '.*count'"):
        counted.forward_and_log_det(x, training=True)
    with pytest.raises(ValueError, match=r'`remat` must be True, False or "inverse". Received: \'yes\''):
        Repeat(ActNorm(), 2, remat="yes")


@pytest.mark.parametrize("times", [0, -1, 2.5, True, "3", None])
def test_times_is_a_positive_integer(times):
    with pytest.raises(ValueError, match=r"`times` must be a positive integer. Expected 1, 2, 3, … Received: "):
        Repeat(OrthogonalDense(), times)


def test_bad_layers_are_refused():
    with pytest.raises(ValueError, match=r"must be invertible. Expected a Keras layer with `Invertible`. Received: <Dense"):
        Repeat(keras.layers.Dense(3), 2)
    with pytest.raises(ValueError, match=r"Received: 'conv'"):
        Repeat("conv", 2)
    layer = OrthogonalDense(name="mine")
    layer.build((None, 3))
    with pytest.raises(ValueError, match=r"Expected a layer that has not been built. Received: 'mine', which has weights"):
        Repeat(layer, 2)
    with pytest.raises(ValueError, match=r"`layer` is a template, .* Received: 'mine', which has weights"):
        Repeat(Chain([ActNorm(), layer]), 2)
    with pytest.raises(ValueError, match=r"Expected a Keras layer with `Invertible`. Received: <class"):
        Repeat(OrthogonalDense, 2)
    with pytest.raises(ValueError, match=r"Expected output shape \(None, 4, 4, 1\). Received: \(None, 2, 2, 4\)"):
        Repeat(Squeeze(), 2).build((None, 4, 4, 1))
    with pytest.raises(ValueError, match=r"`unroll` must be True, False or None. Received: 'yes'"):
        Repeat(OrthogonalDense(), 2, unroll="yes")
    with pytest.raises(ValueError, match=r"without `activity_regularizer`. Received: "):
        Repeat(AuxReflection(activity_regularizer="l2"), 2).build((None, 3))
