"""Clients beyond the number of the start: where they go, what they are told, when there is none.

Ranks are `fake_leader`, the station is `fake_station`: no MXNet, no weights.
"""

import signal

import pytest

from gluon_esgd.cli import main
from gluon_esgd.launch import growth
from gluon_esgd.launch.plan import client_process, leader_at, station_process
from gluon_esgd.settings import read

from .test_plan import site, spec
from .test_restarts import leader
from .test_status import states, until


def test_a_client_more_is_as_the_others():
    job = spec(4, 2, servers=1)
    grown = growth.with_client(site(), "localhost")
    process, other = client_process(job, grown, 2), client_process(job, site(), 1)
    settings = read(process.env)
    assert (settings.client, settings.num_clients, settings.client_size) == (2, 3, 2)
    assert settings.places == "4/6;5/6" and settings.station == "/jobs/1/state/host0.sock"
    assert (process.name, process.log) == ("client 2", "/jobs/1/logs/client2.log")
    assert process.argv == other.argv
    assert read(client_process(job, grown, 0, 1).env).num_clients == 3


def test_it_goes_where_the_fewest_ranks_are_or_where_it_is_told_to():
    job = spec(5, 5, hosts="a:3,b:1,c:1", servers=1)
    here = site(here=("a",))
    assert growth.host_for(job, here, [], None) == "b"
    here = growth.with_client(here, "b")
    assert growth.host_for(job, here, [], None) == "c"
    assert growth.host_for(job, here, [1, 2], None) == "a"  # where places are empty
    assert growth.host_for(job, here, [], "a") == "a"
    assert leader_at(job, 5, here.added) == 1
    station = station_process(job, here, 1)
    assert (station.name, station.host, station.station) == ("station 1", "b", 1)
    assert growth.refill(job, here, [3, 5], None) == 3
    assert growth.refill(job, here, [3, 5], "c") is None
    assert growth.refill(job, here, [3, 4, 5], "b") == 3
    with pytest.raises(ValueError, match="host 'd' is none of this job's, which are a, b, c"):
        growth.host_for(job, here, [], "d")
    with pytest.raises(ValueError, match="host 'd' is none of this job's"):
        growth.refill(job, here, [], "d")


@pytest.mark.parametrize(
    ("options", "sync", "why"),
    [
        ({"servers": 0}, None, "all 2 clients are one MPI job, whose ranks are fixed"),
        ({"servers": 1}, None, "no client has come to its trainer yet"),
        ({"servers": 1, "rule": "sgd"}, True, "under rule sgd all clients make each step together"),
    ],
)
def test_where_none_can_come_the_reason_is_told(options, sync, why):
    with pytest.raises(ValueError, match=why):
        growth.check(spec(2, 2, **options), sync)


def test_a_job_without_servers_and_a_moving_rate_that_is_too_large_are_told():
    with pytest.raises(ValueError, match="no servers by which a further client could exchange"):
        growth.check(spec(1, 1), None)
    fast = spec(2, 2, servers=1, alpha=0.6)
    with pytest.raises(ValueError, match=r"--alpha 0.6 is above 2/\(1\+clients\) = 0.5 .*--beta"):
        growth.host_for(fast, site(), [], None)
    assert growth.host_for(spec(2, 2, servers=1, alpha=0.5), site(), [], None) == "localhost"


def test_a_client_comes_goes_and_comes_again_beyond_those_of_the_start(start, capsys):
    job = start(["-n", 1, "--servers", 1, "--rule", "esgd", "--grace", 5], leader("stay"))
    job.wait_for("filled")
    assert main(["add-client", job.dir]) == 0
    assert capsys.readouterr().out == "client 1 starts on localhost\n"
    assert "go 2 of 2" in job.wait_for("go 2", 2)
    assert "filled True" in job.wait_for("filled")  # the center that is there
    told = until(job, lambda told: told["clients"][1:] and told["clients"][1]["step"])
    assert [(c["client"], c["state"], c["life"]) for c in told["clients"]] == [
        (0, "training", 0),
        (1, "training", 0),
    ]
    assert main(["status", job.dir]) == 0 and "1  training" in capsys.readouterr().out
    assert main(["remove-client", job.dir, "1"]) == 0
    assert "go 3 of 1" in job.wait_for("go 3")
    until(job, lambda told: states(told) == ["training", "empty"])
    assert main(["add-client", job.dir, "--host", "localhost"]) == 0
    assert "go 4 of 2" in job.wait_for("go 4", 2)
    assert until(job, lambda told: told["clients"][1]["step"])["clients"][1]["life"] == 1
    assert main(["add-client", job.dir, "--host", "elsewhere"]) == 2
    assert "host 'elsewhere' is none of this job's" in capsys.readouterr().err
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


def test_one_that_fails_at_its_start_harms_nobody(start, capsys):
    job = start(["-n", 2, "--clients", 2], leader("early", "2"))
    job.wait_for("filled", 2)
    assert main(["add-client", job.dir]) == 0
    job.wait_for("the place of client 2 stays empty; 2 of 3 clients go on")
    told = until(job, lambda told: states(told) == ["training", "training", "empty"])
    assert told["generation"] == 1
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130


def test_a_host_that_had_nobody_gets_a_station_for_it(start, remote, capsys):
    hosts = ["--hosts", "127.0.0.2:1,127.0.0.3:1", "--remote-shell", "fakesh"]
    flags = ["-n", 1, "--servers", 1, "--rule", "esgd"]
    job = start([*flags, *hosts], leader("stay"), **remote)
    job.wait_for("filled")
    assert main(["add-client", job.dir]) == 0
    assert capsys.readouterr().out == "client 1 starts on 127.0.0.3\n"
    assert "filled True" in job.wait_for("filled")
    assert job.pids("gluon_esgd.launch.relay")
    with open(remote["SHELL_LOG"]) as log:
        assert log.read().split() == ["127.0.0.2"] * 2 + ["127.0.0.3"] * 2
    job.popen.send_signal(signal.SIGINT)
    assert job.finish()[0] == 130
