"""The experiment as a user runs it, in an empty folder; then its parts."""

import json

import keras
import matplotlib.image
import numpy as np
import pytest

from experiments.harness import checkpoints, flows, galleries, training
from experiments.harness.flows import Pictures
from experiments.harness.results import Results, Run
from keras_auxref.flows import Glow
from tests.support import assert_agree

SMALL = (
    "--size",
    "8",
    "--levels",
    "1",
    "--steps",
    "1",
    "--hidden",
    "8",
    "--train-size",
    "64",
    "--batch-size",
    "16",
    "--verbose",
    "2",
)
TINY = ("--mixing", "aux_factored", "--mixing", "conv", "--train-steps", "4", "--steps-per-epoch", "2", *SMALL)
FIGURES = ("interpolations", "likelihood", "reconstructions", "samples")


@pytest.mark.slow
def test_trains_measures_draws_and_resumes(experiment_here, tmp_path):
    done = experiment_here("glow", *TINY)
    assert done.returncode == 0, done.stderr
    folder, stem = tmp_path / "runs" / "glow-patches-8", "glow-patches-8"
    expected = [f"{stem}-{kind}.png" for kind in FIGURES] + [f"{stem}.json"]
    expected += [f"{stem}-{name}" for name in ("aux_factored-0.keras", "aux_factored.npz", "conv-0.keras", "conv.npz")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)

    text = (folder / f"{stem}.json").read_text()
    assert str(tmp_path) not in text
    content = json.loads(text)
    assert content["dataset"] == {"name": "patches", "train": 64, "validation": 228, "image_shape": [8, 8, 3], "classes": 2}
    assert content["settings"]["train_steps"] == 4
    assert [(run["map"], run["run"], run["finished"]) for run in content["runs"]] == [
        ("aux_factored", 0, True),
        ("conv", 0, True),
    ]
    for run in content["runs"]:
        assert {name: len(curve) for name, curve in run["curves"].items()} == dict.fromkeys(
            ("seconds", "training_bits", "validation_bits"), 2
        )
        measured = run["measurements"]
        # All 228 validation images are in the curve as well.
        assert measured["bits_per_dim"] == pytest.approx(run["curves"]["validation_bits"][-1], rel=1e-4)
        assert 4 < measured["bits_per_dim"] < 12
        assert measured["reconstruction"]["max_error"] < 1e-4
        assert measured["reconstruction"]["share_of_images_restored"] == 1
    aux, conv = (run["measurements"] for run in content["runs"])
    assert aux["branches"]["min_share_returned"] == 1
    assert aux["branches"]["layers"][0]["vectors"] == 64 * 4 * 4
    assert "branches" not in conv
    assert conv["certified"] == conv["mixings"] == 1

    for kind in FIGURES:
        picture = matplotlib.image.imread(folder / f"{stem}-{kind}.png")
        assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 100, kind
    table = done.stdout[done.stdout.index("| mixing") :]
    assert "ratio to conv" in table
    assert "| aux_factored |    1 |" in table

    stored = Pictures.load(folder / f"{stem}-aux_factored.npz")
    model = keras.models.load_model(folder / f"{stem}-aux_factored-0.keras")
    assert isinstance(model, Glow)
    again = keras.ops.convert_to_numpy(model.decode(model.encode(stored.originals)[0]))
    np.testing.assert_allclose(again, stored.reconstructions, atol=1e-5)

    resumed = experiment_here("glow", *TINY, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count("finished before") == 2
    assert "Epoch 1/2" not in resumed.stdout
    assert json.loads((folder / f"{stem}.json").read_text()) == content

    measured = experiment_here("glow", "--mixing", "conv", *TINY[4:], "--resume", "--measure")
    assert measured.returncode == 0, measured.stderr
    assert measured.stdout.count("measured again") == 1
    for before, after in zip(content["runs"], json.loads((folder / f"{stem}.json").read_text())["runs"], strict=True):
        assert after["curves"] == before["curves"]
        assert after["measurements"]["bits_per_dim"] == pytest.approx(before["measurements"]["bits_per_dim"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mixing", "lu"), "--mixing"),
        (("--coupling", "quadratic"), "--coupling"),
        (
            ("--recipe", "ema+sgd"),
            "--recipe: expected parts out of ema, cosine, cooldown, prior, flips, adamax, clip, norm, received 'sgd'",
        ),
        (("--recipe", "cosine+cooldown"), "--recipe: expected one decay of the rate, received cosine and cooldown"),
        (("--dequantisation", "none"), "--dequantisation"),
        (("--train-steps", "0"), "--train-steps"),
        (("--train-steps", "70"), "--train-steps: expected a multiple of --steps-per-epoch (50), received 70"),
        (("--levels", "6"), "--levels: expected at most 5 for images of 32×32, received 6"),
        (("--size", "20"), "--size"),
        (("--dataset", "mnist", "--size", "16"), "--size: expected a divisor of 28 for mnist, received 16"),
        (("--dataset", "mnist", "--levels", "3"), "--levels: expected at most 2 for images of 28×28, received 3"),
        (("--learning-rate", "-1"), "--learning-rate"),
        (("--epochs", "3"), "--epochs"),
    ],
)
def test_wrong_arguments_are_refused_at_once(experiment, arguments, message):
    done = experiment("glow", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_name_of_a_run_tells_its_parts():
    from experiments.glow import COUPLINGS, DEQUANTISATIONS, MIXINGS, MORE_MIXINGS, parts_of, run_name
    from keras_auxref import flows

    assert set(COUPLINGS) == set(flows.COUPLINGS)
    assert set(DEQUANTISATIONS) == set(flows.DEQUANTISATIONS)
    assert {*MIXINGS, *MORE_MIXINGS} == set(flows.MIXINGS)
    assert run_name("aux", "affine", "uniform") == "aux"
    names = [(m, c, d) for m in MIXINGS for c in COUPLINGS for d in DEQUANTISATIONS]
    assert len({run_name(*name) for name in names}) == len(names)
    for name in names:
        assert tuple(parts_of(run_name(*name)).values()) == (*name, "standard")


def test_a_recipe_is_in_the_name_of_a_run_and_in_its_model():
    from types import SimpleNamespace

    from experiments import glow

    name = glow.run_name("conv", "logistic_mixture", "uniform", parts=glow.recipe("norm+prior+clip+ema+cosine"))
    assert name == "conv+logistic_mixture+ema+cosine+prior+clip+norm"
    assert glow.recipe("plain") == ()
    args = SimpleNamespace(levels=1, steps=1, hidden=4, learning_rate=1e-3, warmup=2, train_steps=10, jit=None)
    model = glow.build_model(args, name, (4, 4, 3), seed=0)
    assert model.flow.prior == "learned"
    assert type(model.flow.coupling).__name__ == "LogisticMixtureCoupling"
    assert model.flow.coupling.norm
    assert (model.optimizer.use_ema, model.optimizer.global_clipnorm) == (True, 1.0)
    rate = model.optimizer.get_config()["learning_rate"]["config"]
    assert (rate["warmup_steps"], rate["decay_steps"], rate["alpha"]) == (2, 8, 0.0)
    cooled = glow.build_model(args, "conv+cooldown", (4, 4, 3), seed=0).optimizer
    rates = [float(cooled._learning_rate(step)) for step in (2, 7, 9, 10)]
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 5e-4, 0.0], atol=1e-9)  # The last two steps of ten.
    plain = glow.build_model(args, "conv", (4, 4, 3), seed=0)
    assert (plain.flow.prior, plain.flow.coupling, plain.optimizer.use_ema) == ("standard", "affine", False)


