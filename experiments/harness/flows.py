"""What is measured on a trained flow, and the images that figures show of it."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

# One batch size everywhere: every other one would have the model traced anew.
BATCH = 32
MEASURED = 64
TEMPERATURES = (0.7, 1.0)
SHOWN = 8


def continuous(images: np.ndarray) -> np.ndarray:
    """The numbers in [0, 1] that whole values 0 … 255 stand for."""
    return images.astype("float32") / 255


def reconstruct(model: Any, images: np.ndarray) -> np.ndarray:
    """n⁻¹(n(x))."""
    return _decode(model, _encode(model, images))


def measure(model: Any, images: np.ndarray, batch_size: int) -> dict[str, Any]:
    """Likelihood, quality of the inverse, and what is known about the branches of auxiliary reflections.

    Args:
        model: A `keras_auxref.Glow`.
        images: Validation images with whole values 0 … 255.
        batch_size: The batch size of `fit`'s validation, for which the model is compiled.
    """
    bits = model.evaluate(images, batch_size=batch_size, verbose=0, return_dict=True)["bits_per_dim"]
    some = images[:MEASURED]
    error = np.abs(reconstruct(model, some) - continuous(some))
    finite = error[np.isfinite(error)]
    certificates = model.certificates().values()
    measured = {
        "bits_per_dim": float(bits),
        "images": len(images),
        "reconstruction": {
            "images": len(some),
            "max_error": float(finite.max()) if finite.size else float("nan"),
            "mean_error": float(finite.mean()) if finite.size else float("nan"),
            "share_not_found": float(1 - finite.size / error.size),
            # Within half of a value in every pixel, so that rounding restores the image.
            "share_of_images_restored": float((np.nan_to_num(error, nan=1.0) < 0.5 / 255).all(axis=(1, 2, 3)).mean()),
        },
        "mixings": len(certificates),
        "certified": sum(bool(certificate.invertible) for certificate in certificates),
    }
    layers = model.branches(some)
    if layers:
        measured["branches"] = {
            "mean_preimages": float(np.mean([layer.preimages for layer in layers])),
            "max_preimages": int(max(layer.most_preimages for layer in layers)),
            "min_share_returned": float(min(layer.returned for layer in layers)),
            "mean_share_returned": float(np.mean([layer.returned for layer in layers])),
            "layers": [_plain(asdict(layer)) for layer in layers],
        }
    return measured


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Without NumPy's numbers and tuples, which JSON does not have."""
    return {
        key: list(value) if isinstance(value, tuple) else getattr(value, "item", lambda v=value: v)()
        for key, value in entry.items()
    }


def load_model(path: Path) -> Any:
    """A flow that `training.save_model` wrote."""
    import keras

    import keras_auxref.flows  # noqa: F401 (Keras then knows the classes of the file)

    return keras.models.load_model(path)


@dataclass(frozen=True)
class Pictures:
    """Images of one trained flow, with values in [0, 1] and NaN where no preimage was found.

    Attributes:
        originals: The most contrasted of the first validation images, (8, height, width, channels).
        reconstructions: n⁻¹(n(x)) of these.
        samples: For each of `TEMPERATURES` eight samples, (2, 8, height, width, channels).
        interpolations: n⁻¹((1 − t) n(a) + t n(b)) for two pairs of the originals, t = 0 … 1, (2, 8, height, width, channels).
    """

    originals: np.ndarray
    reconstructions: np.ndarray
    samples: np.ndarray
    interpolations: np.ndarray

    @classmethod
    def of(cls, model: Any, images: np.ndarray) -> "Pictures":
        candidates = images[:BATCH]
        chosen = candidates[np.argsort(-candidates.std(axis=(1, 2, 3)), kind="stable")[:SHOWN]]
        z = _encode(model, chosen)
        t = np.linspace(0, 1, SHOWN, dtype=z.dtype)[:, None]
        paths = np.concatenate([(1 - t) * z[first] + t * z[(first + 1) % len(z)] for first in (0, 2 % len(z))])
        samples = np.stack([_numpy(model.sample(BATCH, seed=1, temperature=t))[:SHOWN] for t in TEMPERATURES])
        return cls(
            originals=continuous(chosen),
            reconstructions=_decode(model, z),
            samples=samples,
            interpolations=_decode(model, paths).reshape(2, SHOWN, *images.shape[1:]),
        )

    def save(self, path: Path) -> None:
        """Write a NumPy file aside and rename it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        with aside.open("wb") as file:
            np.savez_compressed(file, **asdict(self))
        os.replace(aside, path)

    @classmethod
    def load(cls, path: Path) -> "Pictures | None":
        """The pictures in a file, or None where there is none."""
        if not path.exists():
            return None
        with np.load(path) as stored:
            return cls(**{name: stored[name] for name in stored.files})


def _encode(model: Any, images: np.ndarray) -> np.ndarray:
    return _in_batches(lambda x: model.encode(x)[0], images)


def _decode(model: Any, z: np.ndarray) -> np.ndarray:
    return _in_batches(model.decode, z)


def _in_batches(function: Any, x: np.ndarray) -> np.ndarray:
    """Function of every batch, the last filled up with copies of its first element."""
    parts = []
    for start in range(0, len(x), BATCH):
        batch = x[start : start + BATCH]
        filled = np.concatenate([batch, np.repeat(batch[:1], BATCH - len(batch), axis=0)])
        parts.append(_numpy(function(filled))[: len(batch)])
    return np.concatenate(parts)


def _numpy(x: Any) -> np.ndarray:
    import keras

    return keras.ops.convert_to_numpy(x)
