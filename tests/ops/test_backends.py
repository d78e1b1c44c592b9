"""The mathematics where Keras runs on JAX (compiled) or torch, in a process that cannot import TensorFlow."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_every_function_on_every_backend(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    script = Path(__file__).with_name("on_a_backend.py")
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 17
    assert {name: error for name, error in found.items() if not error < 2e-4} == {}


def _triangle(rng, m):
    """The T of m reflections in compact WY form, in which some are the same and some nearly so."""
    v = rng.normal(size=(m, m))
    v[:, m // 2 :] = v[:, : m - m // 2] + 1e-3 * v[:, m // 2 :]
    v /= np.linalg.norm(v, axis=0)
    return np.triu(v.T @ v, 1) + 0.5 * np.eye(m)


@pytest.mark.parametrize("m", [1, 3, 12, 48])
def test_upper_triangles_on_jax(rng, m):
    jax = pytest.importorskip("jax")
    from keras_auxref.ops.backend.jax import solve_upper

    t, b = _triangle(rng, m).astype("float32"), rng.normal(size=(m, 4)).astype("float32")
    exact = np.linalg.solve(t.astype("float64"), b.astype("float64"))
    assert np.abs(jax.jit(solve_upper)(t, b) - exact).max() < 2e-6 * np.abs(exact).max() + 1e-6
    with jax.enable_x64(True):
        found = jax.jit(solve_upper)(t.astype("float64"), b.astype("float64"))
        assert found.dtype == "float64"
        assert np.abs(found - exact).max() < 1e-13 * m * np.abs(exact).max()


def test_derivatives_of_upper_triangles_on_jax(rng):
    jax = pytest.importorskip("jax")
    from keras_auxref.ops.backend.jax import solve_upper

    def loss(solve):
        return lambda t, b: jax.numpy.sum(jax.numpy.cos(solve(t, b)))

    with jax.enable_x64(True):
        t, b = _triangle(rng, 6), rng.normal(size=(6, 2))
        for differentiate in (jax.grad, jax.jacfwd, jax.hessian):
            computed, expected = (
                jax.tree.leaves(differentiate(loss(solve), (0, 1))(t, b))
                for solve in (solve_upper, jax.scipy.linalg.solve_triangular)
            )
            for a, e in zip(computed, expected, strict=True):
                np.testing.assert_allclose(a, e, rtol=1e-10, atol=1e-11)


def test_on_jax_a_function_is_compiled_once_for_its_shapes():
    """Eager calls find it again: to compile an inverse takes seconds."""
    pytest.importorskip("jax")
    from keras_auxref.ops.backend.jax import shared

    traced = []

    def function(x, *, power):
        traced.append(power)
        return x**power

    for _ in range(3):
        np.testing.assert_allclose(shared(function, np.full(2, 3.0, "float32"), power=2), 9)
    assert traced == [2]
    shared(function, np.full(2, 3.0, "float32"), power=3)
    shared(function, np.full(4, 3.0, "float32"), power=3)
    assert traced == [2, 3, 3]


@pytest.mark.parametrize("many", [3, 40])
def test_on_jax_only_some_rows_are_replaced(rng, many):
    pytest.importorskip("jax")
    import jax.numpy as jnp

    from keras_auxref.ops.backend.jax import only_rows

    x, current = jnp.asarray(rng.normal(size=(2, many, 4)).astype("float32"))
    for share in (0.0, 0.2, 1.0):
        chosen = jnp.asarray(rng.uniform(size=(many, 1)) < share)
        rows, total = only_rows(chosen, lambda x, y: (x + y, x.sum()), current, x, x, total=jnp.float32(1))
        np.testing.assert_allclose(rows, np.where(chosen, 2 * x, current), rtol=1e-6)
        np.testing.assert_allclose(total, 1 + np.sum(chosen * x), rtol=1e-4, atol=1e-4)


def test_what_jax_compiles_for_numbers_is_compiled_in_a_hurry(monkeypatch):
    jax = pytest.importorskip("jax")
    from keras_auxref.ops.backend import jax as backend

    assert jax.default_backend() != "cpu" or backend._sooner() is not None
    found, before = [], backend._compiled
    monkeypatch.setattr(backend, "_compiled", lambda *arguments: found.append(arguments[-1]) or before(*arguments))

    def double(x):
        return 2 * x

    x = jax.numpy.ones(())
    ways = [
        lambda: backend.shared(double, x),
        lambda: jax.jit(lambda: backend.shared(double, x))(),
        lambda: jax.jit(lambda x: backend.shared(double, x))(x),
        lambda: jax.grad(lambda x: backend.shared(double, x))(x),
        lambda: jax.vmap(lambda x: backend.shared(double, x))(x[None])[0],
    ]
    assert [float(way()) for way in ways] == [2.0] * 5
    assert found == [True, False, False, False, False]
