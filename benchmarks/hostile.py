"""Counts rows of hostile families for which the inverse or the log-determinant is lost or wrong.

    python -m benchmarks.hostile [--matrices 200] [--rows 64] [--seed 0] [--families …] [--output …]
    python -m benchmarks.hostile --families proven --matrices 300 --rows 2048 --sizes 2 3 6 12 24 48 --inverse-only

Every answer is compared with extended precision (`numpy.longdouble`); nothing is assumed about how it was computed. Certified
families have one preimage for every vector, which must be found. For the others a preimage exists wherever W is invertible,
which is proven here for W as it is stored, rounding included; for any other W nothing says that there is one.
"""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

Matrix = Callable[[np.random.Generator, int], np.ndarray]
LIVE = 16  # rows are compared where max|Wx| is at least this many times the bound below which Wx counts as zero


def _orthogonal(rng: np.random.Generator, d: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(d, d)))[0]


def _skew(rng: np.random.Generator, d: int, norm: float) -> np.ndarray:
    k = rng.normal(size=(d, d))
    k = k - k.T
    return k * (norm / max(np.linalg.norm(k, 2), 1e-30))


def _certified(rng: np.random.Generator, d: int) -> np.ndarray:
    """W⁻¹ = S + K with κ(S) just below 2 and a skew part over many decades."""
    condition = 2 - 10 ** rng.uniform(-6, -0.5)
    inner = rng.choice([1, condition], d) if rng.uniform() < 0.5 else rng.uniform(1, condition, d)
    inner[:2] = (1, condition)
    q = _orthogonal(rng, d) if rng.uniform() < 0.7 else np.eye(d)
    return np.linalg.inv(q * inner @ q.T + _skew(rng, d, 10 ** rng.uniform(-3, 4) if rng.uniform() < 0.8 else 0.0))


def _proven(rng: np.random.Generator, d: int) -> np.ndarray:
    """κ(S) from 2 − 1e-2 to 2 − 1e-9, eigenvalues of S in clusters, skew parts from 1e-3 to 1e6 of several shapes."""
    condition = 2 - 10 ** rng.uniform(-9, -2)
    s = [
        lambda: rng.choice([1, condition], d),
        lambda: rng.uniform(1, condition, d),
        lambda: np.where(rng.uniform(size=d) < 0.5, 1 + 1e-9 * rng.uniform(size=d), condition - 1e-9 * rng.uniform(size=d)),
        lambda: np.ones(d),
        lambda: 1 + (condition - 1) * 10 ** -rng.uniform(0, 12, d),
    ][rng.integers(5)]()
    s[:2] = (1, condition)
    q = _orthogonal(rng, d) if rng.uniform() < 0.7 else np.eye(d)
    k = [
        lambda: rng.normal(size=(d, d)),
        lambda: np.eye(d, k=1) * (rng.uniform(size=d) < 0.5),
        lambda: np.outer(*rng.normal(size=(2, d))),
        lambda: rng.normal(size=(d, d)) * 10 ** rng.uniform(-4, 4, (d, 1)),
    ][rng.integers(4)]()
    k = k - k.T
    k *= (rng.uniform() < 0.9) * 10 ** rng.uniform(-3, 6) / max(np.linalg.norm(k, 2), 1e-30)
    return np.linalg.inv(q * s @ q.T + k) * rng.choice([1, -1, 1e-20, 1e20])


def _edge(rng: np.random.Generator, d: int) -> np.ndarray:
    """κ(S) at 2 or just over it."""
    s = rng.choice([1.0, 2.0], d)
    s[:2] = (1, 2 + rng.choice([0, 1e-12, 1e-7, 1e-4, 1e-2]))
    q = _orthogonal(rng, d) if rng.uniform() < 0.7 else np.eye(d)
    return np.linalg.inv(q * s @ q.T + _skew(rng, d, rng.choice([0.0, 1e-6, 1.0, 100.0])))


