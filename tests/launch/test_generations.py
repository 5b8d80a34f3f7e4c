"""The launcher's side of generations, driven message by message: no process, no clock."""

import pytest

from gluon_esgd.launch import words

from .generation_job import START_S, Job, job, joined, vector


def test_the_first_generation_waits_for_all_and_is_served_in_order():
    start = Job(port=9000)
    start.hello(0, 1)
    assert start.told("welcome") == [(k, {"do": "welcome", "secret": "ab"}) for k in (0, 1)]
    start.register(0)
    assert start.stations == []
    start.register(1)
    counts = {"num_clients": 2, "num_servers": 2}
    scheduler = {"role": "scheduler", "index": 0, "host": "127.0.0.1", "port": 9000}
    assert start.stations == [(0, {"do": "serve", "generation": 1, **scheduler, **counts})]
    start.role("serving", "scheduler", address="127.0.0.1:77")
    server = {"do": "serve", "generation": 1, "role": "server", "scheduler": "127.0.0.1:77"}
    assert start.stations[1:] == [(0, {**server, "index": k, **counts}) for k in (0, 1)]
    prepare = {"do": "prepare", "generation": 1, "scheduler": "127.0.0.1:77", **counts}
    vectors = [vector()]
    assert start.told("prepare") == [
        (k, {**prepare, "client": k, "vectors": vectors}) for k in (0, 1)
    ]
    start.ready(0, 1)
    start.role("serving", "server", 0)
    assert start.told("go") == []
    start.role("serving", "server", 1)
    assert start.told("go") == [
        (k, {"do": "go", "generation": 1, "num_clients": 2, "place": k}) for k in (0, 1)
    ]
    assert start.told("attached") == [(k, {"do": "attached", "name": "trainer0"}) for k in (0, 1)]
    assert start.machine.joined == {0, 1}
    assert start.records[0]["generation"] == 1 and start.records[0]["source"] is None


def test_contracts_that_differ_are_refused_to_all_at_the_start():
    start = Job(3)
    start.hello(0, 1, 2)
    start.register(0, 1)
    start.register(2, num_parameters=6)
    why = "the clients do not match: num_parameters: client 0 has 4, client 2 has 6"
    refuse = {"do": "refuse", "name": "trainer0", "why": why}
    assert start.told("refuse") == [(k, refuse) for k in range(3)]
    assert start.stations == []


def test_a_missing_client_fails_the_job_by_name():
    start = Job(3)
    start.hello(0, 1, 2)
    start.register(0, 2)
    start.after(START_S - 1)
    assert not start.failed
    start.after(2)
    assert start.failed == ["client 1 did not come to a trainer within 120 s of the first"]


def test_nobody_is_missed_while_nobody_has_a_trainer():
    start = Job()
    start.hello(0)
    start.after(10 * START_S)
    assert not start.failed


def test_a_dead_scheduler_is_a_soft_handover_from_the_old_servers():
    run = job()
    run.dies("scheduler")
    assert run.told("hold") == []  # the old generation goes on exchanging
    run.now += 0.5
    run.serve()
    run.ready(0, 1)
    hold = {"do": "hold", "generation": 1, "hard": False}
    assert run.told("hold") == [(0, hold), (1, hold)]
    run.held(_0=3.0, _1=1.0)
    save = {"do": "save", "generation": 1, "names": ["trainer0"]}
    assert run.told("save") == [(0, save)]
    run.says(0, "saved", generation=1, ok=True)
    assert run.told("seed") == [(0, {"do": "seed", "generation": 2, "names": ["trainer0"]})]
    assert run.who("go") == []
    run.says(0, "seeded", generation=2)
    assert run.who("go") == [0, 1]
    assert run.take(run.stations, "end") == [(0, {"do": "end", "generation": 1})]
    assert run.records[-1] == {
        "generation": 2,
        "why": "scheduler was killed by SIGKILL",
        "hard": False,
        "fault": True,
        "seconds": 0.5,
        "source": 0,
        "lost": None,
    }


def test_a_dead_server_is_a_hard_handover_from_the_freshest_client():
    run = job(3)
    run.dies("server", 1)
    hold = {"do": "hold", "generation": 1, "hard": True}
    assert run.told("hold") == [(k, hold) for k in range(3)]  # at once
    run.held(_0=3.0, _1=1.0, _2=None)
    run.serve()
    run.ready(0, 1, 2)
    assert run.told("save") == [] and run.told("hold") == []
    assert run.who("seed") == [1]
    run.says(1, "seeded", generation=2)
    assert run.who("go") == [0, 1, 2]
    assert (run.records[-1]["hard"], run.records[-1]["source"]) == (True, 1)
    assert "may be lost" in run.records[-1]["lost"]


