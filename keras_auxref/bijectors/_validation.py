"""What is proven about a bijector, and what `validate_args=True` means for its inverse."""

import tensorflow as tf
import tensorflow_probability as tfp

from keras_auxref import ops
from keras_auxref.certificate import Certificate
from keras_auxref.typing import Tensor


def certified(w: Tensor, symmetric: bool | None) -> tf.Tensor:
    """Whether f(x) = H(Wx) x is proven to have one preimage for every vector: a scalar boolean tensor, also inside graphs."""
    return ops.is_certified(tf.convert_to_tensor(w), symmetric)


def weakest(members: list[Certificate]) -> Certificate:
    """What holds for all members of a batch: the first certificate without a proof, or the one with the worst condition."""
    if len(members) == 1:
        return members[0]
    index = max(range(len(members)), key=lambda i: (not members[i].invertible, members[i].condition, -i))
    worst = members[index]
    brackets = [member.bracket for member in members]
    constants = [[member.lipschitz for member in members], [member.inverse_lipschitz for member in members]]
    return Certificate(
        worst.invertible,
        worst.condition,
        (min(low for low, _ in brackets), max(high for _, high in brackets)),
        f"Member {index} of {len(members)}: {worst.reason}",
        *(None if None in bounds else max(bound for bound in bounds if bound is not None) for bounds in constants),
    )


def checked_inverse(x: tf.Tensor, y: tf.Tensor, bijector: tfp.bijectors.Bijector, proven: list[tf.Tensor]) -> tf.Tensor:
    """x, or `tf.errors.InvalidArgumentError` if x is not proven to be the only preimage of y, or was not found."""
    # NaN means that the inverse found nothing. A NaN in the input is not a failure of the inverse.
    found = _finite(x, bijector.forward_min_event_ndims) | ~_finite(y, bijector.inverse_min_event_ndims)
    missing = f"The inverse of '{bijector.name}' did not find a preimage for every vector."
    unproven = (
        f"The inverse of '{bijector.name}' is not certified: W⁻¹ = S + K with S definite and κ(S) < 2 does not hold, "
        "and a vector may have several preimages."
    )
    checks = [tf.debugging.assert_equal(proof, True, message=unproven) for proof in proven]
    checks.append(tf.debugging.assert_equal(tf.reduce_all(found), True, message=missing))
    with tf.control_dependencies(checks):
        return tf.identity(x)


def _finite(x: tf.Tensor, event_ndims: int) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(x), axis=list(range(-event_ndims, 0)))
