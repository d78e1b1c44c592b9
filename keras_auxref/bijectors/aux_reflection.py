"""The auxiliary reflection as a TFP bijector."""

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import kernels, ops
from keras_auxref.bijectors._base import Parameter, reference, require_event, require_one_dtype, square_shape
from keras_auxref.bijectors._batch import batch_shape, map_member_rows, map_members
from keras_auxref.bijectors._cache import CompositeBijector
from keras_auxref.bijectors._validation import certified, checked_inverse, weakest
from keras_auxref.typing import Tensor

Weights: TypeAlias = Tensor | dict[str, Tensor]


class AuxReflection(CompositeBijector):
    """y = f(x) = H(Wx) x on the last axis.

    The inverse solves one scalar equation per vector, and the log-determinant factors W once per batch; see `ops.inverse` and
    `ops.log_det_jacobian`. f is a bijection when W⁻¹ = S + K, S symmetric with condition below 2 and K skew: the kernels
    `"spectral"` and `"relaxed_cayley"` guarantee this, and W = I − U, with U orthogonal without eigenvalue 1, starts there. For
    any other W the inverse returns one of the preimages, and a density is valid only on that branch.

    Args:
        w: Tensor or variable: W itself, of shape `(..., d, d)`, a batch of matrices. With a kernel other than `"free"`, its
            weights: a single matrix if it has only one (V for `"spectral"`), else a dict of tensors or variables with the names
            of `kernels.Kernel.weight_names`, whose batches broadcast.
        kernel: How `w` becomes W: a name, a `kernels.Kernel`, or None for W itself.
        symmetric: True promises W = Wᵀ; by default what the kernel promises.
        near: The c = 2 uᵀx/‖u‖², u = W x, of the data, to choose among the preimages of an uncertified W. See `ops.inverse`.
        validate_args: Raise `tf.errors.InvalidArgumentError` if an inverse is not proven to be the only one, or is not found.
        name: Name of the bijector.

    Example:
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> from keras_auxref.bijectors import AuxReflection
    >>> bijector = AuxReflection(np.diag([2.0, 2.0, 3.0]))
    >>> x = np.array([[1.0, 2.0, 3.0]])
    >>> np.allclose(bijector.inverse(tf.identity(bijector.forward(x))), x)
    True

    Reference: Mathiasen & Hvilshøj, "One Reflection Suffice", 2020.
    """

    def __init__(
        self,
        w: Weights,
        kernel: kernels.KernelLike | None = None,
        symmetric: bool | None = None,
        near: float | None = None,
        validate_args: bool = False,
        name: str = "aux_reflection",
    ) -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            self._parametrization = self._no_dependency(kernels.get("free" if kernel is None else kernel))
            self._lone = not isinstance(w, dict)
            self._weights = _named(w, self._parametrization)
            given = {"w" if self._lone else f"w[{key!r}]": value for key, value in self._weights.items()}
            for key, value in given.items():
                require_event(value, 2, key, "(..., d, d)", square=True)
            if len({value.shape[-1] for value in given.values()}) > 1:
                shapes = {key: tuple(value.shape) for key, value in given.items()}
                raise ValueError(
                    f"The matrices of `w` must have one size. Expected shape (..., d, d) for all. Received: {shapes}"
                )
            batch_shape(given, 2)
            # Not `_symmetric`: TFP looks up the arguments of a bijector by name, and this value may come from the kernel.
            self._promise = symmetric if symmetric is not None else (True if self._parametrization.symmetric else None)
            self._near = near
            super().__init__(
                forward_min_event_ndims=1,
                dtype=require_one_dtype(**given),
                validate_args=validate_args,
                parameters=parameters,
                name=name,
            )

    @classmethod
    def _parameter_properties(cls, dtype: tf.DType) -> dict[str, tfp.util.ParameterProperties]:
        return {"w": tfp.util.ParameterProperties(event_ndims=_event_ndims, shape_fn=square_shape)}

    @property
    def w(self) -> Parameter | dict[str, Parameter]:
        """W or the weights of the kernel, as they were given."""
        weights = dict(self._weights)
        return next(iter(weights.values())) if self._lone else weights

    @property
    def matrix(self) -> tf.Tensor:
        """W as a tensor of shape (..., d, d), computed from what was given."""
        weights = {key: tf.convert_to_tensor(value) for key, value in self._weights.items()}
        if isinstance(self._parametrization, kernels.Free):
            return weights["kernel"]
        return map_members(lambda **weights: tf.convert_to_tensor(self._parametrization(weights)), weights, 2)

    def certificate(self) -> kernels.Certificate:
        """What is proven about the invertibility of this bijector with its current values; for a batch, of all members."""
        w = self.matrix
        return weakest([self._parametrization.certificate(one) for one in tf.reshape(w, [-1, *w.shape[-2:]])])

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return self._map_rows(ops.reflect, x, self.matrix)

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        w = self.matrix
        x = self._map_rows(lambda y, w: ops.inverse(y, w, symmetric=self._promise, near=self._near), y, w)
        if not self.validate_args:
            return x
        proven = map_members(lambda w: certified(w, self._promise), {"w": w}, 2, dtype=tf.bool)
        return checked_inverse(x, y, self, [tf.reduce_all(proven)])

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return self._map_rows(lambda x, w: ops.log_det_jacobian(x, w, symmetric=self._promise), x, self.matrix)

    def _map_rows(self, function: Callable[..., tf.Tensor], x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return map_member_rows(function, x, {"w": w}, 2)


def _event_ndims(bijector: AuxReflection, x_event_ndims: int) -> int | dict[str, int]:
    """The axes of `w`, or of every matrix in it, that belong to an event of x."""
    return tf.nest.map_structure(lambda _: x_event_ndims + 1, bijector.w)


def _named(w: Weights, kernel: kernels.Kernel) -> dict[str, Parameter]:
    """The weights of the kernel by name; a single matrix is the weight of a kernel that has only one."""
    names = sorted(kernel.weight_names)
    if not isinstance(w, dict) and len(names) == 1:
        return {names[0]: reference(w, "w")}
    if not isinstance(w, dict) or sorted(w) != names:
        received = sorted(w) if isinstance(w, dict) else type(w).__name__
        raise ValueError(
            f"`w` must hold the weights of {type(kernel).__name__}. Expected a dict with {names}. Received: {received}"
        )
    return {key: reference(value, f"w[{key!r}]") for key, value in w.items()}
