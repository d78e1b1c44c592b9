"""Every signature against the live model, in a process of its own that has TensorFlow only."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_auxref import AuxReflection, Glow, OrthogonalDense, OrthogonalRNN, SVDDense, export_saved_model
from tests.support import assert_agree

PLAIN = Path(__file__).parent / "plain_tensorflow.py"
SHAPE = (4, 4, 3)
D = 48


def _flow(mixing, dtype="float32", levels=1):
    model = Glow(SHAPE, levels=levels, steps=1, hidden=4, mixing=mixing, seed=0, dtype=dtype)
    rng = np.random.default_rng(0)
    model.initialize(rng.integers(0, 256, (16, *SHAPE), dtype="uint8"))
    for variable in model.trainable_variables:  # as if it had been trained: couplings start as the identity
        variable.assign_add(0.05 * rng.normal(size=variable.shape))
    return model


def _flow_cases(model, rng):
    """(signature, case, inputs, what the live model answers). No empty batch: TensorFlow's convolutions raise there."""
    dtype = model.compute_dtype
    images = {
        "many": rng.uniform(size=(5, *SHAPE)),
        "one": rng.uniform(size=(1, *SHAPE)),
        "black and white": np.stack([np.zeros(SHAPE), np.ones(SHAPE)]),
        "beyond white": np.full((1, *SHAPE), 1.04),
    }
    latent = {
        "many": rng.normal(size=(5, D)),
        "one": rng.normal(size=(1, D)),
        "zero": np.zeros((2, D)),
        "far": 5 * rng.normal(size=(2, D)),
    }
    # The live model is asked once for all cases: it is traced for every size of batch, which is most of the time here.
    x, z = (np.concatenate(list(cases.values())).astype(dtype) for cases in (images, latent))
    (codes, log_dets), log_probs, decoded = model.encode(x), model.log_prob(x), model.decode(z)
    for case, rows in _rows(images):
        answer = {"log_prob": log_probs[rows]}
        yield "encode", case, {"images": x[rows]}, {"z": codes[rows], "log_det": log_dets[rows]}
        yield "log_prob", case, {"images": x[rows]}, answer
        yield "serving_default", case, {"images": x[rows]}, answer
    for case, rows in _rows(latent):
        yield "decode", case, {"z": z[rows]}, {"images": decoded[rows]}
    for seed, temperature in ((1, 0.7), (1, 0.7), (-5, 1.0), (2**40, 0.0)):
        inputs = {"n": np.int32(len(z)), "seed": np.int64(seed), "temperature": np.array(temperature, dtype)}
        answer = model.sample(len(z), seed=seed, temperature=temperature)
        yield "sample", f"{seed} {temperature}", inputs, {"images": answer}


def _rows(cases):
    """Where each case is in all of them, one after another."""
    ends = np.cumsum([len(batch) for batch in cases.values()])
    return [(name, slice(end - len(batch), end)) for (name, batch), end in zip(cases.items(), ends, strict=True)]


