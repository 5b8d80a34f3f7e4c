"""Command lines: what they mean, and all that can be wrong with them, told at once."""

import argparse
import socket
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from gluon_esgd.launch import arguments
from gluon_esgd.launch.hosts import Host, is_here, parse_hosts, place_workers, read_hostfile


def spec(*argv, command=("python3", "train.py")):
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return arguments.spec_from(parser.parse_args([*argv, *command]))


def faults(*argv, **kwargs):
    with pytest.raises(ValueError) as caught:
        spec(*argv, **kwargs)
    return str(caught.value)


def test_defaults():
    job = spec("-n", "4")
    assert (job.workers, job.clients, job.client_size, job.num_servers) == (4, 1, 4, 0)
    assert job.command == ("python3", "train.py")
    assert (job.bind, job.start_timeout_s, job.remote_shell) == ("cores", None, "ssh")
    assert (job.max_restarts, job.min_clients, job.grace_s, job.resume) == (None, None, 30.0, False)


@pytest.mark.parametrize(("clients", "servers"), [(1, 0), (2, 1), (4, 1)])
def test_there_is_a_server_as_soon_as_there_are_several_clients(clients, servers):
    assert spec("-n", "4", "--clients", str(clients)).num_servers == servers


def test_one_client_may_have_servers():
    assert spec("-n", "1", "--servers", "2").num_servers == 2


def test_without_a_server_several_clients_are_one_mpi_job():
    job = spec("-n", "4", "--clients", "4", "--servers", "0", "--rule", "sgd")
    assert (job.num_servers, job.is_split, job.needs_mpi) == (0, True, True)
    apart = spec("-n", "4", "--clients", "4")
    assert (apart.is_split, apart.needs_mpi) == (False, False)


def test_the_commands_own_flags_are_left_alone():
    command = ("--", "python3", "train.py", "--lr", "0.1", "-n", "7", "--", "--env")
    assert spec("-n", "1", command=command).command == command[1:]


