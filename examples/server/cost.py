"""What a request costs to parse, seen before it is parsed.

Bytes are a poor measure: 31 MB of `[],` become ten million lists, a gigabyte. A body is therefore held to the number of values,
lists and objects that a model can take, which is counted without parsing in a hundredth of the time.
"""

import math
from collections.abc import Iterable
from typing import Any

FREE = 2**22
"""Values of an input whose shape leaves a size open, besides that of the batch. They have about 32 MB."""
ALLOWANCE = 1024
"""For names, spaces between, and so that a request that is slightly too large is told so by name."""


def parts(body: bytes | bytearray) -> int:
    """At least as many values, lists and objects as there are in a JSON text, and at most three times as many."""
    return body.count(b",") + body.count(b"[") + body.count(b"{") + 1


def most_parts(inputs: Iterable[Iterable[Any]], max_batch: int) -> int:
    """The largest `parts` of a request for one of several signatures, each given as its inputs, in either format."""
    return ALLOWANCE + 2 * max((sum(_parts(tensor, max_batch) for tensor in tensors) for tensors in inputs), default=0)


def _parts(tensor: Any, max_batch: int) -> int:
    """Values and lists of one input; for every row one more, for the object that it may be an entry of."""
    if tensor.shape is None or None in tensor.shape[1:] or tensor.dtype == "string":
        return FREE
    sizes = [max_batch if size is None else size for size in tensor.shape]
    return sum(math.prod(sizes[:axis]) for axis in range(len(sizes) + 1)) + max_batch
