"""The layers of the paper: auxiliary and factored reflections, the orthogonal maps that they replace, recurrent networks."""

import importlib
import warnings
from typing import Any

from keras_auxref.layers.aux_reflection import AuxReflection
from keras_auxref.layers.factored_reflection import FactoredReflection
from keras_auxref.layers.modrelu import ModReLU
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.layers.orthogonal_rnn import OrthogonalRNN
from keras_auxref.layers.orthogonal_rnn_cell import OrthogonalRNNCell
from keras_auxref.layers.svd_dense import SVDDense

__all__ = [
    "AuxReflection",
    "FactoredReflection",
    "ModReLU",
    "OrthogonalDense",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "SVDDense",
]

_FLOWS = (
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "InvertibleDense",
    "LogisticMixtureCoupling",
    "Permutation",
    "QRDense",
    "Squeeze",
)
_MOVED = {
    **dict.fromkeys(_FLOWS, "flows"),
    **dict.fromkeys(("FactoredFlow", "HouseholderFlow", "SylvesterFlow"), "posteriors"),
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'keras_auxref.layers' has no attribute {name!r}")
    room = _MOVED[name]
    warnings.warn(
        f"`keras_auxref.layers.{name}` is now `keras_auxref.{room}.{name}`; the old name goes with version 0.4.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module(f"keras_auxref.{room}"), name)
