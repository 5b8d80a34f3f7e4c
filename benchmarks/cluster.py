"""A cluster on one machine: hosts as namespaces of the kernel, joined by shaped links.

    python benchmarks/cluster.py --hosts 2 --rate 100mbit -- gluon-esgd run --hosts {hosts:2} \
        --remote-shell {shell} --clients 2 python train.py

Each host has a network, a name, process numbers and shared memory of its own; they share files,
cores and memory. A bridge joins them; ``tc tbf`` holds both ends of every link to `--rate`. With
`--racks R` hosts stand in R racks whose uplinks have `--uplink`. A host more, by the name that is
last, stands beside the racks where `--server-rate` says how fast its link is. The command runs on
the first host; in it ``{hosts}`` becomes its addresses, ``{hosts:2}`` the same with slots, and
``{shell}`` a remote shell.

Namespaces need root and iproute2. They end with this process, however that ends: process 1 of a
host ends when its standard input does, and with it go, by the kernel, all others and the links.
"""

import argparse
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type, Union

__all__ = ["Cluster", "Network", "counters", "fill_in", "why_impossible"]

HOST = Path(__file__).with_name("cluster_host.py")
LIMIT_S = 20.0  # to make a host, and to end it
# Of tbf: what may pass at once; how long a packet waits in the switch, which then drops it as
# switches do; how much waits in a host. Hosts drop nothing: the kernel would tell TCP, which gives
# a connection up that had no luck 15 times, and ps-lite then waits for what was in it for ever.
BURST, SWITCH_QUEUE, HOST_QUEUE = "256kb", "latency 50ms", "limit 64mb"
SWITCH = ["unshare", "--net", "--fork", "--kill-child"]
NAMESPACES = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]


@dataclass(frozen=True)
class Network:
    """Hosts and links; rates as ``tc`` takes them ("100mbit"), each way.

    Attributes
    ----------
    hosts : int
        Hosts for workers.
    rate : str
        Of the link of each of these hosts.
    racks : int
        Into how many racks they are put, equally many to each, in order.
    uplink : str, optional
        Rate of the link from a rack to the core, needed with several racks.
    server_rate : str, optional
        Rate of one host more, at the core; None: there is none.
    """

    hosts: int
    rate: str
    racks: int = 1
    uplink: Optional[str] = None
    server_rate: Optional[str] = None

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= 200:
            raise ValueError(f"hosts is {self.hosts}, must be 1 to 200")
        if self.racks < 1 or self.hosts % self.racks:
            raise ValueError(f"racks is {self.racks}, must divide the {self.hosts} hosts")
        if (self.racks > 1) != (self.uplink is not None):
            raise ValueError("uplink is the rate between racks: give it with racks above 1 only")
        for rate in (self.rate, self.uplink, self.server_rate):
            if rate is not None and not re.fullmatch(r"[1-9][0-9]*[kmg]bit", rate):
                raise ValueError(f"{rate!r} is no rate; write 100mbit or 1gbit")


