"""Fully connected networks in SVD form: one auxiliary reflection against the orthogonal maps it replaces.

The experiment of section 4.1 of "One Reflection Suffice" (Mathiasen & Hvilshøj, 2020): three layers y = U Σ Vᵀ x of the
width of the input with relu between them, a final Dense, and Adam with default parameters. U and V are auxiliary reflections,
products of d Householder reflections, or orthogonal matrices by the Cayley map or the matrix exponential. Beside the paper: plain
matrices with one of four penalties on what is not orthogonal (Bansal et al. 2018), and with none.

    python -m experiments.fcnn                                     scikit-learn's digits, about a minute on two CPU cores
    python -m experiments.fcnn --map aux --map exp --runs 3        only these two, with mean and standard deviation
    python -m experiments.fcnn --map aux --map cayley --map soft-srip --map dense    orthogonal by form, by a penalty, or not
    python -m experiments.fcnn --dataset mnist --resume            the paper's experiment; goes on where it was interrupted
    python -m experiments.fcnn --map householder --rate 1e-3 --rate 1e-4    one map with two learning rates of U and V

Writes a JSON file with every epoch of every run and a figure of the validation error over epochs and over seconds of
training, without validation and without compiling: the training step is compiled on a trial batch before the clock starts.
Afterwards ‖WᵀW − I‖ is measured, for all matrices U and V.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
from typing import TYPE_CHECKING, Any

from experiments.harness import cli, data
from experiments.harness.results import Results, environment, hardware

if TYPE_CHECKING:
    import keras

MAPS = ("aux", "householder", "cayley", "exp")
SOFT = {"soft-so": 1e-2, "soft-dso": 1e-2, "soft-mc": 1e-1, "soft-srip": 1e-1}
"""Penalties and their strengths: those on all entries of WᵀW − I are large numbers, those on the largest are small."""
REFERENCE = "dense"
LAYERS = 3
STARTS = {"uniform": None, "rotation": "fixed_point_free"}
"""Of U and V: weights U(−1/√d, 1/√d) as in the paper, or random rotations, the same kind for every map."""
RATE = 1e-3
"""The learning rate of Adam, if no other is given for U and V."""
DEFAULTS = {
    "digits": {"epochs": 20, "batch_size": 32, "runs": 1},
    "mnist": {"epochs": 10, "batch_size": 128, "runs": 3},
}


def run_name(map: str, start: str, rate: float) -> str:
    """The name of a run: its map, and what is not as in the paper."""
    return "+".join([map, *([start] if start != "uniform" else []), *([f"rate={rate:g}"] if rate != RATE else [])])


def parts_of(name: str) -> tuple[str, str, float]:
    """The map, the start and the learning rate of a run."""
    map, *more = name.split("+")
    start = more.pop(0) if more and more[0] in STARTS else "uniform"
    return map, start, float(more[0].removeprefix("rate=")) if more else RATE


def build_model(name: str, dimension: int, classes: int, start: str = "uniform") -> "keras.Sequential":
    """The paper's classifier with U and V by the map `name`, or with plain Dense layers in their place (`"dense"`, `"soft-…"`).

    A relu follows each of the three layers, the last too, so that it does not merge with the final Dense.
    """
    import keras

    from experiments.harness.layers import Scale
    from keras_auxref import SVDDense
    from keras_auxref.regularizers import SoftOrthogonal

    penalty = SoftOrthogonal(name.removeprefix("soft-"), SOFT[name]) if name in SOFT else None
    # Weights U(−1/√d, 1/√d), as SVDDense has them.
    uniform = {"kernel_initializer": keras.initializers.VarianceScaling(1 / 3, mode="fan_in", distribution="uniform")}

    def linear() -> Any:
        return keras.layers.Dense(dimension, use_bias=False, kernel_regularizer=penalty, **uniform)

    layers: list[Any] = [keras.Input((dimension,))]
    for _ in range(LAYERS):
        if name == REFERENCE or name in SOFT:
            layers += [linear(), Scale(), linear(), keras.layers.ReLU()]
        else:
            layers.append(SVDDense(map=name, activation="relu", kernel_initializer=STARTS[start]))
    return keras.Sequential([*layers, keras.layers.Dense(classes, **uniform)], name=name)


def compile_model(model: "keras.Sequential", rate: float, jit: bool | str = "auto") -> None:
    """Adam with default parameters as in the paper, and with a learning rate of their own for U and V."""
    import keras

    from experiments.harness import training

    adam, own = keras.optimizers.Adam(RATE), keras.optimizers.Adam(rate)
    model.compile(
        optimizer=adam if rate == RATE else training.optimizers(adam, own, ".*/[uv]/.*"),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit,
    )


def orthogonality(model: "keras.Sequential") -> dict[str, Any]:
    """The largest ‖WᵀW − I‖ in the Frobenius norm over all U and V; nothing where they are no matrices (`"aux"`)."""
    import keras
    import numpy as np

    from keras_auxref import OrthogonalDense

    matrices = [
        keras.ops.convert_to_numpy(layer.matrix if isinstance(layer, OrthogonalDense) else layer.kernel).astype("float64")
        for layer in model._flatten_layers()
        if isinstance(layer, OrthogonalDense) or (isinstance(layer, keras.layers.Dense) and not layer.use_bias)
    ]
    defects = [float(np.linalg.norm(w.T @ w - np.eye(len(w)))) for w in matrices]
    return {"orthogonality_defect": max(defects)} if defects else {}


def rows(results: Results) -> list[list[str]]:
    """The closing table."""

    def defect(name: str) -> str:
        found = [run.measurements.get("orthogonality_defect") for run in results.runs(name)]
        known = [value for value in found if value is not None]
        return f"{max(known):.2g}" if known else "–"

    return [[*row, defect(row[0])] for row in cli.comparison(results)]


def add_settings(p: Any) -> None:
    """The arguments that say which networks to train."""
    p.add_argument(
        "--map",
        action="append",
        dest="maps",
        choices=(*MAPS, *SOFT, REFERENCE),
        help="a map to train; repeat for several (default: the four maps; soft-…: plain Dense layers with a penalty on what is "
        "not orthogonal; dense: without one)",
    )
    p.add_argument(
        "--start",
        action="append",
        dest="starts",
        choices=tuple(STARTS),
        help="where U and V start, for every map; repeat for several (default: uniform, the paper's weights)",
    )
    p.add_argument(
        "--rate",
        action="append",
        dest="rates",
        type=cli.positive_number,
        metavar="X",
        help=f"learning rate of U and V, for every map; repeat for several (default: {RATE}, which all other weights have)",
    )


def run_names(p: Any, args: Any) -> list[str]:
    """Every map with every start and every learning rate."""
    maps, starts, rates = args.maps or MAPS, args.starts or ["uniform"], args.rates or [RATE]
    if set(maps) & {*SOFT, REFERENCE} and (starts, rates) != (["uniform"], [RATE]):
        p.error(f"arguments --start and --rate: expected maps of {', '.join(MAPS)}")
    return list(dict.fromkeys(run_name(map, start, rate) for map in maps for start in starts for rate in rates))


def arguments() -> Any:
    p = cli.parser(__doc__, ("digits", "mnist"), DEFAULTS)
    add_settings(p)
    cli.add_backend(p)
    args = cli.parse(p)
    args.names = run_names(p, args)
    return args


def main() -> None:
    args = arguments()
    dataset = data.load(args.dataset, download=args.download).limit(args.train_size)
    stem = f"fcnn-{args.dataset}"
    output = cli.output(args, stem)
    settings = cli.settings(args, ("epochs", "batch_size", "seed", "strategy", "jit"))
    results = Results(output / f"{stem}.json", "fcnn", dataset.describe(), settings, resume=args.resume)

    cli.import_keras(args)

    from experiments.harness import plotting, training
    from experiments.harness.attempts import attempts

    here = environment()
    print(f"{args.dataset}: d = {dataset.dimension}, {len(dataset.train_images)} training images, on {hardware(here)}")
    training_data, validation_data = dataset.vectors()
    for attempt in attempts(args, args.names, results, here):
        map, start, rate = parts_of(attempt.run.map)
        with cli.scope(args):
            model = build_model(map, dataset.dimension, dataset.classes, start)
            compile_model(model, rate, cli.jit_compile(args))
        training.train(
            model,
            training_data,
            validation_data,
            attempt.run,
            results,
            epochs=args.epochs,
            batch_size=args.batch_size,
            checkpoints=attempt.checkpoints,
            verbose=args.verbose,
            save=attempt.model if args.save else None,
            afterwards=orthogonality,
        )

    figure = output / f"{stem}.png"
    plotting.learning_curves(results.runs(), figure, title=f"SVD layers of width {dataset.dimension} on {args.dataset}")
    print(f"\nAfter {args.epochs} epochs; seconds are medians over epochs of training alone:\n")
    header = ("map", "runs", "validation error (%)", "s/epoch", "ratio to aux", "‖WᵀW − I‖")
    print(cli.table(header, rows(results)))
    print(f"\n{results.path}\n{figure}")


if __name__ == "__main__":
    cli.main(main)
