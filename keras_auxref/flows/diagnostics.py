"""What is proven about the mixings of a flow, and what can be measured where nothing is."""

from dataclasses import dataclass

import keras
import numpy as np

from keras_auxref import ops
from keras_auxref.flows.multi_scale import MultiScale
from keras_auxref.layers import AuxReflection, FactoredReflection
from keras_auxref.typing import Tensor

RETURNED_WITHIN = 1e-3


@dataclass(frozen=True)
class Branches:
    """Whether one auxiliary reflection f of a flow is inverted on given data.

    Attributes:
        layer: Name of the layer.
        invertible: True when f is proven to be a bijection; then the rest follows.
        condition: κ(S) of the certificate.
        preimages: Mean number of preimages of f(x) over the vectors x for which they were counted.
        most_preimages: The largest such number.
        counted: The number of vectors for which preimages were counted.
        returned: The share of vectors x with ‖f⁻¹(f(x)) − x‖ ≤ 1e-3 ‖x‖, among all vectors of the images.
        vectors: The number of these vectors.
        coefficient: Mean and standard deviation of c(x) = 2 uᵀx/‖u‖², u = Wx, over them.

    Example:
    >>> import numpy as np
    >>> from keras_auxref import Glow
    >>> model = Glow((4, 4, 1), levels=1, steps=1, hidden=4, mixing="aux_spectral")
    >>> found = model.branches(np.zeros((2, 4, 4, 1), "uint8"), counted=2)
    >>> [(branches.invertible, branches.preimages) for branches in found]
    [(True, 1.0)]
    """

    layer: str
    invertible: bool
    condition: float
    preimages: float
    most_preimages: int
    counted: int
    returned: float
    vectors: int
    coefficient: tuple[float, float]


def branches(flow: MultiScale, images: Tensor, counted: int, seed: int) -> list[Branches]:
    """`Branches` for every auxiliary reflection that these images pass through."""
    generator = np.random.default_rng(seed)
    found: list[Branches] = []

    def visit(name: str, layer: keras.layers.Layer, x: Tensor) -> None:
        if not isinstance(layer, AuxReflection | FactoredReflection):
            return
        y = layer(x)
        back = layer.inverse(keras.ops.convert_to_tensor(keras.ops.copy(y)))
        rows, images_of_rows, back = (_rows(t) for t in (x, y, back))
        length = np.linalg.norm(rows, axis=-1)
        with np.errstate(invalid="ignore"):  # NaN where no preimage was found: not returned
            returned = np.linalg.norm(back - rows, axis=-1) <= RETURNED_WITHIN * length
        chosen = generator.choice(len(rows), size=min(counted, len(rows)), replace=False)
        w = keras.ops.convert_to_numpy(layer.kernel).astype(np.float64)
        if isinstance(layer, FactoredReflection):  # y = −UVᵀ f(x)
            u, v = (keras.ops.convert_to_numpy(m).astype(np.float64) for m in (layer.left, layer.right))
            images_of_rows = -images_of_rows @ u @ v.T
        counts = [len(ops.preimages(y, w)) for y in images_of_rows[chosen]]
        c = _rows(layer.coefficient(x)[..., None])
        certificate = layer.certificate()
        found.append(
            Branches(
                layer=name,
                invertible=certificate.invertible,
                condition=certificate.condition,
                preimages=float(np.mean(counts)) if counts else float("nan"),
                most_preimages=max(counts, default=0),
                counted=len(counts),
                returned=float(returned.mean()),
                vectors=len(rows),
                coefficient=(float(c.mean()), float(c.std())),
            )
        )

    flow.walk_mixings(images, visit)
    return found


def _rows(x: Tensor) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(x), np.float64).reshape(-1, x.shape[-1])
