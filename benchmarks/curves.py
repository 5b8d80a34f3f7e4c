"""Curves of a run as a picture, from its event files.

    python benchmarks/curves.py runs/resnet50_imagenet/tensorboard --output docs/img/curves.png \\
        --plots loss center/top_1,client/top_1 images_per_s

Each plot has one curve of each client for each of its names, over the steps of the run. Needs
matplotlib.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

from gluon_esgd.telemetry import read_curves

matplotlib.use("Agg")
from matplotlib import pyplot

_Raw = argparse.RawDescriptionHelpFormatter


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("logdir", type=Path, help="folder with client0, client1, ...")
    parser.add_argument("--plots", nargs="+", default=["loss"], help="names, by commas, of each")
    parser.add_argument("--title", default="")
    parser.add_argument("--output", type=Path, required=True, help="PNG")
    return parser.parse_args()


def draw(axes: Any, names: str, clients: dict) -> None:
    """Draw the curves called `names` of all clients."""
    for name in names.split(","):
        for client, curves in clients.items():
            if name in curves:
                steps, values = zip(*curves[name])
                several = len(curves[name]) > 200
                label = f"{name}, {client.replace('client', 'client ')}"
                axes.plot(steps, values, lw=0.8 if several else 1.6, label=label)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main() -> None:
    """Draw all plots into one picture."""
    args = arguments()
    clients = {path.name: read_curves(path) for path in sorted(args.logdir.glob("client*"))}
    if not clients:
        raise SystemExit(f"{args.logdir} has no folder client0: it is no logdir of a TrainingLog")
    columns = min(3, len(args.plots))
    rows = -(-len(args.plots) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3 * rows), squeeze=False, layout="constrained"
    )
    for axes, names in zip(grid.flat, args.plots):
        draw(axes, names, clients)
    for axes in list(grid.flat)[len(args.plots) :]:
        axes.axis("off")
    figure.suptitle(args.title, fontsize=10)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=110)
    print(args.output)


if __name__ == "__main__":
    main()
