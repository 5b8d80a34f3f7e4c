"""Where a client goes that is added to a running job, or why none can be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Optional, Sequence

from .faults import MOST_RANKS
from .plan import Site, workers_at
from .spec import JobSpec

__all__ = ["check", "host_for", "refill", "with_client"]


def check(spec: JobSpec, sync: Optional[bool]) -> None:
    """Raise unless clients of this job may come while it runs.

    Parameters
    ----------
    spec : JobSpec
    sync : bool, optional
        Whether its rule is sgd; None as long as no trainer has said.

    Raises
    ------
    ValueError
        They cannot; says why.
    """
    if spec.is_split:
        raise ValueError(
            f"all {spec.clients} clients are one MPI job, whose ranks are fixed at its start; "
            "start the job with --servers 1 or more"
        )
    if spec.num_servers == 0:
        raise ValueError(
            "the job has no servers by which a further client could exchange; start it with "
            "--servers 1 --rule esgd"
        )
    if sync is None:
        raise ValueError("no client has come to its trainer yet; try again when they train")
    if sync:
        raise ValueError(
            "under rule sgd all clients make each step together, and none can come later; use "
            "rule esgd or asgd"
        )


def refill(spec: JobSpec, site: Site, empty: Sequence[int], host: Optional[str]) -> Optional[int]:
    """Return the first client of the `empty` places, on `host` if given; None: there is none.

    Raises
    ------
    ValueError
        The job has no such host.
    """
    _check_host(spec, host)
    at = workers_at(spec, site.added)
    return next((k for k in empty if host in (None, at[k * spec.client_size])), None)


def host_for(spec: JobSpec, site: Site, empty: Sequence[int], host: Optional[str]) -> str:
    """Return the host of one client more: `host`, or else that with the fewest ranks.

    Raises
    ------
    ValueError
        The job has no such host, or would become too large for itself or its moving rate.
    """
    _check_host(spec, host)
    at = workers_at(spec, site.added)
    size, clients = spec.client_size, len(at) // spec.client_size + 1
    if clients * size > MOST_RANKS:
        raise ValueError(f"the job has {len(at)} ranks, and {MOST_RANKS} are the most")
    bound = 2 / (1 + clients - len(empty))
    if spec.alpha is not None and spec.rule != "asgd" and spec.alpha > bound:
        raise ValueError(
            f"--alpha {spec.alpha:g} is above 2/(1+clients) = {bound:g} for one client more, "
            "beyond which the exchange diverges; start the job with --beta, which follows the "
            "number of clients"
        )
    ranks = Counter(h for w, h in enumerate(at) if w // size not in empty)
    names = (each.name for each in spec.host_list if each.slots)
    return host or min(names, key=lambda name: ranks[name])


def with_client(site: Site, host: str) -> Site:
    """Return the site of a job that has one client more, on `host`."""
    return replace(site, added=(*site.added, host))


def _check_host(spec: JobSpec, host: Optional[str]) -> None:
    names = [each.name for each in spec.host_list]
    if host is not None and host not in names:
        raise ValueError(f"host {host!r:.80} is none of this job's, which are {', '.join(names)}")
