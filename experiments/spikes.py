"""How long the gradient of a recurrent network is, step by step, with and without clipping.

An auxiliary reflection keeps the length of the state, but its Jacobian is not orthogonal: where W h is small beside h, a small
change of h turns the direction W h, and with it the reflection, a lot. Over hundreds of time steps that can add up to a gradient
hundreds of times as long as usual. One such batch is enough to undo what was learnt, and Adam and RMSprop, which divide by a
running mean of squares, take short steps for long afterwards. This trains the network of `experiments.rnn` and records the
length of the gradient of its transition at every step, before clipping.

    python -m experiments.spikes                                        scikit-learn's digits, under a minute on two CPU cores
    python -m experiments.spikes --dataset mnist                        784 pixels: minutes
    python -m experiments.spikes --transition aux --clip 1 --clip 10    one transition, with two lengths beside no clipping
    python -m experiments.spikes --transition aux --lipschitz 1.1       a free W beside one with a proof, neither of them clipped

Writes a JSON file and a figure of the gradient and of the training loss over steps. TensorFlow only.
"""

# Keras and TensorFlow are imported where they are used: they take seconds, and a wrong argument or missing data should not.
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import rnn
from experiments.harness import cli, data, sequences
from experiments.harness.results import command, environment, hardware, write_json

if TYPE_CHECKING:
    import keras
    import numpy as np

STEPS = {"digits": 40, "mnist": 120}
KEYS = ("batch_size", "runs", "learning_rate", "transition_learning_rate")
DEFAULTS = {name: {**{key: rnn.DEFAULTS[name][key] for key in KEYS}, "train_steps": steps} for name, steps in STEPS.items()}
HIDDEN = 170


def trace(model: "keras.Sequential", inputs: "np.ndarray", labels: "np.ndarray", batch_size: int, steps: int) -> dict[str, Any]:
    """Trains a compiled model by `fit`, as `experiments.rnn` does; of every step the loss and the length of the transition's
    gradient before clipping.
    """
    import keras
    import tensorflow as tf

    from experiments.harness import training

    lengths = tf.Variable(tf.zeros(steps), trainable=False)
    optimizer, transition = model.optimizer, [i for i, v in enumerate(model.trainable_variables) if "/transition/" in v.path]
    apply = optimizer.apply

    def recording(gradients: list[tf.Tensor], variables: Any = None) -> None:
        step = tf.minimum(tf.cast(optimizer.iterations.value, tf.int32), steps - 1)
        lengths.scatter_nd_update([[step]], [tf.linalg.global_norm([gradients[i] for i in transition])])
        apply(gradients, variables)

    means: list[float] = []  # Keras tells the mean over all steps so far
    keeping = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: means.append(logs["loss"]))
    optimizer.apply = recording
    try:
        # The same batches in the same order as there: what draws random numbers before `fit` does so here too.
        training.warm_up(model, training.trial_batches((inputs, labels), batch_size))
        lengths.assign(tf.zeros(steps))
        model.fit(inputs, labels, batch_size=batch_size, steps_per_epoch=steps, verbose=0, callbacks=[keeping])
    finally:
        del optimizer.apply
    losses = [(step + 1) * mean - step * before for step, (mean, before) in enumerate(zip(means, [0.0, *means], strict=False))]
    return {"loss": [float(f"{v:.4g}") for v in losses], "gradient": [float(f"{v:.4g}") for v in lengths.numpy()]}


def spike(gradient: list[float]) -> tuple[int, float]:
    """The step whose gradient is longest beside the median of the twenty before, and how many times as long it is."""
    import numpy as np

    before = 20
    ratios = [value / np.median(gradient[step - before : step]) for step, value in enumerate(gradient) if step >= before]
    return (before + int(np.argmax(ratios)), float(max(ratios))) if ratios else (0, 1.0)


def arguments() -> Any:
    p = cli.parser(__doc__, ("digits", "mnist"), DEFAULTS)
    steps = ", ".join(f"{name}: {count}" for name, count in STEPS.items())
    p.add_argument("--train-steps", type=cli.positive, metavar="N", help=f"of every run, an epoch at most (default: {steps})")
    p.add_argument("--hidden", type=cli.positive, default=HIDDEN, metavar="N", help="size of the state (default: %(default)s)")
    p.add_argument("--learning-rate", type=cli.positive_number, metavar="X", help="of RMSprop, as in experiments.rnn")
    p.add_argument("--transition-learning-rate", type=cli.positive_number, metavar="X", help="of Adam, as in experiments.rnn")
    p.add_argument(
        "--transition",
        action="append",
        dest="transitions",
        choices=rnn.TRANSITIONS,
        help="a transition to train; repeat for several (default: aux, householder)",
    )
    p.add_argument(
        "--clip",
        action="append",
        dest="clips",
        type=cli.positive_number,
        metavar="X",
        help="beside no clipping: the length of the gradient of every weight; repeat for several (default: 1, with --lipschitz "
        "none)",
    )
    rnn.add_bounds(p)
    args = cli.parse(p)
    unused = {"resume": args.resume, "jit": args.jit is not None, "strategy": args.strategy != "none"}
    if any(unused.values()):
        p.error(f"not of use here: {', '.join(f'--{name}' for name, given in unused.items() if given)}")
    args.bounded = rnn.bounded(p, args)
    args.transitions = args.transitions or ([] if args.bounded else ["aux", "householder"])
    args.clips = [None, *(args.clips or ([] if args.bounded else [1.0]))]
    return args


