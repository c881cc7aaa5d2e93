# SPDX-License-Identifier: Apache-2.0
"""How many lines of a script change to make it elastic. `make soak` runs these scripts."""

from __future__ import annotations

import re

import pytest

import matrix
from conftest import ROOT


@pytest.mark.parametrize("name", matrix.CASES)
def test_few_lines_change(name: str) -> None:
    case = matrix.CASES[name]
    compile(case.plain, name, "exec")
    compile(case.elastic, name, "exec")
    assert "elasticdl" not in case.plain and "elasticdl" in case.elastic
    assert 0 < case.n_changed() <= case.limit, case.elastic


def test_the_documentation_has_these_numbers() -> None:
    text = (ROOT / "docs" / "pytorch.md").read_text()
    rows = re.findall(r"^\| (`.*?)(?::.*)? \|.*\| (\d) \|$", text, re.M)
    found = {name: int(n) for names, n in rows for name in re.findall("`(.*?)`", names)}
    assert found == {name: case.n_changed() for name, case in matrix.CASES.items()}
