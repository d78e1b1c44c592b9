import keras
import numpy as np
import pytest

from keras_auxref import AuxReflection, initializers
from tests.support import assert_agree, orthogonal, relative


@pytest.mark.parametrize("make", [initializers.Cayley, initializers.Henaff])
@pytest.mark.parametrize("d", [1, 2, 5, 8])
def test_rotation_blocks_are_orthogonal_and_repeatable(make, d):
    u = np.asarray(make(seed=3)((d, d), dtype="float64"))
    np.testing.assert_allclose(u @ u.T, np.eye(d), atol=1e-15)
    assert np.linalg.det(u) == pytest.approx(1)
    assert_agree(u, make(seed=3)((d, d), dtype="float64"))
    if d > 1:
        assert np.abs(u - make(seed=4)((d, d), dtype="float64")).max() > 1e-3


@pytest.mark.parametrize("d", [2, 3, 7, 12])
def test_a_signed_permutation_exchanges_the_halves_and_has_no_fixed_point(d):
    for seed in range(20):
        q = np.asarray(initializers.SignedPermutation(seed)((d, d), dtype="float64"))
        assert_agree(q @ q.T, np.eye(d))
        assert sorted(np.unique(np.abs(q))) == [0, 1]
        assert np.abs(np.linalg.eigvals(q) - 1).min() > 1e-3
        assert not q[: d // 2, : d // 2].any()  # the first half comes from the second
        assert np.abs(q[d - d // 2 :, : d // 2]).sum() == d // 2


def test_cayley_is_the_cayley_transform_of_its_blocks():
    """expRNN: s = √((1 − cos t)/(1 + cos t)), t ~ U(0, π/2), U = (I + A)⁻¹(I − A), A = ±[[0, s], [−s, 0]]."""
    u = np.asarray(initializers.Cayley(seed=0)((2, 2), dtype="float64"))
    s = np.sqrt((1 - u[0, 0]) / (1 + u[0, 0]))
    assert 0 <= s <= 1
    a = np.array([[0, -s], [s, 0]])
    np.testing.assert_allclose(u, np.linalg.solve(np.eye(2) + a, np.eye(2) - a), atol=1e-14)


def test_angles_fill_their_ranges():
    angles = {}
    for make in (initializers.Cayley, initializers.Henaff):
        u = np.asarray(make(seed=0)((2000, 2000), dtype="float64"))
        angles[make] = np.arctan2(u[1::2, ::2].diagonal(), u[::2, ::2].diagonal())
    assert -np.pi / 2 <= angles[initializers.Cayley].min() < -1.5
    assert -0.1 < angles[initializers.Cayley].max() <= 0
    assert angles[initializers.Henaff].min() < -3
    assert angles[initializers.Henaff].max() > 3


def test_uniform_is_the_papers():
    w = np.asarray(initializers.UniformFanIn(seed=1)((400, 400)))
    assert np.abs(w).max() <= 1 / 20
    assert w.std() == pytest.approx(1 / 20 / np.sqrt(3), rel=0.02)


@pytest.mark.parametrize("source", ["orthogonal", initializers.Henaff(seed=1), "array"])
def test_reflection_of_starts_the_layer_as_the_orthogonal_map(rng, source):
    matrix = orthogonal(7, rng) if isinstance(source, str) and source == "array" else source
    start = initializers.ReflectionOf(matrix)
    layer = AuxReflection(kernel_initializer=start, dtype="float64")
    x = rng.normal(size=(9, 7))
    y = layer(x)
    u = np.eye(7) - layer.kernel.numpy()
    np.testing.assert_allclose(u @ u.T, np.eye(7), atol=1e-6)
    assert relative(y, x @ u.T) < 1e-6
    if matrix is not source:
        np.testing.assert_allclose(u, matrix, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: initializers.Cayley(seed=5),
        lambda: initializers.Henaff(seed=5),
        lambda: initializers.UniformFanIn(seed=5),
        lambda: initializers.ReflectionOf(initializers.Cayley(seed=5)),
        lambda: initializers.ReflectionOf(np.eye(4)[::-1]),
    ],
)
def test_serialisation(make):
    initializer = make()
    again = keras.initializers.get(keras.saving.serialize_keras_object(initializer))
    assert_agree(again((4, 4)), initializer((4, 4)))


def test_seeding_keras_governs_the_seeds():
    draws = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        draws.append(np.asarray(initializers.Cayley()((6, 6))))
    assert_agree(*draws)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: initializers.Cayley()((3, 4)), r"square matrix. Expected a shape \(d, d\). Received: \(3, 4\)"),
        (lambda: initializers.ReflectionOf(np.ones((3, 3))), r"Expected an orthogonal matrix.*Received: max\|UᵀU − I\| = 3"),
        (lambda: initializers.ReflectionOf(np.ones((3, 2))), r"square. Expected shape \(d, d\). Received: \(3, 2\)"),
        (lambda: initializers.ReflectionOf(np.eye(3))((4, 4)), r"Expected shape \(4, 4\). Received: \(3, 3\)"),
        (lambda: initializers.ReflectionOf("ones")((4, 4)), "Expected an orthogonal matrix"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
