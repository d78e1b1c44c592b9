"""Recurrent networks with a norm-preserving transition: one auxiliary reflection against the orthogonal maps it replaces.

The experiment of section 4.2 of "One Reflection Suffice" (Mathiasen & Hvilshøj, 2020): an image is read one pixel at a time,
h' = modrelu(T(h) + V x + b), and its class read off the last state. T is an auxiliary reflection, one Householder reflection, a
product of as many as the state has dimensions, or an orthogonal matrix by the Cayley map or the matrix exponential. All but the
single reflection start as the same map. Adam trains the transition and RMSprop the rest, as in expRNN.

    python -m experiments.rnn                               scikit-learn's digits, 64 pixels: about two minutes on two CPU cores
    python -m experiments.rnn --dataset mnist --resume      784 pixels: the paper's experiment; goes on where it was interrupted
    python -m experiments.rnn --dataset mnist --permute     the pixels in a fixed random order
    python -m experiments.rnn --lipschitz 1.1               a Jacobian that is proven to be at most 1.1 long
    python -m experiments.rnn --task copying --length 200   ten symbols, to be repeated after 200 steps
    python -m experiments.rnn --task adding --length 200    the sum of two marked numbers out of 200

Writes a JSON file and a CSV file with every epoch of every run and a figure of the validation error and loss over epochs and over
seconds of training, without validation and without compiling: the training step is compiled on a trial batch before the clock
starts.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.harness import cli, data, sequences
from experiments.harness.results import Results, environment, hardware
from experiments.harness.sequences import Sequences

if TYPE_CHECKING:
    import keras

TRANSITIONS = ("aux", "householder-1", "householder", "cayley", "exp")
REFERENCES = ("simple_rnn", "lstm")
KERNELS = ("relaxed_cayley", "spectral")
MEMORY = {"batch_size": 128, "runs": 1, "epochs": 20, "steps_per_epoch": 100, "length": 200, "learning_rate": 1e-3}
# For each data set or task. The learning rates of MNIST are those of expRNN.
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {
        "epochs": 15,
        "batch_size": 32,
        "runs": 1,
        "learning_rate": 1e-3,
        "transition_learning_rate": 2e-4,
        "start": "cayley",
        "activation": "modrelu",
    },
    "mnist": {
        "epochs": 10,
        "batch_size": 128,
        "runs": 1,
        "learning_rate": 7e-4,
        "transition_learning_rate": 7e-5,
        "start": "cayley",
        "activation": "modrelu",
    },
    "copying": {**MEMORY, "transition_learning_rate": 1e-3, "start": "henaff", "activation": "modrelu"},
    "adding": {**MEMORY, "transition_learning_rate": 1e-3, "start": "cayley", "activation": "relu"},
}
POOL = 400
"""Batches of different sequences that a memory test draws from."""


class Task(NamedTuple):
    """What is answered, how it is scored, and what is shown: (measure, label, scale) of the figure's rows."""

    loss: Any
    metrics: list[str]
    rows: list[tuple[str, str, float]]
    column: str


def build_model(name: str, task: str, x: Sequences, hidden: int, start: str, activation: str = "modrelu") -> "keras.Sequential":
    """A network with the transition `name`, or with Keras' SimpleRNN or LSTM of the same hidden size in its place.

    `aux+KERNEL=L` is an auxiliary reflection with a proof: the transition makes a gradient at most L times as long in a step.
    """
    import keras

    from keras_auxref import OrthogonalRNN, kernels

    sequence = {"return_sequences": task == "copying", "name": "rnn"}
    # he_normal as in expRNN; with it the sums of the adding task start far too large.
    inputs_start = "glorot_uniform" if task == "adding" else "he_normal"
    arguments: dict[str, Any] = {
        **sequence,
        "activation": activation,
        "kernel_initializer": inputs_start,
        "recurrent_initializer": start,
    }
    layer: Any
    if name == "simple_rnn":
        layer = keras.layers.SimpleRNN(hidden, **sequence)
    elif name == "lstm":
        layer = keras.layers.LSTM(hidden, **sequence)
    elif name == "householder-1":
        # A single reflection cannot start as the map that the others start as.
        layer = OrthogonalRNN(hidden, "householder", reflections=1, **{**arguments, "recurrent_initializer": None})
    elif name.startswith("aux+"):
        family, _, bound = name.removeprefix("aux+").partition("=")
        kernel = {"relaxed_cayley": kernels.RelaxedCayley, "spectral": kernels.Spectral}[family](lipschitz=float(bound))
        begin = None if family == "spectral" else start  # a symmetric W makes no rotation
        layer = OrthogonalRNN(hidden, "aux", kernel=kernel, **{**arguments, "recurrent_initializer": begin})
    else:
        layer = OrthogonalRNN(hidden, name, **arguments)
    inputs = [keras.Input(x.train[0].shape[1:])]
    if task == "copying":
        symbols = sequences.SYMBOLS + 2
        inputs.append(keras.layers.Embedding(symbols, symbols, embeddings_initializer="identity", trainable=False))
    outputs = {"copying": sequences.SYMBOLS + 1, "adding": 1}.get(task) or int(
        max(part[1].max() for part in (x.train, x.validation))
    ) + 1
    return keras.Sequential([*inputs, layer, keras.layers.Dense(outputs)], name=re.sub(r"\W", "_", name))


