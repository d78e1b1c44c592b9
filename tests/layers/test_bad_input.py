"""What is not one dense tensor of the right rank gets one sentence from the layers that take sequences or images."""

import numpy as np
import pytest
import tensorflow as tf

from keras_auxref.flows import Squeeze
from keras_auxref.layers import OrthogonalRNN

LAYERS = {"rnn": (lambda: OrthogonalRNN(3), (2, 3, 4)), "squeeze": (Squeeze, (2, 4, 4, 1))}
BAD = {
    "none": (lambda x: None, "Expected shape .*Received: None"),
    "empty": (lambda x: x[..., :0], r"Expected shape .*Received: \(.*, 0\)"),
    "two": (lambda x: [x, x], "Expected shape .*Received: 2 (inputs|tensors in a list)"),
    "flat": (lambda x: x[0], r"Expected shape \(batch, .*Received: \("),
    "ragged": (lambda x: tf.RaggedTensor.from_tensor(tf.constant(x)), "Received: a ragged tensor"),
    "sparse": (lambda x: tf.sparse.from_dense(x), "Received: a sparse tensor"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_not_one_tensor_gets_one_sentence(name, kind):
    make, shape = LAYERS[name]
    bad, message = BAD[kind]
    value = bad(np.ones(shape, "float32"))
    with pytest.raises(ValueError, match=message):
        make()(value)
    if name == "squeeze" and kind != "flat":
        for method in ("inverse", "log_det_jacobian", "forward_and_log_det"):
            for built in (False, True):
                layer = make()
                if built:
                    layer.build((None, *shape[1:]))
                with pytest.raises(ValueError, match=message):
                    getattr(layer, method)(value)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_that_is_built_still_looks_at_the_rank(name):
    make, shape = LAYERS[name]
    layer = make()
    layer.build((None, *shape[1:]))
    with pytest.raises(ValueError, match="ndim"):
        layer(np.ones(shape[1:], "float32"))