def _blocks(rng: np.random.Generator, d: int) -> np.ndarray:
    w = np.zeros((d, d))
    k = 0
    while k < d:
        size = min(int(rng.integers(1, 4)), d - k)
        block = rng.normal(size=(size, size)) if rng.uniform() < 0.6 else rng.normal() * np.eye(size) + np.eye(size, k=1)
        w[k : k + size, k : k + size] = block * rng.choice([1.0, 1.0, 10.0 ** rng.uniform(-6, 2)])
        k += size
    return w


def _almost_symmetric(rng: np.random.Generator, d: int) -> np.ndarray:
    s = rng.normal(size=(d, d))
    s = s + s.T if rng.uniform() < 0.5 else (lambda q: q * rng.choice([1.0, 1.5, 2.0], d) @ q.T)(_orthogonal(rng, d))
    return s + _skew(rng, d, 10 ** rng.uniform(-16, -3))


def _rank_deficient(rng: np.random.Generator, d: int) -> np.ndarray:
    rank = int(rng.integers(1, d))
    return rng.normal(size=(d, rank)) @ rng.normal(size=(rank, d)) + rng.choice([0, 1e-12, 1e-7]) * rng.normal(size=(d, d))


def _companion(rng: np.random.Generator, d: int) -> np.ndarray:
    w = np.eye(d, k=1)
    w[-1] = rng.integers(-2, 3, d) if rng.uniform() < 0.5 else rng.normal(size=d)
    w[-1, 0] = w[-1, 0] or 1.0
    return w


def _scaled(rng: np.random.Generator, d: int) -> np.ndarray:
    return rng.normal(size=(d, d)) * 10 ** rng.uniform(-2, 2, (d, 1)) * 10 ** rng.uniform(-1, 1, (1, d))


def _ill_conditioned(rng: np.random.Generator, d: int) -> np.ndarray:
    values = 10 ** -rng.uniform(0, rng.choice([3.0, 5.0, 10.0]), d)
    return _orthogonal(rng, d) * values @ _orthogonal(rng, d)


def _triangular(rng: np.random.Generator, d: int) -> np.ndarray:
    return np.eye(d) * rng.choice([1.0, 2.0, -1.0], d) + np.triu(rng.normal(size=(d, d)), 1) * 10 ** rng.uniform(-1, 1)


FAMILIES: dict[str, Matrix] = {
    "certified": _certified,
    "proven": _proven,
    "edge": _edge,
    "block diagonal": _blocks,
    "almost symmetric": _almost_symmetric,
    "rank deficient": _rank_deficient,
    "integer": lambda rng, d: rng.integers(-2, 3, (d, d)).astype(float),
    "companion": _companion,
    "normal": lambda rng, d: rng.normal(size=(d, d)),
    "scaled": _scaled,
    "ill conditioned": _ill_conditioned,
    "triangular": _triangular,
    "symmetric": lambda rng, d: (lambda a: a + a.T)(rng.normal(size=(d, d))),
    "rotation": lambda rng, d: np.eye(d) - _orthogonal(rng, d),
}


FAILURES = (
    "certified, NaN",
    "certified, inexact",
    "free, well conditioned, NaN",
    "free, NaN",
    "wrong",
    "residual misreported",
    "log-det wrong",
    "log-det not finite",
    "gradient not finite",
)