def test_all_flags_arrive():
    job = spec(
        *("-n", "6", "--clients", "3", "--servers", "2", "--rule", "esgd", "--interval", "8"),
        *("--alpha", "0.25", "--lazy", "0", "--env", "A=b=c", "--env", "PATH", "--bind", "none"),
        *("--start-timeout", "9.5", "--job-dir", "here", "--dry-run", "--compression", "fp16"),
        *("--max-restarts", "5", "--min-clients", "2", "--grace", "7.5"),
    )
    assert (job.max_restarts, job.min_clients, job.grace_s) == (5, 2, 7.5)
    assert (job.rule, job.interval, job.alpha, job.lazy) == ("esgd", 8, 0.25, 0)
    assert job.env == (("A", "b=c"), ("PATH", None)) and job.compression == "fp16"
    assert (job.bind, job.start_timeout_s, job.job_dir, job.dry_run) == ("none", 9.5, "here", True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "-n is missing"),
        ("-n two", "-n 'two' must be an integer"),
        ("-n 0", "-n 0 must be at least 1"),
        ("-n 4 --clients 3", "must divide -n 4: clients are of equal size; give --clients 2 or "),
        ("-n 4 --clients 3", "--clients 2 or --clients 4, or -n 3 or -n 6"),
        ("-n 2 --clients 4", "of equal size; give --clients 2, or -n 4"),
        ("-n 7 --clients 4095", "give --clients 7, or -n 4095"),
        ("-n 1000000000001 --clients 3", "-n 1000000000001 must be at least 1, and 4096 at most"),
        ("-n 12 --clients 5", "give --clients 4 or --clients 6, or -n 10 or -n 15"),
        ("-n 4 --clients 0", "--clients 0 must be at least 1"),
        ("-n 4 --servers -1", "--servers -1 must be at least 0"),
        (
            "-n 4 --clients 2 --servers 0 --rule asgd",
            "--servers 0 with --rule asgd and 2 clients: asynchronous clients need a server",
        ),
        ("-n 2 --clients 2 --servers 0 --mpiexec /nowhere/mpiexec", "'/nowhere/mpiexec' is not a"),
        ("-n 1 --env GLUON_ESGD_NUM_CLIENTS=2", "NUM_CLIENTS: set by the launcher itself"),
        ("-n 4 --rule easgd", "--rule easgd must be one of sgd, asgd, esgd"),
        ("-n 4 --compression 2bit", "--compression 2bit must be fp16"),
        ("-n 4 --rule sgd --interval 2", "--interval 2 with --rule sgd"),
        ("-n 4 --interval 0", "--interval 0 must be at least 1"),
        ("-n 4 --interval 2 --lazy 3", "--lazy 3 must not exceed --interval 2"),
        ("-n 4 --lazy -1", "--lazy -1 must be at least 0"),
        ("-n 4 --alpha x", "--alpha 'x' must be a number"),
        ("-n 4 --alpha 0.1 --beta 0.2", "give one"),
        ("-n 4 --clients 4 --alpha 0.41", "2/(1+clients) = 0.4 for 4 clients"),
        ("-n 4 --clients 4 --beta 1.7", "--beta 1.7: alpha = 0.425 must lie in"),
        ("-n 4 --alpha -0.1", "--alpha -0.1: alpha = -0.1 must lie in"),
        ("-n 4 --alpha nan", "alpha = nan must lie in"),
        ("-n 4 --hosts localhost:2", "-n 4 exceeds the 2 slots"),
        ("-n 1 --hosts localhost:1,127.0.0.9:0", "127.0.0.9 have 0 slots, which is for servers"),
        ("-n 1 --hosts a:x", "--hosts: 'a:x' must be NAME or NAME:SLOTS"),
        ("-n 1 --hosts a:9999", "--hosts: 'a:9999' must be"),
        ("-n 1 --hosts a,b,a", "--hosts: a given more than once"),
        ("-n 1 --hosts a --hostfile b --dry-run", "--hosts and --hostfile: give one"),
        ("-n 1 --hostfile /nowhere", "--hostfile: '/nowhere' cannot be read"),
        ("-n 2 --hosts localhost:1,b:1 --dry-run", "localhost among others"),
        ("-n 1 --hosts no.such.host.invalid", "'no.such.host.invalid' has no address"),
        ("-n 1 --hosts 127.0.0.2 --remote-shell nossh", "--remote-shell 'nossh' is not a program"),
        ("-n 1 --env 1A=b", "--env '1A' must be NAME=VALUE"),
        ("-n 1 --env NOT_SET_HERE", "--env NOT_SET_HERE: not set here"),
        ("-n 1 --env DMLC_ROLE=worker", "--env DMLC_ROLE: the parameter server's own"),
        ("-n 1 --env PORT=1", "--env PORT: the parameter server's own"),
        ("-n 1 --env GLUON_ESGD_CLIENT=1", "--env GLUON_ESGD_CLIENT: set by the launcher itself"),
        ("-n 1 --env GLUON_ESGD_STALL_WARNING_S=x", "GLUON_ESGD_STALL_WARNING_S='x' must be"),
        ("-n 1 --start-timeout 0", "--start-timeout 0 must be above 0"),
        ("-n 1 --start-timeout soon", "--start-timeout 'soon' must be a number of seconds"),
        ("-n 1 --port 70000", "--port 70000 must lie in 1 .. 65535"),
        ("-n 2 --clients 2 --max-restarts -1", "--max-restarts -1 must be at least 0"),
        ("-n 2 --clients 2 --max-restarts x", "--max-restarts 'x' must be an integer"),
        ("-n 2 --clients 2 --min-clients 3", "--min-clients 3 must lie in 1 .. 2"),
        ("-n 2 --clients 2 --min-clients 0", "--min-clients 0 must lie in 1 .. 2"),
        ("-n 2 --clients 2 --min-clients 1 --rule sgd", "--min-clients 1: only clients that"),
        ("-n 1 --grace -1", "--grace -1 must be at least 0 seconds"),
        ("-n 1 --grace inf", "--grace inf must be at least 0 seconds"),
        ("-n 1 --resume /nowhere", "--resume '/nowhere' is not a folder"),
        ("-n 1 --resume . --job-dir x", "--job-dir and --resume: give one of them"),
        ("-n 1 --bind socket", "--bind socket must be cores or none"),
        ("-n 2 --mpiexec /nowhere/mpiexec", "'/nowhere/mpiexec' is not a program"),
        ("-n 2 --mpiexec /bin/true", "neither MPICH nor Open MPI"),
    ],
)
def test_each_fault_names_value_and_remedy(argv, says):
    assert says in faults(*argv.split())


