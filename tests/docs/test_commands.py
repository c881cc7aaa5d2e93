# SPDX-License-Identifier: Apache-2.0
"""Every command of the documentation is run, or checked where it needs what this machine lacks.

A block of shell commands is run, in the order of its page, in a home of the page's own.
A mark after its language (```sh cluster) says what its commands need; then they are checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import ABROAD, MARKS, NOT_RUN, Shell
from conftest import CHECKED
from pages import ROOT, SHELL, Block, blocks, pages, simple_commands, spans

# Blocks of this mark are run where there is a Python that has the package, Keras and PyTorch.
PYTHON = "python"
NO_PYTHON = "needs Python with the package, Keras and PyTorch"


@pytest.fixture
def shell(tmp_path: Path, elasticdl: Path, python: Path | None) -> Iterator[Shell]:
    shell = Shell(tmp_path, elasticdl, python)
    yield shell
    shell.end()


def why_not_run(block: Block, line: str, python: Path | None) -> str | None:
    """What keeps a command from being run here, if anything does."""
    mark = block.why_not_run
    if mark == PYTHON and not python:
        return NO_PYTHON
    if mark and mark != PYTHON:
        assert mark in MARKS, f"{block.place}: nobody knows the mark `{mark}`"
        return MARKS[mark]
    programs = [words[0] for words in simple_commands(line)]
    if line.startswith("cargo run --release -- "):
        return None
    reasons = [ABROAD[program] for program in programs if program in ABROAD]
    reasons += [why for pattern, why in NOT_RUN if re.search(pattern, line)]
    return next(iter(reasons), None)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_works(
    page: Path,
    shell: Shell,
    python: Path | None,
    record_property: pytest.RecordProperty,
) -> None:
    for block in blocks(page):
        if block.file:
            (shell.folder / block.file).write_text(block.text)
            continue
        if block.language not in SHELL:
            continue
        for line, number in block.commands():
            place = f"{page.relative_to(ROOT)}:{number}"
            why = why_not_run(block, line, python)
            if why:
                kind = "skip" if why == NO_PYTHON else "note"
                record_property(CHECKED, (str(shell.check(line, place, why)), kind, why))
            else:
                shell.run(line, place)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_are_parsed(page: Path, shell: Shell) -> None:
    for span in spans(page):
        if span.startswith("elasticdl ") and " " in span.strip():
            shell.check(span, str(page.relative_to(ROOT)), "stands in a sentence")
