"""Lipschitz constants: nothing breaks them, they are sharp where the theorem says so, and what is not known is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, FactoredReflection, Invertible, OrthogonalDense, SVDDense, kernels, lipschitz_bounds
from keras_auxref.certificate import Bounds, certify, linear_bounds, upwards
from keras_auxref.flows import ActNorm, AdditiveCoupling, Chain, InvertibleDense, Permutation, QRDense, Repeat, Squeeze
from tests.support import certified, jacobians, orthogonal, reflect

CASES = {
    "spectral": (lambda **kw: AuxReflection(kernel=kernels.Spectral(0.9), **kw), (5,)),
    "relaxed_cayley": (lambda **kw: AuxReflection(kernel=kernels.RelaxedCayley(0.1), **kw), (4,)),
    "factored": (lambda **kw: FactoredReflection(**kw), (4,)),
    "factored_left": (lambda **kw: FactoredReflection(lipschitz=1.3, sides="left", **kw), (3,)),
    "householder": (lambda **kw: OrthogonalDense(**kw), (5,)),
    "svd": (lambda **kw: SVDDense(6, "exp", activation="tanh", singular_bounds=(0.5, 2.0), use_bias=True, **kw), (4,)),
    "svd_square": (lambda **kw: SVDDense(map="cayley", singular_bounds=(0.5, 2.0), **kw), (4,)),
    "qr_factored": (lambda **kw: QRDense("factored", **kw), (4,)),
    "dense": (lambda **kw: InvertibleDense(**kw), (4,)),
    "act_norm": (lambda **kw: ActNorm(**kw), (5,)),
    "tall": (lambda **kw: OrthogonalDense(units=6, activation="leaky_relu", use_bias=True, **kw), (4,)),
    "chain": (lambda **kw: Chain([FactoredReflection(lipschitz=1.5, **kw), ActNorm(**kw)], **kw), (3,)),
}
REFLECTIONS = ("spectral", "relaxed_cayley", "factored")
MODELS = {
    "network": lambda: [keras.layers.Dense(7, "relu"), FactoredReflection(lipschitz=1.2), keras.layers.Dense(3)],
    "images": lambda: [
        keras.layers.Rescaling(1 / 3, offset=0.1),
        keras.layers.ZeroPadding2D(1),
        keras.layers.MaxPooling2D(3, strides=2),
        keras.layers.AveragePooling2D(2, strides=1),
        keras.layers.LeakyReLU(0.1),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.5),
    ],
}
SHAPES = {"network": (5,), "images": (7, 7, 2)}


def _make(name, rng, dtype="float32"):
    make, shape = CASES[name]
    layer = make(dtype=dtype)
    layer.build((None, *shape))
    for weight in layer.trainable_weights:
        weight.assign_add(0.5 * rng.normal(size=weight.shape))
    return layer, shape


def _ratios(function, x, direction, step):
    """‖f(x + t e) − f(x)‖/t for unit vectors e and lengths t, over all entries of an event."""
    direction = direction / tf.reshape(tf.norm(tf.reshape(direction, (len(x), -1)), axis=1), (-1, *(1,) * (len(x.shape) - 1)))
    moved = function(x + step * direction) - function(x)
    return tf.sqrt(tf.reduce_sum(tf.reshape(tf.cast(moved, x.dtype), (len(x), -1)) ** 2, axis=1) + 1e-30) / step


def _extremes(function, shape, rng, dtype, rows=64, steps=8):
    """The smallest and the largest ratio that random pairs and gradient descent and ascent on the ratio find."""
    sign = np.repeat([-1.0, 1.0], rows).reshape(-1, *(1,) * len(shape))  # half of the rows go down, half go up
    x, direction = (tf.constant(rng.normal(size=(2 * rows, *shape)), dtype) for _ in range(2))
    found = [_ratios(function, x, direction, tf.constant(3.0, dtype))]
    step = tf.constant({"float64": 1e-3, "float32": 0.1}[dtype], dtype)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            tape.watch([x, direction])
            ratio = _ratios(function, x, direction, step)
        found.append(ratio)
        x, direction = (
            a + tf.cast(sign, dtype) * g / (tf.norm(g) / rows**0.5 + 1e-12)
            for a, g in zip((x, direction), tape.gradient(ratio, [x, direction]), strict=True)
        )
    ratios = np.concatenate(found).astype(np.float64)
    assert np.isfinite(ratios).all()
    return ratios.min(), ratios.max()


def _room(dtype):
    """What rounding of f(x) does to a ratio: ε ‖f(x)‖ over the distance, both generous."""
    return {"float64": 1e-10, "float32": 1e-4}[dtype]


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float64") for name in CASES), *((n, "float32") for n in REFLECTIONS)])
def test_no_pair_breaks_the_bounds_of_a_layer(rng, dtype, name):
    layer, shape = _make(name, rng, dtype)
    certificate = layer.certificate()
    low, high = _extremes(layer, shape, rng, dtype)
    assert high <= certificate.lipschitz * (1 + _room(dtype))
    if name == "svd":  # tanh brings points together as far as it likes
        assert certificate.inverse_lipschitz is None
    else:
        assert low >= (1 - _room(dtype)) / certificate.inverse_lipschitz


@pytest.mark.parametrize("name", MODELS)
def test_no_pair_breaks_the_bound_of_a_model(rng, name):
    model = keras.Sequential([keras.Input(SHAPES[name]), *MODELS[name]()])
    for weight in model.weights:
        weight.assign(np.abs(rng.normal(size=weight.shape)) + 0.1)
    bounds = lipschitz_bounds(model)
    assert _extremes(model, SHAPES[name], rng, "float32")[1] <= bounds.lipschitz * 1.0001
    assert bounds.inverse_lipschitz is None
    assert bounds.lipschitz == pytest.approx(np.prod([high for high, _ in bounds.layers.values()]))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("name", [*REFLECTIONS, "householder", "svd_square", "dense", "act_norm"])
def test_half_precision_keeps_the_bounds_at_distances_above_its_rounding(rng, policy, name):
    layer, shape = _make(name, rng, policy)
    certificate = layer.certificate()
    x, y = rng.normal(size=(2, 500, *shape))
    a, b = (keras.ops.convert_to_numpy(keras.ops.cast(layer(t), "float32")) for t in (x, y))
    x, y = (np.asarray(tf.cast(tf.cast(t, layer.compute_dtype), "float64")) for t in (x, y))
    ratio = np.linalg.norm(a - b, axis=-1) / np.linalg.norm(x - y, axis=-1)
    unit = 2.0**-10 if "float16" in policy and "b" not in policy else 2.0**-7
    size = (np.linalg.norm(a, axis=-1) + np.linalg.norm(b, axis=-1)) / np.linalg.norm(x - y, axis=-1)
    assert (ratio <= certificate.lipschitz + 2 * unit * size).all()
    assert (ratio + 2 * unit * size >= 1 / certificate.inverse_lipschitz).all()


@pytest.mark.parametrize("condition", [1.0, 1.3, 1.9, 3.0])
@pytest.mark.parametrize("skew", [0.0, 0.3, 30.0])
def test_singular_values_of_the_jacobian_lie_where_the_theorem_says(rng, condition, skew):
    """By central differences of the definition; the upper bound also for κ ≥ 2, where f need not be a bijection."""
    w = certified(4, condition, skew, rng)
    certificate = certify(w)
    singular = np.linalg.svd(jacobians(lambda x: reflect(x, w), rng.normal(size=(300, 4)), 1e-6), compute_uv=False)
    assert np.abs(singular - 1).min(axis=-1).max() < 1e-5
    assert singular.max() <= 2 * condition - 1 + 1e-5
    assert singular.min() >= 2 / condition - 1 - 1e-5
    assert certificate.lipschitz == pytest.approx(2 * condition - 1, rel=1e-6)
    assert certificate.lipschitz >= 2 * condition - 1 - 1e-12
    if condition < 2:
        assert certificate.inverse_lipschitz == pytest.approx(condition / (2 - condition), rel=1e-6)
    else:
        assert certificate.inverse_lipschitz is None


def test_both_constants_are_sharp():
    """On the plane of the extreme eigenvectors of a symmetric W."""
    certificate = certify(np.diag([1.0, 1.8]))
    points = np.eye(2) + 1e-9  # off the axes, where J is a limit
    singular = np.linalg.svd(jacobians(lambda x: reflect(x, np.diag([1.0, 1.8])), points, 1e-6), compute_uv=False)
    assert singular.max() == pytest.approx(certificate.lipschitz, rel=1e-4)
    assert singular.min() == pytest.approx(1 / certificate.inverse_lipschitz, rel=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda L, dtype: AuxReflection(kernel=kernels.Spectral(lipschitz=L), dtype=dtype),
        lambda L, dtype: AuxReflection(kernel=kernels.RelaxedCayley(lipschitz=L), dtype=dtype),
        lambda L, dtype: FactoredReflection(lipschitz=L, dtype=dtype),
        lambda L, dtype: FactoredReflection("cayley", lipschitz=L, dtype=dtype),
    ],
)
@pytest.mark.parametrize(("lipschitz", "d"), [(1.05, 3), (1.2, 150), (2.9, 24)])
def test_a_constant_that_was_asked_for_holds_for_every_weight(rng, dtype, make, lipschitz, d):
    layer = make(lipschitz, dtype)
    layer.build((None, d))
    for size in (0.0, 1.0, 1e6):
        for weight in layer.trainable_weights:
            weight.assign_add(size * rng.normal(size=weight.shape))
        ends = np.sign(np.arange(d) - 0.5)
        if isinstance(layer, FactoredReflection):
            layer.exponents.assign(size * ends)
        elif len(layer.trainable_weights) == 2:  # an S with both extreme eigenvalues
            q = orthogonal(d, rng)
            layer.trainable_weights[0].assign(size * (q * ends) @ q.T)
        elif len(layer.trainable_weights) == 1:  # eigenvalues 1 and 1 + bound
            layer.trainable_weights[0].assign((1 + size) * np.outer(rng.normal(size=d), np.eye(d)[0]))
        certificate = layer.certificate()
        assert certificate.lipschitz <= lipschitz
        assert certificate.invertible
    assert certificate.lipschitz > 1 + 0.9 * (lipschitz - 1) - (0.03 if dtype == "float32" else 0)


@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_bfloat16"])
def test_rounding_at_its_worst_stays_below_a_constant_that_was_asked_for(rng, policy):
    """Extreme eigenvalues with all planes of K at their largest, W of rank one, reflections by almost equal vectors."""
    d, many = 24, 150
    ends = np.where(np.arange(d) % 2, 1.0, -1.0)
    relaxed = AuxReflection(kernel=kernels.RelaxedCayley(lipschitz=1.02), dtype=policy)
    spectral = AuxReflection(kernel=kernels.Spectral(lipschitz=1.001), dtype=policy)
    factored = FactoredReflection(lipschitz=1.005, dtype=policy)
    for layer, size in ((relaxed, d), (spectral, d), (factored, many)):
        layer.build((None, size))
    for _ in range(3):
        q, basis = orthogonal(d, rng), orthogonal(d, rng)
        relaxed.trainable_weights[0].assign((q * ends) @ q.T)
        relaxed.trainable_weights[1].assign(1e3 * basis @ np.kron(np.eye(d // 2), [[0, 1], [-1, 0]]) @ basis.T)
        spectral.trainable_weights[0].assign(np.outer(rng.normal(size=d), np.eye(d)[0]))
        for side in (factored.left_map, factored.right_map):
            (vectors,) = side.trainable_weights
            vectors.assign(1 + 0.01 * rng.normal(size=vectors.shape))
        factored.exponents.assign(1e3 * np.sign(rng.normal(size=many)))
        for layer, bound in ((relaxed, 1.02), (spectral, 1.001), (factored, 1.005)):
            assert 1 + 0.7 * (bound - 1) < layer.certificate().lipschitz <= bound


def test_settings_survive_a_round_trip():
    for kernel in (kernels.Spectral(lipschitz=1.5), kernels.RelaxedCayley(lipschitz=1.5, max_skew=3.0)):
        again = kernels.get(keras.saving.serialize_keras_object(kernel))
        assert again.get_config() == kernel.get_config()
        assert again.lipschitz == 1.5
    layer = FactoredReflection.from_config(FactoredReflection(lipschitz=1.5).get_config())
    assert (layer.lipschitz, layer.condition) == (1.5, pytest.approx(1.25, abs=1e-4))
    assert FactoredReflection.from_config(FactoredReflection(margin=0.3).get_config()).margin == 0.3


@pytest.mark.parametrize("make", [kernels.Spectral, kernels.RelaxedCayley, FactoredReflection])
def test_bad_settings(make):
    for value in (1, 0.5, 3.0, float("nan"), "2", True):
        with pytest.raises(ValueError, match=r"Expected 1 < lipschitz < 3\. Received"):
            make(lipschitz=value)
    name = "bound" if make is kernels.Spectral else "margin"
    with pytest.raises(ValueError, match=rf"Expected one of the two. Received: {name}=0.3, lipschitz=1.5"):
        make(**{name: 0.3, "lipschitz": 1.5})
    layer = (lambda: make(lipschitz=1 + 1e-7)) if make is FactoredReflection else lambda: AuxReflection(make(lipschitz=1 + 1e-7))
    with pytest.raises(ValueError, match="Rounding alone may take more than that in float32"):
        layer().build((None, 8))


def test_what_has_no_constant_says_none(rng):
    free = AuxReflection()
    free.build((None, 4))
    coupling = AdditiveCoupling(hidden=3)
    coupling.build((None, 4))
    for layer in (free, coupling):
        certificate = layer.certificate()
        assert (certificate.lipschitz, certificate.inverse_lipschitz) == (None, None)
    assert "no Lipschitz constant" in coupling.certificate().reason
    assert linear_bounds(np.full((2, 2), np.nan)) == (None, None)
    wide, tall = linear_bounds(np.ones((2, 3))), linear_bounds(np.eye(3)[:, :2] * 2)
    assert wide.inverse_lipschitz is None
    assert tall.inverse_lipschitz == pytest.approx(0.5)


def test_copies_of_a_layer_have_the_product_of_their_constants():
    layer = Repeat(ActNorm(), 2)
    layer.build((None, 3))
    (scale,) = (weight for weight in layer.trainable_weights if "scale" in weight.name)
    scale.assign([np.log([2.0, 1.0, 0.5]), np.log([3.0, 1.0, 4.0])])
    certificate = layer.certificate()
    assert (certificate.lipschitz, certificate.inverse_lipschitz) == pytest.approx((2 * 4, 1 / 0.5), rel=1e-6)


def test_permutations_and_squeezes_keep_distances():
    for layer in (Permutation(), Squeeze()):
        assert layer.certificate().lipschitz == layer.certificate().inverse_lipschitz == 1


def test_functional_chains_and_models_within_models(rng):
    inner = keras.Sequential([keras.Input((4,)), FactoredReflection(), keras.layers.Dense(4, use_bias=False)])
    x = keras.Input((4,))
    shared = OrthogonalDense(name="shared")
    model = keras.Model(x, shared(inner(shared(x))))
    bounds = lipschitz_bounds(model)
    assert list(bounds.layers) == ["shared", inner.layers[0].name, inner.layers[1].name, "shared'"]
    singular = np.linalg.svd(inner.layers[1].kernel, compute_uv=False)
    assert bounds.lipschitz == pytest.approx(singular[0], rel=1e-5)
    assert bounds.inverse_lipschitz == pytest.approx(1 / singular[-1], rel=1e-4)
    assert lipschitz_bounds(shared).lipschitz == pytest.approx(1, abs=1e-5)


class _Unproven(Invertible, keras.layers.Layer):
    def forward_and_log_det(self, x, training=None):
        return x, 0 * x[..., 0]


class _Subclass(keras.Model):
    def call(self, x):
        return 100 * x


def _branches():
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.add([keras.layers.Dense(4)(x), x]))


def _always_training(layer):
    x = keras.Input((4,))
    return keras.Model(x, layer(x, training=True))


def _with_nan(layer, weight):
    layer.build((None, 4))
    getattr(layer, weight).assign(np.full(4, np.nan))
    return layer


def _quantized():
    layer = keras.layers.Dense(4, name="small")
    layer.build((None, 4))
    layer.quantize("int8")
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [keras.layers.LayerNormalization(name="norm")], "Nothing is known of layer 'norm'.*Received: LayerNorm"),
        (lambda: [keras.layers.Dense(3, "gelu", name="last")], "'last' has no proven.*Expected an activation of.*'gelu'"),
        (lambda: [AuxReflection(name="free")], "Layer 'free' has no proven Lipschitz constant. Not proven: "),
        (lambda: [AdditiveCoupling(hidden=2)], "no Lipschitz constant holds for every network"),
        (lambda: [keras.layers.ReLU(threshold=1.0)], "has no proven Lipschitz constant. Expected .* no jump.*'threshold': 1.0"),
        (lambda: [keras.layers.Rescaling(2.0, dtype="float16"), keras.layers.LeakyReLU(1e9, dtype="float16")], "finite slopes"),
        (lambda: [keras.layers.Reshape((4, 1)), keras.layers.Rescaling([1.0, 1.0])], "one output for every entry.*Rescaling"),
        (lambda: [keras.layers.Reshape((4, 1)), keras.layers.Rescaling(1.0, [0.0, 0.0])], "one output for every entry"),
        (lambda: [_with_nan(keras.layers.Dense(4), "bias")], "weights are not finite"),
        (lambda: [_with_nan(keras.layers.BatchNormalization(), "moving_mean")], "weights are not finite"),
        (lambda: _quantized(), "'small' has no proven.*Expected a layer that is not quantized. Received: 'int8'"),
        (lambda: _always_training(keras.layers.Dropout(0.5)), "Expected its input alone. Received: {'training': True}"),
        (lambda: _always_training(keras.Sequential([keras.layers.Dropout(0.5)])), "Expected its input alone"),
        (lambda: [_Unproven()], "_Unproven does not implement `certificate`"),
        (lambda: [AuxReflection(network=keras.layers.Dense(4))], "needs a linear n"),
        (lambda: "model", "Expected a `keras.layers.Layer`. Received: 'model'"),
        (lambda: _branches(), "is not a chain"),
        (lambda: _Subclass(name="mine"), "'mine' is no chain.*Received: _Subclass"),
        (lambda: FactoredReflection(), "has not been built"),
    ],
)
def test_refuses_what_it_does_not_know(make, message):
    made = make()
    with pytest.raises(ValueError, match=message):
        lipschitz_bounds(keras.Sequential([keras.Input((4,)), *made]) if isinstance(made, list) else made)


def test_refuses_means_that_are_cut_off_at_the_border():
    model = keras.Sequential([keras.Input((9, 1)), keras.layers.AveragePooling1D(5, strides=1, padding="same")])
    with pytest.raises(ValueError, match="overlap and are cut off at the border"):
        lipschitz_bounds(model)


def test_scales_are_those_that_the_dtype_has():
    """1.02e-6 has three digits in float16, and 1e-9 is 0 there, which maps all negative numbers to one."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.02e-6, dtype="float16")])
    moved = float(np.asarray(model(np.ones((1, 1))))[0, 0])
    bounds = lipschitz_bounds(model)
    assert 1 / bounds.inverse_lipschitz <= moved < 1.02e-6 <= bounds.lipschitz
    assert lipschitz_bounds(keras.layers.LeakyReLU(1e-9, dtype="float16")).inverse_lipschitz is None
    assert lipschitz_bounds(keras.layers.LeakyReLU(3.0)).lipschitz >= 3
    assert lipschitz_bounds(keras.layers.ELU(2.0)).lipschitz >= 2
    channels = keras.layers.Rescaling([1.0, 2.0])
    channels.build((None, 5, 2))
    assert lipschitz_bounds(channels).lipschitz == pytest.approx(2, rel=1e-6)


def test_no_bound_is_0_or_infinite_by_rounding():
    assert 0 < Bounds(1e-200, 1e200).then(Bounds(1e-200, 1e200)).lipschitz < 1e-300
    assert Bounds(1e-200, 1e200).then(Bounds(1e-200, 1e200)).inverse_lipschitz is None
    assert upwards(float(np.finfo(np.float64).max)) is None