def why_impossible() -> Optional[str]:
    """Return why no cluster can be made here; None where it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    return f"{', '.join(missing)} not found: install iproute2 and util-linux" if missing else None


class Cluster:
    """A running cluster; a context manager, which ends everything that runs in it.

    Parameters
    ----------
    network : Network
        Hosts and links.

    Attributes
    ----------
    names : list of str
        Names of the hosts ("h1", ...), that of the server's host last.
    addresses : list of str
        Their addresses, in the same order.
    shell : str
        Command of a remote shell, which takes a name or an address of a host.
    """

    def __init__(self, network: Network) -> None:
        problem = why_impossible()
        if problem:
            raise RuntimeError(problem)
        self.network = network
        count = network.hosts + (network.server_rate is not None)
        self.names = [f"h{k + 1}" for k in range(count)]
        self.addresses = [f"10.77.0.{k + 1}" for k in range(count)]
        self._holders: List[subprocess.Popen[bytes]] = []
        self._folder = tempfile.mkdtemp(prefix="cluster-")
        self.shell = f"{self._folder}/shell"

    def __enter__(self) -> "Cluster":
        try:
            self._write_shell()
            self._switch = self._hold([*SWITCH, "sh", "-c", "echo; exec cat"])
            serve = [*NAMESPACES, sys.executable, "-I", "-S", str(HOST), "serve"]
            self._pids = [self._hold([*serve, name, self._folder]) for name in self.names]
            self._wire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts, what runs on them, and their links."""
        for process in self._holders:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self._holders:
            process.wait(LIMIT_S)
            process.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, host: int, argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        """Start a command on a host, by its number, in this folder; see `subprocess.Popen`."""
        line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(argv)}"
        return subprocess.Popen([self.shell, self.names[host], line], **options)

    def traffic(self) -> Dict[str, Dict[str, int]]:
        """Return bytes "out" of and "in" to each host by its name, and each rack ("rack 0")."""
        found = {name: counters(pid, "e0") for name, pid in zip(self.names, self._pids)}
        for rack in range(self.network.racks if self.network.racks > 1 else 0):
            found[f"rack {rack}"] = counters(self._switch, f"u{rack}")
        return found

    def _write_shell(self) -> None:
        command = f'exec {sys.executable} -I -S {HOST} shell {self._folder} "$@"'
        Path(self.shell).write_text(f"#!/bin/sh\n{command}\n")
        os.chmod(self.shell, 0o700)
        for name, address in zip(self.names, self.addresses):
            os.symlink(f"{name}.sock", f"{self._folder}/{address}.sock")

    def _hold(self, argv: Sequence[str]) -> int:
        """Start what holds namespaces as long as we live; return the process inside."""
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._holders.append(process)
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], LIMIT_S)[0]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if not (ready and process.stdout.readline() and children):
            raise RuntimeError(f"no namespaces after {LIMIT_S:g} s: {shlex.join(argv)}")
        return int(children[0])

    def _wire(self) -> None:
        """Make bridges and links, and shape both ends of each link."""
        _in_network(self._switch, _switch_lines(self.network))
        for k, pid in enumerate(self._pids):
            ends = f"e0 netns {pid} type veth peer name p{k} netns {self._switch}"
            subprocess.run(["ip", "link", "add", *ends.split()], check=True)
            bridge, rate = _place(self.network, k)
            _in_network(self._switch, [*_port(f"p{k}", bridge), _shape(f"p{k}", rate)])
            own = [f"ip addr add {self.addresses[k]}/24 dev e0", "ip link set lo up"]
            _in_network(pid, [*own, "ip link set e0 up", _shape("e0", rate, HOST_QUEUE)])


def _place(network: Network, host: int) -> Tuple[str, str]:
    """Return the bridge of a host and the rate of its link."""
    if host == network.hosts:
        return "core", str(network.server_rate)
    rack = host * network.racks // network.hosts
    return "core" if network.racks == 1 else f"rack{rack}", network.rate


def _switch_lines(network: Network) -> List[str]:
    lines = _bridge("core")
    for rack in range(network.racks if network.racks > 1 else 0):
        lines += [*_bridge(f"rack{rack}"), f"ip link add u{rack} type veth peer name c{rack}"]
        for end, bridge in ((f"u{rack}", f"rack{rack}"), (f"c{rack}", "core")):
            lines += [*_port(end, bridge), _shape(end, str(network.uplink))]
    return lines


def _bridge(name: str) -> List[str]:
    return [f"ip link add {name} type bridge", f"ip link set {name} up"]


def _port(end: str, bridge: str) -> List[str]:
    return [f"ip link set {end} master {bridge}", f"ip link set {end} up"]


def _shape(end: str, rate: str, queue: str = SWITCH_QUEUE) -> str:
    return f"tc qdisc add dev {end} root tbf rate {rate} burst {BURST} {queue}"


def _in_network(pid: int, lines: Sequence[str]) -> None:
    """Run commands in the network of a process."""
    script = "set -e; " + "; ".join(lines)
    done = subprocess.run(
        ["nsenter", "--net", "-t", str(pid), "sh", "-c", script], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{script}: {done.stderr.strip()}")


def counters(pid: Union[int, str], device: str) -> Dict[str, int]:
    """Return the bytes that went "out" of and came "in" to a device in a process's network."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == device:
            return {"in": int(numbers.split()[0]), "out": int(numbers.split()[8])}
    raise ValueError(f"process {pid} sees no device {device!r}")


def fill_in(words: Sequence[str], cluster: Cluster) -> List[str]:
    """Return a command with addresses and remote shell in their places."""

    def hosts(match: "re.Match[str]") -> str:
        slots = match.group(1) or ""
        return ",".join(address + slots for address in cluster.addresses)

    filled = (word.replace("{shell}", cluster.shell) for word in words)
    return [re.sub(r"\{hosts(:[0-9]+)?\}", hosts, word) for word in filled]


def main() -> int:
    """Run the command in a cluster; print what went over each link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit", help="of the link of each host")
    parser.add_argument("--racks", type=int, default=1)
    parser.add_argument("--uplink", help="rate between a rack and the core")
    parser.add_argument("--server-rate", help="rate of one host more, at the core")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    network = Network(args.hosts, args.rate, args.racks, args.uplink, args.server_rate)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Cluster(network) as cluster:
        code = cluster.start(0, fill_in(args.command, cluster)).wait()
        for name, found in cluster.traffic().items():
            print(f"{name:8}{found['out'] / 1e6:10.1f} MB out{found['in'] / 1e6:10.1f} MB in")
    return code


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())
