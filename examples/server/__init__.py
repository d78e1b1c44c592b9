"""What `examples/serve.py` is made of, and what `examples/client.py` reads: SavedModels behind TensorFlow Serving's protocol."""

import os

# Set before TensorFlow is imported, here and in the replicas: its start-up notices would bury the server's own lines.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
