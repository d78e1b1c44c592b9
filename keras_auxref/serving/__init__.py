"""Models that leave Python: SavedModels for TensorFlow and TensorFlow Serving, ONNX and LiteRT."""

from keras_auxref.serving.formats import export_litert, export_onnx
from keras_auxref.serving.saved_model import export_saved_model

__all__ = ["export_litert", "export_onnx", "export_saved_model"]
