"""Times, as ratios from one run. Run one from the root of the repository, as `python -m benchmarks.core`."""

import os

# Set before TensorFlow is imported: its start-up notices would bury the tables. 0 shows them again.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
