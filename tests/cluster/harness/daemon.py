# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the command that starts them, and are found again by what they recorded.

A process is never looked for by its name: it writes down its own number and time of birth before
it becomes the program, so not even a crash of the harness leaves one unrecorded, and a number that
was given to another process since is not mistaken for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .waiting import Failure, until

# The kernel needs a moment to end a process with much memory, or a whole pid namespace.
KILL_LIMIT = 30
LOG_LINES = 12
# $0 is where to record, "$@" the program.
RECORD_AND_RUN = 'read -r line </proc/$$/stat && echo "$line" >"$0" && exec "$@"'


@dataclass(frozen=True)
class Process:
    """A process that was seen once, and may be gone."""

    pid: int
    born: int

    @classmethod
    def parse(cls, stat: str) -> Process:
        """Reads a line of `/proc/PID/stat`; the program's name may hold anything, even `)`."""
        rest = stat.rpartition(")")[2].split()
        return cls(int(stat.split(" ", 1)[0]), int(rest[19]))

    @classmethod
    def see(cls, pid: int) -> Process | None:
        try:
            return cls.parse(Path(f"/proc/{pid}/stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None

    def alive(self) -> bool:
        """Whether it still runs; one that only waits to be collected does not."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return Process.parse(stat) == self and stat.rpartition(")")[2].split()[0] not in "ZX"

    def children(self) -> list[Process]:
        """Its own children, and never those of a later process with the same number."""
        if not self.alive():
            return []
        try:
            listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [child for pid in listed.split() if (child := Process.see(int(pid)))]

    def program(self) -> str:
        """What it runs now; nothing where it is gone."""
        try:
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def kill(self) -> None:
        """Ends it at once, and returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive():
                os.kill(self.pid, signal.SIGKILL)
        until(f"process {self.pid} ends", lambda: not self.alive(), KILL_LIMIT)


class Daemons:
    """The processes of one cluster, with their records and logs in its folder."""

    def __init__(self, folder: Path) -> None:
        self.records = folder / "processes"
        self.logs = folder / "logs"

    def start(self, name: str, *command: str | Path) -> None:
        """Starts `command` in a session of its own, so that no signal of a terminal reaches it."""
        self.records.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        record = self.records / name
        record.unlink(missing_ok=True)
        with open(self.logs / f"{name}.log", "ab") as log:
            started = subprocess.Popen(
                ["sh", "-c", RECORD_AND_RUN, record, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # Its record tells what becomes of it; this object would only warn that it runs on.
        started.returncode = 0
        until(f"`{name}` starts", lambda: self.find(name) or not Process.see(started.pid), 10)

    def find(self, name: str) -> Process | None:
        try:
            line = (self.records / name).read_text()
        except FileNotFoundError:
            return None
        return Process.parse(line) if line.endswith("\n") else None

    def names(self) -> list[str]:
        return sorted(path.name for path in self.records.glob("*"))

    def stop(self, name: str) -> None:
        """Ends one process, if it was started and still runs."""
        if process := self.find(name):
            process.kill()
        (self.records / name).unlink(missing_ok=True)

    def until(self, what: str, name: str, holds, seconds: float) -> None:
        """Waits for what `name` brings about, and no longer than it lives."""

        def holds_or_dead() -> object:
            if holds():
                return True
            process = self.find(name)
            if process is None or not process.alive():
                raise Failure(f"{what}: `{name}` ended{self.last_words(name)}")
            return False

        until(what, holds_or_dead, seconds, lambda: self.last_words(name))

    def last_words(self, name: str) -> str:
        log = self.logs / f"{name}.log"
        if not log.exists():
            return ""
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "; its log ends:\n" + "\n".join(lines)
