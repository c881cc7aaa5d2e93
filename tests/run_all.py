# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of `make unit`, `make page`, `make python` and `make docs` concurrently.

Each of them alone leaves cores idle: a page waits for its browser, and the last test of a part
runs alone.

Usage: `run_all.py ELASTICDL PYTHON PAGE…`, with the command, a Python that has the package, and the
command line that tests the pages.
"""

from __future__ import annotations

import sys

import run_python
import run_rust
from schedule import Counts, Part, Run, Unit

ROOT = run_python.ROOT
# As in `make docs`, but with fewer pages at a time, because other tests run, too.
DOCS = ["-m", "pytest", "-q", "-n", "2", "--dist=worksteal", "tests/docs", "tests/scripts"]


def page(command: list[str]) -> Part:
    return Part("page", [Unit("page", command, ROOT)], judge_page)


def judge_page(unit: Unit, counts: Counts) -> bool:
    if unit.code != 0:
        counts.failed += 1
    elif "skip\t" in unit.output:
        counts.ignored += 1
    else:
        counts.passed += 1
    return unit.code == 0


def docs(elasticdl: str, python: str) -> Part:
    env = {"ELASTICDL": elasticdl, "ELASTICDL_PYTHON": python}
    return Part("docs", [Unit("docs", [sys.executable, *DOCS], ROOT, env)], run_python.judge)


def main() -> int:
    elasticdl, python, *command = sys.argv[1:]
    parts = [run_rust.part(), page(command), run_python.part(python), docs(elasticdl, python)]
    return 0 if Run(parts).all() else 1


if __name__ == "__main__":
    sys.exit(main())
