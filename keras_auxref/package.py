"""The name under which the package registers with Keras."""

PACKAGE = "keras_auxref"
