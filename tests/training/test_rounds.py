"""Rule ``sgd`` between clients: rounds begin while later buckets are reduced in the client."""

from __future__ import annotations

import os
import re
import time
from typing import Any, List, Sequence, Tuple

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

from gluon_esgd.communicator import Communicator
from gluon_esgd.counters import Counters
from gluon_esgd.engine import Lane
from gluon_esgd.errors import CenterError, LostClientsError
from gluon_esgd.gradients import GradientReducer
from gluon_esgd.settings import Settings

from ..pool import Pools, Shape, label, run_once, until
from .problems import batches, digest, flat, make_trainer, network, own_share, train_step
from .telling import before_each_pack, train_and_tell, worker_rank

BUCKETS = (("GLUON_ESGD_BUCKET_BYTES", "64"),)
COUNT = 3  # that makes of the parameters
SERVERS = Shape(4, 2, 2, "sgd", settings=BUCKETS)
SPLIT = Shape(4, 2, 0, "sgd", settings=BUCKETS)


def _watched(waits: bool) -> Tuple[List[Tuple[str, int]], str]:
    """What the second of two steps does, in order; with `waits` its last bucket waits for rounds.

    Until the sums of the buckets before it are here, without anybody having asked for them.
    """
    from gluon_esgd import rounds, world

    events: List[Tuple[str, int]] = []
    net = network()
    trainer = make_trainer(net)
    x, y = batches()
    train_step(net, trainer, own_share(x[0]), own_share(y[0]))
    mx.nd.waitall()
    boxes = trainer._replica._rounds
    before = boxes.server_bytes
    lengths = trainer._replica._round_lengths
    earlier = 2 * 4 * sum(lengths[:-1])

    def pack(step: int, bucket: int) -> None:
        events.append(("pack", bucket))
        if waits and bucket == len(lengths) - 1 and world().is_leader:
            until(lambda: boxes.server_bytes - before == earlier, 20.0)

    originals = rounds.ClientRounds.start_sum, rounds.ClientRounds.finish_sum

    def noted(name: str, original: Any) -> Any:
        def call(self: Any, number: int, *args: Any) -> None:
            events.append((name, number))
            original(self, number, *args)

        return call

    rounds.ClientRounds.start_sum = noted("start", originals[0])  # type: ignore[method-assign]
    rounds.ClientRounds.finish_sum = noted("finish", originals[1])  # type: ignore[method-assign]
    undo = before_each_pack(pack)
    try:
        train_step(net, trainer, own_share(x[1]), own_share(y[1]))
        mx.nd.waitall()
    finally:
        undo()
        rounds.ClientRounds.start_sum, rounds.ClientRounds.finish_sum = originals  # type: ignore
    trainer.finish()
    return events, digest(net)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "shape",
    [pytest.param(SERVERS, marks=pytest.mark.servers), SPLIT],
    ids=label,
)
def test_rounds_are_under_way_while_later_buckets_are_reduced(pools: Pools, shape: Shape) -> None:
    results = pools.get(shape).run(_watched, shape.servers > 0)
    assert len({weights for _, weights in results}) == 1
    for worker, (events, _) in enumerate(results):
        packs = [("pack", number) for number in range(COUNT)]
        begins = [pair for p in range(COUNT) for pair in (("pack", p), ("start", p))]
        ends = [("finish", number) for number in range(COUNT)]
        assert events == (packs if worker % 2 else begins + ends)


def _weights() -> np.ndarray:
    net = network()
    trainer = make_trainer(net)
    for x, y in zip(*batches(6)):
        train_step(net, trainer, own_share(x), own_share(y))
    trainer.finish()
    return flat(net)


@pytest.mark.servers
@pytest.mark.mpi
def test_how_buckets_are_cut_does_not_change_a_bit(pools: Pools) -> None:
    many, one = (pools.get(shape).run(_weights) for shape in (SERVERS, Shape(4, 2, 2, "sgd")))
    for weights in [*many, *one]:
        np.testing.assert_array_equal(weights, many[0])


def last_bucket_fails() -> None:
    def fail(step: int, bucket: int) -> None:
        if worker_rank() == 1 and (step, bucket) == (3, COUNT - 1):
            raise MemoryError("no room for the bucket")

    before_each_pack(fail)
    train_and_tell(20, lambda i, trainer: mx.nd.waitall())


