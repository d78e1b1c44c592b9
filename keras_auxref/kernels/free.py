"""W without constraints."""

from typing import Any

import keras

from keras_auxref.initializers import PACKAGE, UniformFanIn
from keras_auxref.kernels.base import Kernel


@keras.saving.register_keras_serializable(PACKAGE)
class Free(Kernel):
    """W itself is the weight. Fastest and most expressive; nothing is guaranteed, though a certificate may still be found.

    `kernel_initializer` means W; the default is the paper's U(−1/√d, 1/√d).
    """

    def default_initializer(self) -> keras.initializers.Initializer:
        return UniformFanIn()

    def __call__(self, weights: dict[str, Any]) -> Any:
        return weights["kernel"]
