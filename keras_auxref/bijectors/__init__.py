"""Bijectors of TensorFlow Probability, on TensorFlow."""

import keras

if keras.backend.backend() != "tensorflow":
    raise NotImplementedError(
        "`keras_auxref.bijectors` are bijectors of TensorFlow Probability on TensorFlow: with another backend they would see no "
        "variables, and training one would change nothing. Expected the TensorFlow backend of Keras. "
        f"Received: KERAS_BACKEND={keras.backend.backend()!r}"
    )

from keras_auxref.bijectors.act_norm import ActNorm
from keras_auxref.bijectors.affine_coupling import AffineCoupling
from keras_auxref.bijectors.aux_reflection import AuxReflection
from keras_auxref.bijectors.factored_reflection import FactoredReflection
from keras_auxref.bijectors.householder import Householder
from keras_auxref.bijectors.layer import LayerBijector
from keras_auxref.bijectors.squeeze import Squeeze
from keras_auxref.bijectors.sylvester import Sylvester

__all__ = [
    "ActNorm",
    "AffineCoupling",
    "AuxReflection",
    "FactoredReflection",
    "Householder",
    "LayerBijector",
    "Squeeze",
    "Sylvester",
]
