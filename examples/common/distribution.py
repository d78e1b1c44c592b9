"""Training on several GPUs."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class Mirrored(tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy` whose iterators over data are let go of late.

    Keras drops an iterator at the start of `fit` after one batch, and TensorFlow (2.21) may crash when an iterator goes while the
    thread behind it is fetching the next batch: a segmentation fault in one fit out of a few hundred, on a busy machine. Some
    iterators later that thread has long been waiting, and to let go is safe.
    """

    def __init__(self, devices: list[str] | None = None) -> None:
        super().__init__(devices)
        self._kept: deque[Iterator[Any]] = deque(maxlen=8)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> "_Distributed":
        return _Distributed(super().experimental_distribute_dataset(dataset, options), self._kept)


class _Distributed:
    """What Keras asks of a distributed data set: iterators over it."""

    def __init__(self, dataset: Any, kept: deque[Iterator[Any]]) -> None:
        self._dataset, self._kept = dataset, kept

    def __iter__(self) -> Iterator[Any]:
        self._kept.append(iter(self._dataset))
        return self._kept[-1]
