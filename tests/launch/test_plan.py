"""Plans as data: from a spec and a described machine to processes, without starting any."""

import shlex
from dataclasses import replace

import pytest

from gluon_esgd.launch.arguments import main
from gluon_esgd.launch.child import clean_environment
from gluon_esgd.launch.hosts import parse_hosts
from gluon_esgd.launch.mpi import Mpi
from gluon_esgd.launch.plan import Site, client_process, leader_at, plan, servers_at
from gluon_esgd.launch.rank import core_set, place_of
from gluon_esgd.launch.run import look_around
from gluon_esgd.launch.spec import JobSpec
from gluon_esgd.settings import Settings, read

COMMAND = ("python3", "train.py", "--lr", "0.1")
RANK = ["/py", "-m", "gluon_esgd.launch.rank", "--", *COMMAND]
MPICH = Mpi("/bin/mpiexec", "mpich", "5.0.2")
OPENMPI = Mpi("/bin/mpiexec", "openmpi", "5.0.11")


def site(mpi=MPICH, here=("localhost",), **environ):
    return Site(
        python="/py",
        cwd="/my work",
        job_dir="/jobs/1",
        here=frozenset(here),
        address="127.0.0.1",
        mpi=mpi,
        environ=environ,
        base=Settings(stall_abort_s=600.0),
    )


def spec(workers, clients=1, hosts="", **kwargs):
    listed = parse_hosts(hosts) if hosts else ()
    return JobSpec(COMMAND, workers, clients, hosts=listed, dry_run=True, **kwargs)


def test_one_client_is_one_mpi_job():
    (client,) = plan(spec(4), site())
    options = ["-bind-to", "none", "-launcher", "fork", "-iface", "lo", "-localhost", "127.0.0.1"]
    assert list(client.argv) == ["/bin/mpiexec", "-n", "4", *options, *RANK]
    assert (client.name, client.host, client.client) == ("client 0", "localhost", 0)


def test_clients_of_one_rank_need_no_mpi():
    processes = plan(spec(2, 2), site(mpi=None))
    assert [list(p.argv) for p in processes if p.client is not None] == [RANK, RANK]


