"""A host of `cluster.py`, and the remote shell by which others reach it.

    cluster_host.py serve NAME FOLDER      # process 1 of a host; ends with its standard input
    cluster_host.py shell FOLDER [OPTIONS] HOST COMMAND...

`serve` runs lines of shell for whoever connects to FOLDER/NAME.sock; `shell` stands in for
``ssh``: it passes three streams on and ends with the command's exit code. The streams go through
pipes of the shell's own, so a shell that is killed takes the command's input and output with it,
as the end of an ``ssh`` does.
"""

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import List

DRAIN_S = 2.0  # for the output of what a command has left running
PIECE = 1 << 16


def serve(name: str, folder: str) -> None:
    """Be process 1 of a host until standard input ends; the kernel then ends all others here."""
    socket.sethostname(name)
    for kind, place in (("tmpfs", "/dev/shm"), ("sysfs", "/sys")):  # /sys lists the network's links
        subprocess.run(["mount", "-t", kind, kind, place], check=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/{name}.sock")
    listener.listen(64)
    os.write(1, b"ready\n")
    if os.fork() == 0:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_run, args=(connection,)).start()
    threading.Thread(target=_reap, daemon=True).start()
    while os.read(0, PIECE):
        pass


def _reap() -> None:
    """Wait for processes whose parents are gone, which come to process 1."""
    while True:
        os.wait()


def _run(connection: socket.socket) -> None:
    """Run the line of shell that comes, with the streams that come with it; answer its code."""
    with connection:
        streams = array.array("i")
        size = socket.CMSG_SPACE(3 * streams.itemsize)
        line, ((_, _, rights),), _, _ = connection.recvmsg(1 << 20, size)
        streams.frombytes(rights)
        command = ["sh", "-c", json.loads(line)]
        stdin, stdout, stderr = streams
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
        for stream in streams:
            os.close(stream)
        code = process.wait()
        with contextlib.suppress(BrokenPipeError):  # the shell has been killed
            connection.sendall(str(code if code >= 0 else 128 - code).encode())


def shell(folder: str, words: List[str]) -> int:
    """Run a line on a host as ``ssh`` would; return its exit code."""
    while words[0].startswith("-"):
        del words[: 2 if words[0] in ("-o", "-l", "-p") else 1]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{folder}/{words[0]}.sock")
    pipes = [os.pipe() for _ in range(3)]
    theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))
    connection.sendmsg([json.dumps(" ".join(words[1:])).encode()], [rights])
    for stream in theirs:
        os.close(stream)
    _copying(0, pipes[0][1])
    output = [_copying(pipes[1][0], 1), _copying(pipes[2][0], 2)]
    code = int(connection.recv(16) or b"255")  # nothing: the host has gone
    for thread in output:
        thread.join(DRAIN_S)
    return code


def _copying(source: int, target: int) -> threading.Thread:
    """Copy until `source` ends, then close `target`, so that its reader sees the end too."""

    def copy() -> None:
        with contextlib.suppress(BrokenPipeError):
            while piece := os.read(source, PIECE):
                while piece:
                    piece = piece[os.write(target, piece) :]
        os.close(target)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3])
    else:
        code = shell(sys.argv[2], sys.argv[3:])
        sys.stdout.flush()
        os._exit(code)  # a thread may wait for standard input
