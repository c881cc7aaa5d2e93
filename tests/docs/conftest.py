# SPDX-License-Identifier: Apache-2.0
"""Selects the command to test (`ELASTICDL`, `ELASTICDL_PYTHON`; `make docs` sets them), and lists
the commands that were checked but not run."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

CHECKED = "checked"


@pytest.fixture(scope="session")
def elasticdl() -> Path:
    named = os.environ.get("ELASTICDL") or shutil.which("elasticdl")
    assert named, "set ELASTICDL=FILE to the command to test; `make docs` builds it"
    return Path(named).absolute()


@pytest.fixture(scope="session")
def python() -> Path | None:
    """A Python with the package, Keras and PyTorch; without it, Python models are not run."""
    named = os.environ.get("ELASTICDL_PYTHON")
    return Path(named).absolute() if named else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    properties = [
        p for report in terminalreporter.getreports("passed") for p in report.user_properties
    ]
    checked = [text for name, text in properties if name == CHECKED]
    if checked:
        terminalreporter.section("checked, not run")
        for text, _, _ in checked:
            terminalreporter.line(text)
    reasons = Counter((kind, why) for _, kind, why in checked)
    name = os.environ.get("ELASTICDL_SKIPS")
    # Not in an xdist worker, which runs only some of the tests.
    if name and not hasattr(terminalreporter.config, "workerinput"):
        with open(name, "a") as skips:
            for (kind, why), number in sorted(reasons.items()):
                skips.write(f"{kind}\tcommands of docs, checked but not run: {why} ({number})\n")
