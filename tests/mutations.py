"""Breaks formulas of the package one at a time, and reports which breaks no test notices: `python -m tests.mutations`.

Works on a copy of the checkout. Every mutation is one change of text and the tests that have to fail with it; a text that is
no longer there is an error, so that the list follows the code. Words as arguments choose the mutations whose names have one of
them, and `--part 2/8` the second of eight parts. Not a test itself. TensorFlow is imported once, and every mutation runs in a
fork: ten minutes on a quiet core.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import conftest  # the environment of the tests, before TensorFlow

with conftest.silenced():
    import tensorflow  # noqa: F401
    import tensorflow_probability  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    """In `file` the text `old`, which is there once, becomes `new`; `tests` have to notice."""

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = {
    "reflection: 2 of 2/‖u‖²": Mutation(
        "ops/householder.py", "factor = 2 / (ops.sum", "factor = 1.99 / (ops.sum", "tests/ops/test_reflect.py"
    ),
    "reflection: gradient": Mutation(
        "ops/reflect.py",
        "e = k * forward.direction - g",
        "e = k * forward.direction + g",
        "tests/ops/test_reflect.py::test_gradients_match_finite_differences",
    ),
    "Jacobian: log-determinant": Mutation(
        "ops/log_det.py", "return point.log_abs_det, ()", "return 1.001 * point.log_abs_det, ()", "tests/ops/test_log_det.py"
    ),
    "Jacobian: gradient of the log-determinant": Mutation(
        "ops/log_det.py", "gx = (g * beta) * wp - (along", "gx = (g * beta) * wp + (along", "tests/ops/test_log_det.py"
    ),
    "Jacobian: κ in the basis of a general W": Mutation(
        "ops/point_basis.py",
        "terms = self.beta * (self.v * self.adjugate_u) * inverse",
        "terms = 0.99 * self.beta * (self.v * self.adjugate_u) * inverse",
        "tests/ops/test_log_det.py",
    ),
    "Jacobian: κ in the basis of a symmetric W": Mutation(
        "ops/point_basis.py",
        "terms = self.beta * ops.square(self.u) * inverse",
        "terms = 0.99 * self.beta * ops.square(self.u) * inverse",
        "tests/ops/test_log_det.py",
    ),
    "Cayley: I + K/2": Mutation(
        "ops/cayley.py", "identity + 0.5 * k", "identity + 0.501 * k", "tests/ops/test_orthogonal_maps.py"
    ),
    "exponential: scaling": Mutation(
        "ops/matrix_exp.py",
        "ops.stack([c, c**2, c**3, c**6])",
        "ops.stack([c, c**2, c**3, c**5])",
        "tests/ops/test_orthogonal_maps.py",
    ),
    "exponential: gradient": Mutation(
        "ops/matrix_exp.py",
        "gn = _MIDDLE * g +",
        "gn = 0.99 * _MIDDLE * g +",
        "tests/ops/test_orthogonal_maps.py::test_gradient_matches_finite_differences",
    ),
    "exponential: inverse": Mutation(
        "ops/skew.py", "v = 1.5 * v - 0.5", "v = 1.49 * v - 0.5", "tests/ops/test_orthogonal_maps.py"
    ),
    "product of reflections: T": Mutation(
        "ops/householder_product.py",
        "half = 0.5 * ops.where",
        "half = 0.501 * ops.where",
        "tests/ops/test_householder_product.py",
    ),
    "Stiefel: length of a column": Mutation(
        "ops/stiefel.py", "v[0] = -tail / (1 + column[0])", "v[0] = -tail / (1.01 + column[0])", "tests/ops/test_stiefel.py"
    ),
    "Stiefel: determinant of the completion": Mutation(
        "ops/stiefel.py", "signs[-1] = (-1) ** k *", "signs[-1] = (-1) ** (k + 1) *", "tests/ops/test_stiefel.py"
    ),
    "factored: c": Mutation(
        "ops/diagonal.py",
        "c = 2 * ops.sum(weighted * scaled,",
        "c = 2.001 * ops.sum(weighted * scaled,",
        "tests/ops/test_factored.py",
    ),
    "factored: log-determinant": Mutation(
        "ops/diagonal.py",
        "ops.log(2 * r + (2 * zero - 1))",
        "ops.log(2 * r + (zero - 0.99))",
        "tests/ops/test_factored.py::test_log_det_is_that_of_automatic_differentiation",
    ),
    "factored: inverse": Mutation(
        "ops/diagonal.py",
        "return c + (ops.sqrt(n / total) - 1) * n / m",
        "return c + 0.5 * (ops.sqrt(n / total) - 1) * n / m",
        "tests/ops/test_factored.py::test_inverse_of_hostile_vectors",
    ),
    "factored: gradient of the inverse": Mutation(
        "ops/diagonal.py",
        "        for _ in range(2):\n            c = newton(c, lam, squares, total)",
        "        c = newton(c, *constants)",
        "tests/ops/test_factored.py::test_gradients",
    ),
    "proof: κ < 2": Mutation(
        "ops/proof.py", "far + error < 2 * (near - error)", "far + error < 2.2 * (near - error)", "tests/ops/test_factors.py"
    ),
    "proof: bracket": Mutation(
        "ops/proof.py", "low, high = 2 * (proof.low", "low, high = 2.01 * (proof.low", "tests/ops/test_factors.py"
    ),
    "start of the search": Mutation(
        "ops/reflect.py",
        "return 2 * ops.trace(w) /",
        "return -ops.trace(w) /",
        "tests/ops/test_reflect.py",
    ),
    "search: Newton's step": Mutation(
        "ops/secular.py",
        "newton = c * secular.psi * secular.x_squared",
        "newton = 0.5 * c * secular.psi * secular.x_squared",
        "tests/ops/test_inverse.py::test_certified_matrices_converge_from_anywhere",
    ),
    "inverse: gradient": Mutation(
        "ops/implicit.py",
        "return t, -matmul(ops.transpose(gu), x) / scale",
        "return t, matmul(ops.transpose(gu), x) / scale",
        "tests/ops/test_inverse.py::test_every_route_gives_value_and_gradients",
    ),
    "inverse: rising roots": Mutation(
        "ops/secular.py",
        "ops.where(rising, -one, one)",
        "one",
        "tests/ops/test_hostile.py::test_a_preimage_that_rounding_spoils_gives_way_to_another_one",
    ),
    "recurrence: gradient": Mutation(
        "ops/backend/_while.py",
        "tf.matmul(gu, previous, transpose_a=True)",
        "tf.matmul(gz, previous, transpose_a=True)",
        "tests/ops/test_recurrence.py::test_gradients_agree_with_differences",
    ),
    "spectral kernel: bound": Mutation(
        "kernels/spectral.py", "+ bound * normalised", "+ 1.2 * bound * normalised", "tests/kernels/test_kernels.py"
    ),
    "relaxed Cayley: margin": Mutation(
        "kernels/relaxed_cayley.py",
        "beta = (1 - self.margin) / 3",
        "beta = (1 - self.margin) / 2",
        "tests/kernels/test_kernels.py",
    ),
    "norm: too small": Mutation(
        "kernels/norms.py",
        "return rounding * value, rounding * gradient",
        "return 0.99 * value, 0.99 * gradient",
        "tests/kernels/test_norms.py",
    ),
    "Lipschitz: 2κ − 1": Mutation(
        "certificate.py",
        "upwards(2 * (far / near) - 1)",
        "upwards(1.9 * (far / near) - 0.9)",
        "tests/test_lipschitz.py::test_singular_values_of_the_jacobian_lie_where_the_theorem_says",
    ),
    "Lipschitz: κ/(2 − κ)": Mutation(
        "certificate.py",
        "gap = 2 * near - far -",
        "gap = 2.01 * near - far -",
        "tests/test_lipschitz.py::test_singular_values_of_the_jacobian_lie_where_the_theorem_says",
    ),
    "Lipschitz: κ of a constant that is asked for": Mutation(
        "certificate.py",
        "return (lipschitz + 1) / 2",
        "return (lipschitz + 1.02) / 2",
        "tests/test_lipschitz.py::test_a_constant_that_was_asked_for_holds_for_every_weight",
    ),
    "Lipschitz: products": Mutation(
        "certificate.py",
        "Bounds(_product(self[0], after[0])",
        "Bounds(_product(self[0], self[0])",
        "tests/test_lipschitz.py::test_no_pair_breaks_the_bound_of_a_model",
    ),
    "Lipschitz: windows of max pooling": Mutation(
        "lipschitz.py",
        "math.ceil(size / stride)",
        "math.floor(size / stride)",
        "tests/test_lipschitz.py::test_no_pair_breaks_the_bound_of_a_model",
    ),
    "Lipschitz: batch normalization": Mutation(
        "lipschitz.py",
        "gamma / np.sqrt(variance + layer.epsilon)",
        "gamma / (1 + variance)",
        "tests/test_lipschitz.py::test_no_pair_breaks_the_bound_of_a_model",
    ),
    "Sylvester: log-determinant": Mutation(
        "ops/sylvester.py", "(1 - ops.square(h)) * _products(p)", "(1 - h) * _products(p)", "tests/ops/test_sylvester.py"
    ),
    "Sylvester: inverse": Mutation(
        "ops/sylvester.py", "known = known - triangle", "known = known + triangle", "tests/ops/test_sylvester.py"
    ),
    "affine: inverse": Mutation(
        "ops/affine.py",
        "y * ops.exp(-log_scale) - shift",
        "y * ops.exp(-log_scale) + shift",
        "tests/flows/parts/test_act_norm.py",
    ),
    "affine: log-determinant": Mutation(
        "ops/affine.py",
        "ops.zeros_like(x[..., 0]) + ops.sum(log_scale)",
        "ops.zeros_like(x[..., 0]) - ops.sum(log_scale)",
        "tests/flows/parts/test_act_norm.py tests/layers/test_invertible.py::test_log_det_is_that_of_automatic_differentiation",
    ),
    "mixture: slope": Mutation(
        "ops/logistic_mixture.py", "+ rest - log_scales, axis=-1)", "+ rest, axis=-1)", "tests/ops/test_logistic_mixture.py"
    ),
    "mixture: inverse": Mutation(
        "ops/logistic_mixture.py",
        "newton = x - residual * ops.exp(-value.log_slope)",
        "newton = x - 0.1 * residual * ops.exp(value.log_slope)",
        "tests/ops/test_logistic_mixture.py",
    ),
    "spline: value": Mutation(
        "ops/spline.py",
        "(ratio * ratio + left * mixed) / (1 +",
        "(ratio * ratio + right * mixed) / (1 +",
        "tests/ops/test_spline.py",
    ),
    "spline: slope": Mutation(
        "ops/spline.py",
        "above = right * ratio * ratio + 2 * ratio * rest",
        "above = right * ratio * ratio + ratio * rest",
        "tests/ops/test_spline.py",
    ),
    "spline: inverse": Mutation(
        "ops/spline.py", "a, b = 1 - left + bend, left - bend", "a, b = 1 - left + bend, left + bend", "tests/ops/test_spline.py"
    ),
    "spline: inverse where b < 0": Mutation(
        "ops/spline.py",
        "(root - b) / ops.where(usual, one, 2 * a)",
        "(root - b) / ops.where(usual, one, a)",
        "tests/ops/test_spline.py",
    ),
    "spline: slopes at knots": Mutation(
        "ops/spline.py",
        "inner = 2 * before * after / (before + after)",
        "inner = 0.5 * (before + after)",
        "tests/ops/test_spline.py",
    ),
    "reflected dense: log-determinant": Mutation(
        "flows/parts/reflected_dense.py",
        "return y, first + second",
        "return y, second",
        "tests/layers/test_invertible.py::test_log_det_is_that_of_automatic_differentiation",
    ),
    "reflected dense: inverse": Mutation(
        "flows/parts/reflected_dense.py",
        "self.reflection.inverse(self.dense.inverse(",
        "self.dense.inverse(self.reflection.inverse(",
        "tests/layers/test_invertible.py::test_round_trip",
    ),
    "reflected dense: Lipschitz": Mutation(
        "flows/parts/reflected_dense.py",
        "bounds_of(reflection).then(bounds_of(dense))",
        "bounds_of(reflection)",
        "tests/flows/parts/test_reflected_dense.py",
    ),
    "repeat: log-determinant": Mutation(
        "flows/repeat.py",
        "return y, carry[1] + keras.ops.cast(",
        "return y, keras.ops.cast(",
        "tests/flows/test_repeat.py::test_loop_and_steps_written_out_are_the_copies_one_after_the_other",
    ),
    "repeat: order of the inverse": Mutation(
        "flows/repeat.py",
        "y, context, reverse=True)",
        "y, context)",
        "tests/flows/test_repeat.py::test_loop_and_steps_written_out_are_the_copies_one_after_the_other",
    ),
    "repeat: start from data": Mutation(
        "flows/repeat.py",
        "return y, [scope.get_current_value",
        "return x, [scope.get_current_value",
        "tests/flows/test_repeat.py::test_a_start_from_data_goes_through_the_copies",
    ),
    "SVD: bounds": Mutation(
        "layers/svd_dense.py",
        "keras.ops.clip(low + (high - low)",
        "keras.ops.clip(low + 0.5 * (high - low)",
        "tests/layers/test_svd_dense.py",
    ),
    "SVD: log-determinant": Mutation(
        "layers/svd_dense.py",
        "first + second + keras.ops.sum",
        "first + second - keras.ops.sum",
        "tests/layers/test_invertible.py::test_log_det_is_that_of_automatic_differentiation",
    ),
    "preprocessing: log-determinant": Mutation(
        "flows/preprocessing.py", "- log_p - log_q)", "- log_p + log_q)", "tests/flows/test_preprocessing.py"
    ),
    "dequantisation: middle of the noise": Mutation(
        "flows/preprocessing.py",
        "(whole + (noise - 0.5)) / peak",
        "(whole + noise) / peak",
        "tests/flows/test_glow.py::test_bits_per_dim_is_log_prob_of_dequantised_images",
    ),
    "start: angles of Hénaff": Mutation(
        "initializers.py", "uniform(-math.pi, math.pi, count)", "uniform(0, math.pi, count)", "tests/test_initializers.py"
    ),
    "regulariser: W'W − I": Mutation(
        "regularizers.py", "w) - ops.eye(w.shape[1]", "w) - 0.9 * ops.eye(w.shape[1]", "tests/test_regularizers.py"
    ),
}


def survives(folder: Path, mutation: Mutation) -> bool:
    """Whether the tests of a mutation pass on it; the copy is left as it was."""
    path = folder / "keras_auxref" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    log = folder / "mutation.log"
    code = _run(folder, log, mutation.tests.split(), "not slow and not programs")
    if code in (0, 5):  # 5: no tests
        code = _run(folder, log, mutation.tests.split(), "slow and not programs and not cluster and not exhaustive")
    path.write_text(text)
    if code == 5:  # all of its tests are among those that ran first, and passed
        code = 0
    if code not in (0, 1):  # 1: a test failed
        raise SystemExit(f"Expected tests that pass or fail. Received exit code {code}.\n{log.read_text()[-3000:]}")
    return code == 0


def _run(folder: Path, log: Path, tests: list[str], marks: str) -> int:
    child = os.fork()
    if child == 0:
        _test(folder, log, tests, marks)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _test(folder: Path, log: Path, tests: list[str], marks: str) -> None:
    """Runs tests of the copy and ends this process with pytest's exit code."""
    os.chdir(folder)
    sys.path[0] = str(folder)
    sys.dont_write_bytecode = True  # a file that is changed twice in a second would be taken from the cache
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "experiments", "keras_auxref")]:
        del sys.modules[name]
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 4
    try:
        code = int(pytest.main(["-q", "-x", "-n", "0", "-m", marks, "-p", "no:cacheprovider", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Runs the mutations that were chosen, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations whose names have one of these words")
    parser.add_argument("--part", default="1/1", help="only this part of them: 1/4, 2/4, …")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    names = [name for name in MUTATIONS if not arguments.words or any(word in name for word in arguments.words)][
        part - 1 :: parts
    ]
    for name, mutation in MUTATIONS.items():
        count = (ROOT / "keras_auxref" / mutation.file).read_text().count(mutation.old)
        if count != 1:
            raise SystemExit(f"{name}: expected once in keras_auxref/{mutation.file}: {mutation.old!r}. Received: {count} times.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        skip = shutil.ignore_patterns(".git", ".venv", "_build", "__pycache__", "runs", "saved_models", ".*_cache")
        shutil.copytree(ROOT, folder, ignore=skip)
        left = []
        for name in names:
            alive = survives(folder, MUTATIONS[name])
            left += [name] * alive
            print(f"{'survived' if alive else 'caught':9} {name}", flush=True)
    print(f"{len(names) - len(left)} of {len(names)} mutations were caught.")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
