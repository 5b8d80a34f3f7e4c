"""A rank that speaks a leader's protocol with its station, without MXNet and without weights.

It prints what happens to it: "life L", "go G of N", "filled J". With ``-m tests.launch.fake_leader
BEHAVIOUR`` it fails or ends as told once it takes part:

    stay        until it is told to end by a signal
    leave       says that it has finished, and ends with 0
    fail K      ends with 3, if it is client K, in each of its lives
    fail-once K the same, in its first life; all leave in the second generation
    early K     client K fails before it says anything
"""

import json
import os
import socket
import sys
import time

from gluon_esgd.settings import read

VECTOR = {"name": "t", "sizes": [3], "chunks": [[0, 3]], "exact": [False], "contract": {"a": 1}}


class Leader:
    def __init__(self, sync):
        self.settings, self.sync = read(), sync
        self.generation = 0
        self.connect()

    def connect(self):
        limit = time.monotonic() + 30
        folder, name = os.path.split(self.settings.station)
        os.chdir(folder)
        while True:
            try:
                self.socket = socket.socket(socket.AF_UNIX)
                self.socket.connect(name)
                break
            except OSError:
                assert time.monotonic() < limit
                time.sleep(0.05)
        about = {"client": self.settings.client, "pid": os.getpid(), "life": self.settings.life}
        self.say(say="hello", **about)
        self.say(say="register", vector=VECTOR, sync=self.sync)

    def say(self, **message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def lines(self):
        rest = b""
        while True:
            try:
                chunk = self.socket.recv(65536)
            except ConnectionError:
                chunk = b""
            if not chunk:
                self.connect()
                continue
            *lines, rest = (rest + chunk).split(b"\n")
            yield from map(json.loads, lines)

    def run(self):
        """Answer until the center is filled; yields what happened."""
        for message in self.lines():
            do = message["do"]
            answer = getattr(self, f"on_{do}", None)
            if answer is not None:
                answer(**{name: value for name, value in message.items() if name != "do"})
            yield do, message

    def on_welcome(self, secret):
        assert len(secret) == 64

    def on_prepare(self, generation, **rest):
        self.say(say="ready", generation=generation)

    def on_hold(self, generation, hard):
        self.say(say="held", generation=generation, fresh=1.0)

    def on_save(self, generation, names):
        self.say(say="saved", generation=generation, ok=True)

    def on_seed(self, generation, names):
        self.say(say="seeded", generation=generation)

    def on_go(self, generation, num_clients, place):
        print("go", generation, "of", num_clients, flush=True)
        progress = {"step": 7, "exchanges": 2, "lost": 0, "late": 1, "staleness_s": 0.5}
        self.say(say="progress", **progress)

    def on_attached(self, name):
        if self.sync:
            self.say(say="meet", what="start")
        else:
            self.say(say="offer", name=name, again=False)

    def on_fill(self, name):
        self.say(say="filled", name=name, ok=True)


def main(behaviour, client="", rule="esgd"):
    settings = read()
    me = str(settings.client) == client
    if behaviour == "early" and me:
        sys.exit(3)
    print("life", settings.life, flush=True)
    leader = Leader(rule == "sgd")
    for do, message in leader.run():
        second = do == "go" and message["generation"] > 1
        if do not in ("filled", "met") and not (behaviour == "fail-once" and second and not me):
            continue
        print("filled", message.get("joined"), flush=True)
        if me and (behaviour == "fail" or (behaviour == "fail-once" and settings.life == 0)):
            print("fails", flush=True)
            sys.exit(3)
        if behaviour == "leave" or (behaviour == "fail-once" and (me or second)):
            leader.say(say="finished")
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
