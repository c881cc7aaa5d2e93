# SPDX-License-Identifier: Apache-2.0
"""Tests that run in forks share nothing, and are counted even if they crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Runs a file of tests twice, in forks of one process.
RUN = """
import sys
from pathlib import Path

from run_python import judge
from schedule import Part, Run, Unit

file = Path(sys.argv[1])
command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
env = {"OF_A_FORK": "yes"}
imported = ("pytest", "colorsys", "no_such_module")
part = Part("forks", [Unit(name, command, file.parent, env, imported) for name in "ab"], judge)
Run([part]).all()
print(part.counts)
"""

FORKED = """
import os, sys

def test_the_process_starts_with_what_was_imported():
    assert "colorsys" in sys.modules

def test_it_leads_its_session_and_has_no_input():
    assert os.getsid(0) == os.getpid() and os.environ["OF_A_FORK"] == "yes"
    assert os.read(0, 1) == b""

def test_it_shares_nothing_with_other_tests():
    assert not hasattr(sys, "was_changed")
    sys.was_changed = True
"""
LATE = """
import atexit

def test_a_line_after_the_summary():
    atexit.register(print, "7 instances leaked")
"""
SILENT = "import os\ndef test_exit():\n    os._exit(0)\n"
MIXED = "def test_no():\n    assert False\ndef test_yes():\n    pass\n"
CRASH = "import os\ndef test_crash():\n    os.abort()\n"


@pytest.mark.parametrize(
    ("text", "passed", "failed"),
    [(FORKED, 6, 0), (LATE, 2, 0), (MIXED, 2, 2), (CRASH, 0, 2), (SILENT, 0, 2)],
)
def test_forks_are_counted(tmp_path: Path, text: str, passed: int, failed: int) -> None:
    file = tmp_path / "test_forked.py"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", RUN, file],
        env={**os.environ, "CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
    )
    last = done.stdout.splitlines()[-1]
    assert last == f"Counts(passed={passed}, failed={failed}, ignored=0)", done.stdout