def test_all_faults_come_at_once():
    message = faults(
        *("-n", "4", "--clients", "3", "--rule", "sgd", "--interval", "2", "--lazy", "x"),
        *("--bind", "some", "--port", "0", "--env", "PORT=1"),
        command=("no-such-program",),
    )
    assert message.startswith("command line: 7 faults:")
    for part in ("--clients 3", "--rule sgd", "--lazy 'x'", "--bind some", "--port 0", "PORT"):
        assert part in message
    assert "'no-such-program' is not a program on PATH" in message


def test_only_numbers_that_can_be_given_are_named():
    assert faults("-n", "7", "--clients", "9999").endswith("of equal size; give --clients 7")


def test_a_script_in_place_of_a_program_is_said(tmp_path):
    script, program = tmp_path / "train.py", tmp_path / "train"
    assert faults("-n", "1", command=(str(script),)).endswith("or a path to one")
    script.touch()
    assert f"but a file: give python {script}" in faults("-n", "1", command=(str(script),))
    program.touch()
    assert f"but a file: chmod +x {program}" in faults("-n", "1", command=(str(program),))


def test_a_command_is_needed():
    assert "no command" in faults("-n", "1", command=())


def test_a_port_in_use_is_a_fault_and_a_free_one_is_taken():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        assert f"--port {port} is in use" in faults("-n", "2", "--clients", "2", "--port", port)
        assert spec("-n", "2", "--port", port).num_servers == 0  # nobody would bind it
    assert spec("-n", "2", "--clients", "2", "--port", port).port == int(port)


def test_faults_leave_by_exit_code_2(capsys):
    assert arguments.main(["-n", "3", "--clients", "2", sys.executable]) == 2
    assert "gluon-esgd run: command line: --clients 2 must divide" in capsys.readouterr().err


def test_hosts_and_hostfile_say_the_same(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# machines\nalpha slots=4\n\nbeta:2  # small\ngamma\n")
    expected = (Host("alpha", 4), Host("beta", 2), Host("gamma", 1))
    assert read_hostfile(str(path)) == parse_hosts("alpha:4, beta:2,gamma") == expected
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="names no host"):
        read_hostfile(str(path))


def test_all_slots_are_taken_when_n_is_left_out():
    assert spec("--hosts", "localhost:3").workers == 3


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_hosts_are_filled_in_order(workers):
    placed = place_workers((Host("a", 2), Host("b", 3)), workers)
    assert placed == ["a", "a", "b", "b", "b"][:workers]


def test_this_machine_is_known_by_its_names():
    assert is_here("localhost") and is_here(socket.gethostname()) and is_here("127.0.0.1")
    assert not is_here("127.0.0.2") and not is_here("no.such.host.invalid")


def test_a_scheduler_that_other_hosts_cannot_reach_is_a_fault(monkeypatch):
    addresses = {"alpha": "127.0.1.1", "beta": "10.0.0.2", "gamma": "10.0.0.3"}
    monkeypatch.setattr(socket, "gethostbyname", addresses.__getitem__)
    both = ("-n", "2", "--clients", "2", "--remote-shell", "true")
    said = faults(*both, "--hosts", "alpha,beta")
    assert "host 'alpha' is 127.0.1.1 here" in said and "the interface" in said
    assert spec(*both, "--hosts", "beta,gamma").workers == 2
    assert spec("-n", "2", "--remote-shell", "true", "--hosts", "alpha,beta").num_servers == 0


def test_versions_of_what_workers_import(monkeypatch):
    versions = {"mxnet": "1.6.0", "numpy": "1.24.1"}

    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    said = faults("-n", "2")
    assert "mxnet is 1.6.0 in " in said and "pip install 'mxnet==1.9.1'" in said
    assert "numpy is 1.24.1 in " in said and "pip install 'numpy<1.24'" in said
    del versions["mxnet"]
    assert "mxnet is not installed in " in faults("-n", "2")
    versions.update({"mxnet-cu112": "1.9.1", "numpy": "1.23.5"})
    assert spec("-n", "2").workers == 2