def optimizer(learning_rate: float, transition_learning_rate: float, clip: float | None = None) -> "keras.optimizers.Optimizer":
    """Adam for the weights of the transition, RMSprop for the others; of every weight the gradient is at most `clip` long."""
    import keras

    from experiments.harness import training

    rest = keras.optimizers.RMSprop(learning_rate, clipnorm=clip)
    transition = keras.optimizers.Adam(transition_learning_rate, clipnorm=clip)
    return training.optimizers(rest, transition, ".*/transition/.*")


def describe(task: str) -> Task:
    import keras

    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if task == "pixels":
        rows = [("validation_error", "Validation error (%)", 100.0), ("validation_loss", "Validation loss", 1.0)]
        return Task(cross_entropy, ["accuracy"], rows, "validation error (%)")
    if task == "copying":
        return Task(cross_entropy, [], [("validation_loss", "Cross-entropy", 1.0)], "cross-entropy (×10⁻³)")
    return Task(keras.losses.MeanSquaredError(), [], [("validation_loss", "Mean squared error", 1.0)], "squared error (×10⁻³)")


def losses(logs: dict[str, float]) -> dict[str, float]:
    """What is recorded of a memory test."""
    return {"training_loss": logs["loss"], "validation_loss": logs["val_loss"]}


def add_bounds(p: Any) -> None:
    """The arguments of an auxiliary reflection with a proof."""
    p.add_argument("--kernel", choices=KERNELS, default=KERNELS[0], help="the W of --lipschitz (default: %(default)s)")
    p.add_argument(
        "--lipschitz",
        action="append",
        default=[],
        type=cli.positive_number,
        metavar="L",
        help="an auxiliary reflection whose Jacobian is proven to be at most L long; repeat for several",
    )


def bounded(p: Any, args: Any) -> list[str]:
    """The transitions that `add_bounds` asks for."""
    if not all(1 < bound < 3 for bound in args.lipschitz):
        p.error(f"--lipschitz: expected numbers between 1 and 3, received {args.lipschitz}")
    return [f"aux+{args.kernel}={bound:g}" for bound in args.lipschitz]


def arguments() -> Any:
    p = cli.parser(__doc__, ("digits", "mnist"), DEFAULTS)
    p.add_argument(
        "--task", choices=("pixels", "copying", "adding"), default="pixels", help="what to learn (default: %(default)s)"
    )
    p.add_argument("--permute", action="store_true", help="read the pixels in a fixed random order")
    p.add_argument("--length", type=cli.positive, metavar="T", help="length of a memory test (default: 200)")
    p.add_argument(
        "--steps-per-epoch", type=cli.positive, metavar="N", help="training steps per epoch of a memory test (default: 100)"
    )
    p.add_argument("--hidden", type=cli.positive, default=170, metavar="N", help="size of the state (default: %(default)s)")
    p.add_argument(
        "--start", choices=("cayley", "henaff"), help="the orthogonal matrix to start at (default: henaff for copying)"
    )
    p.add_argument(
        "--activation",
        choices=("modrelu", "relu", "tanh"),
        help="of the orthogonal ones (default: relu for adding, else modrelu)",
    )
    p.add_argument("--learning-rate", type=cli.positive_number, metavar="X", help="of RMSprop (mnist: 7e-4, others: 1e-3)")
    p.add_argument(
        "--transition-learning-rate",
        type=cli.positive_number,
        metavar="X",
        help="of Adam (digits: 2e-4, mnist: 7e-5, others: 1e-3)",
    )
    p.add_argument(
        "--clip",
        type=cli.positive_number,
        metavar="X",
        help="shorten the gradient of every weight to this length where it is longer (default: never)",
    )
    p.add_argument(
        "--transition",
        action="append",
        dest="transitions",
        choices=(*TRANSITIONS, *REFERENCES),
        help="a transition to train; repeat for several (default: the five orthogonal ones; for memory tests aux, householder, "
        "simple_rnn and lstm)",
    )
    add_bounds(p)
    cli.add_backend(p)
    args = cli.parse(p, choice="task")
    memory = args.task != "pixels"
    if memory and (args.permute or args.dataset != "digits"):
        p.error("--permute and --dataset belong to --task pixels")
    if not memory and (args.length or args.steps_per_epoch):
        p.error("--length and --steps-per-epoch belong to --task copying and --task adding")
    names, args.bounded = args.transitions or [], bounded(p, args)
    if not names and not args.bounded:
        names = ("aux", "householder", *REFERENCES) if memory else TRANSITIONS
    args.transitions = list(dict.fromkeys([*names, *args.bounded]))
    return args