def _classifier(maps=("aux", "householder", "cayley", "exp")):
    layers = [SVDDense(9, map=m, activation="relu") for m in maps]
    model = keras.Sequential([keras.Input((9,), name="pixels"), *layers, keras.layers.Dense(4)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _classifier_cases(model, rng):
    batches = {"many": rng.normal(size=(6, 9)), "one": rng.normal(size=(1, 9)), "none": np.zeros((0, 9))}
    batches |= {"zero": np.zeros((2, 9)), "huge": 1e15 * rng.normal(size=(2, 9)), "nan": np.full((1, 9), np.nan)}
    for case, x in batches.items():
        x = x.astype("float32")
        probabilities = keras.ops.softmax(model(x))
        answer = {"probabilities": probabilities, "class": np.argmax(probabilities, axis=-1)}
        yield "serving_default", case, {"pixels": x}, answer


def _reader(transition):
    rnn = OrthogonalRNN(6, transition, return_sequences=True)
    return keras.Sequential([keras.Input((None, 2)), rnn, OrthogonalRNN(5, transition), keras.layers.Dense(3)])


def _reader_cases(model, rng):
    for case, shape in {"many": (4, 7, 2), "one": (1, 7, 2), "longer": (2, 30, 2), "one step": (2, 1, 2)}.items():
        x = rng.normal(size=shape).astype("float32")
        yield "serving_default", case, {"inputs": x}, {"outputs": model(x)}


def _branching():
    """Two inputs by name and two outputs, with a provably invertible layer, an orthogonal one and a network in it."""
    a, b = keras.Input((4,), name="a"), keras.Input((3, 4), name="b")
    pooled = keras.layers.GlobalAveragePooling1D()(AuxReflection("relaxed_cayley")(b))
    joined = keras.layers.Add()([AuxReflection("spectral")(a), pooled])
    last = AuxReflection(network=keras.layers.Dense(4))(OrthogonalDense("exp")(joined))
    return keras.Model({"b": b, "a": a}, {"first": joined, "second": last})


def _branching_cases(model, rng):
    for case, n in {"many": 5, "one": 1}.items():
        inputs = {"a": rng.normal(size=(n, 4)).astype("float32"), "b": rng.normal(size=(n, 3, 4)).astype("float32")}
        yield "serving_default", case, inputs, model(inputs)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.reflection, self.dense = AuxReflection(), keras.layers.Dense(2, activation="softmax")

    def call(self, inputs):
        return self.dense(self.reflection(inputs))


def _subclassed():
    model = Subclassed()
    model(np.ones((1, 5), "float32"))
    return model


def _subclassed_cases(model, rng):
    x = rng.normal(size=(3, 5)).astype("float32")
    y = model(x)
    yield "serving_default", "many", {"inputs": x}, {"probabilities": y, "class": np.argmax(y, axis=-1)}


def _lookups():
    """Words, whole numbers and a text become rows of embeddings: tables, of which one comes from a file."""
    words, numbers, text = (keras.Input((n,), dtype=t, name=name) for name, n, t in INPUTS_OF_LOOKUPS)
    by_word = keras.layers.StringLookup(vocabulary=str(PLAIN.with_name("words.txt")))
    by_number = keras.layers.IntegerLookup(vocabulary=[3, 5, 8])
    by_text = keras.layers.TextVectorization(output_sequence_length=4)
    by_text.adapt(["the cat sat", "the dog"])
    embedded = [keras.layers.Embedding(9, 4)(part) for part in (by_word(words), by_number(numbers), by_text(text))]
    return keras.Model([words, numbers, text], AuxReflection()(keras.layers.Concatenate(axis=1)(embedded)))


INPUTS_OF_LOOKUPS = (("words", 3, "string"), ("numbers", 2, "int64"), ("text", 1, "string"))


def _lookups_cases(model, rng):
    inputs = {
        "words": np.array([["a", "b", "ä"], ["", "a", "a"]]),
        "numbers": np.array([[3, 8], [-1, 5]], "int64"),
        "text": np.array([["The dog!"], ["nothing of this"]]),
    }
    for case, rows in {"many": slice(None), "one": slice(1)}.items():
        chosen = {key: value[rows] for key, value in inputs.items()}
        yield "serving_default", case, chosen, {"outputs": model([tf.constant(value) for value in chosen.values()])}


SERVED = ("aux_factored", "aux", "aux_spectral", "aux_conv", "aux_factored_qr")
MODELS = {
    # What differs in a served flow is what was computed from the weights: one of each kind.
    **{f"flow {mixing}": (lambda mixing=mixing: _flow(mixing), _flow_cases) for mixing in SERVED},
    "flow of two levels": (lambda: _flow("householder", levels=2), _flow_cases),
    "flow in float64": (lambda: _flow("conv", "float64"), _flow_cases),
    "classifier": (_classifier, _classifier_cases),
    **{f"rnn {t}": (lambda t=t: _reader(t), _reader_cases) for t in ("aux", "householder", "cayley", "exp")},
    "branching": (_branching, _branching_cases),
    "subclassed": (_subclassed, _subclassed_cases),
    "lookups": (_lookups, _lookups_cases),
}


NAMES = sorted(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[::3], NAMES[1::3], NAMES[2::3]], ids=", ".join)
def test_a_process_with_tensorflow_alone_answers_as_the_live_model(names, rng, tmp_path):
    inputs, expected = {}, {}
    for name in names:
        make, cases = MODELS[name]
        model = make()
        folder = export_saved_model(model, tmp_path / name)
        assert folder == tmp_path / name / "1"
        for signature, case, tensors, answer in cases(model, rng):
            call = f"{folder}|{signature}|{case}"
            inputs |= {f"{call}|{key}": value for key, value in tensors.items()}
            expected |= {f"{call}|{key}": keras.ops.convert_to_numpy(value) for key, value in answer.items()}
    np.savez(tmp_path / "cases.npz", **inputs)
    command = [sys.executable, str(PLAIN), str(tmp_path / "cases.npz"), str(tmp_path / "results.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    results = np.load(tmp_path / "results.npz")
    assert set(results.files) == set(expected)
    for key, value in expected.items():
        # Of a log-density the terms that cancel in it count, about one for each dimension.
        scale = D if key.endswith(("log_prob", "log_det")) else 1
        finite = value[np.isfinite(value)]
        scale = max([scale, *np.abs(finite).ravel()])
        tolerance = (1e-10 if value.dtype == np.float64 else 1e-5) * scale
        assert results[key].dtype == value.dtype, key
        np.testing.assert_allclose(results[key], value, rtol=1e-5, atol=tolerance, err_msg=key)


@pytest.mark.slow
def test_what_depends_on_weights_alone_is_not_computed_at_requests(tmp_path):
    """No factorisation of W, no matrix exponential, no inverse in any function; and a smaller file for it."""
    factoring = {"Eig", "SelfAdjointEigV2", "MatrixInverse", "MatrixSolve", "Qr", "Svd", "LogMatrixDeterminant"}
    live = _classifier(("cayley",))
    assert factoring & {op.type for op in tf.function(live).get_concrete_function(tf.ones((1, 9))).graph.get_operations()}
    for model in (_flow("aux_relaxed_cayley"), _flow("conv"), _flow("householder"), _classifier(("cayley", "householder"))):
        folder = export_saved_model(model, tmp_path / model.name)
        graph = _saved_graph(folder)
        nodes = [node.op for function in graph.library.function for node in function.node_def] + [n.op for n in graph.node]
        rows = (
            {"Qr"} if getattr(model, "mixing", None) == "aux_relaxed_cayley" else set()
        )  # of single rows that no basis of W serves
        assert not (factoring - rows) & set(nodes), factoring & set(nodes)


def test_only_what_is_used_is_stored(tmp_path):
    model = _classifier(("aux",))
    x, y = np.ones((8, 9), "float32"), np.zeros(8)
    model.fit(x, y, verbose=0)  # Adam has two values for every weight
    loaded = tf.saved_model.load(str(export_saved_model(model, tmp_path)))
    assert sum(np.size(v) for v in loaded.weights) == sum(np.size(v) for v in model.trainable_variables)


def _saved_graph(folder):
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0].graph_def


def test_a_frozen_copy_does_not_change_the_model(tmp_path):
    model = _classifier(("cayley", "aux"))
    x = np.random.default_rng(0).normal(size=(4, 9)).astype("float32")
    before = model(x).numpy()
    first = tf.saved_model.load(str(export_saved_model(model, tmp_path)))
    assert_agree(model(x), before)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3)
    after = model(x).numpy()
    assert np.abs(after - before).max() > 1e-3  # the live model follows its weights
    second = tf.saved_model.load(str(export_saved_model(model, tmp_path)))
    for loaded, logits in ((first, before), (second, after)):
        answer = loaded.signatures["serving_default"](pixels=tf.constant(x))["probabilities"]
        np.testing.assert_allclose(answer, tf.nn.softmax(logits), atol=1e-6)


@pytest.mark.parametrize("map", ["aux", "householder", "cayley", "exp"])
def test_keras_own_export_works_too(map, tmp_path):
    """`model.export` saves gradients, which closed forms must not make impossible."""
    model = _classifier((map,))
    model.export(tmp_path / "model", verbose=False)
    x = np.random.default_rng(0).normal(size=(3, 9)).astype("float32")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_allclose(loaded.serve(x), model(x), rtol=1e-5, atol=1e-5)


def test_wrong_shapes_and_dtypes_get_tensorflows_own_error(tmp_path):
    served = tf.saved_model.load(str(export_saved_model(_classifier(("aux",)), tmp_path))).signatures["serving_default"]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="9"):
        served(pixels=tf.ones((2, 8)))
    with pytest.raises((TypeError, ValueError, tf.errors.InvalidArgumentError), match="float"):
        served(pixels=tf.ones((2, 9), tf.int32))
    with pytest.raises(TypeError, match="pixels"):
        served(images=tf.ones((2, 9)))


