"""Times, as ratios from one run. Run one from the root of the repository, as `python -m benchmarks.core`."""

from experiments.harness.notices import silenced

# First of all, without TensorFlow's start-up notices, which would bury the tables.
with silenced():
    import keras  # noqa: F401