def test_who_does_not_hold_in_time_is_not_waited_for():
    run = job(3)
    run.dies("server")
    run.serve()
    run.ready(0, 1, 2)
    run.held(_2=9.0)
    run.after(2.0)
    assert run.who("seed") == []
    run.after(1.0)
    assert run.who("seed") == [2]


def test_a_stall_is_hard_and_a_lost_agent_is_soft():
    for stall in (True, False):
        run = job()
        run.says(1, "lost", generation=1, stall=stall, why="no answer")
        assert bool(run.told("hold")) is stall
        run.serve()
        run.ready(0, 1)
        run.held(_0=1.0, _1=0.5)
        assert run.who("save" if not stall else "seed") == [1 if stall else 0]


def test_who_cannot_save_is_followed_by_the_next_and_those_without_agent_come_last():
    run = job(3)
    run.says(0, "lost", generation=1, stall=False, why="killed")
    run.serve()
    run.ready(0, 1, 2)
    run.held(_0=1.0, _1=2.0, _2=3.0)
    assert run.who("save") == [1]
    run.after(2.1)
    assert run.who("save") == [2]
    run.says(1, "saved", generation=1, ok=True)  # too late to count
    run.says(2, "saved", generation=1, ok=False)
    assert run.who("save") == [0]
    run.says(0, "saved", generation=1, ok=False)
    assert run.who("seed") == [0]  # nobody could: the freshest of those that clients hold
    assert run.machine.handover.lost


def test_an_old_server_that_dies_makes_a_soft_handover_hard():
    run = job()
    run.dies("scheduler")
    run.serve()
    run.ready(0, 1)
    run.forget()
    run.dies("server", generation=1)
    assert run.machine.last == 3
    assert [m["hard"] for _, m in run.told("hold")] == [True, True]
    run.held(_0=2.0, _1=1.0)
    run.serve()
    run.ready(0, 1)
    assert run.who("seed") == [1]


def test_an_old_server_is_not_missed_once_its_center_was_saved():
    run = job()
    run.dies("scheduler")
    run.serve()
    run.ready(0, 1)
    run.held(_0=2.0, _1=1.0)
    run.says(0, "saved", generation=1, ok=True)
    run.dies("server", generation=1)
    assert run.machine.last == 2 and run.who("seed") == [0]


def test_a_second_fault_keeps_the_saved_center_and_late_words_are_ignored():
    run = job()
    run.dies("scheduler")
    run.serve()
    run.ready(0, 1)
    run.held(_0=2.0, _1=1.0)
    run.says(0, "saved", generation=1, ok=True)
    run.forget()
    run.dies("server", generation=2)  # of the one being prepared
    assert run.machine.last == 3
    assert run.take(run.stations, "end") == []  # "end" would take the old servers, too
    run.says(0, "ready", generation=2)
    run.says(1, "lost", generation=2, stall=True, why="late")
    assert run.machine.last == 3
    run.serve()
    run.ready(0, 1)
    run.held(_0=4.0, _1=3.0)
    assert run.told("save") == [] and run.who("seed") == [0]
    run.says(0, "seeded", generation=3)
    assert run.who("go") == [0, 1]
    assert run.take(run.stations, "end") == [(0, {"do": "end", "generation": 2})]
    why = "scheduler was killed by SIGKILL; then server 0 was killed by SIGKILL"
    assert run.records[-1]["why"] == why and not run.records[-1]["hard"]


@pytest.mark.parametrize("how", ["late", "lost"])
def test_another_client_seeds_when_the_seeder_fails(how):
    run = job()
    run.dies("server")
    run.serve()
    run.ready(0, 1)
    run.held(_0=2.0, _1=1.0)
    assert run.who("seed") == [1]
    if how == "late":
        run.after(10.1)
    else:
        run.says(1, "lost", generation=2, stall=False, why="killed")
    assert run.machine.last == 3
    run.serve()
    run.ready(0, 1)
    run.held(_0=2.5, _1=1.5)
    assert run.who("seed") == [0]


def test_a_client_that_dies_starts_nothing_but_its_return_does():
    run = job(3)
    run.gone(2)
    assert run.machine.last == 1
    run.hello(2, life=1)
    assert run.machine.last == 1  # it has not registered yet
    run.register(2)
    assert run.machine.last == 2 and run.machine.handover.why == "client 2 came back"
    run.serve()
    run.ready(0, 1, 2)
    assert run.who("hold") == [0, 1]  # it takes no part in the running generation
    run.held(_0=1.0, _1=1.0)
    run.says(0, "saved", generation=1, ok=True)
    run.says(0, "seeded", generation=2)
    assert run.who("attached") == [2]
    run.says(2, "offer", name="trainer0", again=False)
    joined = {"do": "filled", "name": "trainer0", "joined": True}
    assert run.told("filled") == [(2, joined)] and run.told("fill") == []


