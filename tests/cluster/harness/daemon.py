# SPDX-License-Identifier: Apache-2.0
"""Processes that outlive the command that starts them, and are found again by their records.

Processes are never found by name. Each records its own PID and start time before it executes the
program, so even if the harness crashes, no process is left unrecorded, and a reused PID is not
mistaken for the original process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .waiting import Failure, until

# The kernel needs a moment to kill a process with much memory, or a whole PID namespace.
KILL_LIMIT = 30
LOG_LINES = 12
# $0 is the path of the record, "$@" the program.
RECORD_AND_RUN = 'read -r line </proc/$$/stat && echo "$line" >"$0" && exec "$@"'


@dataclass(frozen=True)
class Process:
    """A process that existed at some time, and may have exited."""

    pid: int
    born: int

    @classmethod
    def parse(cls, stat: str) -> Process:
        """Parses a line of `/proc/PID/stat`; the program's name may contain anything, even `)`."""
        rest = stat.rpartition(")")[2].split()
        return cls(int(stat.split(" ", 1)[0]), int(rest[19]))

    @classmethod
    def see(cls, pid: int) -> Process | None:
        try:
            return cls.parse(Path(f"/proc/{pid}/stat").read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None

    def alive(self) -> bool:
        """Whether it is still running; a zombie is not."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return Process.parse(stat) == self and stat.rpartition(")")[2].split()[0] not in "ZX"

    def children(self) -> list[Process]:
        """Its own children, never those of a later process with the same PID."""
        if not self.alive():
            return []
        try:
            listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [child for pid in listed.split() if (child := Process.see(int(pid)))]

    def program(self) -> str:
        """The program that it runs; empty if it has exited."""
        try:
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def kill(self) -> None:
        """Kills it, and returns when it has exited."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive():
                os.kill(self.pid, signal.SIGKILL)
        until(f"process {self.pid} exits", lambda: not self.alive(), KILL_LIMIT)


class Daemons:
    """The processes of one cluster, with their records and logs in its folder."""

    def __init__(self, folder: Path) -> None:
        self.records = folder / "processes"
        self.logs = folder / "logs"

    def start(self, name: str, *command: str | Path) -> None:
        """Starts `command` in a new session, so it gets no signals from the terminal."""
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
        # The record is used from here on; this object would only warn that the process still runs.
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
        """Kills a process, if it was started and is still running."""
        if process := self.find(name):
            process.kill()
        (self.records / name).unlink(missing_ok=True)

    def until(self, what: str, name: str, holds, seconds: float) -> None:
        """Waits for a condition while the process `name` is running."""

        def holds_or_dead() -> object:
            if holds():
                return True
            process = self.find(name)
            if process is None or not process.alive():
                raise Failure(f"{what}: `{name}` exited{self.log_tail(name)}")
            return False

        until(what, holds_or_dead, seconds, lambda: self.log_tail(name))

    def log_tail(self, name: str) -> str:
        log = self.logs / f"{name}.log"
        if not log.exists():
            return ""
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "; end of its log:\n" + "\n".join(lines)
