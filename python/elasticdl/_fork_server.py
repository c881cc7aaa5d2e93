# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs as forks of a process that has already imported their packages.

Importing a framework takes seconds of CPU time, and all workers of a job import the same ones. A
fork starts with them, and otherwise behaves like a new process.

The first program is the one that describes the job. It reports which further parts of these
packages it has imported (`report_imports`), and they are imported before the next fork.

`python -m elasticdl._fork_server FILE` imports the packages at the top of FILE, and
`… MODEL_DEF MODEL_ZOO` those of a model. Then it serves requests on its standard input, a socket of
packets. A request is JSON, with the standard input, output and error of the program as file
descriptors. Every message to the caller is JSON, too:

- `{"threads": N}`: the imports are done. If N is not 1, no request is served, because a fork would
  copy the locks of the other threads, but not the threads.
- `{"id": N, "pid": N}` with a pidfd: the program of this request runs.
- `{"pid": N, "exit": N}` or `{"pid": N, "signal": N}`: it ended.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import selectors
import signal
import site
import socket
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

_MAX_REQUEST = 1 << 18
_STDIO = 3
_PIPE = 1 << 16
# The memory allocator of Arrow starts its thread again in a fork.
_RESTARTED = ("jemalloc_bg_thd",)
# Variables that packages set when they are imported: PyTorch's compiler, which the first optimizer
# imports, and Lightning.
_SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK")


def main() -> None:
    """Serves requests. Returns in every fork, with the program to run as the last act of it."""
    requests = socket.socket(fileno=os.dup(0))
    # What a package prints while it is imported belongs to no program.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(_STDIO):
        os.dup2(nothing, fd)
    os.close(nothing)
    # Otherwise, the program could import modules from the folder of the server's caller.
    del sys.path[0]
    _preload(sys.argv[1:])
    # Otherwise, the first search for garbage in a fork would copy all of this memory.
    gc.collect()
    gc.freeze()
    n_threads = _count_threads()
    _send(requests, {"threads": n_threads})
    if n_threads == 1:
        _Server(requests).serve()


