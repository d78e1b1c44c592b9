"""ONNX and LiteRT files against the live model, in the runtimes of these formats."""

import sys

import keras
import numpy as np
import pytest

from keras_auxref import flows, layers
from keras_auxref.flows import Glow
from keras_auxref.serving import export_litert, export_onnx

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
D = 6


def run_onnx(path, **inputs):
    session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs), strict=True))


def run_litert(path, **inputs):
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(str(path))
    return interpreter.get_signature_runner()(**inputs)  # resizes the inputs to the batch


def onnx(model, path, **kwargs):
    pytest.importorskip("tf2onnx")
    return export_onnx(model, path / "model.onnx", **kwargs), run_onnx


def litert(model, path, **kwargs):
    return export_litert(model, path / "model.tflite", **kwargs), run_litert


both = pytest.mark.parametrize("export", [onnx, litert])
# What happens before the formats part: once by default, and in LiteRT, which takes two seconds a file, with the slow tests.
either = pytest.mark.parametrize("export", [onnx, pytest.param(litert, marks=pytest.mark.slow)])


def sequential(shape, *parts):
    return keras.Sequential([keras.Input(shape), *parts])


def rows(rng, *shape):
    """Rows to try: ordinary ones, zero, very large and very small ones."""
    x = rng.normal(size=(8, *shape))
    x[1], x[2], x[3] = 0, x[2] * 1e15, x[3] * 1e-15
    return x.astype("float32")


def assert_same(y, expected, tolerance=1e-5):
    """Equal up to the size of each row."""
    y, expected = np.asarray(y, "float64"), np.asarray(keras.ops.convert_to_numpy(expected), "float64")
    assert y.shape == expected.shape
    size = np.abs(expected).max(axis=tuple(range(1, expected.ndim)), keepdims=True)
    assert np.all(np.abs(y - expected) <= tolerance * size), np.max(np.abs(y - expected) / size)


MODELS = {
    "reflections": lambda: sequential(
        (D,),
        *(layers.AuxReflection(kernel) for kernel in ("free", "spectral", "relaxed_cayley")),
        layers.AuxReflection(network=keras.layers.Dense(D, activation="tanh")),
    ),
    "matrices": lambda: sequential(
        (D,),
        *(layers.OrthogonalDense(map) for map in ("cayley", "exp", "householder")),
        *(layers.SVDDense(units, map) for units, map in ((4, "aux"), (9, "householder"))),
        layers.ModReLU("ones"),
    ),
    "images": lambda: sequential(
        (4, 4, 3), flows.Squeeze(), flows.ActNorm(), layers.AuxReflection(), flows.InvertibleDense(), flows.AffineCoupling()
    ),
}


@both
@pytest.mark.parametrize("name", MODELS)
def test_files_compute_what_the_model_computes(export, name, rng, tmp_path):
    model = MODELS[name]()
    path, run = export(model, tmp_path)
    x = rows(rng, *model.input_shape[1:])
    for batch in (x, x[:1], x[1:2]):
        assert_same(run(path, inputs=batch)["outputs"], model(batch))


@either
def test_what_w_annihilates_stays(export, tmp_path):
    w = np.eye(D, k=1, dtype="float32")  # W e_0 = 0
    model = sequential((D,), layers.AuxReflection(kernel_initializer=keras.initializers.Constant(w)))
    path, run = export(model, tmp_path)
    x = np.eye(D, dtype="float32")[:1]
    np.testing.assert_array_equal(run(path, inputs=x)["outputs"], x)


def recurrent(*transitions, **kwargs):
    *first, last = transitions
    parts = [layers.OrthogonalRNN(D, transition, return_sequences=True) for transition in first]
    return sequential((3, 2), *parts, layers.OrthogonalRNN(D, last, **kwargs))


@pytest.mark.parametrize("transition", ["aux", "exp"])
def test_loops_of_onnx_have_a_free_batch(transition, rng, tmp_path):
    model = recurrent(transition, return_sequences=transition == "exp")
    path, run = onnx(model, tmp_path)
    for batch in (1, 4):
        x = rng.normal(size=(batch, 3, 2)).astype("float32")
        assert_same(run(path, inputs=x)["outputs"], model(x))


@pytest.mark.parametrize(("transition", "batch_size"), [("aux", None), ("exp", 3)])
def test_loops_of_litert_have_a_fixed_batch(transition, batch_size, rng, tmp_path):
    model = recurrent(transition, return_sequences=transition == "exp")
    path, run = litert(model, tmp_path, batch_size=batch_size)
    x = rng.normal(size=(batch_size or 1, 3, 2)).astype("float32")
    assert_same(run(path, inputs=x)["outputs"], model(x))


def test_without_a_loop_litert_has_a_free_batch(rng, tmp_path):
    model = recurrent("aux", unroll=True)
    path, run = litert(model, tmp_path)
    for batch in (1, 4):
        x = rng.normal(size=(batch, 3, 2)).astype("float32")
        assert_same(run(path, inputs=x)["outputs"], model(x))


