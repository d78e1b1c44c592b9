"""Imported before Keras, it imports Keras without TensorFlow's start-up notices. TF_CPP_MIN_LOG_LEVEL=0 shows them again."""

from server.notices import silenced

with silenced():
    import keras  # noqa: F401
