# SPDX-License-Identifier: Apache-2.0
"""Notes every skipped test in the file named by ELASTICDL_SKIPS; `make test` ends with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    name = os.environ.get("ELASTICDL_SKIPS")
    if not name or not report.skipped or hasattr(report, "wasxfail"):
        return
    file, _, why = report.longrepr
    place = report.nodeid or str(Path(file).relative_to(ROOT))
    # A test that has its own target is not missing here.
    kind = "note" if "`make soak`" in why else "skip"
    with open(name, "a") as skips:
        skips.write(f"{kind}\t{place}: {why.removeprefix('Skipped: ')}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    note(report)
