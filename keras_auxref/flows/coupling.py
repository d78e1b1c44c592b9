"""The coupling of every step of a flow: NICE's, RealNVP's and Glow's, and that of Flow++."""

from typing import Any

import keras

from keras_auxref.layers import AdditiveCoupling, AffineCoupling, LogisticMixtureCoupling

_LAYERS = {"additive": AdditiveCoupling, "affine": AffineCoupling, "logistic_mixture": LogisticMixtureCoupling}
COUPLINGS = tuple(_LAYERS)


def check_coupling(coupling: Any) -> str:
    """A name of `COUPLINGS`."""
    if isinstance(coupling, str) and coupling in _LAYERS:
        return coupling
    raise ValueError(f"Unknown coupling. Expected one of {list(COUPLINGS)}. Received: {coupling!r}")


def build_coupling(coupling: str, hidden: int, name: str, dtype: Any) -> keras.layers.Layer:
    """The layer of one coupling, x_b ↦ y_b given x_a, with a default network of `hidden` channels.

    additive           y_b = x_b + t                        volume is preserved
    affine             y_b = (x_b + t)·s
    logistic_mixture   y_b = σ⁻¹(Σ πₖ σ((x_b − μₖ)/sₖ))·eᵃ + t
    """
    return _LAYERS[coupling](hidden=hidden, name=name, dtype=dtype)
