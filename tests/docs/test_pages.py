# SPDX-License-Identifier: Apache-2.0
"""Checks of pages besides commands: code compiles, link targets exist, flags exist."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pages import ROOT, blocks, pages, prose, spans
from reference import CRATES, definition, registered

EVERY_PAGE = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
# Flags of other programs that pages mention.
FOREIGN = {"--features", "--num-nodes"}


@EVERY_PAGE
def test_python_compiles_and_yaml_is_valid(page: Path) -> None:
    for block in blocks(page):
        try:
            if block.language == "python":
                ast.parse(block.text)
            elif block.language == "yaml":
                list(yaml.safe_load_all(block.text))
        except (SyntaxError, yaml.YAMLError) as error:
            raise AssertionError(f"{block.place}: {error}") from error


@EVERY_PAGE
def test_link_targets_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page}: `{target}` does not exist"
        if anchor:
            assert anchor in anchors(file), f"{page}: `{target}` has no such heading"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s]+)\)", index.read_text())
    }
    for page in sorted(ROOT.glob("docs/**/*.md")):
        assert page == index or page in linked, f"docs/README.md does not list {page}"


@EVERY_PAGE
def test_flags_exist(page: Path, flags: set[str]) -> None:
    for span in spans(page):
        named = re.match(r"(--[a-z][a-z_-]*)", span)
        if named and "{" not in span:
            known = named[1].rstrip("_") in flags or named[1] in FOREIGN
            assert known, f"{page}: elasticdl has no flag `{named[1]}`"


@pytest.fixture(scope="session")
def flags(elasticdl: Path) -> set[str]:
    """Every flag of every command, including hidden ones, from the shell completions."""
    script = subprocess.run(
        [elasticdl, "completions", "bash"], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"--[a-z][a-z_-]*", script))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@EVERY_PAGE
def test_fields_of_trainingjobs_exist(page: Path, elasticdl: Path) -> None:
    known = definition(elasticdl)["spec"]["properties"]
    for block in blocks(page):
        if block.language != "yaml":
            continue
        for thing in yaml.safe_load_all(block.text):
            if isinstance(thing, dict) and thing.get("kind") == "TrainingJob":
                unknown = set(thing["spec"]) - set(known)
                assert not unknown, f"{block.place}: unknown fields {unknown}"


@EVERY_PAGE
def test_metrics_exist(page: Path) -> None:
    files = ("edl-master/src/metrics.rs", "edl-operator/src/metrics.rs")
    known = {name for file in files for name, *_ in registered(CRATES / file)}
    for name in re.findall(r"\belasticdl_(?:master|operator)_[a-z_]+", page.read_text()):
        assert name in known, f"{page}: unknown metric `{name}`"


def test_messages_on_the_troubleshooting_page_exist() -> None:
    """Each message on the page consists of pieces that occur in strings of the source."""
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/elasticdl/**/*.py")]
    source_text = "\n".join(squeezed(file.read_text()) for file in sources)
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| (message|reason) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert tables
    for kind, rows in tables:
        for row in rows.splitlines():
            cells = [cell.strip() for cell in row.strip("|").split(" | ")]
            message = cells[0] if kind == "message" else cells[1]
            for piece in message.split("…"):
                piece = piece.strip(" ;,:")
                assert message == "as above" or piece in source_text, (
                    f"not in the source: `{piece}`"
                )
            if kind == "reason":
                assert f'"{cells[0].strip("`")}"' in source_text, f"unknown reason {cells[0]}"


def squeezed(source: str) -> str:
    """The source without backticks, with strings of several lines joined."""
    source = re.sub(r"\\\n\s*", "", source)
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    return source.replace("`", "")
