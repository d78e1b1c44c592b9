"""Keras layers."""

from keras_auxref.layers.aux_reflection import AuxReflection
from keras_auxref.layers.orthogonal_dense import OrthogonalDense
from keras_auxref.layers.svd_dense import SVDDense

__all__ = ["AuxReflection", "OrthogonalDense", "SVDDense"]
