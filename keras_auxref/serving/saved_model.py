"""Keras models as SavedModels that plain TensorFlow loads."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_auxref.layers.frozen import frozen
from keras_auxref.ops.checks import require_tensorflow
from keras_auxref.serving._logs import quiet
from keras_auxref.serving.signatures import Signature, signatures_of
from keras_auxref.serving.versions import write_version
from keras_auxref.typing import PathLike


def export_saved_model(
    model: keras.Model,
    path: PathLike,
    *,
    version: int | None = None,
    overwrite: bool = False,
    outputs: str = "auto",
    input_signature: object = None,
) -> Path:
    """Writes a model as a versioned TensorFlow SavedModel, for TensorFlow Serving or any process that has TensorFlow.

    The folder `path/VERSION` needs neither this package nor Keras nor TensorFlow Probability. The batch size is free, inputs and
    outputs have names, and what depends on weights alone, such as the factorisation of W, is computed at export instead of at
    every request. A version is written under another name and then renamed: a server that watches `path` never sees an
    incomplete one.

    | model | signature | inputs | outputs |
    |---|---|---|---|
    | classifier | `serving_default` | those of the model | `probabilities`, `class` |
    | any other | `serving_default` | those of the model | those of the model; `outputs` if there is one |
    | `Glow` | `log_prob`, `serving_default` | `images` | `log_prob` |
    | | `encode` | `images` | `z`, `log_det` |
    | | `decode` | `z` | `images` |
    | | `sample` | `n`, `seed`, `temperature`, numbers | `images`; the same seed gives the same images |

    Layers with `stateful=True` raise NotImplementedError: a server has many clients, and one state would serve them all.

    Inputs that Keras named by itself are called `inputs`. Images are numbers in [0, 1], k/255 for a pixel k of
    8 bits, as for `Glow.log_prob`; an impossible image has `log_prob` −∞.

    Args:
        model: A built Keras model. A subclassed model must have been called, or needs `input_signature`.
        path: The folder for the model's versions; TensorFlow Serving uses its name.
        version: The version number; by default the next free one, starting at 1.
        overwrite: Whether `version` may be replaced or, if no version is given, the newest. Without it nothing that exists
            is changed.
        outputs: What the model computes: `"logits"` or `"probabilities"` make it a classifier, with one class per entry of the
            last axis, or two if that has a single entry; `"raw"` does not. With `"auto"`, models that are compiled with a
            cross-entropy or end in a softmax are classifiers.
        input_signature: A nest of `tf.TensorSpec`, or of examples, for models whose inputs Keras does not know.

    Returns:
        The folder of the version that was written.

    Example:
    >>> import keras, tempfile
    >>> import tensorflow as tf
    >>> from keras_auxref import AuxReflection
    >>> from keras_auxref.serving import export_saved_model
    >>> model = keras.Sequential([keras.Input((4,)), AuxReflection(), keras.layers.Dense(3, activation="softmax")])
    >>> folder = export_saved_model(model, tempfile.mkdtemp())
    >>> served = tf.saved_model.load(str(folder)).signatures["serving_default"]
    >>> sorted(served(inputs=tf.ones((2, 4))))
    ['class', 'probabilities']
    """
    require_tensorflow("export_saved_model")
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model. Expected a `keras.Model`. Received: {type(model).__name__}")
    _refuse_state(model)
    if not getattr(model, "initialized", True):
        warnings.warn(
            f"{model.name!r} has seen no data, and is exported as it is. Expected `fit`, `initialize` or loaded weights before.",
            stacklevel=2,
        )
    kept: list[tf.Variable] = []

    def keep(tensor: tf.Tensor) -> tf.Tensor | tf.Variable:
        # One value for all signatures. Scalars stay in the graph, which can then drop the branches that they rule out.
        if not tensor.shape.num_elements() or tensor.shape.num_elements() == 1:
            return tensor
        kept.append(tf.Variable(tensor, trainable=False))
        return kept[-1]

    def write(folder: Path) -> None:
        with frozen(model, keep):
            functions = _trace(signatures_of(model, outputs, input_signature))
        module = tf.Module()
        # Only what the functions read: neither the state of an optimizer nor weights that a constant replaces.
        used = {id(variable): variable for function in functions.values() for variable in function.graph.variables}
        module.weights = list(used.values())
        module.tables = _tables(model, functions.values())
        # Without gradients: a server does not need them, and closed forms save what a SavedModel cannot hold.
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
        with quiet("tensorflow"):  # a notice about assets
            tf.saved_model.save(module, str(folder), signatures=functions, options=options)
        _tidy(folder)

    return write_version(Path(path), write, version, overwrite)


def _trace(signatures: dict[str, Signature]) -> dict[str, tf.types.experimental.ConcreteFunction]:
    """One concrete function per signature; equal signatures share one."""
    traced: dict[int, Any] = {}
    for signature in signatures.values():
        if id(signature.function) not in traced:
            function = tf.function(signature.function, autograph=False)
            traced[id(signature.function)] = function.get_concrete_function(**signature.inputs)
    return {name: traced[id(signature.function)] for name, signature in signatures.items()}


def _tables(model: keras.Model, functions: Iterable[tf.types.experimental.ConcreteFunction]) -> list[tf.Module]:
    """The tables of lookup layers that the functions read, which are not variables."""
    captured = {id(tensor) for function in functions for tensor, _ in function.graph.captures}
    parts = tf.train.TrackableView(model).descendants()
    resources = [part for part in parts if isinstance(part, tf.saved_model.experimental.TrackableResource)]
    return [resource for resource in resources if id(resource.resource_handle) in captured]


def _refuse_state(model: keras.Model) -> None:
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise NotImplementedError(
                "A signature is a function of its inputs: a state that a server carries over would go from one client's request "
                f"into the next one's. Expected no layer with stateful=True. Received: {layer.name!r}"
            )


def _tidy(folder: Path) -> None:
    """Checks that no asset is missing, and removes the names of gradients not stored, about which TensorFlow would warn."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved, file = saved_model_pb2.SavedModel(), folder / "saved_model.pb"
    saved.ParseFromString(file.read_bytes())
    for meta_graph in saved.meta_graphs:
        for asset in meta_graph.asset_file_def:
            if not (folder / "assets" / asset.filename).exists():  # which TensorFlow reports only at the first load
                raise FileNotFoundError(
                    "A layer reads its vocabulary from a file that is not there any more. Expected the file that it was made "
                    f"with. Received: no {asset.filename}"
                )
        graph = meta_graph.graph_def
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            for node in nodes:
                node.attr.pop("_gradient_op_type", None)
    file.write_bytes(saved.SerializeToString(deterministic=True))