def hostile_rows(rng: np.random.Generator, w: np.ndarray, n: int) -> np.ndarray:
    """Ordinary, sparse and badly scaled vectors, eigenvectors and singular vectors of W with and without noise, near poles.

    The last are images of vectors whose c is an extreme eigenvalue of 2 S, W⁻¹ = S + K: their root is at an end of the bracket.
    """
    d = len(w)
    rows = rng.normal(size=(n, d))
    part = n // 8
    rows[part : 2 * part] *= 10 ** rng.uniform(-8, 8, (part, d))
    rows[2 * part : 3 * part] = rng.integers(-2, 3, (part, d))
    values, vectors = np.linalg.eig(w)
    special = np.concatenate([np.linalg.svd(w)[2], vectors.real.T, np.linalg.eigh((w + w.T) / 2)[1].T, np.eye(d)])
    chosen = special[rng.integers(0, len(special), 3 * part)]
    rows[3 * part : 6 * part] = chosen + rng.normal(size=(3 * part, d)) * 10 ** rng.uniform(-18, -1, (3 * part, 1))
    real = values.real[np.abs(values.imag) < 1e-9]
    if len(real):  # close to a pole: c(x) = 1/λ on the way from one vector to another
        for k in range(6 * part, 7 * part):
            rows[k] = _towards(w, 1 / rng.choice(real + 1e-300), *rng.normal(size=(2, d)), rng)
    if np.linalg.cond(w) < 1e12:
        m = np.linalg.inv(w)
        ends = np.linalg.eigh((m + m.T) / 2)[1].T[rng.choice([0, -1], n - 7 * part)]
        u = ends + rng.normal(size=ends.shape) * 10 ** rng.uniform(-18, -1, (len(ends), 1))
        x = u @ m.T
        rows[7 * part :] = x - 2 * u * (np.sum(u * x, -1) / np.sum(u * u, -1))[:, None]
    rows /= np.where(np.isin(np.abs(rows).max(-1), (0, np.inf)), 1, np.abs(rows).max(-1))[:, None]
    rows[~(np.abs(rows).max(axis=-1) > 0)] = 1.0
    return rows


