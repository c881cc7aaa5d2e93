# SPDX-License-Identifier: Apache-2.0
"""What a worker prints, which goes to its log."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Log(io.FileIO):
    def write(self, text: Any) -> int:
        try:
            return super().write(text)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(text).nbytes


def survive_a_full_disk() -> None:
    """Makes a worker leave out what has no room in its log: `print` in user code must not fail."""
    if "ELASTICDL_WORKER_ID" not in os.environ:
        return
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # Not one that the user has replaced.
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        log = _Log(stream.fileno(), "w", closefd=False)
        is_buffered = isinstance(stream.buffer, io.BufferedWriter)
        copied = io.TextIOWrapper(
            io.BufferedWriter(log) if is_buffered else log,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, copied)