def test_flips_mirror_some_images_and_change_no_other():
    images = random_images(32)
    (batch,) = next(iter(training._endless((images,), 32, flips=True)))
    originals = {image.tobytes() for image in images}
    mirrored = {image[:, ::-1].tobytes() for image in images}
    kinds = [(image.tobytes() in originals, image.tobytes() in mirrored) for image in batch.numpy()]
    assert set(kinds) == {(True, False), (False, True)}


def test_longer_vectors_have_a_name_and_change_no_map(rng):
    from experiments import glow
    from keras_auxref import Glow, OrthogonalDense

    assert glow.run_name("qr", "additive", "uniform", 4.0) == "qr+additive+length=4"
    assert glow.length_of("qr+additive+length=4") == 4
    assert glow.length_of("qr+additive") == 1
    assert glow.parts_of("qr+additive+length=4") == glow.parts_of("qr+additive")
    images = rng.integers(0, 256, (2, 4, 4, 3)).astype("uint8")
    for mixing in glow.REFLECTING:
        model = Glow((4, 4, 3), levels=1, steps=1, hidden=4, mixing=mixing, seed=0)
        before = model.encode(images)[0].numpy()
        glow.lengthen(model, 4.0)
        # A power of two changes no digit.
        assert_agree(model.encode(images)[0].numpy(), before)
        with model.flow.steps_of_levels[0].copy(0) as step:
            layers = [layer for layer in step._flatten_layers() if isinstance(layer, OrthogonalDense) and layer.built]
            vectors = [keras.ops.convert_to_numpy(layer.kernel) for layer in layers]
        assert vectors
        lengths = np.concatenate([np.linalg.norm(v, axis=0) for v in vectors])
        np.testing.assert_allclose(lengths[lengths > 0], 4, rtol=1e-5)


