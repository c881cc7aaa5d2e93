# SPDX-License-Identifier: Apache-2.0
"""Every image is built from a base image that is known by its digest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for path in sorted([*ROOT.glob("docker/**/Dockerfile*"), *ROOT.glob("examples/**/Dockerfile*")])
    if path.is_file()
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_base_image_is_a_build_argument_with_a_digest(file: Path) -> None:
    """`--build-arg BASE_IMAGE=NAME@sha256:…` selects another one."""
    words = [line.split() for line in file.read_text().splitlines() if re.match("ARG|FROM", line)]
    bases = [base for instruction, base, *_ in words if instruction == "FROM"]
    assert bases == ["${BASE_IMAGE}"]
    (first, default), *_ = words
    assert first == "ARG", "an argument of FROM is declared before it"
    # Our own image is built here.
    pinned = r"scratch|elasticdl:python|\S+:\S+@sha256:[0-9a-f]{64}"
    assert re.fullmatch(f"BASE_IMAGE=({pinned})", default)


def test_there_are_images() -> None:
    assert ROOT / "docker" / "Dockerfile" in FILES
