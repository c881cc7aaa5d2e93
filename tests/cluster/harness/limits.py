# SPDX-License-Identifier: Apache-2.0
"""What the kernel allows one user: the usual limit is too low for several nodes on one machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

# A kubelet and its containerd watch files by about a dozen of these; 128 are usual.
_WATCHERS = Path("/proc/sys/fs/inotify/max_user_instances")
_N_WATCHERS = 1024


def lift() -> None:
    """Lets more nodes run here, where that may be changed; elsewhere they may not start."""
    with contextlib.suppress(OSError):
        if int(_WATCHERS.read_text()) < _N_WATCHERS:
            _WATCHERS.write_text(str(_N_WATCHERS))
