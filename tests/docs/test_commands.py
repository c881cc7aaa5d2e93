# SPDX-License-Identifier: Apache-2.0
"""Runs every command of the documentation, or checks it if this machine lacks what it needs.

The shell blocks of a page are run in order, in a separate home folder.
A mark after the language (```sh cluster) states what the commands need; they are only checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import MARKS, NEVER_RUN, NOT_RUN, Shell
from conftest import CHECKED
from pages import ROOT, SHELL, Block, blocks, pages, simple_commands, spans

# Blocks with this mark are run if there is a Python with the package, Keras and PyTorch.
PYTHON = "python"
NO_PYTHON = "needs Python with the package, Keras and PyTorch"


@pytest.fixture
def shell(tmp_path: Path, elasticdl: Path, python: Path | None) -> Iterator[Shell]:
    shell = Shell(tmp_path, elasticdl, python)
    yield shell
    shell.end()


def why_not_run(block: Block, line: str, python: Path | None) -> str | None:
    """The reason why a command is not run here, if there is one."""
    mark = block.why_not_run
    if mark == PYTHON and not python:
        return NO_PYTHON
    if mark and mark != PYTHON:
        assert mark in MARKS, f"{block.place}: unknown mark `{mark}`"
        return MARKS[mark]
    programs = [words[0] for words in simple_commands(line)]
    if line.startswith("cargo run --release -- "):
        return None
    reasons = [NEVER_RUN[program] for program in programs if program in NEVER_RUN]
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
            shell.check(span, str(page.relative_to(ROOT)), "is part of a sentence")
