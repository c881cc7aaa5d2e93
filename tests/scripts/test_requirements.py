# SPDX-License-Identifier: Apache-2.0
"""Every Python package that is installed to build and test is known by its hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Those that `make requirements` writes; the models' own name packages, not versions.
FILES = sorted(path.with_suffix(".txt") for path in ROOT.glob("**/requirements*.in"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_requirement_has_a_version_and_a_hash(file: Path) -> None:
    text = re.sub(r"\\\n", " ", file.read_text())
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] not in "#-"]
    assert lines, "the file names packages"
    for line in lines:
        assert re.match(r"[\w.\[\]-]+==[^ ]+ .*--hash=sha256:[0-9a-f]{64}", line), line
