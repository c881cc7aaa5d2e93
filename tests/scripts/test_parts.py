# SPDX-License-Identifier: Apache-2.0
"""The last lines of `make test`: skipped tests and the reasons, and when a skip is a failure."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

PARTS = Path(__file__).parents[1] / "parts.sh"


def run(folder: Path, *parts: str, **env: str) -> tuple[int, str]:
    """Replaces `make` with a script: the target `bad` fails, the others record skips."""
    make = folder / "make"
    make.write_text(
        "#!/bin/bash\n[ $2 = bad ] && exit 2\n"
        "case $2 in\n"
        "poor) printf 'skip\\tpage: no browser\\n' >> $ELASTICDL_SKIPS;;\n"
        "soak) printf 'note\\tlong test: `make soak` runs it\\n' >> $ELASTICDL_SKIPS;;\n"
        "esac\n"
    )
    make.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if k not in ("CI", "ELASTICDL_SKIPS")}
    done = subprocess.run(
        ["bash", PARTS, *parts],
        env={**clean, "MAKE": str(make), **env},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_all_parts_are_run_and_timed(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "one", "two", CI="true")
    assert code == 0
    assert "skipped:\n  none\n" in printed
    assert re.search(r"wall time:\n +\d+ s  one\n +\d+ s  two\n", printed)
    assert printed.endswith("passed: one two\n")


def test_a_part_that_fails_does_not_hide_the_others(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "one", "bad", "two")
    assert code == 1
    assert "s  bad\n" in printed and "s  two\n" in printed
    assert printed.endswith("FAILED: bad\n")


@pytest.mark.parametrize(("ci", "expected"), [("true", 1), ("", 0)])
def test_a_skip_is_listed_and_fails_in_ci(tmp_path: Path, ci: str, expected: int) -> None:
    code, printed = run(tmp_path, "poor", CI=ci)
    assert code == expected
    assert "skipped:\n  page: no browser\n" in printed


def test_a_test_that_another_target_runs_is_not_a_skip(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "soak", CI="true")
    assert code == 0
    assert "not part of this run:\n  long test: `make soak` runs it\nskipped:\n  none\n" in printed
