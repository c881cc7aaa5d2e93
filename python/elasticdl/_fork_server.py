# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs as forks of a process that has already imported their packages.

Importing a framework takes seconds of CPU time, and all workers of a job import the same ones. A
fork starts with them, and otherwise behaves like a new process.

The first program is the one that describes the job. It reports which further parts of these
packages it has imported (`report_imports`), and they are imported before the next fork.

`python -m elasticdl._fork_server FILE` (or `-m MODULE`, as for Python itself) imports the packages
at the top of this program, and `… MODEL_DEF MODEL_ZOO` those of a model. Then it serves requests on
its standard input, a socket of packets. A request is JSON, with the standard input, output and
error of the program as file descriptors. Every message to the caller is JSON, too:

- `{"ready": true}`: the imports are done.
- `{"obstacle": "WHY"}`: no request is served, because a fork of this process would not work.
- `{"id": N, "pid": N}`: the program of this request runs.

Forks are children of the caller, which must be the reaper of orphans while it waits for one. So it
sees how they end, they end with it, and they outlive this process.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import runpy
import select
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
# Enough for the names of all modules of PyTorch.
_MAX_REPORT = 1 << 16
_PR_SET_PDEATHSIG = 1
# The memory allocator of Arrow starts its thread again in a fork.
_RESTARTED = ("jemalloc_bg_thd",)
# Variables that packages set when they are imported: PyTorch's compiler, which the first optimizer
# imports, and Lightning.
_SET_BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK")


def main() -> None:
    """Serves requests. Returns in every fork, with the program to run as the last act of it."""
    caller = os.getppid()
    _end_with(caller)
    requests = socket.socket(fileno=os.dup(0))
    # What a package prints while it is imported belongs to no program.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(_STDIO):
        os.dup2(nothing, fd)
    os.close(nothing)
    if _has_own_folder():
        # Otherwise, the program could import modules from the folder of the server's caller.
        del sys.path[0]
    _preload(sys.argv[1:])
    # Otherwise, the first search for garbage in a fork would copy all of this memory.
    gc.collect()
    gc.freeze()
    _Server(requests, caller).serve()


def be_killed_with_parent() -> None:
    """Lets the kernel end this process when its parent does. The parent may have ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Ends this process when its parent does, even if that is killed."""
    be_killed_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _has_own_folder() -> bool:
    """Whether modules are searched in the folder of the program first (not with PYTHONSAFEPATH)."""
    return not getattr(sys.flags, "safe_path", False)


def _obstacle() -> str | None:
    """Returns why a fork of this process would not work."""
    # A fork would copy the locks of the other threads, but not the threads.
    n_threads = _count_threads()
    if n_threads != 1:
        return f"an import starts threads ({n_threads - 1})"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "an import initializes CUDA"
    return None


def _count_threads() -> int:
    """The threads of this process, without those that survive a fork."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name not in _RESTARTED for name in names)


def _send(requests: socket.socket, message: dict[str, Any]) -> None:
    # The caller may be gone; then the next read says so.
    with contextlib.suppress(OSError):
        requests.send(json.dumps(message).encode())


def packages(source: str, folders: list[Path]) -> list[str]:
    """The modules that the program with this source imports before it does anything else.

    `folders` are those where it finds modules of its own.

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
            if not _is_installed(name, folders):
                return found
            found.append(name)
    return found


def _is_installed(name: str, folders: list[Path]) -> bool:
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top == "__future__":
        return True
    # The program's own folders come first when it is run. A folder without code is no module of
    # its own if an installed one has the same name.
    own = importlib.machinery.PathFinder.find_spec(top, [os.path.abspath(f) for f in folders])
    if own is not None and own.loader is not None:
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
        files, folders = _find(target)
        source = "\n".join(file.read_text() for file in files)
        for name in packages(source, folders):
            importlib.import_module(name)


def _find(target: list[str]) -> tuple[list[Path], list[Path]]:
    """The files that a program runs first, and the folders where it finds modules of its own."""
    here = [Path.cwd()] if _has_own_folder() else []
    if target[0] == "-m":
        module = Path(*target[1].split("."))
        choices = [module.with_suffix(".py"), module / "__main__.py"]
        file = next(file for file in choices if file.is_file())
        return [*_packages_around(file), file], here
    if len(target) == 1:
        file = Path(target[0])
        if file.is_dir():
            return [file / "__main__.py"], [file]
        return [file], [file.resolve().parent] if _has_own_folder() else []
    # What a worker imports before its model.
    from elasticdl import _host, _zoo  # noqa: F401

    file = _zoo.source(*target)
    around = _packages_around(file)
    zoo = Path(target[1] or ".")
    return [*around, file], [*here, zoo, file.parent, *(init.parent.parent for init in around)]


def _packages_around(file: Path) -> list[Path]:
    """What is run when a module of a package is imported, before the module itself."""
    inits = []
    for folder in file.absolute().parents:
        init = folder / "__init__.py"
        if not init.is_file():
            break
        if init != file.absolute():
            inits.insert(0, init)
    return inits


