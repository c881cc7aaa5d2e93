# SPDX-License-Identifier: Apache-2.0
"""Runs many test processes, the longest first, to keep every core busy.

Most tests wait for processes that they have started, and some compute. Another test is therefore
started whenever a core is idle, up to a limit; on a busy machine, as many tests run as there are
cores. The order does not affect any result: durations of earlier runs, which are stored outside the
repository, are only used to start the longest tests first.
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

from template import Fork, Template

CORES = len(os.sched_getaffinity(0))
# Maximum number of running tests, no matter how idle the machine is.
MAX_RUNNING = 4 * CORES
# Another test starts if this share of the machine's time was unused since the last check.
IDLE = 0.2 / CORES
CHECK = 0.5
POLL = 0.05
# Far longer than any test takes; a test that reaches this limit hangs.
LIMIT = 600
SLOWEST = 10
PR_SET_CHILD_SUBREAPER = 36


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CACHE") or Path(home) / "elasticdl")


def skipped(kind: str, line: str) -> None:
    """Records a test that did not run: `skip` if the machine lacks something, `note` if another
    target runs the test. `tests/parts.sh` shows both at the end."""
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
    # If there are any, `command` is `python -m pytest …`, and runs in a fork of a process that has
    # imported these modules.
    imported: tuple[str, ...] = ()
    seconds: float = 0.0
    # CPU time of the unit and of all processes that it waited for.
    cpu: float = 0.0
    code: int | None = None
    output: str = ""

    @property
    def end(self) -> str:
        if self.code is None:
            return f"did not exit within {LIMIT} s"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with code {self.code}"


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
    # Whether these are all units, not only those that a filter selects.
    is_complete: bool = True
    counts: Counts = field(default_factory=Counts)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._durations = cache() / f"durations-{self.title}.json"
        self._known = json.loads(self._durations.read_text()) if self._durations.exists() else {}

    def expected(self, unit: Unit) -> float:
        """The duration of an earlier run. A unit that has never passed may take long."""
        return self._known.get(unit.name, LIMIT)

    def remember(self) -> None:
        """Saves the durations for the order of the next run."""
        passed = {unit.name: round(unit.seconds, 2) for unit in self.units if unit.code == 0}
        known = self._known | passed
        if self.is_complete:
            # Units that no longer exist are forgotten.
            known = {unit.name: known[unit.name] for unit in self.units if unit.name in known}
        self._durations.parent.mkdir(parents=True, exist_ok=True)
        self._durations.write_text(json.dumps(known, indent=0, sort_keys=True))

    def finish(self, unit: Unit) -> None:
        """Adds the results of a unit that has exited; if it failed, prints its output."""
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
    """Runs all units of several parts."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._running: dict[subprocess.Popen | Fork, tuple[Part, Unit, float, IO[bytes]]] = {}
        self._templates: dict[tuple[str, ...], Template] = {}
        self._busy = (0, 0)
        self._checked_at = 0.0
        self._shown_at = time.monotonic()
        # Processes that a test leaves behind become our children, and are killed when we exit.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))

    def all(self) -> bool:
        """Runs all units; returns whether all passed."""
        begin = time.monotonic()
        units = [(part, unit) for part in self._parts for unit in part.units]
        waiting = sorted(units, key=lambda one: one[0].expected(one[1]))
        try:
            while waiting or self._running:
                if waiting and self._has_room():
                    self._start(*waiting.pop())
                self._collect()
                self._show_progress(len(units), len(waiting))
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
        if len(self._running) < CORES:
            return True
        now = time.monotonic()
        if len(self._running) >= MAX_RUNNING or now < self._checked_at + CHECK:
            return False
        with open("/proc/stat") as file:
            times = [int(word) for word in file.readline().split()[1:9]]
        idle, every = times[3] + times[4], sum(times)
        before, self._busy, self._checked_at = self._busy, (idle, every), now
        return idle - before[0] > IDLE * (every - before[1])

    def _start(self, part: Part, unit: Unit) -> None:
        # A file, not a pipe: we must not wait for processes that a test leaves behind.
        output = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the unit has ended)
        begin = time.monotonic()
        self._running[self._process(unit, output)] = (part, unit, begin, output)
        self._checked_at = time.monotonic()

    def _process(self, unit: Unit, output: IO[bytes]) -> subprocess.Popen | Fork:
        if unit.imported:
            python, _, _, *words = unit.command
            template = (python, *unit.imported)
            if template not in self._templates:
                self._templates[template] = Template(python, unit.imported)
            return self._templates[template].start(words, unit.cwd, unit.env, output)
        return subprocess.Popen(
            unit.command,
            cwd=unit.cwd,
            env={**os.environ, **unit.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _collect(self) -> None:
        for process, (part, unit, begin, output) in list(self._running.items()):
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
            del self._running[process]
            output.seek(0)
            unit.output = output.read().decode(errors="replace")
            output.close()
            part.finish(unit)
        self._reap()

    def _children(self) -> list[int]:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def _reap(self) -> None:
        ours = {process.pid for process in self._running}
        for pid in self._children():
            if pid not in ours:
                os.waitpid(pid, os.WNOHANG)

    def _end_all(self) -> None:
        """Kills all remaining processes and their children."""
        while children := self._children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                os.waitpid(pid, 0)

    def _show_progress(self, n_units: int, n_waiting: int) -> None:
        """Shows progress: updates a line on a terminal, or prints a line now and then elsewhere."""
        pause, end = (0.2, "\r") if sys.stdout.isatty() else (30, "\n")
        if time.monotonic() < self._shown_at + pause:
            return
        self._shown_at = time.monotonic()
        n_done = n_units - n_waiting - len(self._running)
        titles = ", ".join(part.title for part in self._parts)
        n_failed = sum(len(part.failures) for part in self._parts)
        line = f"{titles}: {n_done} of {n_units} done, {len(self._running)} running"
        print(f"{line}, {n_failed} failed ", end=end, flush=True)