@pytest.mark.slow
@both
@pytest.mark.parametrize("options", [{"go_backwards": True}, {"activation": "tanh"}, {"activation": "silu"}])
def test_every_transition_and_the_general_loop(export, options, rng, tmp_path):
    model = recurrent("aux", "cayley", "exp", "householder", **options)
    path, run = export(model, tmp_path)
    x = rng.normal(size=(1, 3, 2)).astype("float32")
    assert_same(run(path, inputs=x)["outputs"], model(x))


@both
def test_a_classifier_names_its_outputs(export, rng, tmp_path):
    model = sequential((D,), layers.AuxReflection(), keras.layers.Dense(3))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    path, run = export(model, tmp_path)
    x = rng.normal(size=(7, D)).astype("float32")
    outputs = run(path, inputs=x)
    assert sorted(outputs) == ["class", "probabilities"]
    assert_same(outputs["probabilities"], keras.ops.softmax(model(x)))
    np.testing.assert_array_equal(outputs["class"], np.argmax(model(x), axis=-1))
    assert outputs["class"].dtype == np.int64


@either
def test_two_classes_in_one_probability(export, rng, tmp_path):
    model = sequential((D,), layers.AuxReflection(), keras.layers.Dense(1))
    path, run = export(model, tmp_path, outputs="logits")
    x = rng.normal(size=(7, D)).astype("float32")
    outputs = run(path, inputs=x)
    assert_same(outputs["probabilities"], keras.ops.sigmoid(model(x)))
    np.testing.assert_array_equal(outputs["class"], np.asarray(model(x))[:, 0] > 0)


@either
def test_several_inputs_and_outputs_keep_their_names(export, rng, tmp_path):
    a, b = keras.Input((D,), name="a"), keras.Input((D,), name="b")
    model = keras.Model({"a": a, "b": b}, {"s": layers.AuxReflection()(a) + b, "t": layers.AuxReflection()(b)})
    path, run = export(model, tmp_path)
    x = {name: rng.normal(size=(3, D)).astype("float32") for name in "ab"}
    outputs, expected = run(path, **x), model(x)
    for name in ("s", "t"):
        assert_same(outputs[name], expected[name])


@either
def test_mixed_precision_is_exported_in_float32(export, rng, tmp_path):
    def build(dtype):
        return sequential((D,), layers.AuxReflection(dtype=dtype), layers.SVDDense(4, "exp", dtype=dtype))

    model, wide = build("mixed_bfloat16"), build("float32")
    wide.set_weights(model.get_weights())
    path, run = export(model, tmp_path)
    x = rows(rng, D)
    assert_same(run(path, inputs=x)["outputs"], wide(x))
    assert model.layers[0].compute_dtype == "bfloat16"
    assert model(x).dtype == "bfloat16"


def test_onnx_has_float64(rng, tmp_path):
    model = keras.Sequential([keras.Input((D,), dtype="float64"), layers.AuxReflection(dtype="float64")], name="wide")
    path, run = onnx(model, tmp_path)
    x = rng.normal(size=(4, D))
    assert_same(run(path, inputs=x)["outputs"], model(x), 1e-13)


class Subclassed(keras.Model):
    """A subclassed model, of whose inputs Keras knows nothing before a call."""

    def __init__(self):
        super().__init__()
        self.reflection = layers.AuxReflection()

    def call(self, x):
        return self.reflection(x)


def test_a_subclassed_model(rng, tmp_path):
    model, x = Subclassed(), rng.normal(size=(4, D)).astype("float32")
    with pytest.raises(ValueError, match="input_signature"):
        onnx(model, tmp_path)
    expected = model(x)
    path, run = onnx(model, tmp_path)
    assert_same(run(path, inputs=x)["outputs"], expected)


def test_a_file_is_replaced_on_request_only(tmp_path):
    model, folder = sequential((D,), layers.ModReLU()), tmp_path / "made" / "on the way"
    path, _ = onnx(model, folder)
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        onnx(model, folder)
    assert path.read_text() == "precious"
    assert onnx(model, folder, overwrite=True)[0] == path
    assert path.read_bytes() != b"precious"
    assert list(folder.iterdir()) == [path]


@both
def test_a_folder_is_never_replaced(export, tmp_path):
    for suffix in ("onnx", "tflite"):
        (tmp_path / f"model.{suffix}").mkdir()
    with pytest.raises(FileExistsError, match="folder"):
        export(sequential((D,), layers.ModReLU()), tmp_path, overwrite=True)


class Determinant(keras.layers.Layer):
    """Linear algebra of data."""

    def call(self, x):
        return keras.ops.slogdet(x)[1][:, None]

    def compute_output_shape(self, input_shape):
        return (input_shape[0], 1)


@either
def test_what_a_format_cannot_express_leaves_no_file(export, tmp_path):
    model = sequential((3, 3), layers.AuxReflection(dtype="mixed_float16"), Determinant())
    with pytest.raises(NotImplementedError, match=r"LogMatrixDeterminant.*export_saved_model") as caught:
        export(model, tmp_path)
    assert caught.value.__cause__ is not None
    assert list(tmp_path.iterdir()) == []
    assert model.layers[0].compute_dtype == "float16"


