# SPDX-License-Identifier: Apache-2.0
"""Tests of the process that forks workers. A forked program must not differ from a started one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticdl import _fork_server

# Prints everything that a program can see of how it was started.
PROGRAM = """
import json, multiprocessing, os, pickle, signal, sys

class Thing:
    pass

def double(number):
    return 2 * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        doubled = pool.map(double, [1, 2])
    print(json.dumps({
        "argv": sys.argv,
        "path": sys.path[0],
        "file": __file__,
        "input": sys.stdin.read(),
        "variable": os.environ.get("VARIABLE"),
        "thing": type(pickle.loads(pickle.dumps(Thing()))).__module__,
        "leads_group": os.getpgid(0) == os.getpid(),
        "children": signal.getsignal(signal.SIGCHLD).name,
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "doubled": doubled,
    }))
"""


class Server:
    """A server, and the programs that it has started."""

    def __init__(self, folder: Path, source: str, **env: str) -> None:
        self._folder = folder
        self.script = folder / "program.py"
        self.script.write_text(source)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Far longer than any answer takes.
        self._socket.settimeout(60)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elasticdl._fork_server", str(self.script)],
                stdin=theirs,
                env={**os.environ, **env},
            )
        self.n_threads = self.receive()["threads"]

    def receive(self) -> dict[str, int]:
        message, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 1)
        for fd in fds:
            os.close(fd)
        return json.loads(message)

    def start(self, *args: str, text: str = "", **env: str) -> int:
        """Starts the program; returns its pid."""
        files = [self._folder / name for name in ("in", "out", "err")]
        files[0].write_text(text)
        with files[0].open() as stdin, files[1].open("w") as out, files[2].open("w") as err:
            request = {"id": 7, "args": [str(self.script), *args], "env": env}
            fds = [stdin.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        answer = self.receive()
        assert answer["id"] == 7
        return answer["pid"]

    def run(self, *args: str, text: str = "", **env: str) -> tuple[int, str, str]:
        """Runs the program to its end; returns its exit code and what it printed."""
        pid = self.start(*args, text=text, **env)
        end = self.receive()
        assert end["pid"] == pid
        printed = [(self._folder / name).read_text() for name in ("out", "err")]
        return end.get("exit", -end.get("signal", 0)), *printed

    def close(self) -> None:
        self._socket.close()
        assert self.process.wait(timeout=60) == 0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[object]:
    started: list[Server] = []

    def start(source: str, **env: str) -> Server:
        started.append(Server(tmp_path, source, **env))
        return started[-1]

    yield start
    for server in started:
        server.close()


def plainly(server: Server, *args: str, text: str = "", **env: str) -> tuple[int, str, str]:
    """As `Server.run`, without the server."""
    done = subprocess.run(
        [sys.executable, str(server.script), *args],
        input=text,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        preexec_fn=os.setpgrp,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_forked_program_does_not_differ_from_a_started_one(serve) -> None:
    server = serve(PROGRAM)
    assert server.n_threads == 1
    given = {"text": "some text", "VARIABLE": "value"}
    code, out, err = server.run("--flag", "a b", **given)
    assert code == 0, err
    assert (code, out, err) == plainly(server, "--flag", "a b", **given)
    assert json.loads(out)["leads_group"] and json.loads(out)["doubled"] == [2, 4]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('a message')", 1),
        ("def f(): raise ValueError('an error')\nf()", 1),
        ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e", 1),
        ("this is not Python", 1),
        ("import atexit; atexit.register(print, 'at exit')", 0),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.05), print(__name__))).start()",
            0,
        ),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_a_forked_program_ends_like_a_started_one(serve, source: str, code: int) -> None:
    server = serve(source)
    ended = server.run()
    assert ended == plainly(server)
    assert ended[0] == code


def test_a_program_is_killed_by_a_signal(serve) -> None:
    server = serve("import sys; sys.stdin.read()\nimport time; time.sleep(600)")
    pid = server.start()
    os.kill(pid, signal.SIGTERM)
    assert server.receive() == {"pid": pid, "signal": signal.SIGTERM}


def test_forks_draw_different_random_numbers(serve) -> None:
    server = serve(
        "import numpy, random\nprint(random.random(), numpy.random.rand())",
        OPENBLAS_NUM_THREADS="1",
    )
    first, second = server.run()[1].split(), server.run()[1].split()
    assert len(first) == 2
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_process_with_other_threads_does_not_fork(serve, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "starts_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()"
    )
    server = serve("import starts_a_thread", PYTHONPATH=str(packages))
    assert server.n_threads == 2
    assert server.process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("change", "is_there"),
    [
        ("", True),
        ("os.environ['X'] = '1'", False),
        # As PyTorch does it when the first optimizer is created.
        ("os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/nowhere'", True),
    ],
)
def test_the_first_program_reports_what_else_it_imports(serve, change: str, is_there: bool) -> None:
    server = serve(
        "import os, xml, sys\n"
        "print('xml.dom.minidom' in sys.modules, 'sqlite3' in sys.modules)\n"
        f"{change}\n"
        "import xml.dom.minidom, sqlite3\n"
        "from elasticdl import _fork_server\n"
        "_fork_server.report_imports()\n"
    )
    assert server.run()[:2] == (0, "False False\n")
    if is_there:
        assert server.receive() == {"threads": 1}
    # Only parts of packages that the server has imported, and only in the same environment.
    assert server.run()[:2] == (0, f"{is_there} False\n")


def test_packages_are_those_at_the_top_of_a_file(tmp_path: Path) -> None:
    def found(source: str) -> list[str]:
        return _fork_server.packages(source, tmp_path)

    assert found('"""Doc."""\nfrom __future__ import annotations\nimport json, numpy\n') == [
        "__future__",
        "json",
        "numpy",
    ]
    assert found("from numpy.linalg import norm\nimport json") == ["numpy.linalg", "json"]
    # What follows may depend on it.
    assert found("import json\nimport os\nos.environ['X'] = '1'\nimport numpy") == ["json", "os"]
    assert found("import json\nfrom . import model\nimport numpy") == ["json"]
    # A part of the program, even if an installed package has the same name.
    (tmp_path / "model.py").write_text("")
    (tmp_path / "numpy").mkdir()
    assert found("import json\nimport model\nimport os") == ["json"]
    (tmp_path / "numpy" / "__init__.py").write_text("")
    assert found("import json\nimport numpy\nimport os") == ["json"]
    assert found("import json\nimport no_such_package\nimport os") == ["json"]


def test_a_forked_program_has_its_own_syntax_and_an_absolute_path(serve, tmp_path: Path) -> None:
    server = serve("def f(x: int): pass\nprint(f.__annotations__, __file__)")
    server.script = Path(os.path.relpath(server.script))
    assert server.run()[1] == f"{{'x': <class 'int'>}} {tmp_path / 'program.py'}\n"


def test_a_child_that_outlives_the_first_program_does_not_block_the_server(serve) -> None:
    server = serve("import os, time\nif not os.fork():\n    time.sleep(600)\nprint(os.getpgid(0))")
    # The second one runs while a child of the first one still does.
    for code, group, _ in [server.run(), server.run()]:
        assert code == 0
        os.killpg(int(group), signal.SIGKILL)
