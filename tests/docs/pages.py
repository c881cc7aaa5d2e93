# SPDX-License-Identifier: Apache-2.0
"""Parses the pages of the documentation: code blocks, commands, links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = {"sh", "bash", "console"}
# Generated pages contain the output of programs; the test of the reference compares them.
GENERATED = ROOT / "docs" / "reference"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its first line, and its text."""

    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        """The NAME of `file=NAME`, under which a reader saves the block."""
        names = [mark[5:] for mark in self.marks if mark.startswith("file=")]
        return names[0] if names else None

    @property
    def why_not_run(self) -> str | None:
        """The mark for what the commands of this block need, if they are only checked."""
        others = [mark for mark in self.marks if not mark.startswith("file=")]
        return others[0] if others else None

    def commands(self) -> list[tuple[str, int]]:
        """Each command of a shell block with its line number; continued lines are one command."""
        commands, pending, begin = [], "", 0
        for number, raw in enumerate(self.text.splitlines(), self.line + 1):
            line = raw.strip()
            if self.language == "console" and not pending:
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            if not pending:
                begin = number
            if line.endswith("\\"):
                pending += line[:-1]
                continue
            whole, pending = (pending + line).strip(), ""
            if whole and not whole.startswith("#"):
                commands.append((whole, begin))
        assert not pending, f"{self.place}: nothing follows the continued last line"
        return commands


def pages() -> list[Path]:
    """All hand-written pages for users."""
    first = ["README.md", "CONTRIBUTING.md", "data/README.md", "model_zoo/README.md"]
    written = [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
    return [ROOT / name for name in first] + [p for p in written if GENERATED not in p.parents]


def blocks(page: Path) -> list[Block]:
    found, fence = [], None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        opening = re.match(r"( *)(```+)(.*)$", line)
        if fence is None and opening:
            language, *marks = opening[3].split() or [""]
            fence, start, text = opening[2], number, []
            indent, header = len(opening[1]), (language, tuple(marks))
        elif fence and line.strip() == fence:
            found.append(Block(page, start, *header, "\n".join(text) + "\n"))
            fence = None
        elif fence:
            text.append(line[indent:] if line[:indent].isspace() else line)
    assert fence is None, f"{page}: the block at line {start} is not closed"
    return found


def prose(page: Path) -> str:
    """The page without its blocks."""
    lines, fenced = [], False
    for line in page.read_text().splitlines():
        if re.match(r" *```", line):
            fenced = not fenced
        elif not fenced:
            lines.append(line)
    return "\n".join(lines)


def spans(page: Path) -> list[str]:
    """The text between backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def simple_commands(line: str) -> list[list[str]]:
    """The commands joined by `|`, `&&` and `;`, each as its words, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    commands: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if set(word) <= set("|&;"):
            commands.append([])
        elif set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        else:
            commands[-1].append(word)
    # `NAME=value` before a program is its environment.
    named = re.compile(r"[A-Z_0-9]+=")
    without = [list(dropwhile(lambda word: named.match(word), command)) for command in commands]
    return [command for command in without if command]