def _towards(w: np.ndarray, target: float, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    def off(t: float) -> float:
        x = np.cos(t) * a + np.sin(t) * b
        u = w @ x
        return float(2 * u @ x / max(u @ u, 1e-300) - target)

    grid = np.linspace(0, np.pi, 33)
    signs = np.sign([off(t) for t in grid])
    crossing = np.flatnonzero(signs[1:] != signs[:-1])
    if not len(crossing):
        return a
    low, high = grid[crossing[0]], grid[crossing[0] + 1]
    for _ in range(int(rng.integers(10, 60))):
        middle = (low + high) / 2
        low, high = (middle, high) if np.sign(off(middle)) == signs[crossing[0]] else (low, middle)
    return np.cos(low) * a + np.sin(low) * b


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """W x for rows x, in the units in which max|x| and max|W| are about 1: exact products, summed with twice the digits."""

    def halves(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        head = t.astype(np.float32).astype(np.float64)  # 24 digits, and 29 are left
        return head, t - head

    size_x, size_w = np.abs(x).max(-1, keepdims=True).astype(float), float(np.abs(w).max())
    # By powers of two, so that nothing is rounded.
    x = np.ldexp(x.astype(float), -np.frexp(np.where(size_x > 0, size_x, 1))[1])
    w = np.ldexp(w.astype(float), -np.frexp(size_w)[1])
    total, rest = np.zeros((2, len(x), len(w)))
    for a in halves(x):
        for b in halves(w):
            for j in range(len(w)):
                term = a[:, j : j + 1] * b[None, :, j]
                new = total + term
                kept = new - total
                rest += (total - (new - kept)) + (term - kept)
                total = new
    return total.astype(np.longdouble) + rest


def residual(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """‖f(x) − y‖/‖y‖ in extended precision, with f(x) = x only where Wx is exactly zero."""
    if not len(x):
        return np.zeros(0)
    u = product(x, w)
    u = u / np.where(np.abs(u).max(-1, keepdims=True) > 0, np.abs(u).max(-1, keepdims=True), 1)
    x, y = (np.asarray(t, np.longdouble) for t in (x, y))
    squared = np.sum(u * u, -1, keepdims=True)
    value = x - 2 * u * np.sum(u * x, -1, keepdims=True) / np.where(squared > 0, squared, 1)
    scale = np.abs(y).max(-1, keepdims=True)
    return np.sqrt(np.sum(((value - y) / scale) ** 2, -1) / np.sum((y / scale) ** 2, -1)).astype(float)


def log_det(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """log|det J| in extended precision: N = I − cW + 2uvᵀ/‖u‖² has N x = x, and the rest is det of N on x^⊥."""
    u, v = (product(x, m) for m in (w, w.T))
    # In the units of `product`.
    x, w = (np.ldexp(t.astype(float), -np.frexp(np.abs(t).max(axis, keepdims=True))[1]) for t, axis in ((x, -1), (w, None)))
    x, w = x.astype(np.longdouble), w.astype(np.longdouble)
    squared = np.sum(u * u, -1)[:, None, None]
    squared = np.where(squared > 0, squared, 1)
    c = 2 * np.sum(u * x, -1)[:, None, None] / squared
    d = x.shape[-1]
    n = np.eye(d) - c * w + 2 * u[:, :, None] * v[:, None, :] / squared
    # H n H with H x = ±‖x‖ e₁: the first column is e₁.
    h = x / np.sqrt(np.sum(x * x, -1, keepdims=True))
    h[:, 0] += np.where(h[:, 0] >= 0, 1, -1)
    h = h / np.sqrt(np.sum(h * h, -1, keepdims=True))
    n = n - 2 * h[:, :, None] * (h[:, None, :] @ n)
    n = n - 2 * (n @ h[:, :, None]) * h[:, None, :]
    return _log_abs_det(n[:, 1:, 1:])


def _log_abs_det(a: np.ndarray) -> np.ndarray:
    """By elimination with complete pivoting."""
    a = a.copy()
    rows = np.arange(len(a))
    total = np.zeros(len(a), np.longdouble)
    for k in range(a.shape[-1]):
        sub = np.abs(a[:, k:, k:])
        i, j = np.unravel_index(sub.reshape(len(a), -1).argmax(-1), sub.shape[1:])
        a[rows, k], a[rows, i + k] = a[rows, i + k].copy(), a[rows, k].copy()
        a[rows, :, k], a[rows, :, j + k] = a[rows, :, j + k].copy(), a[rows, :, k].copy()
        pivot = a[:, k, k]
        with np.errstate(divide="ignore"):
            total += np.log(np.abs(pivot))
        factor = a[:, k + 1 :, k] / np.where(pivot == 0, 1, pivot)[:, None]
        a[:, k + 1 :, k + 1 :] -= factor[:, :, None] * a[:, k, None, k + 1 :]
    return total.astype(float)


def is_null(x: np.ndarray, w: np.ndarray, factor: float = 1.0) -> np.ndarray:
    """Where max|Wx| ≤ factor · 4 ε √d max|W| max|x|, ε of the dtype of w."""
    bound = factor * 4 * np.finfo(w.dtype).eps * np.sqrt(len(w)) * np.abs(w).max()
    u = np.asarray(x, np.longdouble) @ np.asarray(w, np.longdouble).T
    return np.abs(u).max(-1) <= bound * np.abs(x).max(-1)


def is_invertible(w: np.ndarray) -> bool:
    """Whether ‖I − MW‖ < 1 for some M, with the rounding of the product: a proof that W, as it is stored, has an inverse."""
    w = w.astype(float) / np.abs(w).max()
    try:
        m = np.linalg.inv(w)
    except np.linalg.LinAlgError:
        return False
    rounding = 4 * len(w) * np.finfo(float).eps * np.linalg.norm(m) * np.linalg.norm(w)
    return bool(np.linalg.norm(np.eye(len(w)) - m @ w) + rounding < 1)


def cases(
    families: list[str], matrices: int, rows: int, seed: int, sizes: tuple[int, ...] = (2, 3, 5, 8)
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(family, W, rows) in float64, one dimension after the other."""
    for family in families:
        rng = np.random.default_rng([seed, *family.encode()])
        for d in sizes:
            for _ in range(matrices // len(sizes)):
                w = FAMILIES[family](rng, d)
                if np.isfinite(w).all() and np.abs(w).max() > 0:
                    yield family, w, hostile_rows(rng, w, rows)


def count_inverse(rows: np.ndarray, w: np.ndarray, find: Callable) -> dict[str, np.ndarray]:
    """Which rows are lost, wrong, inexact or reported with a residual that is not theirs."""
    good, fine = {"float32": (1e-4, 1e-5), "float64": (1e-9, 1e-11)}[str(w.dtype)]
    found = find(rows, w)
    x, certified, every = found.x.numpy(), bool(found.certified), np.ones(len(rows), bool)
    lost = np.isnan(x).any(-1)
    true = residual(np.where(lost[:, None], rows, x), rows, w)
    condition, unit = np.linalg.cond(w.astype(float)), np.finfo(w.dtype).eps
    free = not certified and is_invertible(w)
    regular = free and condition < 0.01 / unit
    # f magnifies the rounding of x by up to the condition of W: up to here every preimage, rounded, is good enough.
    kept = free and 4 * unit * condition <= good
    return {
        "rows": every,
        "certified": every & certified,
        "certified, NaN": lost & certified,
        "certified, inexact": ~lost & certified & (true > fine),
        "free, well conditioned": every & kept,
        "free, well conditioned, NaN": lost & kept,
        "free": every & regular,
        "free, NaN": lost & regular,
        "invertible to the last digits": every & free & (not regular),
        "invertible to the last digits, NaN": lost & free & (not regular),
        "not proven invertible": every & (not certified) & (not free),
        "not proven invertible, NaN": lost & (not certified) & (not free),
        "wrong": ~lost & (true > 1.1 * good) & ~is_null(rows, w),
        "residual misreported": ~lost & ~(np.abs(true - found.residual.numpy()) <= 0.1 * good),
    }


def count_log_det(x: np.ndarray, w: np.ndarray, differentiate: Callable) -> dict[str, np.ndarray]:
    """Which rows have a log-determinant that is wrong or not finite, or gradients that are not finite."""
    value, gx, gw = (t.numpy() for t in differentiate(x, w))
    expected, live = log_det(x, w), ~is_null(x, w, LIVE)
    with np.errstate(invalid="ignore"):
        off = np.abs(value - expected) > 1e-3 * (1 + np.abs(expected))
    return {
        "live": live,
        "log-det wrong": live & np.isfinite(value) & off & (expected > -30),
        "log-det not finite": live & ~np.isfinite(value) & (expected > -10),
        "gradient not finite": live & np.isfinite(value) & ~np.isfinite(gx).all(-1),
        "W with a gradient that is not finite": np.array([np.isfinite(value).all() and not np.isfinite(gw).all()]),
    }


def main() -> None:
    import tensorflow as tf

    from keras_auxref import ops

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=200, help="of every family")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="*", default=[2, 3, 5, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float64"])
    parser.add_argument("--inverse-only", action="store_true")
    parser.add_argument("--output", help="a file for the counts; those of other commands stay in it")
    parser.add_argument("--keep", help="a file for the rows that failed")
    arguments = parser.parse_args()

    find = tf.function(ops.inverse_with_info, autograph=False)

    @tf.function(autograph=False)
    def differentiate(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            value = ops.log_det_jacobian(x, w)
            total = tf.reduce_sum(tf.where(tf.math.is_finite(value), value, 0))
        return [value, *tape.gradient(total, [x, w])]

    counts: dict[str, dict[str, Counter]] = {dtype: {} for dtype in arguments.dtypes}
    kept = []
    for family, wide_w, wide_rows in cases(
        arguments.families, arguments.matrices, arguments.rows, arguments.seed, tuple(arguments.sizes)
    ):
        for dtype in arguments.dtypes:
            w, rows = wide_w.astype(dtype), wide_rows.astype(dtype)
            verdicts = count_inverse(rows, w, find)
            if not arguments.inverse_only:
                verdicts |= count_log_det(rows, w, differentiate)
            count = counts[dtype].setdefault(family, Counter())
            for name, which in verdicts.items():
                count[name] += int(which.sum())
                kept += [(dtype, family, name, w, row) for row in rows[which]] if name in FAILURES else []
    for dtype, families in counts.items():
        families["all"] = sum(families.values(), Counter())
        for family, count in families.items():
            print(f"{dtype} {family:18}", ", ".join(f"{name} {n}" for name, n in count.items() if n), flush=True)
    if arguments.output:
        path = Path(arguments.output)
        results = json.loads(path.read_text()) if path.exists() else {}
        results["python -m benchmarks.hostile " + shlex.join(sys.argv[1:])] = counts
        path.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.keep:
        import pickle

        with open(arguments.keep, "wb") as file:
            pickle.dump(kept, file)


if __name__ == "__main__":
    main()
