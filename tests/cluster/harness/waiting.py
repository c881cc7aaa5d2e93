# SPDX-License-Identifier: Apache-2.0
"""Bounded waits: each names what it waits for, so that a timeout can be understood."""

from __future__ import annotations

import time
from collections.abc import Callable

# After how long a condition is looked at again.
INTERVAL = 0.1
# And how many times as long as the look took: one by kubectl takes much of a processor that the
# cluster needs to get on. But never so long that a state comes and goes meanwhile.
PATIENCE = 2
LONGEST_INTERVAL = 1.0


class Failure(Exception):
    """Something did not work; the text is one sentence for whoever runs the tests."""


def until(
    what: str, holds: Callable[[], object], seconds: float, hint: Callable[[], str] = str
) -> None:
    """Waits until `holds`, and fails by saying that `what` did not happen, and `hint`."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if holds():
            return
        now = time.monotonic()
        if now > deadline:
            raise Failure(f"{what}: not within {seconds:.0f} s{hint()}")
        time.sleep(min(LONGEST_INTERVAL, max(INTERVAL, PATIENCE * (now - began))))