class Broken(keras.layers.Layer):
    def call(self, x):
        if keras.backend.is_keras_tensor(x):
            return x
        raise RuntimeError("my own mistake")


@both
def test_mistakes_of_the_model_come_through(export, tmp_path):
    with pytest.raises(RuntimeError, match="my own mistake"):
        export(sequential((D,), Broken()), tmp_path)


@pytest.mark.parametrize("mixing", ["aux_factored", pytest.param("conv", marks=pytest.mark.slow)])
def test_a_flow_answers_one_question_per_file(mixing, rng, tmp_path):
    """decode of the z that the file of encode gives, in ONNX Runtime, is where it came from."""
    model = Glow((4, 4, 3), levels=2, steps=1, hidden=4, mixing=mixing, seed=1)
    model.initialize(rng.integers(0, 256, (16, 4, 4, 3), dtype="uint8"))
    for weight in model.trainable_variables:
        weight.assign_add(0.1 * rng.normal(size=weight.shape))
    images = rng.uniform(size=(3, 4, 4, 3)).astype("float32")
    z, log_det = model.encode(images)
    files = {name: onnx(model, tmp_path / name, signature=name) for name in ("log_prob", "encode", "decode")}
    answers = {
        name: run(path, **({"z": z.numpy()} if name == "decode" else {"images": images})) for name, (path, run) in files.items()
    }
    assert_same(answers["encode"]["z"], z)
    np.testing.assert_allclose(answers["encode"]["log_det"], log_det, rtol=1e-5)
    np.testing.assert_allclose(answers["log_prob"]["log_prob"], model.log_prob(images), rtol=1e-5)
    assert_same(answers["decode"]["images"], images)


def test_litert_has_log_prob_of_a_flow(rng, tmp_path):
    model, images = Glow((4, 4, 1), levels=1, steps=1, hidden=4), rng.uniform(size=(3, 4, 4, 1)).astype("float32")
    path, run = litert(model, tmp_path)
    np.testing.assert_allclose(run(path, images=images)["log_prob"], model.log_prob(images), rtol=1e-5)


@both
def test_flows_with_linear_algebra_of_data_are_refused(export, tmp_path):
    with pytest.raises(NotImplementedError, match=r"'level_1'\. Use `export_saved_model`"):
        export(Glow((4, 4, 1), levels=1, steps=1, hidden=4, mixing="aux"), tmp_path / "nothing")
    with pytest.raises(NotImplementedError, match=r"'level_1'\. Use `export_saved_model`"):
        export(Glow((4, 4, 1), levels=1, steps=1, hidden=4, coupling="logistic_mixture"), tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@both
def test_signatures_that_there_are_not(export, tmp_path):
    flow = Glow((4, 4, 1), levels=1, steps=1, hidden=4)
    for name in ("sample", "nonsense"):  # a sample is made of numbers, not of a batch
        with pytest.raises(ValueError, match=rf"Expected one of .*'decode'\].*Received: '{name}'"):
            export(flow, tmp_path, signature=name)
    with pytest.raises(ValueError, match=r"Expected one of \['serving_default'\]"):
        export(sequential((D,), layers.ModReLU()), tmp_path, signature="log_prob")


@both
def test_states_between_calls_are_refused(export, tmp_path):
    model = keras.Sequential([keras.Input(batch_shape=(2, 5, 2)), layers.OrthogonalRNN(D, stateful=True)])
    with pytest.raises(NotImplementedError, match="stateful=True"):
        export(model, tmp_path)


def test_litert_has_no_float64(tmp_path):
    with pytest.raises(NotImplementedError, match="float64"):
        litert(sequential((D,), layers.AuxReflection(dtype="float64")), tmp_path)


@pytest.mark.parametrize(("export", "suffix"), [(export_onnx, ".onnx"), (export_litert, ".tflite")])
def test_mistakes_of_the_caller(export, suffix, tmp_path):
    model = sequential((D,), layers.ModReLU())
    with pytest.raises(ValueError, match=rf"Expected a path that ends in '{suffix}'. Received: .*model.pb"):
        export(model, tmp_path / "model.pb")
    with pytest.raises(ValueError, match=r"Expected a `keras.Model`. Received: ModReLU"):
        export(layers.ModReLU(), str(tmp_path / "model") + suffix)


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True])
def test_batch_sizes_are_positive(batch_size, tmp_path):
    with pytest.raises(ValueError, match="batch_size"):
        litert(sequential((D,), layers.ModReLU()), tmp_path, batch_size=batch_size)


@pytest.mark.parametrize("package", ["tf2onnx", "onnx"])
def test_a_missing_converter_says_what_to_install(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match="pip install tf2onnx onnx"):
        export_onnx(sequential((D,), layers.ModReLU()), tmp_path / "model.onnx")
