# SPDX-License-Identifier: Apache-2.0
"""Kills workers of jobs that tests run; scripts of all frameworks import it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

# How long a step takes while workers are missing, so that there are steps left when they join.
PACE_SECS = 1.0
# How long a step takes before workers are killed: the master allows the steps of about a second in
# advance, and a worker joins after the last of them.
STEADY_SECS = 0.1


class Faults:
    """Kills workers in the middle of a step, and waits for those that replace them."""

    def __init__(self, folder: Path, n_workers: int, kills: list[int]) -> None:
        self._folder, self._n_workers, self._kills = folder, n_workers, kills
        self._is_new = True

    def between(self, step: int, may_kill: bool = True) -> None:
        """Called in a step, after its changes."""
        if self._is_new:
            self._is_new = False
            (self._folder / f"joined-{step}-{os.getpid()}").touch()
        if may_kill and step in self._kills and self._is_first(f"killed-{step}"):
            self.before_kill()
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        if any(step < kill for kill in self._kills):
            time.sleep(STEADY_SECS)
        while self._is_slow(step) and time.monotonic() < begin + PACE_SECS:
            time.sleep(0.01)

    def before_kill(self) -> None:
        """What else is lost with this worker."""

    def _is_slow(self, step: int) -> bool:
        n_killed = sum(kill <= step for kill in self._kills)
        n_joined = len([*self._folder.glob("joined-*")])
        return n_joined < self._n_workers + n_killed or (self._folder / "slow").exists()

    def _is_first(self, name: str) -> bool:
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