def test_missing_cifar_is_one_sentence(experiment, tmp_path):
    done = experiment("glow", "--dataset", "cifar10", "--no-download", TFDS_DATA_DIR=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--dataset patches" in done.stderr


@pytest.mark.slow
def test_several_runs_without_models_and_mirrored(experiment, tmp_path):
    mixings = ("aux_factored", "conv")
    chosen = [part for name in mixings for part in ("--mixing", name)]
    options = ("--train-steps", "2", "--runs", "2", "--no-save", "--strategy", "mirrored", "--output", "here")
    done = experiment("glow", *chosen, *options, *SMALL)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "here" / "glow-patches-8.json").read_text())["runs"]
    assert [(run["map"], run["run"]) for run in runs] == [(name, number) for name in mixings for number in (0, 1)]
    assert not list((tmp_path / "here").glob("*.keras"))
    assert " ± " in done.stdout
    # Both start as the same orthogonal map, and the couplings as the identity.
    first = {run["map"]: run["curves"]["validation_bits"][0] for run in runs if run["run"] == 0}
    assert max(first.values()) - min(first.values()) < 0.01


def random_images(count=24, size=4):
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype="uint8")


def small_flow(mixing="conv"):
    keras.utils.set_random_seed(0)
    model = Glow((4, 4, 3), levels=1, steps=1, hidden=4, mixing=mixing, seed=0)
    model.compile(Glow.optimizer(warmup_steps=2))
    return model


def start(folder, run, afterwards=None, callbacks=()):
    model = small_flow()
    model.initialize(random_images())
    results = Results(folder / "r.json", "test", {}, {})
    training.train(
        model,
        (random_images(),),
        (random_images(10),),
        run,
        results,
        epochs=4,
        batch_size=8,
        # More steps than there are batches: an epoch goes through the images more than once.
        steps_per_epoch=5,
        checkpoints=folder / "c",
        measures=lambda logs: {"bits": logs["val_bits_per_dim"]},
        callbacks=callbacks,
        afterwards=afterwards,
        verbose=0,
    )
    return model, results