@pytest.mark.parametrize(("workers", "clients"), [(8, 4), (2, 2)])
def test_clients_without_a_server_are_one_mpi_job(workers, clients):
    (job,) = plan(spec(workers, clients, servers=0), site())
    assert list(job.argv[:3]) == ["/bin/mpiexec", "-n", str(workers)]
    assert list(job.argv[-len(RANK) :]) == RANK
    assert (job.name, job.client, job.clients) == (f"clients 0 to {clients - 1}", 0, clients)
    settings = read(job.env)
    assert settings.is_split and settings.station is None
    assert (settings.client, settings.num_clients) == (0, clients)
    assert (settings.client_size, settings.num_servers) == (workers // clients, 0)
    assert settings.places == ";".join(f"{w}/{workers}" for w in range(workers))
    ranks = [place_of(settings, number) for number in range(workers)]
    size = workers // clients
    assert ranks == [(k, r) for k in range(clients) for r in range(size)]


def test_a_rank_of_a_client_that_is_a_job_of_its_own_is_what_mpi_says():
    settings = read(plan(spec(4, 2), site())[-1].env)
    assert not settings.is_split
    assert [place_of(settings, number) for number in range(2)] == [(1, 0), (1, 1)]


def test_a_split_job_on_several_hosts_passes_the_number_of_clients_on():
    job = spec(4, 2, servers=0, hosts="a:2,b:2")
    (client,) = plan(job, site(OPENMPI, here=()))
    words = list(client.argv)
    passed = {words[k + 1] for k, word in enumerate(words) if word == "-x"}
    assert "GLUON_ESGD_NUM_CLIENTS" in passed and "a:2,b:2" in words
    assert read(client.env).places == "0/2;1/2;0/2;1/2"


def test_open_mpi_is_told_the_same_in_its_own_words():
    (client,) = plan(spec(2), site(OPENMPI))
    options = ["--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    assert list(client.argv) == ["/bin/mpiexec", "-n", "2", *options, *RANK]
    assert client.env["OMPI_ALLOW_RUN_AS_ROOT"] == client.env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]
    assert client.env["OMPI_MCA_btl"] == "self,sm"


def test_the_station_comes_first_and_all_know_the_job():
    processes = plan(spec(4, 2, servers=2, rule="esgd", interval=8, grace_s=5.0), site())
    assert [p.name for p in processes] == ["station 0", "client 0", "client 1"]
    station, *clients = processes
    assert station.argv == ("/py", "-m", "gluon_esgd.center.station")
    assert (station.station, station.log) == (0, "/jobs/1/logs/station.log")
    for process in processes:
        settings = read(process.env)
        assert (settings.num_clients, settings.client_size, settings.num_servers) == (2, 2, 2)
        assert (settings.scheduler, settings.job_dir) == (None, "/jobs/1")
        assert (settings.rule, settings.interval, settings.stall_abort_s) == ("esgd", 8, 600)
        assert settings.grace_s == 5.0
    assert [read(p.env).client for p in clients] == [0, 1]
    assert {read(p.env).station for p in clients} == {"/jobs/1/state/host0.sock"}


def test_a_client_that_starts_again_knows_its_life():
    job = spec(4, 2, servers=1)
    assert [read(client_process(job, site(), 0, life).env).life for life in (0, 1, 2)] == [0, 1, 2]
    first, again = (client_process(job, site(), 1, life) for life in (0, 3))
    assert (first.argv, first.log) == (again.argv, again.log)


def test_each_host_with_servers_or_leaders_has_a_station():
    job = spec(6, 2, hosts="a:2,b:1,c:3", servers=2)
    stations = [p for p in plan(job, site(here=("a",))) if p.client is None]
    assert [(p.host, p.station) for p in stations] == [("a", 0), ("b", 1), ("c", 2)]
    one = spec(6, 2, hosts="a:4,b:1,c:1")  # server and both leaders are on the first
    assert [p.station for p in plan(one, site(here=("a",))) if p.client is None] == [0]
    assert servers_at(job) == [0, 1] and leader_at(job, 1) == 2


def test_hosts_without_slots_are_for_servers():
    job = spec(4, 2, hosts="a:2,s:0,b:2,t:0", servers=3)
    assert servers_at(job) == [1, 3, 1] and leader_at(job, 1) == 2
    stations = [p for p in plan(job, site(here=("a",))) if p.client is None]
    assert [p.host for p in stations] == ["a", "s", "b", "t"]
    clients = [" ".join(client_process(job, site(here=("a",)), k).argv) for k in (0, 1)]
    assert not any(f"{host}:" in argv for argv in clients for host in "st")


def test_compression_is_a_flag_or_the_users_variable():
    for process in plan(spec(2, 2, compression="fp16"), site()):
        assert read(process.env).compression == "fp16"
    environ = {"GLUON_ESGD_COMPRESSION": "fp16"}
    assert look_around(spec(1), environ).base.compression == "fp16"


def test_stations_are_neither_bound_nor_given_a_gpu():
    station, *_ = plan(spec(2, 2), site())
    assert read(station.env).places is None
    assert station.env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(("workers", "clients"), [(1, 1), (4, 1), (4, 2), (6, 3), (4, 4)])
def test_places_count_over_all_workers_of_the_job(workers, clients):
    processes = plan(spec(workers, clients), site())
    places = [read(p.env).places for p in processes if p.client is not None]
    assert ";".join(places) == ";".join(f"{w}/{workers}" for w in range(workers))


def test_places_count_by_machine():
    processes = plan(spec(6, 2, hosts="a:4,b:2", remote_shell="rsh"), site(here=()))
    places = [read(p.env).places for p in processes if p.client is not None]
    assert places == ["0/4;1/4;2/4", "3/4;0/2;1/2"]


def test_without_binding_there_are_places_all_the_same():
    bound, free = (read(plan(spec(2, bind=how), site())[0].env) for how in ("cores", "none"))
    assert bound.places == free.places == "0/2;1/2"
    assert (bound.bind, free.bind) == ("cores", "none")


def test_hosts_reach_mpich_with_the_shell():
    job = spec(6, 2, hosts="a:4,b:2", remote_shell="/opt/shell -q")
    processes = plan(job, site(here=()))
    second = processes[-1]
    options = ["-bind-to", "none", "-launcher", "rsh", "-launcher-exec", "/opt/shell"]
    hosts = ["-hosts", "a:1,b:2", "-genvall"]
    assert list(second.argv) == ["/bin/mpiexec", "-n", "3", *options, *hosts, *RANK]
    assert second.env["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-q"
    assert "UCX_NET_DEVICES" not in second.env


def test_each_client_is_reached_as_it_lies():
    job = spec(4, 2, hosts="a:2,b:2", remote_shell="ssh -q")
    *_, here, there = plan(job, site(here=("a",)))
    assert "-localhost 127.0.0.1" in " ".join(here.argv)
    assert here.env["UCX_NET_DEVICES"] == "lo"
    assert "-localhost a -hosts b:2" in " ".join(there.argv)  # by the name that b knows
    assert "UCX_NET_DEVICES" not in there.env


@pytest.mark.parametrize(
    ("version", "agent"),
    [("5.0.11", ["--prtemca", "plm_ssh_agent"]), ("4.1.4", ["--mca", "plm_rsh_agent"])],
)
def test_hosts_and_variables_reach_open_mpi(version, agent):
    job = spec(2, hosts="a:1,b:1", remote_shell="ssh -q", env=(("A", "1"),))
    (client,) = plan(job, site(replace(OPENMPI, version=version), here=()))
    words = list(client.argv)
    at = words.index(agent[0])
    assert words[at : at + 5] == [*agent, "ssh -q", "--host", "a:1,b:1"]
    passed = {words[k + 1] for k, word in enumerate(words) if word == "-x"}
    assert passed == {name for name in client.env if name.startswith(("GLUON_ESGD_", "A"))}
    assert "OMPI_MCA_btl" not in client.env


def test_a_station_on_another_host_is_started_by_the_shell_all_quoted():
    job = spec(2, 2, hosts="a:1,b:1", servers=2, remote_shell="ssh -q")
    processes = plan(job, site(here=("a",)))
    assert [p.host for p in processes] == ["a", "b", "a", "b"]
    assert [p.remote for p in processes] == [False, True, False, True]
    shell, quiet, host, line = processes[1].argv
    assert (shell, quiet, host) == ("ssh", "-q", "b")
    assert line.startswith("cd '/my work' && exec env ")
    words = shlex.split(line)
    relay = ["/py", "-m", "gluon_esgd.launch.relay", "--"]  # whose input goes to the station
    assert words[-len(relay) - 3 :] == [*relay, "/py", "-m", "gluon_esgd.center.station"]
    settings = read(dict(w.split("=", 1) for w in words if w.startswith("GLUON_ESGD_")))
    assert settings.num_servers == 2
    there = read(processes[3].env).station
    assert there == "/jobs/1/state/host1.sock"


def test_the_users_variables_reach_workers_and_only_them():
    job = spec(2, 2, env=(("A", "1"), ("HOME", None)))
    station, first, second = plan(job, site(HOME="/me"))
    assert "A" not in station.env
    for client in (first, second):
        assert (client.env["A"], client.env["HOME"]) == ("1", "/me")


def test_what_the_user_said_to_the_mpi_library_wins():
    (client,) = plan(spec(2), site(UCX_NET_DEVICES="eth0"))
    assert "UCX_NET_DEVICES" not in client.env


@pytest.mark.parametrize(("text", "value"), [(None, 600.0), ("5", 5.0), ("off", None)])
def test_a_stall_ends_a_launched_job_unless_the_user_says_otherwise(text, value):
    environ = {} if text is None else {"GLUON_ESGD_STALL_ABORT_S": text}
    assert look_around(spec(1), environ).base.stall_abort_s == value


def test_settings_of_an_outer_job_do_not_leak():
    environ = {"GLUON_ESGD_CLIENT": "3", "GLUON_ESGD_BUCKET_BYTES": "5"}
    base = look_around(spec(1), environ).base
    assert (base.client, base.bucket_bytes) == (0, 5)


def test_what_children_inherit():
    kept = {"PATH": "/bin", "OMPI_MCA_pml": "ob1", "UCX_TLS": "tcp"}
    dropped = {"DMLC_ROLE": "w", "PS_RESEND": "1", "PORT": "80", "PMI_RANK": "1", "PMIX_RANK": "1"}
    assert clean_environment({**kept, **dropped, "GLUON_ESGD_CLIENT": "1"}) == kept


@pytest.mark.parametrize("cores", [1, 2, 4, 7])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_cores_are_shared_out(cores, workers):
    sets = [core_set(range(10, 10 + cores), place, workers) for place in range(workers)]
    if workers <= cores:
        assert [len(s) for s in sets] == [cores // workers] * workers
        assert len({core for s in sets for core in s}) == workers * (cores // workers)
    else:
        assert sets == [[10 + place % cores] for place in range(workers)]


def test_a_dry_run_prints_everything_and_makes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hosts = ["--hosts", "alpha.invalid:2,beta.invalid:2", "--servers", "2"]
    assert main(["-n", "4", "--clients", "4", *hosts, "--dry-run", "python3", "a b.py"]) == 0
    out = capsys.readouterr().out
    for name in ("station 0 on alpha", "station 1 on beta", "client 3 on beta"):
        assert name in out
    assert list(tmp_path.iterdir()) == []
