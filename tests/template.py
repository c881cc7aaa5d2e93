# SPDX-License-Identifier: Apache-2.0
"""Runs pytest in forks of a process that has already imported what tests need.

Importing a framework takes longer than most tests. A fork starts with it, and otherwise like a new
process: it shares nothing with other tests.

`template.py MODULE…` is such a process. It serves requests on its standard input, a socket.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

MAX_REQUEST = 1 << 16


@dataclass(eq=False)
class Fork:
    """Stands for a process, as `subprocess.Popen` does."""

    pid: int
    returncode: int | None = None


class Template:
    """A process that forks. The caller must be the reaper of orphans: forks become its children."""

    def __init__(self, python: str, modules: tuple[str, ...]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, str(Path(__file__)), *modules]
            self._process = subprocess.Popen(command, stdin=theirs, start_new_session=True)

    def start(self, words: list[str], cwd: Path, env: dict[str, str], output: IO[bytes]) -> Fork:
        """Starts pytest with these arguments, in its own session. `env` is added to the environment
        after the imports."""
        request = json.dumps({"words": words, "cwd": str(cwd), "env": env}).encode()
        socket.send_fds(self._socket, [request], [output.fileno()])
        answer = self._socket.recv(MAX_REQUEST)
        if not answer:
            raise ChildProcessError(f"`{self._process.args}` exited; run it by hand to see why")
        return Fork(int(answer))


def serve(modules: list[str]) -> NoReturn:
    for name in modules:
        # Tests of a missing framework report it themselves.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Otherwise, a fork's first search for garbage would copy all of this memory.
    gc.freeze()
    requests = socket.socket(fileno=0)
    while True:
        request, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 1)
        if not request:
            os._exit(0)
        requests.send(str(fork(json.loads(request), fds[0])).encode())
        os.close(fds[0])


def fork(request: dict, output: int) -> int:
    """Starts an orphan, which becomes a child of the process that reaps orphans."""
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        child = os.fork()
        if child:
            os.write(write, str(child).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        run(request, output)
    os.waitpid(parent, 0)
    os.close(write)
    with open(read) as pipe:
        return int(pipe.read())


def run(request: dict, output: int) -> NoReturn:
    import pytest

    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # As in `python -m pytest`.
    sys.path[0] = request["cwd"]
    sys.argv = ["pytest", *request["words"]]
    code = pytest.main(request["words"])
    # Removing a framework's modules one by one takes up to a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
