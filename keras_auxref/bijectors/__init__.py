"""TFP bijectors."""

from keras_auxref.bijectors.act_norm import ActNorm
from keras_auxref.bijectors.affine_coupling import AffineCoupling
from keras_auxref.bijectors.aux_reflection import AuxReflection
from keras_auxref.bijectors.householder import Householder
from keras_auxref.bijectors.layer import LayerBijector
from keras_auxref.bijectors.squeeze import Squeeze

__all__ = ["ActNorm", "AffineCoupling", "AuxReflection", "Householder", "LayerBijector", "Squeeze"]