@pytest.mark.slow
def test_keras_own_export_of_a_flow(tmp_path):
    model, x = _flow("aux_relaxed_cayley"), np.random.default_rng(1).integers(0, 256, (3, *SHAPE), dtype="uint8")
    model.export(tmp_path / "flow", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "flow"))
    np.testing.assert_allclose(loaded.serve((x / 255).astype("float32")), model.bits_per_dim(x), rtol=1e-5)


def test_pixels_over_255_are_what_a_served_flow_takes(tmp_path):
    model, x = _flow("conv"), np.random.default_rng(1).integers(0, 256, (3, *SHAPE), dtype="uint8")
    served = tf.saved_model.load(str(export_saved_model(model, tmp_path))).signatures
    sent = tf.constant(x / 255, tf.float32)
    np.testing.assert_allclose(served["log_prob"](images=sent)["log_prob"], model.log_prob(x), rtol=1e-5)
    np.testing.assert_allclose(served["encode"](images=sent)["z"], model.encode(x)[0], rtol=1e-4, atol=1e-4)
    impossible = tf.constant(x, tf.float32)
    assert np.isneginf(served["log_prob"](images=impossible)["log_prob"]).all()
    assert np.isneginf(served["encode"](images=impossible)["log_det"]).all()
    assert np.isnan(served["encode"](images=impossible)["z"]).all()


