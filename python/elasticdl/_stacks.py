# SPDX-License-Identifier: Apache-2.0
"""Python stacks of a worker, in its log: when it crashes, and when its supervisor asks."""

from __future__ import annotations

import faulthandler
import os
import signal

# The worker's log.
_STDERR = 2


def log_when_asked() -> None:
    """Makes a worker log the stacks of all its Python threads on SIGUSR1 and on fatal signals.

    This works even while user code holds the interpreter. `elasticdl explain` shows the stacks.
    """
    if "ELASTICDL_WORKER_ID" in os.environ:
        faulthandler.enable(file=_STDERR)
        faulthandler.register(signal.SIGUSR1, file=_STDERR)