class Interrupt(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def test_flow_continues_with_its_steps_and_scales(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, Run("conv", 0, seed=0), callbacks=(Interrupt(),))
    stopped = Results(tmp_path / "r.json", "test", {}, {}, resume=True).find("conv", 0)
    first = list(stopped.curves["bits"])
    assert len(first) == 2
    model, results = start(tmp_path, stopped)
    (run,) = results.runs()
    assert run.curves["bits"][:2] == first
    # Four epochs of five steps in all; a start from data in the middle would have thrown the likelihood back.
    assert int(model.optimizer.iterations) == 20
    assert run.curves["bits"][2] < first[1] < first[0]


def test_a_run_is_finished_only_when_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0)

    def interrupted(model):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, Run("conv", 0, seed=0), afterwards=interrupted)
    stopped = Results(tmp_path / "r.json", "test", {}, {}, resume=True).find("conv", 0)
    assert not stopped.finished
    model, results = start(
        tmp_path, stopped, afterwards=lambda model: {"value": float("nan"), "count": 3, "layers": [{"name": "a"}]}
    )
    (run,) = results.runs()
    # Trained no further, and kept whole in the file, which has no NaN.
    assert int(model.optimizer.iterations) == 20
    assert run.measurements == {"value": None, "count": 3, "layers": [{"name": "a"}]}
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_measure_sees_what_the_inverse_does_not_return(monkeypatch):
    model, images = small_flow("aux"), random_images(40)
    model.initialize(images)
    whole = flows.measure(model, images, 10)
    expected = float(np.mean(keras.ops.convert_to_numpy(model.bits_per_dim(images))))
    assert whole["bits_per_dim"] == pytest.approx(expected, abs=0.02)  # the noise depends on the batch
    assert whole["reconstruction"]["images"] == 40
    assert whole["reconstruction"]["max_error"] < 1e-5

    real = Glow.decode

    def lossy(self, z):
        decoded = keras.ops.convert_to_numpy(real(self, z)).copy()
        decoded[0, 0, 0, 0] = np.nan
        decoded[1, 0, 0, 0] += 0.25
        return decoded

    monkeypatch.setattr(Glow, "decode", lossy)
    lost = flows.measure(model, images, 10)["reconstruction"]
    # In each of two batches, of 32 and of 8 images, one has a pixel that is lost and one a pixel that is wrong.
    assert lost["share_not_found"] == pytest.approx(2 / images.size)
    assert lost["max_error"] == pytest.approx(0.25, abs=1e-5)
    assert lost["share_of_images_restored"] == pytest.approx(36 / 40)


def test_pictures_and_galleries(tmp_path):
    model, images = small_flow(), random_images(40, 4)
    model.initialize(images)
    pictures = Pictures.of(model, images)
    contrast = images[:32].std(axis=(1, 2, 3))
    np.testing.assert_allclose(pictures.originals[0], flows.continuous(images[np.argmax(contrast)]))
    np.testing.assert_allclose(pictures.reconstructions, pictures.originals, atol=1e-5)
    # A straight line between the first two originals, and between the next two.
    for path, ends in zip(pictures.interpolations, ((0, 1), (2, 3)), strict=True):
        np.testing.assert_allclose(path[[0, -1]], pictures.originals[list(ends)], atol=1e-5)
    pictures.save(tmp_path / "p.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]
    assert Pictures.load(tmp_path / "missing.npz") is None
    stored = Pictures.load(tmp_path / "p.npz")
    stored.samples[0, 0, 1, 1] = np.nan
    for kind in ("samples", "reconstructions", "interpolations"):
        getattr(galleries, kind)({"aux": stored, "something else": pictures}, tmp_path / f"{kind}.png", "Title")
        picture = matplotlib.image.imread(tmp_path / f"{kind}.png")[..., :3]
        # Pixels without preimage stand out, and only where there are any.
        magenta = np.all(np.isclose(picture, galleries.NOT_FOUND), axis=-1).mean()
        assert (magenta > 1e-4) == (kind == "samples")
