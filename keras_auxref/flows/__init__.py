"""Normalizing flows from invertible layers."""

from keras_auxref.flows.diagnostics import Branches
from keras_auxref.flows.glow import Glow
from keras_auxref.flows.mixing import MIXINGS
from keras_auxref.flows.multi_scale import MultiScale
from keras_auxref.flows.warmup import Warmup

__all__ = ["MIXINGS", "Branches", "Glow", "MultiScale", "Warmup"]
