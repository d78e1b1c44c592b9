"""Space to depth: (…, H, W, C) ↔ (…, H/f, W/f, f²C)."""

from typing import Any

from keras import ops


def squeeze(x: Any, factor: int) -> Any:
    """Every f×f patch of pixels becomes one pixel of f²C channels: row of the patch first, then column, then channel."""
    *lead, height, width, channels = ops.shape(x)
    x = ops.reshape(x, (*lead, height // factor, factor, width // factor, factor, channels))
    x = _swap(x, len(lead))
    return ops.reshape(x, (*lead, height // factor, width // factor, factor * factor * channels))


def unsqueeze(y: Any, factor: int) -> Any:
    """The inverse of `squeeze`."""
    *lead, height, width, channels = ops.shape(y)
    y = ops.reshape(y, (*lead, height, width, factor, factor, channels // factor**2))
    y = _swap(y, len(lead))
    return ops.reshape(y, (*lead, height * factor, width * factor, channels // factor**2))


def squeezed_shape(shape: Any, factor: int, name: str) -> tuple[Any, ...]:
    """The shape of `squeeze(x)` for x of a shape (…, H, W, C); unknown sizes are None."""
    *lead, height, width, channels = _image(shape, name)
    if any(isinstance(size, int) and size % factor for size in (height, width)):
        raise ValueError(
            f"{name} needs a height and a width that divide by {factor}. Expected multiples of {factor}. "
            f"Received: height {height}, width {width}"
        )
    return (*lead, _times(height, 1, factor), _times(width, 1, factor), _times(channels, factor**2, 1))


def unsqueezed_shape(shape: Any, factor: int, name: str) -> tuple[Any, ...]:
    """The shape of `unsqueeze(y)` for y of a shape (…, H, W, C)."""
    *lead, height, width, channels = _image(shape, name)
    if isinstance(channels, int) and channels % factor**2:
        raise ValueError(
            f"The inverse of {name} needs channels that divide by {factor**2}. Expected a multiple of {factor**2}. "
            f"Received: {channels}"
        )
    return (*lead, _times(height, factor, 1), _times(width, factor, 1), _times(channels, 1, factor**2))


def _image(shape: Any, name: str) -> tuple[Any, ...]:
    several = isinstance(shape, dict) or any(isinstance(size, tuple | list) for size in shape or ())
    if shape is None or several or len(shape) < 3 or (isinstance(shape[-1], int) and shape[-1] == 0):
        received = f"{len(shape)} inputs" if several else shape if shape is None else tuple(shape)
        raise ValueError(
            f"{name} needs images with a channel or more. Expected shape (..., height, width, channels). Received: {received}"
        )
    return tuple(shape)


def _times(size: Any, up: int, down: int) -> Any:
    return None if size is None else size * up // down


def _swap(x: Any, lead: int) -> Any:
    """(…, a, b, c, d, e) → (…, a, c, b, d, e)."""
    return ops.transpose(x, (*range(lead), lead, lead + 2, lead + 1, lead + 3, lead + 4))
