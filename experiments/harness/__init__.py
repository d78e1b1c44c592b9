"""What the experiments and benchmarks share: data, results, figures, training and the command line."""

import logging

# TensorFlow takes the training steps of several models for one that is traced again and again, and warns.
logging.getLogger("tensorflow").setLevel(logging.ERROR)