def load(args: Any) -> tuple[str, Sequences]:
    """The name of the experiment and its sequences."""
    kernels = "-kernels" if args.bounded else ""
    if args.task == "pixels":
        dataset = data.load(args.dataset, download=args.download).limit(args.train_size)
        return f"rnn-{args.dataset}{'-permuted' if args.permute else ''}{kernels}", sequences.pixels(dataset, args.permute)
    make = {"copying": sequences.copying, "adding": sequences.adding}[args.task]
    train = args.train_size or min(POOL, args.epochs * args.steps_per_epoch) * args.batch_size
    return f"rnn-{args.task}-{args.length}{kernels}", make(args.length, train, 1000)


def main() -> None:
    args = arguments()
    stem, x = load(args)
    output = cli.output(args, stem)
    keys = ("epochs", "batch_size", "seed", "strategy", "jit", "hidden", "start", "activation")
    keys += ("learning_rate", "transition_learning_rate")
    settings = cli.settings(args, (*keys, *(key for key in ("steps_per_epoch", "clip") if getattr(args, key))))
    results = Results(output / f"{stem}.json", "rnn", x.description, settings, resume=args.resume)

    cli.import_keras(args)
    import keras

    from experiments.harness import plotting, training
    from experiments.harness.attempts import attempts

    here, task = environment(), describe(args.task)
    print(f"{stem}: {x.steps} steps, {len(x.train[0])} training sequences, hidden size {args.hidden}, on {hardware(here)}")
    if x.baseline:
        print(f"Loss of the best answer without memory: {x.baseline:.4f}")
    for attempt in attempts(args, args.transitions, results, here):
        with cli.scope(args):
            model = build_model(attempt.run.map, args.task, x, args.hidden, args.start, args.activation)
            model.compile(
                optimizer=optimizer(args.learning_rate, args.transition_learning_rate, args.clip),
                loss=task.loss,
                metrics=task.metrics,
                jit_compile=cli.jit_compile(args),
            )
        output.mkdir(parents=True, exist_ok=True)
        training.train(
            model,
            x.train,
            x.validation,
            attempt.run,
            results,
            epochs=args.epochs,
            batch_size=args.batch_size,
            checkpoints=attempt.checkpoints,
            measures=training.classification if args.task == "pixels" else losses,
            callbacks=(keras.callbacks.CSVLogger(attempt.log, append=attempt.resumed),),
            steps_per_epoch=args.steps_per_epoch,
            # Of a batch the inputs of all 784 steps are projected at once.
            validation_batch=250,
            verbose=args.verbose,
            save=attempt.model if args.save else None,
        )

    figure = output / f"{stem}.png"
    (measure, label, scale), *more = task.rows
    title = {"pixels": f"{args.dataset}, {'permuted ' if args.permute else ''}pixel by pixel"}.get(
        args.task, f"{args.task}, T = {args.length}"
    )
    plotting.learning_curves(
        results.runs(),
        figure,
        measure=measure,
        label=label,
        scale=scale,
        title=title,
        steps_per_epoch=args.steps_per_epoch,
        more=more,
        baseline=(x.baseline, "without memory") if x.baseline else None,
    )
    print(f"\nAfter {args.epochs} epochs; seconds are medians over epochs of training alone:\n")
    table_scale = scale if args.task == "pixels" else 1e3
    rows = cli.comparison(results, measure=measure, scale=table_scale)
    print(cli.table(("transition", "runs", task.column, "s/epoch", "ratio to aux"), rows))
    print(f"\n{results.path}\n{figure}")


if __name__ == "__main__":
    cli.main(main)
