"""Normalizing flows, and the invertible layers that they are made of."""

from keras_auxref.flows.chain import Chain
from keras_auxref.flows.coupling import COUPLINGS
from keras_auxref.flows.dequantisation import DEQUANTISATIONS, VariationalDequantisation
from keras_auxref.flows.diagnostics import Branches
from keras_auxref.flows.flow import Flow
from keras_auxref.flows.glow import Glow
from keras_auxref.flows.mixing import MIXINGS
from keras_auxref.flows.multi_scale import MultiScale
from keras_auxref.flows.parts import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    InvertibleDense,
    LogisticMixtureCoupling,
    Permutation,
    QRDense,
    ReflectedDense,
    SplineCoupling,
    Squeeze,
)
from keras_auxref.flows.repeat import Repeat
from keras_auxref.flows.warmup import Warmup

__all__ = [
    "COUPLINGS",
    "DEQUANTISATIONS",
    "MIXINGS",
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "Branches",
    "Chain",
    "Flow",
    "Glow",
    "InvertibleDense",
    "LogisticMixtureCoupling",
    "MultiScale",
    "Permutation",
    "QRDense",
    "ReflectedDense",
    "Repeat",
    "SplineCoupling",
    "Squeeze",
    "VariationalDequantisation",
    "Warmup",
]
