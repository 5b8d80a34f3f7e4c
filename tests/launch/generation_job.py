"""What tests of generations drive: the machine, and leaders, stations and a clock for it."""

from gluon_esgd.launch import words
from gluon_esgd.launch.generations import Generations
from gluon_esgd.launch.terms import Outside, Terms

START_S = 120.0


def vector(name="trainer0", **contract):
    entries = {"num_parameters": 4, **contract}
    return {"name": name, "sizes": [3], "chunks": [[0, 3]], "exact": [False], "contract": entries}


class Job:
    """Leaders, stations and a clock for a machine under test; notes what it is told."""

    def __init__(self, clients=2, servers=2, stations=(0, 0), port=0):
        self.now = 100.0
        self.failed, self.records, self.stations, self.leaders = [], [], [], []
        outside = Outside(
            to_station=lambda host, message: self.stations.append((host, message)),
            to_leader=lambda client, message: self.leaders.append((client, message)),
            failed=self.failed.append,
            note=self.records.append,
            clock=lambda: self.now,
        )
        servers_at = [stations[k % len(stations)] for k in range(servers)]
        terms = Terms(range(clients), 0, servers_at, "127.0.0.1", port, "ab", START_S)
        self.machine = Generations(terms, outside)
        self.pids = {}

    def says(self, who, say, host=0, **fields):
        message = {"say": "heard", "client": who, "message": {"say": say, **fields}}
        assert words.from_station(message), message
        self.machine.from_station(host, message)

    def hello(self, *clients, life=0, host=0):
        for client in clients:
            self.pids[client] = 1000 * (life + 1) + client
            self.says(client, "hello", host, client=client, pid=self.pids[client], life=life)

    def register(self, *clients, name="trainer0", sync=False, **contract):
        for client in clients:
            self.says(client, "register", vector=vector(name, **contract), sync=sync)

    def gone(self, client, host=0):
        self.machine.from_station(host, {"say": "gone", "client": client, "pid": self.pids[client]})

    def role(self, say, role="server", index=0, generation=None, **more):
        generation = self.machine.last if generation is None else generation
        about = {"generation": generation, "role": role, "index": index, "pid": 7, **more}
        assert words.from_station({"say": say, **about})
        self.machine.from_station(0, {"say": say, **about})

    def dies(self, role="server", index=0, generation=None):
        generation = self.machine.running if generation is None else generation
        self.role("ended", role, index, generation, how="was killed by SIGKILL")

    def after(self, seconds):
        self.now += seconds
        self.machine.settle()

    def serve(self):
        """The stations fork what they are told to."""
        self.role("serving", "scheduler", address="127.0.0.1:77")
        for _, message in self.take(self.stations, "serve"):
            if message["role"] == "server":
                self.role("serving", "server", message["index"])

    def ready(self, *clients):
        for client in clients:
            self.says(client, "ready", generation=self.machine.last)

    def held(self, **ages):
        for client, fresh in ages.items():
            self.says(int(client[1:]), "held", generation=self.machine.running, fresh=fresh)

    @staticmethod
    def take(told, do):
        """Take the messages of one kind; those of other kinds stay."""
        found = [(who, message) for who, message in told if message["do"] == do]
        told[:] = [(who, message) for who, message in told if message["do"] != do]
        return found

    def told(self, do):
        return self.take(self.leaders, do)

    def who(self, do):
        return [client for client, _ in self.told(do)]

    def started(self, *clients, sync=False, filled=True):
        """Bring the first generation up, and fill the center."""
        self.hello(*clients)
        self.register(*clients, sync=sync)
        self.serve()
        self.ready(*clients)
        assert self.machine.running == 1
        if filled:
            self.fill(*clients)
        self.forget()
        return self

    def fill(self, *clients):
        for client in clients:
            self.says(client, "offer", name="trainer0", again=False)
        self.says(min(clients), "filled", name="trainer0", ok=True)

    def forget(self):
        self.stations.clear()
        self.leaders.clear()

    def returns(self, client, life=1):
        self.gone(client)
        self.hello(client, life=life)
        self.register(client)


def job(clients=2, **kwargs):
    return Job(clients, **kwargs).started(*range(clients))


def joined(run, *clients, name="trainer1"):
    for client in clients:
        run.says(client, "joined", generation=run.machine.running, name=name)
