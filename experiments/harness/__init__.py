"""What the experiments and benchmarks share: data, results, figures, training and the command line."""

import logging
import os

# Set before TensorFlow is imported: its start-up notices would bury what an experiment prints. 0 shows them again.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# TensorFlow takes the training steps of several models for one that is traced again and again, and warns.
logging.getLogger("tensorflow").setLevel(logging.ERROR)
