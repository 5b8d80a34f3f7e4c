"""The MPI launchers: where ``mpiexec`` is, whose it is, and how each is told the same thing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from ..errors import LaunchError

__all__ = ["Mpi", "Reach", "find"]

Share = Tuple[str, int]  # a host and the number of ranks on it


@dataclass(frozen=True)
class Reach:
    """How the ranks of a client are reached.

    Attributes
    ----------
    local : bool
        All are on this machine; addresses are then loopback.
    remote_shell : str
        Else: what reaches another host, with its arguments.
    own_name : str, optional
        By which name the other hosts reach this machine, where the user gave one.
    names : tuple of str
        Environment variables that ranks on other hosts must get.
    """

    local: bool
    remote_shell: str = "ssh"
    own_name: Optional[str] = None
    names: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Mpi:
    """An ``mpiexec``: its path, its vendor ("mpich" or "openmpi") and its version."""

    mpiexec: str
    vendor: str
    version: str = ""

    def argv(self, shares: Sequence[Share], reach: Reach, command: Sequence[str]) -> List[str]:
        """Return the command that starts one client.

        Parameters
        ----------
        shares : sequence of (str, int)
            Hosts in order, each with its number of ranks.
        reach : Reach
            How the hosts are reached.
        command : sequence of str
            What each rank runs.
        """
        ranks = str(sum(count for _, count in shares))
        options = (_mpich if self.vendor == "mpich" else _openmpi)(self, shares, reach)
        return [self.mpiexec, "-n", ranks, *options, *command]

    def environment(self, reach: Reach) -> Dict[str, str]:
        """Return variables that this vendor needs; those that the user set win."""
        if self.vendor == "openmpi":
            out = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            alone = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"} if reach.local else {}
            return {**out, **alone}
        if reach.local:
            return {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
        extra = reach.remote_shell.split(None, 1)[1:]
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": extra[0]} if extra else {}


def _mpich(mpi: Mpi, shares: Sequence[Share], reach: Reach) -> List[str]:
    options = ["-bind-to", "none"]
    if reach.local:
        return [*options, "-launcher", "fork", "-iface", "lo", "-localhost", "127.0.0.1"]
    shell = reach.remote_shell.split()[0]
    launcher = "ssh" if os.path.basename(shell) == "ssh" else "rsh"
    through = ["-launcher", launcher, "-launcher-exec", shutil.which(shell) or shell]
    own = ["-localhost", reach.own_name] if reach.own_name else []
    return [*options, *through, *own, "-hosts", _host_list(shares), "-genvall"]


def _openmpi(mpi: Mpi, shares: Sequence[Share], reach: Reach) -> List[str]:
    options = ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    if reach.local:
        return options
    old = mpi.version.startswith(("3.", "4."))
    agent = ["--mca", "plm_rsh_agent"] if old else ["--prtemca", "plm_ssh_agent"]
    passed = [word for name in reach.names for word in ("-x", name)]
    return [*options, *agent, reach.remote_shell, "--host", _host_list(shares), *passed]


def _host_list(shares: Sequence[Share]) -> str:
    return ",".join(f"{host}:{count}" for host, count in shares)


def find(mpiexec: Optional[str] = None) -> Mpi:
    """Find ``mpiexec``: the one given, else beside the interpreter, else on PATH.

    Raises
    ------
    LaunchError
        There is none, or it is neither MPICH nor Open MPI; says what to do.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    path = shutil.which(mpiexec or str(beside)) or (None if mpiexec else shutil.which("mpiexec"))
    if path is None:
        where = f"{mpiexec!r} is not a program" if mpiexec else "no mpiexec was found"
        raise LaunchError(f"{where}; clients of several ranks need one: pip install mpich")
    return _identify(path, _version_text(path))


def _version_text(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version failed: {error}") from None
    return done.stdout.decode("utf-8", "replace")


def _identify(path: str, text: str) -> Mpi:
    words = text.split()
    if "Open MPI" in text or "OpenRTE" in text:
        return Mpi(path, "openmpi", next((w for w in words if w[0].isdigit()), ""))
    if "HYDRA" in text or "MPICH" in text:
        after = words[words.index("Version:") + 1 :] if "Version:" in words else [""]
        return Mpi(path, "mpich", after[0])
    raise LaunchError(
        f"{path} is neither MPICH nor Open MPI ({' '.join(words[:8])!r}); "
        "give another with --mpiexec, or pip install mpich"
    )