def test_client_0_fills_nothing_by_coming_back():
    run = job()
    run.returns(0)
    run.says(0, "offer", name="trainer0", again=False)
    assert run.told("fill") == []  # not before the new generation is there
    run.serve()
    run.ready(0, 1)
    run.held(_1=1.0)
    run.says(1, "saved", generation=1, ok=True)
    run.says(1, "seeded", generation=2)
    assert [m["joined"] for _, m in run.told("filled")] == [True] and run.told("fill") == []


def test_a_client_that_comes_back_with_another_network_is_refused_alone():
    run = job(3)
    run.gone(1)
    run.hello(1, life=1)
    run.register(1, num_parameters=6)
    ((client, refuse),) = run.told("refuse")
    assert client == 1
    assert refuse["why"].endswith("num_parameters: client 0 has 4, client 1 has 6")
    assert run.machine.last == 1


def test_a_client_that_dies_in_a_handover_is_left_out():
    run = job(3)
    run.dies("scheduler")
    run.serve()
    run.ready(0, 1)
    run.gone(2)
    assert (run.machine.last, sorted(run.machine.handover.members)) == (3, [0, 1])
    assert not run.machine.handover.hard
    run.serve()
    prepared = {client: message["client"] for client, message in run.told("prepare")}
    assert prepared[0] == 0 and prepared[1] == 1
    for failures in range(4):  # clients that come and go do not use up the job's patience
        run.returns(1, life=2 + failures)
    assert not run.failed


def test_who_is_not_ready_in_time_is_asked_again_later_and_later():
    run = job(3)
    run.dies("scheduler")
    for generation, pause in ((2, 30), (4, 60)):
        run.serve()
        run.ready(0, 2)
        run.after(31)
        run.says(1, "progress", step=5, exchanges=1, lost=0, late=0, staleness_s=None)
        # It trains, but that says nothing of its agent: the others do not wait for it again.
        assert run.machine.last == generation + 1
        assert sorted(run.machine.handover.members) == [0, 2]
        run.serve()
        run.ready(0, 2)
        run.held(_0=1.0, _2=1.0)
        run.says(0, "saved", generation=run.machine.running, ok=True)
        run.says(0, "seeded", generation=generation + 1)
        assert (run.machine.running, sorted(run.machine.crew)) == (generation + 1, [0, 2])
        run.after(pause - 1)
        assert run.machine.handover is None
        run.after(2)
        assert sorted(run.machine.handover.members) == [0, 1, 2]
    assert run.failed == []


def test_who_comes_back_or_has_a_new_trainer_is_not_absent_any_more():
    run = job(3)
    run.dies("scheduler")
    run.serve()
    run.ready(0, 2)
    run.after(31)
    assert sorted(run.machine.handover.members) == [0, 2]
    run.returns(1)
    assert sorted(run.machine.handover.members) == [0, 1, 2]


def test_three_failed_handovers_in_a_row_fail_the_job():
    run = job()
    run.dies("scheduler")
    for _ in range(2):
        run.dies("server", 1, generation=run.machine.last)
    run.serve()
    run.ready(0, 1)
    run.held(_0=1.0, _1=1.0)
    run.says(0, "saved", generation=1, ok=True)
    run.says(0, "seeded", generation=run.machine.last)
    assert run.machine.running == 4  # from here it is counted anew
    run.dies("scheduler")
    for _ in range(2):
        run.dies("server", 1, generation=run.machine.last)
    assert not run.failed
    run.dies("server", 1, generation=run.machine.last)
    assert "3 hand-overs of the center in a row failed" in run.failed[0]
    assert "server 1 was killed by SIGKILL" in run.failed[0]


def test_a_start_that_never_ends_fails_the_job_and_names_who_is_late():
    start = Job()
    start.hello(0, 1)
    start.register(0, 1)
    start.serve()
    start.ready(1)
    start.after(START_S + 1)
    assert len(start.failed) == 1 and "no agent of client 0 was ready" in start.failed[0]


def test_a_finished_client_takes_no_part_in_later_generations():
    run = job(3)
    run.says(0, "finished")
    run.gone(0)
    run.dies("server")
    run.serve()
    assert run.who("prepare") == [1, 2]
    run.ready(1, 2)
    run.held(_1=1.0, _2=2.0)
    run.says(1, "seeded", generation=2)
    assert sorted(run.machine.crew) == [1, 2]
    assert [m["num_clients"] for _, m in run.told("go")] == [3, 3]  # those that the job is to have


