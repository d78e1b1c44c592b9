"""W without constraints."""

from collections.abc import Callable

import keras

from keras_auxref.initializers import ReflectionOf, UniformFanIn, orthogonal_start
from keras_auxref.kernels.base import Kernel
from keras_auxref.package import PACKAGE
from keras_auxref.typing import Tensor


@keras.saving.register_keras_serializable(PACKAGE)
class Free(Kernel):
    """W itself is the weight. Fastest and most expressive; nothing is guaranteed, though a certificate may still be found.

    `kernel_initializer` means W; the default is the paper's U(−1/√d, 1/√d). An orthogonal start Q, such as an
    `initializers.OrthogonalMatrix`, Keras' `"orthogonal"` or an orthogonal array, gives W = I − Q, so that f starts as x ↦ Q x.
    The exception is Keras' `"identity"`, which is W itself: W = I − I never trains.

    Example:
    >>> from keras_auxref import AuxReflection
    >>> from keras_auxref.kernels import Free
    >>> layer = AuxReflection(kernel=Free())  # the default
    """

    weight_names = ("kernel",)

    def default_initializer(self) -> keras.initializers.Initializer:
        return UniformFanIn()

    def initial_weights(self, d: int, initializer: Callable[..., Tensor], dtype: str) -> dict[str, Tensor]:
        if orthogonal_start(initializer) is not None and not isinstance(initializer, ReflectionOf | keras.initializers.Identity):
            initializer = ReflectionOf(initializer)
        return super().initial_weights(d, initializer, dtype)

    def __call__(self, weights: dict[str, Tensor]) -> Tensor:
        return weights["kernel"]
