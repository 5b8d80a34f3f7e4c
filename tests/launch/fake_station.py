"""A station without MXNet: it speaks the protocol, and its roles only sleep."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Station:
    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.roles, self.leaders, self.rest = {}, {}, {}
        self.selector.register(0, selectors.EVENT_READ, self.launcher)
        self.buffer = b""

    def say(self, **message):
        os.write(1, json.dumps(message).encode() + b"\n")

    def run(self):
        while True:
            for key, _ in self.selector.select(0.05):
                key.data()
            for about, child in list(self.roles.items()):
                if child.poll() is not None:
                    del self.roles[about]
                    generation, role, index = about
                    how = f"was killed by {signal.Signals(-child.returncode).name}"
                    about = {"generation": generation, "role": role, "index": index}
                    self.say(say="ended", **about, pid=child.pid, how=how)

    def launcher(self):
        chunk = os.read(0, 65536)
        if not chunk:
            self.kill(1 << 30)
            sys.exit(0)
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            getattr(self, message["do"])(message)

    def begin(self, message):
        assert len(message["secret"]) == 64 and os.path.isdir(message["logs"])
        self.door = socket.socket(socket.AF_UNIX)
        folder, name = os.path.split(message["socket"])
        os.chdir(folder)  # a path may be longer than an address
        if os.path.exists(name):
            os.unlink(name)
        self.door.bind(name)
        self.door.listen()
        self.selector.register(self.door, selectors.EVENT_READ, self.accept)
        self.say(say="up", pid=os.getpid())

    def serve(self, message):
        about = message["generation"], message["role"], message["index"]
        self.roles[about] = child = subprocess.Popen([*SLEEP, message["role"]])
        address = {"address": f"127.0.0.1:{message['port'] or 77}"} if about[1][1] == "c" else {}
        said = dict(zip(("generation", "role", "index"), about))
        self.say(say="serving", **said, pid=child.pid, **address)

    def end(self, message):
        self.kill(message["generation"])

    def kill(self, generation):
        for about in [about for about in self.roles if about[0] <= generation]:
            child = self.roles.pop(about)
            child.kill()
            child.wait()

    def tell(self, message):
        if message["client"] in self.leaders:
            line = json.dumps(message["message"]).encode() + b"\n"
            with contextlib.suppress(OSError):  # it is leaving
                self.leaders[message["client"]][0].sendall(line)

    def accept(self):
        connection, _ = self.door.accept()
        self.rest[connection] = b""
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.leader(connection))

    def leader(self, connection):
        try:
            chunk = connection.recv(65536)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self.selector.unregister(connection)
            connection.close()
            for client, (known, pid) in list(self.leaders.items()):
                if known is connection:
                    del self.leaders[client]
                    self.say(say="gone", client=client, pid=pid)
            return
        *lines, self.rest[connection] = (self.rest[connection] + chunk).split(b"\n")
        for message in map(json.loads, lines):
            if message["say"] == "hello":
                self.leaders[message["client"]] = connection, message["pid"]
            client = next(k for k, (known, _) in self.leaders.items() if known is connection)
            self.say(say="heard", client=client, message=message)


if __name__ == "__main__":
    if os.environ.get("FAKE_STATION") == "broken":
        sys.stderr.write("broken\n")
        sys.exit(5)
    Station().run()