@pytest.mark.mpi
@pytest.mark.parametrize(
    "shape", [pytest.param(SERVERS, marks=pytest.mark.servers), SPLIT], ids=label
)
def test_an_error_behind_rounds_under_way_is_said_on_all_ranks(shape: Shape) -> None:
    ended = run_once(shape, last_bucket_fails)
    assert ended.code != 0 and ended.seconds < 40
    which = rf"gradient bucket {COUNT - 1} \(\w+\), step 3, seen by rank \d"
    for worker in (0, 1):
        told = rf"worker {worker} raised CollectiveError: {which}: rank 1: .*no room for the bucket"
        assert re.search(told, ended.output), ended.output
    for worker in (2, 3):
        told = rf"worker {worker} raised LostClientsError: {which}: a rank of another client"
        assert re.search(told, ended.output), ended.output


def agent_dies() -> None:
    """That of client 1, while rounds are under way for which client 0 has not begun its own."""
    import signal

    folder = os.environ["ONCE_FOLDER"]

    def hold(step: int, bucket: int) -> None:
        if step != 3 or worker_rank() not in (0, 2):
            return
        if worker_rank() == 0 and bucket == 0:
            until(lambda: os.path.exists(f"{folder}/killed"), 30.0)
        if worker_rank() == 2 and bucket == COUNT - 1:
            from gluon_esgd.job import job

            os.kill(job()._link.agent_pid, signal.SIGKILL)
            open(f"{folder}/killed", "w").close()

    before_each_pack(hold)
    train_and_tell(20, lambda i, trainer: mx.nd.waitall())


@pytest.mark.servers
@pytest.mark.mpi
def test_an_agent_that_dies_with_rounds_under_way_ends_all_ranks() -> None:
    start = time.monotonic()
    ended = run_once(SERVERS, agent_dies)
    assert ended.code != 0 and time.monotonic() - start < 50
    for worker in range(4):
        told = rf"worker {worker} raised LostClientsError: gradient bucket 0 .*, step 3, seen by"
        assert re.search(told, ended.output), ended.output


class Between:
    """Another client, which brings the same gradients; `fault` says what fails for a bucket."""

    num_clients = 2

    def __init__(self, fault: Tuple[str, int]) -> None:
        self._fault, self.calls = fault, []  # type: Tuple[str, int], List[Tuple[str, int]]

    def _note(self, what: str, number: int) -> None:
        self.calls.append((what, number))
        if (what, number) == self._fault:
            raise CenterError("the agent is gone")

    def start_sum(self, number: int, buffer: np.ndarray, what: str) -> None:
        self._note("start", number)

    def finish_sum(self, number: int, buffer: np.ndarray, what: str) -> None:
        self._note("finish", number)
        buffer *= 2

    def gather(self, rates: Sequence[float]) -> List[List[float]]:
        raise AssertionError("both clients train")


@pytest.mark.parametrize(
    ("fault", "begun", "ended"),
    [
        (("start", 1), [0, 1], [0]),
        (("finish", 1), [0, 1, 2], [0, 1]),
        (("nothing", 0), [0, 1, 2], [0, 1, 2]),
    ],
)
def test_a_round_that_was_not_had_is_the_last(
    fault: Tuple[str, int], begun: List[int], ended: List[int]
) -> None:
    """No other is begun where one could not be: each would wait as long for what is lost."""
    net, between, lane = network(), Between(fault), Lane()
    params = list(net.collect_params().values())
    settings = Settings(bucket_bytes=64)
    reducer = GradientReducer(params, Communicator(), lane, Counters(), settings, between)
    reducer.lengths()
    with autograd.record():
        loss = net(mx.nd.array(batches()[0][0])).sum()
    loss.backward()
    reducer.settle()
    reducer.reduce(1, 2.0)
    if fault[0] == "nothing":
        lane.wait()
    else:
        with pytest.raises(LostClientsError, match=r"bucket 1 .*: rank 0: the agent is gone"):
            lane.wait()
    assert [number for what, number in between.calls if what == "start"] == begun
    assert [number for what, number in between.calls if what == "finish"] == ended
