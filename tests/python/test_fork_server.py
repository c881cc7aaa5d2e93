# SPDX-License-Identifier: Apache-2.0
"""Tests of the process that forks workers. A forked program must not differ from a started one."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import is_alive
from elasticdl import _fork_server

PR_SET_CHILD_SUBREAPER = 36
# Far longer than anything here takes.
LIMIT = 60

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

    def __init__(self, folder: Path, source: str, target: list[str] | None, env: dict) -> None:
        # Forks are orphans.
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        self._folder = folder
        self.script = folder / "program.py"
        self.script.write_text(source)
        self.target = target
        self._env = env
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(LIMIT)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elasticdl._fork_server", *self.words()],
                stdin=theirs,
                cwd=folder,
                env={**os.environ, **env},
            )
        self.first = self.receive()

    def words(self) -> list[str]:
        """What is run, without arguments."""
        return self.target or [str(self.script)]

    def receive(self) -> dict[str, object]:
        return json.loads(self._socket.recv(1 << 16))

    def start(self, *args: str, text: str = "", **env: str) -> int:
        """Starts the program; returns its pid."""
        files = [self._folder / name for name in ("in", "out", "err")]
        files[0].write_text(text)
        words = [*self.words(), *args]
        request = {"id": 7, "args": words, "env": env, "leads_group": True}
        with files[0].open() as stdin, files[1].open("w") as out, files[2].open("w") as err:
            fds = [stdin.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        answer = self.receive()
        assert answer["id"] == 7
        return answer["pid"]

    def run(self, *args: str, text: str = "", **env: str) -> tuple[int, str, str]:
        """Runs the program to its end; returns its exit code and what it printed."""
        pid = self.start(*args, text=text, **env)
        _, status = os.waitpid(pid, 0)
        printed = [(self._folder / name).read_text() for name in ("out", "err")]
        return os.waitstatus_to_exitcode(status), *printed

    def plainly(self, *args: str, text: str = "", **env: str) -> tuple[int, str, str]:
        """As `run`, but as a new process."""
        done = subprocess.run(
            [sys.executable, *self.words(), *args],
            input=text,
            cwd=self._folder,
            env={**os.environ, **self._env, **env},
            capture_output=True,
            text=True,
            preexec_fn=os.setpgrp,
        )
        return done.returncode, done.stdout, done.stderr

    def close(self) -> None:
        self._socket.close()
        assert self.process.wait(timeout=LIMIT) in (0, -signal.SIGKILL)


def wait_for_end(pid: int) -> None:
    """Waits for the end of a process that need not be a child."""
    deadline = time.monotonic() + LIMIT
    while is_alive(pid):
        assert time.monotonic() < deadline, f"{pid} continues"
        time.sleep(0.01)


def installed(folder: Path, name: str, source: str) -> dict[str, str]:
    """Installs a module; returns the environment that has it."""
    packages = folder / "site-packages"
    packages.mkdir(exist_ok=True)
    (packages / f"{name}.py").write_text(source)
    return {"PYTHONPATH": str(packages)}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[object]:
    started: list[Server] = []

    def start(source: str, target: list[str] | None = None, **env: str) -> Server:
        started.append(Server(tmp_path, source, target, env))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_a_forked_program_does_not_differ_from_a_started_one(serve) -> None:
    server = serve(PROGRAM)
    assert server.first == {"ready": True}
    given = {"text": "some text", "VARIABLE": "value"}
    code, out, err = server.run("--flag", "a b", **given)
    assert code == 0, err
    assert (code, out, err) == server.plainly("--flag", "a b", **given)
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
    assert ended == server.plainly()
    assert ended[0] == code


def test_a_program_is_killed_by_a_signal(serve) -> None:
    server = serve("import sys; sys.stdin.read()\nimport time; time.sleep(600)")
    pid = server.start()
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_forks_draw_different_random_numbers(serve) -> None:
    server = serve(
        "import numpy, random\nprint(random.random(), numpy.random.rand())",
        OPENBLAS_NUM_THREADS="1",
    )
    first, second = server.run()[1].split(), server.run()[1].split()
    assert len(first) == 2
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_fork_outlives_its_server_and_its_end_is_known(serve, tmp_path: Path) -> None:
    end = tmp_path / "end"
    os.mkfifo(end)
    server = serve(f"import sys\nend = open({str(end)!r})\nend.read()\nsys.exit(3)")
    pid = server.start()
    # Now it runs, and waits.
    with end.open("w"):
        server.process.kill()
        server.process.wait()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 3


# Starts a server and a program, prints their numbers, and waits.
CALLER = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_fork_server import Server
server = Server(Path({folder!r}), {source!r}, None, {{}})
print(server.process.pid, server.start(), flush=True)
time.sleep(600)
"""


def test_forks_and_their_server_end_with_their_caller(tmp_path: Path) -> None:
    # Nothing but the kernel ends such a program.
    source = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    text = CALLER.format(tests=str(Path(__file__).parent), folder=str(tmp_path), source=source)
    caller = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in caller.stdout.readline().split()]
    assert len(pids) == 2
    caller.kill()
    caller.wait()
    for pid in pids:
        wait_for_end(pid)


