"""How far one step of Adam turns the orthogonal maps U and V of the network of `experiments.fcnn`.

A learning rate is a length in the space of weights, and every parametrisation of U has its own way from there to U. So the same
rate means a different step of U. This measures that step, in training, as the mean of

    ‖U′x − Ux‖ / ‖x‖

over Gaussian x and over all U and V of the network, U′ being U after one more step of the optimizer. 0 is no step, √2 is what two
unrelated orthogonal maps have.

    python -m experiments.turning                                   scikit-learn's digits, under a minute on two CPU cores
    python -m experiments.turning --dataset mnist                   d = 784, minutes
    python -m experiments.turning --map householder --rate 1e-3 --rate 1e-4    one map with two learning rates of U and V

Writes a JSON file with that number for the steps 1, 10 and 100, and the training loss over the last ten steps before.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
import json
from typing import TYPE_CHECKING, Any

from experiments import fcnn
from experiments.harness import cli, data
from experiments.harness.results import ResultsMismatchError, command, environment, hardware, write_json

if TYPE_CHECKING:
    import keras
    import numpy as np

DEFAULTS = {name: {key: values[key] for key in ("batch_size", "runs")} for name, values in fcnn.DEFAULTS.items()}
STEPS = (1, 10, 100)
PROBES = 64
"""Vectors x."""


def images_of(model: "keras.Sequential", probes: "np.ndarray") -> "np.ndarray":
    """Ux for every U and V of the network, shape (maps, probes, d)."""
    import keras
    import numpy as np

    from keras_auxref import SVDDense

    maps = [part for layer in model.layers if isinstance(layer, SVDDense) for part in (layer.u, layer.v)]
    return np.stack([keras.ops.convert_to_numpy(part(probes)) for part in maps]).astype("float64")


def turning(model: "keras.Sequential", inputs: "np.ndarray", labels: "np.ndarray", batch_size: int) -> dict[str, Any]:
    """Trains for the longest of STEPS on shuffled batches; of each of STEPS, how far it turned U and V, and the loss so far."""
    import numpy as np

    random = np.random.default_rng(0)
    probes = random.standard_normal((PROBES, inputs.shape[1])).astype("float32")
    lengths = np.linalg.norm(probes.astype("float64"), axis=-1)
    losses: list[float] = []
    found = {}
    for step in range(1, max(STEPS) + 1):
        chosen = random.integers(len(inputs), size=batch_size)
        before = images_of(model, probes) if step in STEPS else None
        # Of this batch alone: Keras' own value is a mean over all batches so far.
        model.reset_metrics()
        losses.append(float(model.train_on_batch(inputs[chosen], labels[chosen], return_dict=True)["loss"]))
        if before is not None:
            distance = np.linalg.norm(images_of(model, probes) - before, axis=-1)
            turned = float((distance / lengths).mean())
            found[str(step)] = {"turned": float(f"{turned:.4g}"), "loss": float(f"{np.mean(losses[-10:]):.4g}")}
    return found


def arguments() -> Any:
    p = cli.parser(__doc__, ("digits", "mnist"), DEFAULTS)
    fcnn.add_settings(p)
    cli.add_backend(p)
    args = cli.parse(p)
    args.names = fcnn.run_names(p, args)
    unfit = {fcnn.parts_of(name)[0] for name in args.names} - {*fcnn.MAPS}
    if unfit:
        p.error(f"argument --map: expected one of {', '.join(fcnn.MAPS)}, received {', '.join(sorted(unfit))}")
    return args


def main() -> None:
    args = arguments()
    dataset = data.load(args.dataset, download=args.download).limit(args.train_size)
    stem = f"turning-{args.dataset}"
    path = cli.output(args, stem) / f"{stem}.json"

    cli.import_keras(args)
    import keras

    here = environment()
    print(f"{args.dataset}: d = {dataset.dimension}, {max(STEPS)} steps of every network, on {hardware(here)}")
    (inputs, labels), _ = dataset.vectors()
    settings = {"batch_size": args.batch_size, "seed": args.seed, "probes": PROBES}
    header = {"experiment": "turning", "dataset": dataset.describe(), "settings": settings}
    stored = json.loads(path.read_text(encoding="utf-8")) if args.resume and path.exists() else {**header, "commands": []}
    if any(stored.get(key) != value for key, value in header.items()):
        raise ResultsMismatchError(f"{path.name} holds other data or settings: give the same arguments, or another --output.")
    found: dict[str, Any] = stored.get("maps", {})
    for name in args.names:
        if name not in found:
            map, start, rate = fcnn.parts_of(name)
            keras.utils.set_random_seed(args.seed)
            model = fcnn.build_model(map, dataset.dimension, dataset.classes, start)
            fcnn.compile_model(model, rate, cli.jit_compile(args))
            found[name] = turning(model, inputs, labels, args.batch_size)
            keras.backend.clear_session()
        print(name, *(f"{entry['turned']:.3g}" for entry in found[name].values()), flush=True)
    commands = [*(c for c in stored["commands"] if c != command()), command()]
    write_json(path, {**header, "commands": commands, "environment": here, "maps": found})
    columns = ("map", *(f"‖U′x − Ux‖/‖x‖, step {step}" for step in STEPS), "loss")
    last = str(STEPS[-1])
    rows = [[name, *(f"{e['turned']:.3g}" for e in by.values()), f"{by[last]['loss']:.3f}"] for name, by in found.items()]
    print(f"\n{cli.table(columns, rows)}\n\n{path}")


if __name__ == "__main__":
    cli.main(main)
