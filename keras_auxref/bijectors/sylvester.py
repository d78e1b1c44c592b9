"""A step of a Sylvester flow as a TFP bijector."""

import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import ops
from keras_auxref.bijectors._base import Parameter, reference, require_event, require_one_dtype, square_shape
from keras_auxref.bijectors._batch import batch_shape
from keras_auxref.bijectors._cache import CompositeBijector
from keras_auxref.typing import Tensor

_EVENTS = {"r": 2, "r_tilde": 2, "b": 1, "q": 2}


class Sylvester(CompositeBijector):
    """y = x + Q R tanh(R̃ Qᵀx + b) on the last axis, log|det ∂y/∂x| = Σ log(1 + tanh′(R̃ Qᵀx + b)_i R_ii R̃_ii).

    A bijection for a Q with orthonormal columns, upper triangular R and R̃, and R_ii R̃_ii > −1; see `ops.sylvester`. The inverse
    solves one scalar equation after another. Leading axes of the parameters are batches: with parameters from an encoder this is
    the posterior of a variational autoencoder. None of the conditions is checked.

    Args:
        r: R of shape `(..., M, M)`: tensor or variable. Entries below the diagonal are ignored.
        r_tilde: R̃ of shape `(..., M, M)`, likewise.
        b: Tensor or variable of shape `(..., M)`.
        q: Q of shape `(..., d, M)`: tensor or variable; None for the identity, M = d.
        validate_args: As in every TFP bijector; there is nothing to check here.
        name: Name of the bijector.

    Example:
    >>> import tensorflow as tf
    >>> from keras_auxref.bijectors import Sylvester
    >>> bijector = Sylvester([[0.5, 1.0], [0.0, 0.9]], [[0.5, 0.0], [0.0, 0.5]], [0.0, 1.0])
    >>> y = bijector.forward([3.0, 4.0])
    >>> print(bijector.inverse(tf.identity(y)).numpy().round(5))
    [3. 4.]

    Reference: van den Berg, Hasenclever, Tomczak & Welling, "Sylvester Normalizing Flows for Variational Inference", UAI 2018.
    """

    def __init__(
        self, r: Tensor, r_tilde: Tensor, b: Tensor, q: Tensor | None = None, validate_args: bool = False, name: str = "sylvester"
    ) -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            self._r, self._r_tilde, self._b = (reference(*pair) for pair in ((r, "r"), (r_tilde, "r_tilde"), (b, "b")))
            self._q = None if q is None else reference(q, "q")
            require_event(self._b, 1, "b", "(..., M)")
            m = self._b.shape[-1]
            for key, matrix in (("r", self._r), ("r_tilde", self._r_tilde)):
                require_event(matrix, 2, key, "(..., M, M)", square=True)
                _require_columns(matrix, m, key)
            if self._q is not None:
                require_event(self._q, 2, "q", "(..., d, M)")
                _require_columns(self._q, m, "q")
            dtype = require_one_dtype(**self._given())
            batch_shape(self._given(), _EVENTS)
            super().__init__(
                forward_min_event_ndims=1, dtype=dtype, validate_args=validate_args, parameters=parameters, name=name
            )

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        matrix = tfp.util.ParameterProperties(event_ndims=2, shape_fn=square_shape)
        return {"r": matrix, "r_tilde": matrix, "b": tfp.util.ParameterProperties(event_ndims=1), "q": matrix}

    @property
    def r(self) -> Parameter:
        """R, as it was given."""
        return self._r

    @property
    def r_tilde(self) -> Parameter:
        """R̃, as it was given."""
        return self._r_tilde

    @property
    def b(self) -> Parameter:
        """b, as it was given."""
        return self._b

    @property
    def q(self) -> Parameter | None:
        """Q, as it was given."""
        return self._q

    def _given(self) -> dict[str, Parameter]:
        given = {"r": self._r, "r_tilde": self._r_tilde, "b": self._b, "q": self._q}
        return {key: value for key, value in given.items() if value is not None}

    def _parts(self) -> dict[str, tf.Tensor]:
        return {key: tf.convert_to_tensor(value) for key, value in self._given().items()}

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return ops.sylvester(x, **self._parts())

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        return ops.sylvester_inverse(y, **self._parts())

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return ops.sylvester_and_log_det(x, **self._parts())[1]


def _require_columns(matrix: Tensor, m: int, name: str) -> None:
    if matrix.shape[-1] != m:
        raise ValueError(
            f"`{name}` must fit `b`. Expected {m} columns, as many as entries of `b`. Received: {tuple(matrix.shape)}"
        )