def test_a_server_that_hangs_in_an_import_ends_with_its_caller(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    os.mkfifo(note)
    hangs = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    env = {**os.environ, **installed(tmp_path, "hangs", hangs)}
    text = CALLER.format(
        tests=str(Path(__file__).parent), folder=str(tmp_path), source="import hangs"
    )
    caller = subprocess.Popen([sys.executable, "-c", text], env=env)
    pid = int(note.read_text())
    caller.kill()
    caller.wait()
    wait_for_end(pid)


def test_a_process_with_other_threads_does_not_fork(serve, tmp_path: Path) -> None:
    source = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=[600], daemon=True).start()"
    )
    server = serve("import starts_a_thread", **installed(tmp_path, "starts_a_thread", source))
    assert server.first == {"obstacle": "an import starts threads (1)"}
    assert server.process.wait(timeout=LIMIT) == 0


@pytest.mark.parametrize("is_initialized", [True, False])
def test_a_process_with_cuda_does_not_fork(serve, tmp_path: Path, is_initialized: bool) -> None:
    # Stands for PyTorch.
    source = f"class cuda:\n    def is_initialized(): return {is_initialized}"
    server = serve("import torch", **installed(tmp_path, "torch", source))
    obstacle = {"obstacle": "an import initializes CUDA"}
    assert server.first == (obstacle if is_initialized else {"ready": True})


# Prints how a program finds its modules, and fails.
WHERE = """
import sys
print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name)
def fail():
    raise ValueError("an error")
fail()
"""


@pytest.mark.parametrize("is_safe", ["", "1"])
@pytest.mark.parametrize(
    "target", [None, ["folder"], ["-m", "pack"], ["-m", "pack.part"], ["-m", "no_such_module"]]
)
def test_a_program_can_be_a_file_a_folder_or_a_module(
    serve, tmp_path: Path, target: list[str] | None, is_safe: str
) -> None:
    for name in ("folder/__main__", "pack/__init__", "pack/__main__", "pack/part"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "init" in name else WHERE)
    server = serve(WHERE, target, PYTHONSAFEPATH=is_safe)
    assert server.first == {"ready": True}
    forked, plain = server.run("a", "b"), server.plainly("a", "b")
    assert forked == plain
    # With the variable, a module that is not installed is not found.
    is_found = not target or target == ["folder"] or (target[1] != "no_such_module")
    is_safe_here = bool(is_safe) and hasattr(sys.flags, "safe_path")
    assert ("an error" in forked[2]) == (
        is_found and not (is_safe_here and target and target[0] == "-m")
    )


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
        assert server.receive() == {"ready": True}
    # Only parts of packages that the server has imported, and only in the same environment.
    assert server.run()[:2] == (0, f"{is_there} False\n")


def test_packages_are_those_at_the_top_of_a_file(tmp_path: Path) -> None:
    def found(source: str) -> list[str]:
        return _fork_server.packages(source, [tmp_path])

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
    assert found("import json\nimport numpy\nimport os") == ["json", "numpy", "os"], "no code"
    (tmp_path / "numpy" / "__init__.py").write_text("")
    assert found("import json\nimport numpy\nimport os") == ["json"]
    assert found("import json\nimport no_such_package\nimport os") == ["json"]


@pytest.mark.parametrize(
    ("target", "own"),
    [
        (["train.py"], "numpy.py"),
        (["-m", "pack.train"], "numpy.py"),
        (["-m", "pack"], "numpy.py"),
        (["pack"], "pack/numpy.py"),
        (["pack.train", ""], "numpy.py"),
        (["model.part.custom_model", "zoo"], "zoo/numpy.py"),
        (["zoo/model/part.py", ""], "numpy.py"),
        (["zoo/model", ""], "zoo/numpy.py"),
    ],
)
def test_modules_of_the_program_are_not_imported_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: list[str], own: str
) -> None:
    monkeypatch.chdir(tmp_path)

    def found() -> list[str]:
        files, folders = _fork_server._find(target)
        return _fork_server.packages("\n".join(file.read_text() for file in files), folders)

    for path in ("train", "pack/train", "pack/__main__", "zoo/model/part", "zoo/model/model"):
        file = tmp_path / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import json\nimport numpy\nimport os")
    inits = [tmp_path / "pack" / "__init__.py", tmp_path / "zoo" / "model" / "__init__.py"]
    for init in inits:
        init.write_text("")
    is_init = target == ["zoo/model", ""]
    assert found() == ([] if is_init else ["json", "numpy", "os"])
    (tmp_path / own).write_text("")
    assert found() == ([] if is_init else ["json"])
    # The packages around a module are run before it.
    for init in inits:
        init.write_text("import sys\nsys.flags")
    assert found() == (["json"] if target in (["train.py"], ["pack"]) else ["sys"])


def test_a_forked_program_has_its_own_syntax_and_an_absolute_path(serve, tmp_path: Path) -> None:
    server = serve("def f(x: int): pass\nprint(f.__annotations__, __file__)")
    server.script = Path("program.py")
    assert server.run()[1] == f"{{'x': <class 'int'>}} {tmp_path / 'program.py'}\n"


def test_a_child_that_outlives_the_first_program_does_not_block_the_server(serve) -> None:
    server = serve("import os, time\nif not os.fork():\n    time.sleep(600)\nprint(os.getpgid(0))")
    # The second one runs while a child of the first one still does.
    for code, group, _ in [server.run(), server.run()]:
        assert code == 0
        os.killpg(int(group), signal.SIGKILL)
