# SPDX-License-Identifier: Apache-2.0
"""Control groups (version 1) that account for and limit the containers of a cluster."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .waiting import until

# The kernel releases the group of a dead process shortly after the process.
REMOVE_LIMIT = 30


def hierarchies() -> list[Path]:
    """The folders where the kernel's controllers are mounted."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(where) for _, where, kind, *_ in lines if kind in ("cgroup", "cgroup2")]


def make(group: str) -> None:
    """Creates `group` in every hierarchy."""
    for hierarchy in hierarchies():
        folder = hierarchy
        for part in group.split("/"):
            folder = folder / part
            folder.mkdir(exist_ok=True)
            # A new cpuset group has no CPUs, and accepts no process until they are set.
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (folder / file).exists() and (folder.parent / file).exists():
                    (folder / file).write_text((folder.parent / file).read_text())


def remove(group: str) -> None:
    """Removes `group` and its subgroups; their processes must have exited."""
    until(f"control group `{group}` is empty", lambda: _removed(group), REMOVE_LIMIT)


def _removed(group: str) -> bool:
    left = [each / group for each in hierarchies() if (each / group).exists()]
    for top in left:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return not any(top.exists() for top in left)