def test_when_nobody_is_left_a_dead_server_waits_for_who_comes_back():
    run = job()
    run.gone(0)
    run.gone(1)
    run.dies("server")
    assert run.machine.last == 1
    run.returns(1)
    assert run.machine.last == 2 and run.machine.handover.hard
    run.serve()
    run.ready(1)
    assert run.machine.running == 2
    assert run.records[-1]["lost"] == "the center of trainer0, which no client holds"
    run.says(1, "offer", name="trainer0", again=False)
    assert run.who("fill") == [1]  # so it is filled anew


def test_a_station_that_ends_takes_roles_and_connections_with_it():
    run = job()
    run.machine.station_ended(0, "the station of a ended")
    assert run.machine.last == 1  # nobody is connected
    for client in (0, 1):
        run.says(client, "hello", client=client, pid=run.pids[client], life=0)
        run.register(client)
    assert sorted(run.machine.handover.members) == [0, 1] and run.machine.handover.hard
    assert {m["generation"] for _, m in run.told("hold")} == {1}  # they still hold its center
    run.held(_0=2.0, _1=1.0)
    run.serve()
    run.ready(0, 1)
    assert run.who("seed") == [1]
    run.says(1, "seeded", generation=run.machine.last)
    assert run.who("attached") == [0, 1]  # of their second registration


def test_a_job_that_has_failed_begins_nothing_when_a_station_ends():
    run = Job().started(0, 1, sync=True)
    run.dies("server")
    assert len(run.failed) == 1
    run.forget()
    run.machine.station_ended(0, "station 0 was killed by SIGKILL")
    assert len(run.failed) == 1 and run.stations == []


def test_a_connection_that_only_broke_goes_on_with_its_generation():
    run = job()
    run.gone(1)
    run.says(1, "hello", client=1, pid=run.pids[1], life=0)
    run.register(1)
    assert run.machine.last == 1 and run.who("attached") == [1]


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_under_rule_sgd_every_loss_is_that_of_the_job(role):
    run = Job().started(0, 1, sync=True, filled=False)
    run.dies(role)
    assert len(run.failed) == 1 and "under rule sgd there is no center" in run.failed[0]
    run.after(1000)
    assert len(run.failed) == 1


def test_under_rule_sgd_a_second_vector_needs_no_seed():
    run = Job().started(0, 1, sync=True, filled=False)
    run.register(0, 1, name="trainer1", sync=True)
    joined(run, 0, 1)
    assert run.who("attached") == [0, 1] and run.told("fill") == []


def test_under_rule_sgd_what_is_late_is_tried_again():
    run = Job().started(0, 1, sync=True, filled=False)
    for client in (0, 1):
        run.says(client, "detach", name="trainer0")
    run.register(0, 1, sync=True)  # another of that name, which agents hold still
    for attempt in (2, 3, 4):
        assert run.machine.last == attempt and run.failed == []
        run.serve()
        run.ready(0)
        run.after(31.0)
    assert len(run.failed) == 1 and "no agent of client 1 was ready" in run.failed[0]


def test_a_place_that_stays_empty_counts_no_more():
    run = job(3)
    run.gone(1)
    run.machine.leave(1)
    run.serve()  # a generation of its own tells the others
    run.ready(0, 2)
    run.held(_0=1.0, _2=1.0)
    run.says(0, "saved", generation=1, ok=True)
    run.says(0, "seeded", generation=2)
    assert [(k, m["num_clients"], m["place"]) for k, m in run.told("go")] == [(0, 2, 0), (2, 2, 1)]
    assert run.records[-1]["why"] == "client 1 left" and not run.records[-1]["hard"]
    run.hello(1, life=1)
    assert run.told("welcome") == []  # nobody asked it to come


def test_a_client_that_was_never_there_leaves_without_a_generation():
    run = job(2)
    run.machine.enter(2)
    run.machine.leave(2)
    assert run.told("hold") == [] and run.machine.handover is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[" * 100000,
        b"\xff",
        b"7",
        b'{"say":"up"}',
        b'{"say":"up","pid":true}',
        b'{"say":["up"],"pid":1}',
        b'{"say":"heard","client":0,"message":{"say":"ready","generation":-1}}',
        b'{"say":"heard","client":0,"message":{"say":"held","generation":1,"fresh":NaN}}',
        b'{"say":"heard","client":0,"message":{"say":"shout"}}',
        b'{"say":"serving","generation":1,"role":"scheduler","index":0,"pid":1}',
    ],
)
def test_what_is_no_message_is_none(line):
    assert words.parse(line) is None


def test_unknown_fields_are_ignored():
    assert words.parse(b'{"say":"up","pid":4,"more":[1]}')["pid"] == 4
