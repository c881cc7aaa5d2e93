# SPDX-License-Identifier: Apache-2.0
"""Runs many test processes, the longest first, to keep every core busy.

Most tests wait for processes they have started, and some compute. So another one is started
whenever a core is idle, up to a limit: on a loaded machine there are as many tests as cores.
The order is not part of any result: durations of earlier runs are only used to start the longest
first, and are kept outside the repository.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

CORES = len(os.sched_getaffinity(0))
# Tests in flight at most, however idle the machine looks.
MOST = 4 * CORES
# A core is idle if this share of the machine's time went unused since the last look.
IDLE = 0.5 / CORES
LOOK = 0.5
POLL = 0.02
# Far above what any test takes; a test that reaches it hangs.
LIMIT = 600
SLOWEST = 10
PR_SET_CHILD_SUBREAPER = 36


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CACHE") or Path(home) / "elasticdl")


def skipped(kind: str, line: str) -> None:
    """Notes a test that did not run: `skip` where the machine lacks something, `note` where it is
    left to another target. `tests/parts.sh` shows both at the end."""
    name = os.environ.get("ELASTICDL_SKIPS")
    if name:
        with open(name, "a") as file:
            file.write(f"{kind}\t{line}\n")


@dataclass
class Unit:
    """A process that runs one test or several."""

    name: str
    command: list[str]
    cwd: Path
    env: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    # CPU time of the unit and of all processes that it waited for.
    cpu: float = 0.0
    code: int | None = None
    output: str = ""

    @property
    def end(self) -> str:
        if self.code is None:
            return f"did not end within {LIMIT} s"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with {self.code}"


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    ignored: int = 0


@dataclass
class Part:
    """Tests of one kind. `judge` adds the results of a unit to the counts, and returns whether the
    unit passed."""

    title: str
    units: list[Unit]
    judge: Callable[[Unit, Counts], bool]
    counts: Counts = field(default_factory=Counts)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._memory = cache() / f"durations-{self.title}.json"
        self._known = json.loads(self._memory.read_text()) if self._memory.exists() else {}

    def expected(self, unit: Unit) -> float:
        """The seconds of an earlier run. A unit that has never passed may take long."""
        return self._known.get(unit.name, LIMIT)

    def remember(self) -> None:
        """Keeps the durations for the order of the next run."""
        passed = {unit.name: round(unit.seconds, 2) for unit in self.units if unit.code == 0}
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        self._memory.write_text(json.dumps(self._known | passed, indent=0, sort_keys=True))

    def finish(self, unit: Unit) -> None:
        """Judges a unit that has ended; the output of one that failed is printed."""
        if not self.judge(unit, self.counts):
            self.failures.append(unit.name)
            print(f"--- {self.title}: {unit.name} {unit.end}\n{unit.output}", flush=True)

    def summary(self) -> None:
        print(f"{self.title}: slowest (wall time, CPU time)")
        for unit in sorted(self.units, key=lambda unit: -unit.seconds)[:SLOWEST]:
            print(f"  {unit.seconds:6.1f} s {unit.cpu:6.1f} s  {unit.name}")
        for name in self.failures:
            print(f"{self.title}: FAILED {name}")
        found = self.counts
        print(
            f"{self.title}: {found.passed} passed, {found.failed} failed, {found.ignored} not run, "
            f"{sum(unit.cpu for unit in self.units):.0f} s of CPU time"
        )


class Run:
    """Runs all units of some parts."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._flying: dict[subprocess.Popen, tuple[Part, Unit, float, IO[bytes]]] = {}
        self._busy = (0, 0)
        self._looked = 0.0
        self._told = time.monotonic()
        # Whatever a test leaves behind becomes our child, and is ended with us.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))

    def all(self) -> bool:
        """Runs them all; whether all were good."""
        begin = time.monotonic()
        units = [(part, unit) for part in self._parts for unit in part.units]
        waiting = sorted(units, key=lambda one: one[0].expected(one[1]))
        try:
            while waiting or self._flying:
                if waiting and self._has_room():
                    self._start(*waiting.pop())
                self._collect()
                self._tell(len(units), len(waiting))
                time.sleep(POLL)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            self._end_all()
            for part in self._parts:
                part.remember()
        seconds = time.monotonic() - begin
        for part in self._parts:
            part.summary()
        total = sum(unit.seconds for _, unit in units)
        print(f"all units: {seconds:.0f} s, {total / max(seconds, 0.1):.1f} at a time")
        return not any(part.failures for part in self._parts)

    def _has_room(self) -> bool:
        if len(self._flying) < CORES:
            return True
        now = time.monotonic()
        if len(self._flying) >= MOST or now < self._looked + LOOK:
            return False
        with open("/proc/stat") as file:
            times = [int(word) for word in file.readline().split()[1:9]]
        idle, every = times[3] + times[4], sum(times)
        before, self._busy, self._looked = self._busy, (idle, every), now
        return idle - before[0] > IDLE * (every - before[1])

    def _start(self, part: Part, unit: Unit) -> None:
        # Files, not pipes: a process that a test leaves behind must not keep us waiting.
        output = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the unit has ended)
        process = subprocess.Popen(
            unit.command,
            cwd=unit.cwd,
            env={**os.environ, **unit.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._flying[process] = (part, unit, time.monotonic(), output)
        self._looked = time.monotonic()

    def _collect(self) -> None:
        for process, (part, unit, begin, output) in list(self._flying.items()):
            unit.seconds = time.monotonic() - begin
            # Not `Popen.poll`, which does not report the CPU time.
            has_ended, status, used = os.wait4(process.pid, os.WNOHANG)
            if not has_ended:
                if unit.seconds < LIMIT:
                    continue
                os.killpg(process.pid, signal.SIGKILL)
                _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            unit.code = process.returncode if has_ended else None
            unit.cpu = used.ru_utime + used.ru_stime
            del self._flying[process]
            output.seek(0)
            unit.output = output.read().decode(errors="replace")
            output.close()
            part.finish(unit)
        self._reap()

    def _children(self) -> list[int]:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def _reap(self) -> None:
        ours = {process.pid for process in self._flying}
        for pid in self._children():
            if pid not in ours:
                os.waitpid(pid, os.WNOHANG)

    def _end_all(self) -> None:
        """Ends what is still there, with all that it started."""
        while children := self._children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)

    def _tell(self, n_units: int, n_waiting: int) -> None:
        """A line that changes on a terminal; now and then a new one elsewhere."""
        pause, end = (0.2, "\r") if sys.stdout.isatty() else (30, "\n")
        if time.monotonic() < self._told + pause:
            return
        self._told = time.monotonic()
        n_done = n_units - n_waiting - len(self._flying)
        titles = ", ".join(part.title for part in self._parts)
        n_failed = sum(len(part.failures) for part in self._parts)
        line = f"{titles}: {n_done} of {n_units} done, {len(self._flying)} running"
        print(f"{line}, {n_failed} failed ", end=end, flush=True)