def test_a_flow_refuses_a_negative_temperature(tmp_path):
    loaded = tf.saved_model.load(str(export_saved_model(_flow("fixed"), tmp_path)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="`temperature` must not be negative"):
        loaded.signatures["sample"](n=tf.constant(1), seed=tf.constant(0, tf.int64), temperature=tf.constant(-1.0))


def test_a_vocabulary_whose_file_is_gone_is_not_exported_without_it(tmp_path):
    (tmp_path / "words.txt").write_text("a\nb\n")
    model = keras.Sequential(
        [keras.Input((2,), dtype="string"), keras.layers.StringLookup(vocabulary=str(tmp_path / "words.txt"))]
    )
    (tmp_path / "words.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"words\.txt"):
        export_saved_model(model, tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_a_failed_export_leaves_nothing_behind(tmp_path):
    class Broken(keras.layers.Layer):
        working = True

        def call(self, x):
            if not self.working:
                raise RuntimeError("broken")
            return x

    model = keras.Sequential([keras.Input((3,)), Broken()])
    model.layers[0].working = False
    with pytest.raises(RuntimeError, match="broken"):
        export_saved_model(model, tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.LSTM(3, stateful=True),
        OrthogonalRNN(3, stateful=True),
        keras.layers.Bidirectional(keras.layers.GRU(3, stateful=True)),
    ],
)
def test_states_between_requests_are_refused(layer, tmp_path):
    model = keras.Sequential([keras.Input(batch_shape=(2, 5, 2)), layer])
    with pytest.raises(NotImplementedError, match=r"stateful=True. Received: '\w+'"):
        export_saved_model(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"Expected a `keras.Model`. Received: Dense"):
        export_saved_model(keras.layers.Dense(2), tmp_path)
    with pytest.raises(ValueError, match=r"Expected one of .*'logits'.* Received: 'classes'"):
        export_saved_model(_classifier(("aux",)), tmp_path, outputs="classes")


@pytest.mark.slow
def test_saved_model_cli(tmp_path):
    folder = export_saved_model(_flow("aux_relaxed_cayley"), tmp_path / "flow")
    cli = Path(sys.executable).parent / "saved_model_cli"

    def run(*arguments):
        done = subprocess.run([cli, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    shown = run("show", "--dir", str(folder), "--all")
    for name in ("serving_default", "log_prob", "encode", "decode", "sample"):
        assert f"signature_def['{name}']" in shown
    assert f"shape: (-1, {', '.join(map(str, SHAPE))})" in shown
    numbers = "n=2;seed=1;temperature=1.0"
    arguments = ("run", "--dir", str(folder), "--tag_set", "serve", "--signature_def")
    run(*arguments, "sample", "--input_exprs", numbers, "--outdir", str(tmp_path / "out"), "--overwrite")
    samples = np.load(tmp_path / "out" / "images.npy")
    assert samples.shape == (2, *SHAPE)
    np.save(tmp_path / "x.npy", samples)
    run(*arguments, "log_prob", "--inputs", f"images={tmp_path / 'x.npy'}", "--outdir", str(tmp_path / "out"))
    assert np.isfinite(np.load(tmp_path / "out" / "log_prob.npy")).all()


def test_a_flow_that_has_seen_no_data_is_exported_with_a_warning(tmp_path, recwarn):
    flow = Glow((4, 4, 1), levels=1, steps=1, hidden=4)
    with pytest.warns(UserWarning, match="has seen no data"):
        export_saved_model(flow, tmp_path / "flow")
    flow.initialize(np.random.default_rng(0).integers(0, 256, (8, 4, 4, 1), dtype="uint8"))
    recwarn.clear()
    export_saved_model(flow, tmp_path / "flow")
    assert not [warning for warning in recwarn if "has seen no data" in str(warning.message)]
