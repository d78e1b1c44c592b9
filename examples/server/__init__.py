"""What `examples/serve.py` is made of, and what `examples/client.py` reads: SavedModels behind TensorFlow Serving's protocol."""