class _Server:
    """Forks on request."""

    def __init__(self, requests: socket.socket, caller: int) -> None:
        self._requests = requests
        self._caller = caller
        self._has_forked = False
        # Where the first program reports its imports, until the next one is requested.
        self._report: socket.socket | None = None

    def serve(self) -> None:
        """Serves requests; returns in the forks only."""
        self._tell_whether_it_can_fork()
        while True:
            sockets = [self._requests] + ([self._report] if self._report else [])
            ready, _, _ = select.select(sockets, [], [])
            if self._report in ready:
                self._learn()
            if self._requests in ready and not self._answer():
                return

    def _tell_whether_it_can_fork(self) -> None:
        obstacle = _obstacle()
        if obstacle is not None:
            _send(self._requests, {"obstacle": obstacle})
            os._exit(0)
        _send(self._requests, {"ready": True})

    def _answer(self) -> bool:
        """Answers a request; returns False in the fork."""
        data, fds, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST, _STDIO)
        if not data:
            os._exit(0)
        request = json.loads(data)
        self._forget_report()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The program is an orphan from the beginning, so that the caller becomes its parent.
        between = os.fork()
        if not between:
            ours.close()
            _continue_as_orphan(theirs)
            self._requests.close()
            _become(request, fds, self._caller, None if self._has_forked else theirs)
            return False
        theirs.close()
        for fd in fds:
            os.close(fd)
        pid = ours.recv(_MAX_REQUEST)
        os.waitpid(between, 0)
        if not pid:
            # Too many processes, for example.
            os._exit(1)
        _send(self._requests, {"id": request["id"], "pid": int(pid)})
        # If it was killed already, the caller sees that.
        with contextlib.suppress(OSError):
            ours.send(b"run")
        if not self._has_forked:
            self._report = ours
            self._has_forked = True
        return True

    def _forget_report(self) -> None:
        if self._report is not None:
            self._report.close()
            self._report = None

    def _learn(self) -> None:
        """Imports what the first program has imported."""
        try:
            names = json.loads(self._report.recv(_MAX_REPORT) or "[]")
        except (OSError, ValueError):
            names = []
        self._forget_report()
        for name in names:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        gc.freeze()
        if names:
            self._tell_whether_it_can_fork()


def _continue_as_orphan(server: socket.socket) -> None:
    """Ends this process, and continues as a fork of it that the server has announced."""
    try:
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        with contextlib.suppress(OSError):
            server.send(str(pid).encode())
        os._exit(0)
    with contextlib.suppress(OSError):
        if server.recv(_MAX_REQUEST):
            return
    # The server was killed: not an error of the program.
    os.kill(os.getpid(), signal.SIGKILL)


# The program that this fork runs: the arguments of its interpreter.
_program: list[str] = []
# Where this fork reports its imports; the modules and the environment that it began with.
_reports: list[tuple[socket.socket, set[str], dict[str, str]]] = []


def report_imports() -> None:
    """Reports the parts of the server's packages that this process has imported since.

    Nothing is reported if the program has changed its environment, which may affect its imports.
    """
    if not _reports:
        return
    server, known, environment = _reports.pop()
    tops = {name for name in known if "." not in name}
    if _environment() == environment:
        names = [n for n in sys.modules if n not in known and n.partition(".")[0] in tops]
        data = json.dumps([name for name in names if name != "__main__"]).encode()
        if len(data) <= _MAX_REPORT:
            # The server may be gone.
            with contextlib.suppress(OSError):
                server.send(data, socket.MSG_DONTWAIT)
    server.close()


def _environment() -> dict[str, str]:
    """The environment, without what imports add to it."""
    return {name: value for name, value in os.environ.items() if name not in _SET_BY_IMPORTS}


def _become(
    request: dict[str, Any], fds: list[int], caller: int, report: socket.socket | None
) -> None:
    """Turns this fork into a process as its caller would have started it."""
    _end_with(caller)
    try:
        os.setpgid(0, 0 if request["leads_group"] else os.getpgid(caller))
    except PermissionError:  # The caller has left the session, as with `--detach`.
        os.setpgid(0, 0)
    for fd, target in zip(fds, range(_STDIO)):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.update(request["env"])
    if report is not None:
        _reports.append((report, set(sys.modules), _environment()))
    # Python reseeds its own generator after a fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    _program[:] = request["args"]


def run(program: list[str]) -> None:
    """Runs a program as `python PROGRAM…` does, and as the last act of this process."""
    sys.excepthook = _hide_this_file(sys.excepthook)
    # A new one, which stays until the other threads and exit handlers of the program are done.
    module = types.ModuleType("__main__")
    module.__builtins__ = __builtins__
    sys.modules["__main__"] = module
    _join_job()
    # As Python does it; `sys.argv` keeps what was given.
    if program[0] == "-m":
        sys.argv = program[:1] + program[2:]
        if _has_own_folder():
            sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(program[1])
        return
    sys.argv = list(program)
    path = os.path.abspath(program[0])
    if pkgutil.get_importer(program[0]) is not None:
        # A folder or archive with a `__main__.py`.
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", alter_argv=False)
        return
    if _has_own_folder():
        sys.path.insert(0, str(Path(path).resolve().parent))
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _join_job() -> None:
    """Lets this process join its job where the imports of a new process would have: those of the
    adapters for trainers do, and set the seed before the program creates its model."""
    trainers = sys.modules.get("elasticdl._trainers")
    if trainers is not None:
        trainers.job()


def _hide_this_file(hook: Any) -> Any:
    """Hides the frames of this file in a traceback: a program does not know that it was forked."""

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        frame = trace
        while frame is not None:
            if frame.tb_frame.f_code is run.__code__:
                trace = frame.tb_next
            frame = frame.tb_next
        hook(kind, error.with_traceback(trace), trace)

    return report


if __name__ == "__main__":
    # Not this copy of the module: `report_imports` is called by other modules.
    from elasticdl import _fork_server

    _fork_server.main()
    # At the top level, so that the interpreter exits in the usual way afterwards.
    if _fork_server._program:
        _fork_server.run(_fork_server._program)
