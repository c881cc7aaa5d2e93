# SPDX-License-Identifier: Apache-2.0
"""Kernel limits per user: the usual limit is too low for several nodes on one machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

# A kubelet and its containerd use about a dozen inotify instances; the usual limit is 128.
_WATCHERS = Path("/proc/sys/fs/inotify/max_user_instances")
_N_WATCHERS = 1024


def lift() -> None:
    """Raises the limit if possible; otherwise, nodes may not start."""
    with contextlib.suppress(OSError):
        if int(_WATCHERS.read_text()) < _N_WATCHERS:
            _WATCHERS.write_text(str(_N_WATCHERS))
