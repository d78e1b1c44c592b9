"""Models as ONNX and LiteRT files, through Keras' own converters."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_auxref.layers.frozen import frozen
from keras_auxref.ops.checks import HALF, require_tensorflow, whole_number_or_none
from keras_auxref.serving._logs import quiet
from keras_auxref.serving.aside import writing_aside
from keras_auxref.serving.signatures import Signature, signatures_of
from keras_auxref.typing import PathLike, Tensor

_MISSING_OPERATION = re.compile(r"'tf\.(\w+)' op|No Op registered for (\w+)")


def export_onnx(
    model: keras.Model,
    path: PathLike,
    *,
    overwrite: bool = False,
    outputs: str = "auto",
    input_signature: object = None,
    signature: str = "serving_default",
) -> Path:
    """Writes a model as an ONNX file, for ONNX Runtime and everything else that reads this format.

    Inputs and outputs have the names that `export_saved_model` gives them, `probabilities` and `class` for a classifier, and the
    batch size is free. What depends on weights alone, such as an orthogonal matrix, is a constant in the file. Layers in half
    precision are exported in float32. The file is written under another name and then renamed, so it is never seen incomplete.

    A file has one signature; a flow has several, and `signature` chooses. Layers with `stateful=True`, flows whose
    log-determinants or inverses factor matrices or search (`Invertible.elementary` is False) and models with an operation that
    the converter does not support raise NotImplementedError.

    Args:
        model: A built Keras model. A subclassed model must have been called, or needs `input_signature`.
        path: A file name that ends in `.onnx`; parent folders are created.
        overwrite: Whether an existing file may be replaced.
        outputs: `"auto"`, `"logits"`, `"probabilities"` or `"raw"`, as in `export_saved_model`.
        input_signature: A nest of `tf.TensorSpec`, or of examples, for models whose inputs Keras does not know.
        signature: Which of the model's signatures, as `export_saved_model` names them: `"log_prob"`, `"encode"` or `"decode"` of
            a flow.

    Returns:
        The path of the file.

    Example:
    >>> import os, tempfile
    >>> import keras
    >>> import numpy as np
    >>> import onnxruntime  # pip install onnxruntime tf2onnx onnx
    >>> from keras_auxref import AuxReflection
    >>> from keras_auxref.serving import export_onnx
    >>> model = keras.Sequential([keras.Input((4,)), AuxReflection(), keras.layers.Dense(3, activation="softmax")])
    >>> path = export_onnx(model, os.path.join(tempfile.mkdtemp(), "model.onnx"))
    >>> session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    >>> session.run(["probabilities"], {"inputs": np.ones((2, 4), "float32")})[0].shape
    (2, 3)
    """

    def convert(served: keras.Model, inputs: list[tf.TensorSpec], file: str) -> None:
        import onnx

        served.export(file, format="onnx", input_signature=inputs, verbose=False)
        onnx.checker.check_model(file)  # the converter writes unknown operations unchanged and continues

    for module in ("tf2onnx", "onnx"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"`export_onnx` needs the package {module}: pip install tf2onnx onnx", name=module)
    return _export(model, path, "ONNX", ".onnx", convert, overwrite, outputs, input_signature, signature, None)


def export_litert(
    model: keras.Model,
    path: PathLike,
    *,
    overwrite: bool = False,
    outputs: str = "auto",
    input_signature: object = None,
    signature: str = "serving_default",
    batch_size: int | None = None,
) -> Path:
    """Writes a model as a LiteRT (TensorFlow Lite) file of built-in operations only, which runs without TensorFlow.

    Everything in `export_onnx` holds here too, with three exceptions. A loop over time in LiteRT has a fixed batch size: a
    model with a recurrent layer that is not unrolled takes `batch_size` rows, by default 1. Float64 is refused. And for a flow
    LiteRT has `log_prob` and `encode`, but `decode` only with few mixings.

    Args:
        model, overwrite, outputs, input_signature, signature: See `export_onnx`.
        path: A file name that ends in `.tflite`; parent folders are created.
        batch_size: The number of rows of every input; by default free, or 1 with a loop over time.

    Returns:
        The path of the file.

    Example:
    >>> import os, tempfile
    >>> import keras
    >>> import numpy as np
    >>> from ai_edge_litert.interpreter import Interpreter  # pip install ai-edge-litert
    >>> from keras_auxref import AuxReflection
    >>> from keras_auxref.serving import export_litert
    >>> model = keras.Sequential([keras.Input((4,)), AuxReflection(), keras.layers.Dense(3, activation="softmax")])
    >>> path = export_litert(model, os.path.join(tempfile.mkdtemp(), "model.tflite"))
    >>> run = Interpreter(str(path)).get_signature_runner()
    >>> run(inputs=np.ones((2, 4), "float32"))["probabilities"].shape
    (2, 3)
    """

    def convert(served: keras.Model, inputs: list[tf.TensorSpec], file: str) -> None:
        # Without TensorFlow's own operations, which the runtime of LiteRT does not have.
        target = {"supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS]}
        served.export(file, format="litert", input_signature=inputs, verbose=False, target_spec=target)

    batch_size = whole_number_or_none("batch_size", batch_size)
    return _export(model, path, "LiteRT", ".tflite", convert, overwrite, outputs, input_signature, signature, batch_size)


class _Served(keras.Model):
    """A model with the named inputs and outputs of a signature."""

    def __init__(self, model: keras.Model, signature: Signature) -> None:
        super().__init__(autocast=False, name="served")
        self.model, self.function, self.built = model, signature.function, True

    def call(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.function(**inputs)


def _export(
    model: keras.Model,
    path: PathLike,
    name: str,
    suffix: str,
    convert: Callable[[keras.Model, list[tf.TensorSpec], str], None],
    overwrite: bool,
    outputs: str,
    input_signature: object,
    signature_name: str,
    batch_size: int | None,
) -> Path:
    require_tensorflow(f"export_{name.lower()}")
    path = Path(path)
    if path.suffix != suffix:
        raise ValueError(f"{name} files have a suffix of their own. Expected a path that ends in {suffix!r}. Received: {path}")
    _refuse_existing(path, overwrite)
    _refuse_model(model, name)
    signature = _chosen(signatures_of(model, outputs, input_signature), signature_name)
    loops = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and not layer.unroll]
    if name == "LiteRT" and loops:
        batch_size = batch_size or 1
    inputs = {key: tf.TensorSpec((batch_size, *spec.shape[1:]), spec.dtype, key) for key, spec in signature.inputs.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_aside(path.parent) as aside:  # on the same disk, so that renaming is one step
        file = os.path.join(aside, path.name)
        # Arrays instead of tensors, which tf2onnx takes for inputs; and no messages about gradients, which are not exported.
        with frozen(model, keras.ops.convert_to_numpy), _in_float32(model), quiet("absl", "tensorflow", "tf2onnx"):
            try:
                convert(_Served(model, signature), [inputs], file)
            except Exception as error:
                missing = sorted({"".join(found) for found in _MISSING_OPERATION.findall(str(error))})
                if not missing:
                    raise
                free = " with a free batch size (see `batch_size`)" if name == "LiteRT" and batch_size is None else ""
                raise NotImplementedError(
                    f"{model.name!r} cannot be exported to {name}: the converter has nothing for {', '.join(missing[:5])}"
                    f"{', …' if missing[5:] else ''}, of TensorFlow's operations{free}. Use `export_saved_model`."
                ) from error
        _refuse_existing(path, overwrite)
        os.replace(file, path)
    return path


def _chosen(signatures: dict[str, Signature], name: str) -> Signature:
    """The signature with this name, if each of its inputs has a batch axis."""
    possible = {key: value for key, value in signatures.items() if all(spec.shape.rank for spec in value.inputs.values())}
    if name not in possible:
        raise ValueError(f"Unknown signature. Expected one of {list(possible)}, functions of a batch. Received: {name!r}")
    return possible[name]


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.is_dir() or (path.exists() and not overwrite):
        raise FileExistsError(
            f"Expected a file that does not exist yet. Received: {path}. "
            + ("It is a folder." if path.is_dir() else "Pass overwrite=True to replace it.")
        )


def _refuse_model(model: Any, name: str) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a Keras model. Expected a `keras.Model`. Received: {type(model).__name__}")
    offers = hasattr(model, "export_signatures")
    for layer in model._flatten_layers():
        if offers and not getattr(layer, "elementary", True):
            raise NotImplementedError(
                f"The flow {model.name!r} cannot be exported to {name}: the log-determinant or the inverse of a layer factors "
                "matrices or searches, for which the converter has nothing. Expected layers of sums and products, such as "
                f"mixing='aux_factored', coupling='affine'. Received: {layer.name!r}. Use `export_saved_model`."
            )
        if getattr(layer, "stateful", False):
            raise NotImplementedError(
                f"A file of {name} is a function of its inputs, and carries no state over from call to call. Expected no layer "
                f"with stateful=True. Received: {layer.name!r}"
            )
        if name == "LiteRT" and layer.compute_dtype == "float64":
            raise NotImplementedError(
                f"LiteRT does not compute in float64. Expected layers in float32 or mixed precision. Received: {layer.name!r} in "
                "float64. Use `export_onnx` or `export_saved_model`."
            )


@contextlib.contextmanager
def _in_float32(model: keras.Model) -> Iterator[None]:
    """A context in which layers in half precision compute in float32: neither format has half precision for all operations."""
    half = [
        (layer, layer.dtype_policy)
        for layer in model._flatten_layers()
        if layer.compute_dtype in HALF and layer.quantization_mode is None
    ]
    try:
        for layer, _ in half:
            layer.dtype_policy = "float32"
        yield
    finally:
        for layer, policy in half:
            layer.dtype_policy = policy
