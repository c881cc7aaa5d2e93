# SPDX-License-Identifier: Apache-2.0
"""A lock between processes; the kernel releases it even if a process crashes."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from .waiting import until


@contextlib.contextmanager
def alone(lock: Path, what: str, seconds: float) -> Iterator[None]:
    """Waits until no other process (or thread) holds `lock`, whose holder does `what`."""

    def locked() -> bool:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as held:
        until(f"another process finishes {what}", locked, seconds)
        yield
