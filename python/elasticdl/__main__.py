# SPDX-License-Identifier: Apache-2.0
"""Entry point of the `elasticdl` command and of `python -m elasticdl …`."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line and exits with its exit code."""
    from elasticdl import _elasticdl

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # It would do nothing while native code runs.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    again = [sys.executable, "-m", "elasticdl"]
    code = _elasticdl.main(["elasticdl", *sys.argv[1:]], again)
    sys.stdout.flush()
    sys.stderr.flush()
    # Imported in forks only.
    if forked := sys.modules.get("elasticdl._fork_server"):
        forked.report_imports()
    # A thread may still be running the user's model; it must not keep this process alive.
    os._exit(code)


if __name__ == "__main__":
    main()
