"""Normalizing flows from invertible layers."""

from keras_auxref.flows.coupling import COUPLINGS
from keras_auxref.flows.dequantisation import DEQUANTISATIONS, VariationalDequantisation
from keras_auxref.flows.diagnostics import Branches
from keras_auxref.flows.glow import Glow
from keras_auxref.flows.mixing import MIXINGS
from keras_auxref.flows.multi_scale import MultiScale
from keras_auxref.flows.warmup import Warmup

__all__ = [
    "COUPLINGS",
    "DEQUANTISATIONS",
    "MIXINGS",
    "Branches",
    "Glow",
    "MultiScale",
    "VariationalDequantisation",
    "Warmup",
]
