"""The contract of invertible layers, by the name under which layers import it."""

from keras_auxref.invertible import Invertible

__all__ = ["Invertible"]
