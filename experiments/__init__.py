"""The paper's experiments and the harness they run on; not part of the installed package.

Run one from the root of the repository, as `python -m experiments.fcnn`.
"""
