# SPDX-License-Identifier: Apache-2.0
"""The runner of commands reports commands that do not work or cannot be tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import Failed, Shell
from pages import ROOT, Block, simple_commands


@pytest.fixture
def shell(tmp_path: Path, elasticdl: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path, elasticdl, None)
    yield shell
    shell.end()


@pytest.mark.parametrize(
    "line",
    [
        "elasticdl train --num_wrokers=3",
        "elasticdl trian",
        "elasticdl train --image_name=x --training_data=/data",
        "cargo run --release -p edl-core --example nothing",
        "make nothing",
        "kubectl apply -f manifests/nothing.yaml",
        "frobnicate",
        "elasticdl list | frobnicate",
        "elasticdl list 'unclosed",
    ],
)
def test_a_command_that_cannot_work_fails_when_checked(shell: Shell, line: str) -> None:
    with pytest.raises(Failed):
        shell.check(line, "here", "needs a cluster")


def test_a_failed_command_is_reported(shell: Shell) -> None:
    with pytest.raises(Failed, match="exited with code 4"):
        shell.run("elasticdl status unknown", "here")


def test_a_line_is_split_into_its_commands() -> None:
    line = "A=1 make x && elasticdl list > file | grep 'a | b'  # and so on"
    assert simple_commands(line) == [["make", "x"], ["elasticdl", "list"], ["grep", "a | b"]]


def test_continued_lines_are_one_command_without_the_prompt() -> None:
    page = ROOT / "README.md"
    block = Block(page, 1, "console", (), "$ elasticdl train \\\n    --seed=1\nsome output\n$ ls\n")
    assert block.commands() == [("elasticdl train --seed=1", 2), ("ls", 5)]
