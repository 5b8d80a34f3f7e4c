"""What a leader is told, and how soon, when a process behind the center is gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator, List

import numpy as np
import pytest

from gluon_esgd.center import CenterLink, Mailbox
from gluon_esgd.errors import CenterError

from ..pool import until
from .servers import Job, Servers, free_port

pytestmark = pytest.mark.servers

N = 100
KINDS = np.zeros(1, np.int64)


def attach(job: Job, name: str = "m") -> List[Mailbox]:
    mailboxes = job.all(lambda link: link.attach(name, [N], [(0, N)], {}), job.links)
    outs = [np.empty(N, np.float32) for _ in mailboxes]
    job.all(lambda m, i, out: m.seed(i == 0, out), mailboxes, range(len(mailboxes)), outs)
    return mailboxes


@contextlib.contextmanager
def own_job(*arguments: Any, **options: Any) -> Iterator[Job]:
    """Servers and links that the test may damage."""
    job = Job(*arguments, start_timeout_s=60.0, **options)
    try:
        yield job
    finally:
        job.close()


@contextlib.contextmanager
def within(limit_s: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < limit_s, f"took {took:.2f} s"


def ended(pid: int) -> bool:
    """Whether the process is gone, or dead and not yet waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def ignores_sigint(pid: int) -> bool:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_an_exchange_may_be_late(tmp_path: Path) -> None:
    with own_job(1, 1, delay_s=1.0, job_dir=str(tmp_path)) as job:
        (mailbox,) = attach(job)
        shift, center = np.empty(N, np.float32), np.empty(N, np.float32)
        mailbox.x[:] = 1
        with within(0.5):
            mailbox.start_exchange("esgd", 0.5, KINDS)
            assert not mailbox.collect(shift, 0.0)
            assert not mailbox.collect(shift, 0.05)
            assert mailbox.in_flight
        start = time.monotonic()
        assert mailbox.collect(shift, 20.0)
        assert time.monotonic() - start > 0.3  # acknowledged, not only sent
        assert (shift == -0.5).all() and not mailbox.in_flight
        mailbox.pull(center)
        assert (center == 0.5).all()
        _check_that_a_failing_command_is_told(mailbox, tmp_path)


def _check_that_a_failing_command_is_told(mailbox: Mailbox, job_dir: Path) -> None:
    with pytest.raises(CenterError, match="client 0: KeyError: 'no such command'"):
        mailbox._link._call("nothing", 5.0, "no such command")
    log = (job_dir / "logs" / "client0.agent.log").read_text()
    assert "store is up" in log and "KeyError: 'no such command'" in log
    assert (job_dir / "state" / "client0.agent").exists()
    assert mailbox._link.alive


def test_a_killed_agent_is_told_at_the_next_call(tmp_path: Path) -> None:
    with own_job(1, 1, job_dir=str(tmp_path)) as job:
        (mailbox,) = attach(job)
        out, link = np.zeros(N, np.float32), job.links[0]
        os.kill(link.zygote_pid, signal.SIGSTOP)  # nobody can ask it what became of the agent
        os.kill(link.agent_pid, signal.SIGKILL)
        until(lambda: ended(link.agent_pid), 2.0)
        said = r"its agent \(pid \d+\) is gone; its log is"
        with within(2.0), pytest.raises(CenterError, match=said):
            mailbox.pull(out)
        os.kill(link.zygote_pid, signal.SIGCONT)
        assert not link.alive
        with within(0.5), pytest.raises(CenterError, match="its agent"):
            mailbox.start_exchange("esgd", 0.5, KINDS)
        assert mailbox.last_center(out)


def test_an_agent_killed_in_an_exchange_is_told_by_collect() -> None:
    with own_job(1, 1, delay_s=1.0) as job:
        (mailbox,) = attach(job)
        out = np.zeros(N, np.float32)
        mailbox.start_exchange("esgd", 0.5, KINDS)
        pid = job.links[0].agent_pid
        os.kill(pid, signal.SIGKILL)
        said = rf"client 0: its agent \(pid {pid}\) was killed by SIGKILL"
        with within(2.0), pytest.raises(CenterError, match=said):
            mailbox.collect(out, 20.0)
        assert not mailbox.in_flight
        with pytest.raises(CenterError, match=said):
            mailbox.start_exchange("esgd", 0.5, KINDS)


def test_a_dead_zygote_does_not_hurt_its_agent_and_a_dead_server_is_an_error_in_time() -> None:
    with own_job(1, 1, limit_s=1.5) as job:
        (mailbox,) = attach(job)
        out, link = np.zeros(N, np.float32), job.links[0]
        os.kill(link.zygote_pid, signal.SIGKILL)
        link._zygote.process.wait()
        mailbox.start_exchange("esgd", 0.5, KINDS)
        assert mailbox.collect(out, 20.0)
        job.servers.servers[0].kill()
        mailbox.start_exchange("esgd", 0.5, KINDS)
        assert not mailbox.collect(out, 0.1)
        with within(3.0), pytest.raises(CenterError, match=r"no answer within 1\.5 s to an exch"):
            mailbox.collect(out, 20.0)
        assert not link.alive and mailbox.last_center(out)
        until(lambda: ended(link._agent.pid), 2.0)  # although it was stuck in the exchange
        with within(0.5), pytest.raises(CenterError, match="given up"):
            mailbox.pull(out)