def _count_threads() -> int:
    """The threads of this process, without those that survive a fork."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name not in _RESTARTED for name in names)


def _send(requests: socket.socket, message: dict[str, int], *fds: int) -> None:
    # The caller may be gone; then the next read says so.
    with contextlib.suppress(OSError):
        socket.send_fds(requests, [json.dumps(message).encode()], list(fds))


def packages(source: str, folder: Path) -> list[str]:
    """The modules that the program with this source imports before it does anything else.

    They end at the first statement that is not an import, because it may affect the imports after
    it, and at the first module that is not an installed one, because it is part of the program.
    """
    found: list[str] = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [statement.module]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        else:
            break
        for name in names:
            if not _is_installed(name, folder):
                return found
            found.append(name)
    return found


def _is_installed(name: str, folder: Path) -> bool:
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top == "__future__":
        return True
    # The program's own folder comes first when it is run.
    if importlib.machinery.PathFinder.find_spec(top, [str(folder)]):
        return False
    spec = importlib.util.find_spec(top)
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        return False
    places = [spec.origin, *(spec.submodule_search_locations or ())]
    return any(place and _is_below_packages(place) for place in places)


def _is_below_packages(place: str) -> bool:
    if place in ("built-in", "frozen"):
        return True
    roots = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")]
    # A path file may add the packages of another environment.
    roots += [path for path in sys.path if path.endswith("site-packages")]
    return any(Path(place).is_relative_to(root) for root in roots)


def _preload(target: list[str]) -> None:
    # An error is the program's own: the program reports it when it runs.
    with contextlib.suppress(Exception, SystemExit):
        if len(target) == 1:
            file = Path(target[0])
        else:
            # What a worker imports before its model.
            from elasticdl import _host, _zoo  # noqa: F401

            file = _zoo.source(*target)
        for name in packages(file.read_text(), file.parent):
            importlib.import_module(name)


class _Server:
    """Forks on request, and reports how the forks end."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: set[int] = set()
        # Where a running program reports its imports: the first one, until it ends.
        self._reports: dict[int, int] = {}
        self._has_forked = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        """Serves requests; returns in the forks only."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # Without a handler there would be no wake-up.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                self._report_ends()
                if self._requests in ready and not self._answer():
                    break
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._requests.close()

    def _answer(self) -> bool:
        """Answers a request; returns False in the fork."""
        data, fds, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST, _STDIO)
        if not data:
            # The caller is gone. Its programs notice that by themselves.
            os._exit(0)
        request = json.loads(data)
        read, write = (-1, -1) if self._has_forked else os.pipe()
        pid = os.fork()
        if not pid:
            _become(request, fds, write)
            return False
        self._running.add(pid)
        if not self._has_forked:
            os.close(write)
            self._reports[pid] = read
            self._has_forked = True
        pidfd = os.pidfd_open(pid)
        _send(self._requests, {"id": request["id"], "pid": pid}, pidfd)
        for fd in (*fds, pidfd):
            os.close(fd)
        return True

    def _report_ends(self) -> None:
        for pid in list(self._running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            self._running.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            ended = {"exit": code} if code >= 0 else {"signal": -code}
            _send(self._requests, {"pid": pid, **ended})
            if pid in self._reports:
                self._learn(self._reports.pop(pid))

    def _learn(self, read: int) -> None:
        """Imports what the first program has imported."""
        # Not to its end: children of the program that outlive it may keep the pipe open.
        os.set_blocking(read, False)
        try:
            names = json.loads(os.read(read, _PIPE) or "[]")
        except (BlockingIOError, ValueError):
            names = []
        os.close(read)
        if self._running:
            # It must not exit before them.
            return
        for name in names:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        gc.freeze()
        if names:
            n_threads = _count_threads()
            _send(self._requests, {"threads": n_threads})
            if n_threads != 1:
                # The caller starts what it has asked for since in another way.
                os._exit(0)


# The program that this fork runs: the arguments of its interpreter.
_program: list[str] = []
# Where this fork reports its imports; the modules and the environment that it began with.
_reports: list[tuple[int, set[str], dict[str, str]]] = []


def report_imports() -> None:
    """Reports the parts of the server's packages that this process has imported since.

    Nothing is reported if the program has changed its environment, which may affect its imports.
    """
    if not _reports:
        return
    write, known, environment = _reports.pop()
    tops = {name for name in known if "." not in name}
    if _environment() == environment:
        names = [n for n in sys.modules if n not in known and n.partition(".")[0] in tops]
        # A pipe has room for the names of all modules of PyTorch; without room, they are left out.
        os.set_blocking(write, False)
        data = json.dumps([name for name in names if name != "__main__"]).encode()
        if len(data) <= _PIPE:
            os.write(write, data)
    os.close(write)


def _environment() -> dict[str, str]:
    """The environment, without what imports add to it."""
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_IMPORTS}


def _become(request: dict[str, Any], fds: list[int], report: int) -> None:
    """Turns this fork into a process as its caller would have started it."""
    os.setpgid(0, 0)
    for fd, target in zip(fds, range(_STDIO)):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.update(request["env"])
    if report >= 0:
        _reports.append((report, set(sys.modules), _environment()))
    # Python reseeds its own generator after a fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    _program[:] = request["args"]


def run(program: list[str]) -> None:
    """Runs a program as `python PROGRAM…` does, and as the last act of this process."""
    if program[0] == "-m":
        sys.argv = program[1:]
        # As with `python -m`; the module itself is found by its name.
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    # As Python does it; `sys.argv` keeps what was given.
    path = os.path.abspath(program[0])
    sys.argv = list(program)
    sys.path.insert(0, str(Path(path).resolve().parent))
    # Not `runpy.run_path`, which removes the module before other threads and exit handlers of the
    # program are done with it.
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = __builtins__
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.excepthook = _hide_this_file(sys.excepthook)
    exec(code, module.__dict__)


def _hide_this_file(hook: Any) -> Any:
    """Hides the frames of this file in a traceback: a program does not know that it was forked."""

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return report


_OWN_FILES = (__file__, "<frozen runpy>", runpy.__file__)

if __name__ == "__main__":
    # Not this copy of the module: `report_imports` is called by other modules.
    from elasticdl import _fork_server

    _fork_server.main()
    # At the top level, so that the interpreter exits in the usual way afterwards.
    if _fork_server._program:
        _fork_server.run(_fork_server._program)