def draw(runs: list[dict[str, Any]], path: Path, title: str) -> None:
    from experiments.harness import plotting

    with plotting.plt.rc_context(plotting.RC):
        figure, axes = plotting.plt.subplots(2, 1, figsize=(9, 6.4), sharex=True, layout="constrained")
        broken: list[float] = []  # lengths of clipping, each with its own broken line
        bounds: list[str] = []
        for run in runs:
            transition, _, proof = run["transition"].partition("+")
            clip = run["clip"]
            if proof:  # a colour for every bound
                bounds += [proof] if proof not in bounds else []
                color = plotting.SPARE_COLORS[bounds.index(proof) % len(plotting.SPARE_COLORS)]
                look = {"color": color, "label": f"{proof.partition('=')[0].replace('_', ' ')}, L = {proof.partition('=')[2]}"}
            else:
                broken += [clip] if clip and clip not in broken else []
                name = transition if clip is None else f"{transition}+clip={clip:g}"
                look = plotting.style(name, broken.index(clip) if clip else 0)
            line = {"color": look["color"], "linestyle": look.get("linestyle", "-"), "linewidth": 1.4, "label": look["label"]}
            for axis, measure in zip(axes, ("gradient", "loss"), strict=True):
                axis.plot(range(1, len(run[measure]) + 1), run[measure], **line)
        for axis, label in zip(axes, ("Length of the gradient", "Training loss"), strict=True):
            axis.set(yscale="log", ylabel=label)
            plotting.plain_numbers(axis.yaxis)
        axes[-1].set(xlabel="Training step")
        figure.suptitle(title, fontsize=12)
        handles, labels = axes[0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=2)
        plotting.save(figure, path)


def main() -> None:
    args = arguments()
    dataset = data.load(args.dataset, download=args.download).limit(args.train_size)
    epoch = -(-len(dataset.train_images) // args.batch_size)
    if args.train_steps > epoch:
        sys.exit(f"--train-steps: expected at most the {epoch} steps of an epoch, received {args.train_steps}.")
    stem = f"spikes-{args.dataset}{'-kernels' if args.bounded else ''}"
    path = (args.output or Path("runs", stem)) / f"{stem}.json"
    cli.import_keras()
    import keras
    import numpy as np

    if keras.backend.backend() != "tensorflow":
        sys.exit(f"experiments.spikes: expected Keras' backend tensorflow, received {keras.backend.backend()}.")
    here, x = environment(), sequences.pixels(dataset)
    print(f"{args.dataset}: {x.steps} pixels, {args.train_steps} steps of every network, on {hardware(here)}")
    start, activation = (rnn.DEFAULTS[args.dataset][key] for key in ("start", "activation"))
    runs, rows = [], []
    for seed in range(args.seed, args.seed + args.runs):
        pairs = [(transition, clip) for transition in args.transitions for clip in args.clips]
        for transition, clip in pairs + [(name, None) for name in args.bounded]:
            keras.utils.set_random_seed(seed)
            model = rnn.build_model(transition, "pixels", x, args.hidden, start, activation)
            optimizer = rnn.optimizer(args.learning_rate, args.transition_learning_rate, clip)
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
            found = trace(model, *x.train, args.batch_size, args.train_steps)
            runs.append({"transition": transition, "clip": clip, "seed": seed, **found})
            step, ratio = spike(found["gradient"])
            last = np.mean(found["loss"][-10:])
            rows.append([transition, f"{clip:g}" if clip else "–", str(seed), f"{ratio:.0f}", str(step + 1), f"{last:.2f}"])
            print(*rows[-1], flush=True)
            keras.backend.clear_session()
    keys = ("train_steps", "batch_size", "hidden", "learning_rate", "transition_learning_rate", "seed", "runs")
    settings = {key: getattr(args, key) for key in keys}
    header = {"experiment": "spikes", "dataset": dataset.describe(), "settings": settings, "command": command()}
    write_json(path, {**header, "environment": here, "runs": runs})
    figure = path.with_suffix(".png")
    draw(runs, figure, f"Gradients on {args.dataset}, pixel by pixel, hidden size {args.hidden}")
    columns = ("transition", "clip", "seed", "longest gradient / usual", "at step", "loss, last 10 steps")
    print(f"\n{cli.table(columns, rows)}\n\n{path}\n{figure}")


if __name__ == "__main__":
    cli.main(main)
