# SPDX-License-Identifier: Apache-2.0
"""`python -m elasticdl …` and the `elasticdl` command are one."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line and leaves the process with its exit code."""
    from elasticdl import _elasticdl

    again = [sys.executable, "-m", "elasticdl"]
    code = _elasticdl.main(["elasticdl", *sys.argv[1:]], again)
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may still be inside the user's model; it must not keep this process.
    os._exit(code)


if __name__ == "__main__":
    main()
