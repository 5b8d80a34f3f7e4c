"""Vectors that come and go while a generation runs."""

import pytest

from .generation_job import job, joined, vector


def test_a_second_vector_joins_the_running_generation():
    run = job()
    run.register(0, name="trainer1")
    assert run.told("attach") == []
    run.register(1, name="trainer1")
    attach = {"do": "attach", "generation": 1, "vector": vector("trainer1")}
    assert run.told("attach") == [(0, attach), (1, attach)]
    joined(run, 0)
    assert run.told("attached") == []  # agents make its keys together
    joined(run, 1)
    assert run.told("attached") == [(k, {"do": "attached", "name": "trainer1"}) for k in (0, 1)]
    assert run.machine.last == 1 and run.stations == [] and len(run.records) == 1


def test_vectors_join_one_after_the_other():
    run = job()
    run.register(0, name="trainer1")
    run.register(0, name="trainer2")
    run.register(1, name="trainer2")  # agents attach in one order everywhere
    assert [m["vector"]["name"] for _, m in run.told("attach")] == ["trainer2"] * 2
    run.register(1, name="trainer1")
    joined(run, 0, 1, name="trainer1")  # nobody was told to
    assert run.told("attach") == run.told("attached") == []
    joined(run, 1, 0, name="trainer2")
    assert [m["vector"]["name"] for _, m in run.told("attach")] == ["trainer1"] * 2


@pytest.mark.parametrize("fault", ["server", "scheduler", "agent", "client", "late"])
def test_what_is_lost_while_a_vector_joins_makes_the_next_generation_with_it(fault):
    run = job()
    run.register(0, 1, name="trainer1")
    joined(run, 0)
    if fault == "agent":
        run.says(1, "lost", generation=1, stall=False, why="it is gone")
    elif fault == "client":
        run.returns(1)
        run.register(1, name="trainer1")
    elif fault == "late":
        run.after(9.0)
        assert run.machine.handover is None
        run.after(2.0)
    else:
        run.dies(fault)
    # Agents that wait for each other reach no server: nobody can pull the old center.
    assert set(run.who("hold")) >= {0} and run.machine.handover.hard
    run.serve()
    names = [[v["name"] for v in m["vectors"]] for _, m in run.told("prepare")]
    assert names[-2:] == [["trainer0", "trainer1"]] * 2
    run.ready(0, 1)
    run.held(_0=1.0, _1=2.0)
    assert run.told("seed")[-1] == (
        0,
        {"do": "seed", "generation": run.machine.last, "names": ["trainer0"]},
    )
    run.says(0, "seeded", generation=run.machine.last)
    assert [k for k, m in run.told("attached") if m["name"] == "trainer1"] == [0, 1]


def test_who_joins_too_late_attaches_nothing_twice():
    run = job()
    run.register(0, 1, name="trainer1")
    joined(run, 0)
    run.after(11.0)
    run.forget()
    joined(run, 1)  # of the generation that is given up
    assert run.leaders == [] and run.machine.last == 2
    run.serve()
    run.ready(0, 1)
    joined(run, 0, 1)
    run.held(_0=1.0, _1=2.0)
    assert run.told("attached") == []  # not before the generation that has it runs
    run.says(0, "seeded", generation=2)
    joined(run, 0, 1)
    assert run.who("attached") == [0, 1] and run.told("attach") == []
    run.register(0, 1, name="trainer2")
    for client in (0, 1):
        run.says(client, "joined", generation=1, name="trainer2")
    assert run.told("attached") == []  # that generation is over
    joined(run, 0, 1, name="trainer2")
    assert run.who("attached") == [0, 1]


def test_a_vector_that_comes_when_a_client_is_gone_needs_the_next_generation():
    run = job()
    run.gone(1)
    run.register(0, name="trainer1")
    assert run.told("attach") == [] and run.machine.handover is not None
    assert not run.machine.handover.hard


def test_vectors_that_nobody_has_any_more_are_left_behind_in_the_end():
    run = job()
    for number in range(1, 9):
        name = f"trainer{number}"
        run.register(0, 1, name=name)
        joined(run, 0, 1, name=name)
        for client in (0, 1):
            run.says(client, "detach", name=name)
    assert run.machine.last == 1
    run.register(0, 1, name="trainer9")
    assert run.machine.last == 2 and not run.machine.handover.hard
    run.serve()
    names = [[v["name"] for v in m["vectors"]] for _, m in run.told("prepare")]
    assert names == [["trainer0", "trainer9"]] * 2
    run.ready(0, 1)
    run.held(_0=1.0, _1=1.0)
    run.says(0, "saved", generation=1, ok=True)
    run.says(0, "seeded", generation=2)
    assert not run.records[-1]["fault"]
    run.register(0, 1, name="trainer10")
    assert run.machine.last == 2  # it has room again


def test_a_vector_that_all_detached_is_in_no_later_generation():
    run = job()
    run.register(0, 1, name="trainer1")
    joined(run, 0, 1)
    run.forget()
    run.says(0, "detach", name="trainer0")
    run.dies("scheduler")
    run.serve()
    assert [len(m["vectors"]) for _, m in run.told("prepare")] == [2, 2]  # client 1 has it still
    run.ready(0, 1)
    run.says(1, "detach", name="trainer0")
    run.held(_0=1.0, _1=1.0)
    run.forget()
    run.dies("scheduler", generation=2)
    run.serve()
    names = [[v["name"] for v in m["vectors"]] for _, m in run.told("prepare")]
    assert names == [["trainer1"]] * 2
    run.ready(0, 1)
    run.held(_0=1.0, _1=1.0)
    assert run.machine.running == 3  # nothing else was filled
    run.register(0, steps=1)  # another of the same name
    assert run.told("attached") == [] and run.machine.last == 3
    run.register(1, steps=1)
    assert run.who("attach") == [0, 1] and run.machine.last == 3