def test_a_missing_client_and_a_stopped_agent_are_errors_in_time(tmp_path: Path) -> None:
    with own_job(3, 1, limit_s=1.5, peers_limit_s=1.5, job_dir=str(tmp_path)) as job:
        one, _, two = attach(job)
        out = np.empty(N, np.float32)
        os.kill(job.links[2].agent_pid, signal.SIGSTOP)
        with within(3.0), pytest.raises(CenterError, match=r"no answer within 1\.5 s to a pull"):
            two.pull(out)
        until(lambda: ended(job.links[2].agent_pid), 2.0)  # although it could not see the end
        said = r"no answer within 1\.5 s to a pull of 'm', for which all 3 clients must ask"
        with within(3.0), pytest.raises(CenterError, match=said):
            one.pull(out, sync=True)
        job.links[1].start_timeout_s = 1.0
        said = "within 1 s to the mailbox 'other', which all 3 clients must attach"
        with within(3.0), pytest.raises(CenterError, match=said):
            job.links[1].attach("other", [N], [(0, N)], {})


def test_a_start_that_lacks_scheduler_and_clients_says_so(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "client2.agent").touch()
    link = CenterLink(
        address, client=0, num_clients=4, num_servers=2, sync=False, job_dir=str(tmp_path),
        start_timeout_s=2.0,
    )  # fmt: skip
    try:
        with within(4.0), pytest.raises(CenterError) as caught:
            link.wait_ready()
        for part in [
            "client 0: its agent was given up: its store was not up within 2 s",
            "4 clients and 2 servers",
            f"scheduler {address} (where nothing listens",
            "have asked for their agent: 0, 2; not seen: 1, 3",
            f"its log is {tmp_path}/logs/client0.agent.log",
        ]:
            assert part in str(caught.value)
    finally:
        with within(2.0):
            link.close()
    with pytest.raises(CenterError, match="not up within"):
        link.attach("m", [1], [(0, 1)], {})


def test_a_zygote_that_cannot_start_is_told(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    link = CenterLink("127.0.0.1:9", client=0, num_clients=1, num_servers=1, sync=False)
    try:
        with within(5.0), pytest.raises(CenterError, match="zygote, which ended with 1"):
            link.wait_ready()
    finally:
        link.close()


@pytest.mark.parametrize("with_agent", [False, True])
def test_close_ends_all_at_once(with_agent: bool) -> None:
    address = f"127.0.0.1:{free_port()}"
    link = CenterLink(address, client=0, num_clients=1, num_servers=1, sync=False)
    children = [link.zygote_pid]
    if with_agent:  # stuck: there is no scheduler
        children += _child_of(link.zygote_pid)
        os.kill(children[-1], signal.SIGSTOP)
    with within(2.0):
        link.close()
        link.close()
    assert not link.alive
    until(lambda: all(map(ended, children)), 1.0)


def _child_of(pid: int) -> List[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    until(lambda: bool(path.read_text()), 60.0)
    return [int(child) for child in path.read_text().split()]


@pytest.mark.parametrize("zygote_first", [False, True])
def test_children_end_with_their_leader_though_a_forked_child_lives(
    tmp_path: Path, zygote_first: bool
) -> None:
    servers = Servers(1, 1)
    script = Path(__file__).with_name("leader.py")
    leader = subprocess.Popen(
        [sys.executable, str(script), servers.address, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert leader.stdout is not None
    zygote, agent, child = map(int, leader.stdout.readline().split())
    try:
        assert not any(map(ended, (zygote, agent, child)))
        assert os.sched_getaffinity(agent) == set(range(os.cpu_count() or 1))
        assert os.getsid(zygote) == os.getsid(agent) == zygote  # out of reach of Ctrl-C
        assert ignores_sigint(zygote) and ignores_sigint(agent)
        environment = Path(f"/proc/{zygote}/environ").read_bytes().split(b"\0")
        assert {b"OMP_NUM_THREADS=1", b"CUDA_VISIBLE_DEVICES="} <= set(environment)
        if zygote_first:  # then the agent must see it by itself
            os.kill(zygote, signal.SIGKILL)
        else:  # then it cannot, and the zygote must end it
            os.kill(agent, signal.SIGSTOP)
        leader.kill()
        leader.wait()
        until(lambda: ended(zygote) and ended(agent), 2.0)
        assert not ended(child)
    finally:
        for pid in (child, agent, zygote):
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)
        leader.kill()
        leader.wait()
        leader.stdout.close()
        servers.close()


def test_a_forked_child_does_not_close_its_leaders_link() -> None:
    address = f"127.0.0.1:{free_port()}"
    link = CenterLink(address, client=0, num_clients=1, num_servers=1, sync=False)
    _child_of(link.zygote_pid)
    child = os.fork()
    if child == 0:
        link.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert link.alive and not ended(link.zygote_pid)
    link.close()


def run_server(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GLUON_ESGD_")}
    return subprocess.run(
        [sys.executable, "-m", "gluon_esgd.center.server", *arguments],
        env={**clean, **env}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_server_refuses_what_it_cannot_be() -> None:
    assert "usage" in run_server().stderr
    assert "role='worker' must be" in run_server("worker").stderr
    done = run_server("server", GLUON_ESGD_SCHEDULER="h:1")
    assert done.returncode == 1
    assert re.search("NUM_SERVERS of at least 1 .got 0.", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_lives_through_sigint_and_ends_on_sigterm() -> None:
    servers = Servers(1, 1)
    try:
        link = CenterLink(servers.address, client=0, num_clients=1, num_servers=1, sync=False)
        link.wait_ready()
        processes = (servers.scheduler, *servers.servers)
        for process in processes:
            assert ignores_sigint(process.pid)
            process.send_signal(signal.SIGINT)
        mailbox, out = link.attach("m", [N], [(0, N)], {}), np.empty(N, np.float32)
        mailbox.seed(True, out)
        for process in processes:
            process.terminate()
        assert [process.wait(5) for process in processes] == [-signal.SIGTERM] * 2
        link.close()
    finally:
        servers.close()
