"""The auxiliary reflection as a TFP bijector."""

from typing import Any

import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import kernels, ops
from keras_auxref.bijectors._base import FreshBijector, reference, require_one_dtype, require_rank
from keras_auxref.bijectors._validation import certified, checked_inverse


class AuxReflection(FreshBijector):
    """y = f(x) = H(Wx) x on the last axis.

    The inverse solves one scalar equation per vector, and the log-determinant factors W once per batch; see `ops.inverse` and
    `ops.log_det_jacobian`. f is a bijection when W⁻¹ = S + K, S symmetric with condition below 2 and K skew: the kernels
    `"spectral"` and `"relaxed_cayley"` hold it there, and W = I − U, U orthogonal without eigenvalue 1, starts there. For any
    other W the inverse returns one of the preimages, and a density is one only on that branch.

    Args:
        w: Tensor or variable: W itself, of shape `(d, d)`. With another kernel than `"free"`, its weights: the one matrix if it
            has only one (V for `"spectral"`), else a dict of tensors or variables with the names of
            `kernels.Kernel.initial_weights`.
        kernel: How `w` becomes W: a name, a `kernels.Kernel`, or None for W itself.
        symmetric: True promises W = Wᵀ; by default what the kernel promises.
        near: The c = 2 uᵀx/‖u‖², u = W x, of the data, to choose among the preimages of an uncertified W. See `ops.inverse`.
        validate_args: Raise `tf.errors.InvalidArgumentError` where an inverse is not proven to be the only one, or is not found.
        name: Name of the bijector.

    Example:
    >>> import numpy as np
    >>> bijector = AuxReflection(np.diag([2.0, 2.0, 3.0]))
    >>> x = np.array([[1.0, 2.0, 3.0]])
    >>> np.allclose(bijector.inverse(tf.identity(bijector.forward(x))), x)
    True

    Reference: Mathiasen & Hvilshøj, "One Reflection Suffice", 2020.
    """

    def __init__(
        self,
        w: Any,
        kernel: Any = None,
        symmetric: bool | None = None,
        near: float | None = None,
        validate_args: bool = False,
        name: str = "aux_reflection",
    ) -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            self._parametrization = self._no_dependency(kernels.get("free" if kernel is None else kernel))
            self._w = {key: reference(value, key) for key, value in _named(w, self._parametrization).items()}
            for key, value in self._w.items():
                require_rank(value, 2, key, "(d, d)")
            self._symmetric = symmetric if symmetric is not None else (True if self._parametrization.symmetric else None)
            self._near = near
            super().__init__(
                forward_min_event_ndims=1,
                dtype=require_one_dtype(**self._w),
                validate_args=validate_args,
                parameters=parameters,
                name=name,
            )

    @classmethod
    def _parameter_properties(cls, dtype: Any) -> dict[str, Any]:
        return {"w": tfp.util.ParameterProperties(event_ndims=2)}

    @property
    def matrix(self) -> tf.Tensor:
        """W as a tensor of shape (d, d), computed from what was given."""
        return tf.convert_to_tensor(self._parametrization({key: tf.convert_to_tensor(value) for key, value in self._w.items()}))

    def certificate(self) -> kernels.Certificate:
        """What is proven about the invertibility of this bijector, as it is now."""
        return self._parametrization.certificate(self.matrix)

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        return ops.reflect(x, self.matrix)

    def _inverse(self, y: tf.Tensor) -> tf.Tensor:
        w = self.matrix
        x = ops.inverse(y, w, symmetric=self._symmetric, near=self._near)
        return checked_inverse(x, y, self, [certified(w, self._symmetric)]) if self.validate_args else x

    def _forward_log_det_jacobian(self, x: tf.Tensor) -> tf.Tensor:
        return ops.log_det_jacobian(x, self.matrix, symmetric=self._symmetric)


def _named(w: Any, kernel: kernels.Kernel) -> dict[str, Any]:
    """The weights of the kernel by name; a lone matrix is the weight of a kernel that has just one."""
    names = sorted(kernel.initial_weights(2, kernel.default_initializer(), "float32"))
    if not isinstance(w, dict) and len(names) == 1:
        return {names[0]: w}
    if not isinstance(w, dict) or sorted(w) != names:
        received = sorted(w) if isinstance(w, dict) else type(w).__name__
        raise ValueError(
            f"`w` must hold the weights of {type(kernel).__name__}. Expected a dict with {names}. Received: {received}"
        )
    return dict(w)
