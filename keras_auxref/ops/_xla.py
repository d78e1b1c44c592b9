"""Whether the code being traced will be compiled by XLA."""

import tensorflow as tf


def inside_xla() -> bool:
    """True while tracing a `tf.function(jit_compile=True)`, so that a path without `tf.linalg.eig` can be chosen.

    TensorFlow offers no public question for this; where the private one is missing, the answer is False, and XLA reports the
    operation that it cannot compile.
    """
    if tf.executing_eagerly():
        return False
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
