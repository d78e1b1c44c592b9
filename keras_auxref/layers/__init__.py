"""Keras layers."""

from keras_auxref.layers.act_norm import ActNorm
from keras_auxref.layers.additive_coupling import AdditiveCoupling
from keras_auxref.layers.affine_coupling import AffineCoupling
from keras_auxref.layers.aux_reflection import AuxReflection
from keras_auxref.layers.factored_flow import FactoredFlow
from keras_auxref.layers.factored_reflection import FactoredReflection
from keras_auxref.layers.householder_flow import HouseholderFlow
from keras_auxref.layers.invertible_dense import InvertibleDense
from keras_auxref.layers.logistic_mixture_coupling import LogisticMixtureCoupling
from keras_auxref.layers.modrelu import ModReLU
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.layers.orthogonal_rnn import OrthogonalRNN
from keras_auxref.layers.orthogonal_rnn_cell import OrthogonalRNNCell
from keras_auxref.layers.permutation import Permutation
from keras_auxref.layers.qr_dense import QRDense
from keras_auxref.layers.squeeze import Squeeze
from keras_auxref.layers.svd_dense import SVDDense
from keras_auxref.layers.sylvester_flow import SylvesterFlow

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "AuxReflection",
    "FactoredFlow",
    "FactoredReflection",
    "HouseholderFlow",
    "InvertibleDense",
    "LogisticMixtureCoupling",
    "ModReLU",
    "OrthogonalDense",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
    "Permutation",
    "QRDense",
    "SVDDense",
    "Squeeze",
    "SylvesterFlow",
]
