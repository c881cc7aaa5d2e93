# SPDX-License-Identifier: Apache-2.0
"""Adds every skipped test to the file in ELASTICDL_SKIPS; `make test` lists them at the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A shell starts background commands with SIGINT ignored. The processes that tests interrupt would
# inherit that, and never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    name = os.environ.get("ELASTICDL_SKIPS")
    if not name or not report.skipped or hasattr(report, "wasxfail"):
        return
    file, _, why = report.longrepr
    place = report.nodeid or str(Path(file).relative_to(ROOT))
    # A test that another target runs does not count as skipped.
    kind = "note" if "`make soak`" in why else "skip"
    with open(name, "a") as skips:
        skips.write(f"{kind}\t{place}: {why.removeprefix('Skipped: ')}\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    note(report)
