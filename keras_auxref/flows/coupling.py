"""The coupling of every step of a flow: NICE's, RealNVP's and Glow's, that of Flow++, and neural splines."""

from typing import Any

import keras

from keras_auxref.flows.chain import check_template
from keras_auxref.flows.copies import clone, serialized
from keras_auxref.flows.mixing import Part, as_template
from keras_auxref.flows.parts import AdditiveCoupling, AffineCoupling, LogisticMixtureCoupling, SplineCoupling
from keras_auxref.flows.parts.coupling import Coupling
from keras_auxref.invertible import takes
from keras_auxref.typing import Config, DType

_LAYERS = {
    "additive": AdditiveCoupling,
    "affine": AffineCoupling,
    "logistic_mixture": LogisticMixtureCoupling,
    "spline": SplineCoupling,
}
COUPLINGS = tuple(_LAYERS)

SPLINE_BOUND = 3.0
"""The `bound` of the splines that the name `"spline"` stands for. It was 4, and configurations did not state it."""


def check_coupling(coupling: Part | Config) -> Part:
    """A name of `COUPLINGS`, or a template: an invertible layer that has not been built."""
    if isinstance(coupling, dict):
        coupling = keras.saving.deserialize_keras_object(coupling)
    if isinstance(coupling, str) and coupling in _LAYERS:
        return coupling
    if not isinstance(coupling, keras.layers.Layer):
        raise ValueError(
            f"Unknown coupling. Expected one of {list(COUPLINGS)}, or an invertible Keras layer. Received: {coupling!r}"
        )
    return check_template(coupling, "coupling")


def coupling_config(coupling: Part) -> Config:
    """The part of a flow's configuration that is about its coupling: its name and what that stands for, or a template."""
    if not isinstance(coupling, str):
        return {"coupling": serialized(coupling)}
    return {"coupling": coupling, **({"spline_bound": SPLINE_BOUND} if coupling == "spline" else {})}


def coupling_of_config(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a flow from its configuration, with the coupling that its name stood for when it was saved."""
    config = dict(config)
    bound = config.pop("spline_bound", 4.0)
    if config.get("coupling") == "spline" and bound != SPLINE_BOUND:
        config["coupling"] = SplineCoupling(hidden=config.get("hidden", 64), bound=bound)
    return config


def coupling_template(coupling: Part, hidden: int, dtype: DType, context: int | None = None) -> keras.layers.Layer:
    """The layer of one coupling, x_b ↦ y_b given x_a, not built; by a name with a default network of `hidden` channels.

        additive           y_b = x_b + t                        volume is preserved
        affine             y_b = (x_b + t)·s
        logistic_mixture   y_b = σ⁻¹(Σ πₖ σ((x_b − μₖ)/sₖ))·eᵃ + t
        spline             y_b = h(x_b), h a monotone rational-quadratic spline

    A layer instead of a name is taken as it is. The network of a coupling sees `context` more channels.
    """
    if isinstance(coupling, str):
        return _LAYERS[coupling](hidden=hidden, context=context, dtype=dtype)
    layer = as_template(coupling, dtype)
    if isinstance(layer, Coupling):
        if layer.context not in (None, context):
            other = "" if context is None else f", or with context={context}"
            raise ValueError(
                f"A coupling sees the context of its flow. Expected a coupling without `context`{other}. Received: "
                f"'{layer.name}' with context={layer.context}"
            )
        return clone(layer, context=context)
    if context is not None and not takes(layer.forward_and_log_det, "context"):
        raise ValueError(
            "The coupling is what sees the context of a flow. Expected a layer whose `forward_and_log_det` and `inverse` take "
            f"`context`. Received: {layer!r}"
        )
    return layer
