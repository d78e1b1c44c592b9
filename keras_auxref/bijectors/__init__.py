"""TFP bijectors."""

from keras_auxref.bijectors.layer import LayerBijector

__all__ = ["LayerBijector"]
