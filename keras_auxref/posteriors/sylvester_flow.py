"""Sylvester flows as a Keras layer."""

from collections.abc import Callable
from typing import TypeAlias, Unpack

import keras
import numpy as np

from keras_auxref.ops import backend
from keras_auxref.ops.checks import whole_number_or_none
from keras_auxref.ops.householder_flow import householder_flow
from keras_auxref.ops.sylvester import orthonormal_columns, sylvester_and_log_det, sylvester_inverse
from keras_auxref.package import PACKAGE
from keras_auxref.posteriors.amortised import AmortisedFlow
from keras_auxref.typing import Config, LayerArguments, Shape, Tensor

FORMS = ("orthogonal", "householder", "triangular")
LARGEST_DIAGONAL = 0.999

Map: TypeAlias = Callable[[Tensor], Tensor]


@keras.saving.register_keras_serializable(PACKAGE)
class SylvesterFlow(AmortisedFlow):
    """T steps z ← z + Q R tanh(R̃ Qᵀz + b), with Q, R, R̃ and b from an encoder, for every sample.

        orthogonal    Q of M ≤ d orthonormal columns, by the iteration of Björck & Bowie
        householder   Q = H(v_k) … H(v₁), M = d
        triangular    Q alternates between the identity and the reversal of all entries, M = d

    All parameters are linear in the context. R and R̃ are upper triangular with diagonals 0.999·tanh(·), so
    R_ii R̃_ii > −1, which makes every step a bijection for every output of the encoder.

        log|det ∂z′/∂z| = Σ log(1 + tanh′(R̃ Qᵀz + b)_i R_ii R̃_ii)

    Args:
        steps: The number T of steps; 0 is the identity.
        form: `"orthogonal"`, `"householder"` or `"triangular"`.
        columns: The number M of columns; by default half of d, rounded up. Only for `"orthogonal"`.
        reflections: The number k of reflections; by default 4. Only for `"householder"`.
        **kwargs: Arguments of `keras.layers.Layer`: `name`, `dtype`, `trainable`, …

    Call arguments:
        inputs: z of shape `(batch, d)`, or `(samples, batch, d)` for several samples each.
        context: Tensor of shape `(batch, features)`.

    Output: A tensor of the shape of z.

    Example:
    >>> import numpy as np
    >>> from keras_auxref.posteriors import SylvesterFlow
    >>> flow, z, h = SylvesterFlow(steps=2), np.ones((2, 4), "float32"), np.ones((2, 16), "float32")
    >>> moved = flow(z, h)
    >>> np.allclose(flow.inverse(moved, h), z, atol=1e-4)
    True

    Reference: van den Berg, Hasenclever, Tomczak & Welling, "Sylvester Normalizing Flows for Variational Inference", UAI 2018.
    """

    def __init__(
        self,
        steps: int = 4,
        form: str = "orthogonal",
        columns: int | None = None,
        reflections: int | None = None,
        **kwargs: Unpack[LayerArguments],
    ) -> None:
        super().__init__(steps, **kwargs)
        if form not in FORMS:
            raise ValueError(f"Unknown form of a Sylvester flow. Expected one of {list(FORMS)}. Received: {form!r}")
        for name, value, owner in (("columns", columns, "orthogonal"), ("reflections", reflections, "householder")):
            if value is not None and form != owner:
                raise ValueError(f'`{name}` is for form="{owner}". Expected {name}=None. Received: form={form!r}, {name}={value}')
        self.form, self.columns = form, whole_number_or_none("columns", columns)
        self.reflections = whole_number_or_none("reflections", reflections)

    def build_parameters(self, d: int, context_shape: Shape) -> None:
        if self.columns is not None and self.columns > d:
            raise ValueError(
                f"More columns than dimensions are not orthonormal. Expected columns ≤ {d}. Received: {self.columns}"
            )
        m = d
        if self.form == "orthogonal":
            m = self.columns or (d + 1) // 2
        self._events = {"triangles": (m, m + 1), "b": (m,)}
        if self.form == "orthogonal":
            self._events["q"] = (d, m)
        elif self.form == "householder":
            self._events["v"] = (self.reflections or 4, d)
        self.linears = [
            self.linear(self.steps * int(np.prod(event)), name, context_shape) for name, event in self._events.items()
        ]

    def parameters(self, context: Tensor) -> dict[str, Tensor]:
        found = {
            name: keras.ops.reshape(layer(context), (-1, self.steps, *event))
            for layer, (name, event) in zip(self.linears, self._events.items(), strict=True)
        }
        r, r_tilde = _triangles(found.pop("triangles"))
        if "q" in found:
            found["q"] = orthonormal_columns(found["q"])
        return {"r": r, "r_tilde": r_tilde, **found}

    def transform(self, z: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        log_det = keras.ops.zeros_like(z[..., 0])
        for t in range(self.steps):
            own, there, back = self._step(parameters, t)
            z, change = sylvester_and_log_det(there(z), **own)
            z, log_det = back(z), log_det + change
        return z, log_det

    def invert(self, z: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        for t in reversed(range(self.steps)):
            own, there, back = self._step(parameters, t)
            z = back(sylvester_inverse(there(z), **own))
        return z

    def _step(self, parameters: dict[str, Tensor], t: int) -> tuple[dict[str, Tensor], Map, Map]:
        """The parameters of step t, and for M = d the maps Qᵀ and Q before and after it: z′ = Q g(Qᵀz)."""
        own = {name: value[:, t] for name, value in parameters.items()}
        if "v" in own:
            v = own.pop("v")
            opposite = keras.ops.flip(v, axis=-2)
            return own, lambda z: householder_flow(z, opposite), lambda z: householder_flow(z, v)
        if self.form == "triangular" and t % 2:
            return own, _reverse, _reverse
        return own, lambda z: z, lambda z: z

    def get_config(self) -> Config:
        return {**super().get_config(), "form": self.form, "columns": self.columns, "reflections": self.reflections}


def _reverse(z: Tensor) -> Tensor:
    return keras.ops.flip(z, axis=-1)


def _triangles(entries: Tensor) -> tuple[Tensor, Tensor]:
    """R and R̃ from M×(M + 1) numbers: above the diagonal of the first M columns, below it, and two diagonals."""
    square, last = entries[..., :-1], entries[..., -1]
    m = last.shape[-1]
    above, identity = (keras.ops.convert_to_tensor(a, dtype=entries.dtype) for a in (np.triu(np.ones((m, m)), 1), np.eye(m)))
    first = keras.ops.diagonal(square, axis1=-2, axis2=-1)
    r, r_tilde = (
        above * upper + identity * (LARGEST_DIAGONAL * backend.tanh(diagonal))[..., None]
        for upper, diagonal in ((square, first), (keras.ops.swapaxes(square, -1, -2), last))
    )
    return r, r_tilde
