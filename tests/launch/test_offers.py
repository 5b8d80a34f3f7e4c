"""Start values of the center, and meetings: who fills it, who waits for whom."""

from .generation_job import Job, job


def test_start_values_come_from_the_lowest_client_once_all_have_offered():
    run = Job(3).started(0, 1, 2, filled=False)
    run.says(2, "offer", name="trainer0", again=False)
    run.says(1, "offer", name="trainer0", again=False)
    assert run.told("fill") == []
    run.says(0, "offer", name="trainer0", again=False)
    assert run.told("fill") == [(0, {"do": "fill", "name": "trainer0"})]
    run.says(0, "filled", name="trainer0", ok=False)
    assert run.who("fill") == [0]  # once more
    run.says(0, "filled", name="trainer0", ok=True)
    filled = {"do": "filled", "name": "trainer0", "joined": False}
    assert sorted(run.told("filled"), key=str) == [(k, filled) for k in range(3)]


def test_a_client_that_has_closed_its_trainers_is_waited_for_at_the_next_one():
    run = job()
    for client in (0, 1):
        run.says(client, "detach", name="trainer0")
    run.register(0, name="trainer1")
    assert run.told("attach") == []
    run.register(1, name="trainer1")
    assert run.who("attach") == [0, 1]


def test_nobody_goes_on_before_all_that_live_have_pulled_the_start():
    run = Job(3).started(0, 1, 2, filled=False)
    for client in range(3):
        run.says(client, "offer", name="trainer0", again=False)
    run.says(0, "filled", name="trainer0", ok=True)
    run.says(0, "pulled", name="trainer0")
    run.says(2, "pulled", name="trainer0")
    assert run.told("started") == []
    run.gone(1)
    started = {"do": "started", "name": "trainer0"}
    assert run.told("started") == [(0, started), (2, started)]
    run.says(0, "pulled", name="trainer0")  # who could not hear it says so once more
    assert run.told("started") == [(0, started)]


def test_an_offer_of_an_earlier_life_does_not_count():
    run = Job().started(0, 1, filled=False)
    run.says(1, "offer", name="trainer0", again=False)
    run.returns(1)
    run.serve()
    run.ready(0, 1)
    run.says(0, "held", generation=1, fresh=None)
    assert run.machine.running == 2
    run.says(0, "offer", name="trainer0", again=False)
    assert run.told("fill") == []
    run.says(1, "offer", name="trainer0", again=False)
    assert run.who("fill") == [0]


def test_a_fill_that_its_generation_did_not_see_to_the_end_is_done_again():
    run = Job().started(0, 1, filled=False)
    for client in (0, 1):
        run.says(client, "offer", name="trainer0", again=False)
    assert run.who("fill") == [0]
    run.dies("server")
    run.serve()
    run.ready(0, 1)
    run.held(_0=None, _1=None)
    assert run.machine.running == 2  # nothing is filled, so nobody seeds
    assert run.who("fill") == [0]
    run.says(0, "filled", name="trainer0", ok=True)  # of the first generation
    assert run.told("filled") == []
    run.says(0, "filled", name="trainer0", ok=True)
    assert run.who("filled") == [0, 1]


def test_a_fill_whose_answer_was_lost_with_a_connection_is_asked_for_again():
    run = Job().started(0, 1, filled=False)
    for client in (0, 1):
        run.says(client, "offer", name="trainer0", again=False)
    assert run.who("fill") == [0]
    run.hello(0)  # the same process, by another connection, which repeats what counts
    run.register(0)
    run.says(0, "offer", name="trainer0", again=False)
    assert run.who("fill") == [0]
    run.says(0, "filled", name="trainer0", ok=True)
    assert run.who("filled") == [0, 1]


def test_a_center_is_replaced_when_all_offer_again():
    run = job()
    run.says(1, "offer", name="trainer0", again=True)
    assert run.told("fill") == [] and run.told("filled") == []
    run.says(0, "offer", name="trainer0", again=True)
    assert run.who("fill") == [0]
    run.says(0, "filled", name="trainer0", ok=True)
    assert [m["joined"] for _, m in run.told("filled")] == [False, False]


def test_leaders_meet_and_those_that_finish_or_die_are_not_waited_for():
    run = job(3)
    run.says(0, "meet", what="center")
    run.says(1, "meet", what="center")
    assert run.told("met") == []
    run.says(2, "finished")
    assert run.told("met") == [(k, {"do": "met", "what": "center"}) for k in (0, 1)]
    run.says(0, "meet", what="center")
    assert run.told("met") == []  # once each
    run.gone(1)
    assert run.who("met") == [0]
