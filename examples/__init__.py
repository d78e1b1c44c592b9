"""Scripts to read and to run, as `python examples/fcnn.py`, and the server of `examples/serve.py`."""
