# SPDX-License-Identifier: Apache-2.0
"""Runs many test processes, the longest first, so that every core stays busy.

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


class Run:
    """Runs units to their end; `judge` adds what a unit says to the counts, and tells whether it
    is good."""

    def __init__(self, title: str, judge: Callable[[Unit, Counts], bool]) -> None:
        self.title, self.judge = title, judge
        self.counts = Counts()
        self.failures: list[str] = []
        self._flying: dict[subprocess.Popen, tuple[Unit, float, object]] = {}
        self._busy = (0, 0)
        self._looked = 0.0
        self._told = time.monotonic()
        # Whatever a test leaves behind becomes our child, and is ended with us.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))

    def all(self, units: list[Unit]) -> bool:
        """Runs them all; whether all were good."""
        begin = time.monotonic()
        memory = cache() / f"durations-{self.title}.json"
        known = json.loads(memory.read_text()) if memory.exists() else {}
        # What nobody has measured yet may be long.
        waiting = sorted(units, key=lambda unit: known.get(unit.name, LIMIT))
        try:
            while waiting or self._flying:
                if waiting and self._has_room():
                    self._start(waiting.pop())
                self._collect()
                self._tell(len(units), len(waiting))
                time.sleep(POLL)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            self._end_all()
            known |= {unit.name: round(unit.seconds, 2) for unit in units if unit.code == 0}
            memory.parent.mkdir(parents=True, exist_ok=True)
            memory.write_text(json.dumps(known, indent=0, sort_keys=True))
        self._summary(units, time.monotonic() - begin)
        return not self.failures

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

    def _start(self, unit: Unit) -> None:
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
        self._flying[process] = (unit, time.monotonic(), output)
        self._looked = time.monotonic()

    def _collect(self) -> None:
        for process, (unit, begin, output) in list(self._flying.items()):
            unit.seconds = time.monotonic() - begin
            if process.poll() is None:
                if unit.seconds < LIMIT:
                    continue
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            else:
                unit.code = process.returncode
            del self._flying[process]
            output.seek(0)
            unit.output = output.read().decode(errors="replace")
            output.close()
            if not self.judge(unit, self.counts):
                self.failures.append(unit.name)
                print(f"--- {self.title}: {unit.name} {unit.end}\n{unit.output}", flush=True)
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
        line = f"{self.title}: {n_done} of {n_units} done, {len(self._flying)} running"
        print(f"{line}, {len(self.failures)} failed ", end=end, flush=True)

    def _summary(self, units: list[Unit], seconds: float) -> None:
        print(f"{self.title}: slowest")
        for unit in sorted(units, key=lambda unit: -unit.seconds)[:SLOWEST]:
            print(f"  {unit.seconds:6.1f} s  {unit.name}")
        for name in self.failures:
            print(f"{self.title}: FAILED {name}")
        found = self.counts
        used = f"in {seconds:.0f} s"
        if total := sum(unit.seconds for unit in units):
            used += f" ({total / max(seconds, 0.1):.1f} at a time)"
        print(
            f"{self.title}: {found.passed} passed, {found.failed} failed, "
            f"{found.ignored} not run, {used}"
        )
