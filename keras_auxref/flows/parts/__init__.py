"""The invertible layers that flows are made of, beside the reflections of `keras_auxref.layers`."""

from keras_auxref.flows.parts.act_norm import ActNorm
from keras_auxref.flows.parts.additive_coupling import AdditiveCoupling
from keras_auxref.flows.parts.affine_coupling import AffineCoupling
from keras_auxref.flows.parts.invertible_dense import InvertibleDense
from keras_auxref.flows.parts.logistic_mixture_coupling import LogisticMixtureCoupling
from keras_auxref.flows.parts.permutation import Permutation
from keras_auxref.flows.parts.qr_dense import QRDense
from keras_auxref.flows.parts.reflected_dense import ReflectedDense
from keras_auxref.flows.parts.spline_coupling import SplineCoupling
from keras_auxref.flows.parts.squeeze import Squeeze

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "InvertibleDense",
    "LogisticMixtureCoupling",
    "Permutation",
    "QRDense",
    "ReflectedDense",
    "SplineCoupling",
    "Squeeze",
]
