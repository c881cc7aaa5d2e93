# SPDX-License-Identifier: Apache-2.0
"""Waits with a time limit; each names what it waits for in its error."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds between two checks of a condition.
INTERVAL = 0.1
# The interval is at least this many times the duration of a check: kubectl uses CPU time that the
# cluster needs. But it is never so long that a short-lived state is missed.
PATIENCE = 2
LONGEST_INTERVAL = 1.0


class Failure(Exception):
    """Something did not work; the text is a one-line error."""


def until(
    what: str, holds: Callable[[], object], seconds: float, hint: Callable[[], str] = str
) -> None:
    """Waits until `holds`; on a timeout, fails with `what` and `hint`."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if holds():
            return
        now = time.monotonic()
        if now > deadline:
            raise Failure(f"{what}: not within {seconds:.0f} s{hint()}")
        time.sleep(min(LONGEST_INTERVAL, max(INTERVAL, PATIENCE * (now - began))))
