"""Keras layers."""

from keras_auxref.layers.aux_reflection import AuxReflection

__all__ = ["AuxReflection"]
