# SPDX-License-Identifier: Apache-2.0
"""What pages say beside commands: their code compiles, their links lead somewhere, flags exist."""

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
# Flags of other programs that pages speak of.
FOREIGN = {"--features", "--num-nodes"}


@EVERY_PAGE
def test_python_compiles_and_yaml_is_yaml(page: Path) -> None:
    for block in blocks(page):
        try:
            if block.language == "python":
                ast.parse(block.text)
            elif block.language == "yaml":
                list(yaml.safe_load_all(block.text))
        except (SyntaxError, yaml.YAMLError) as error:
            raise AssertionError(f"{block.place}: {error}") from error


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page}: `{target}` is not there"
        if anchor:
            assert anchor in anchors(file), f"{page}: `{target}` has no such heading"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve()
        for target in re.findall(r"\]\(([^)\s]+)\)", index.read_text())
    }
    for page in sorted(ROOT.glob("docs/**/*.md")):
        assert page == index or page in linked, f"docs/README.md does not name {page}"


@EVERY_PAGE
def test_flags_exist(page: Path, flags: set[str]) -> None:
    for span in spans(page):
        named = re.match(r"(--[a-z][a-z_-]*)", span)
        if named and "{" not in span:
            known = named[1].rstrip("_") in flags or named[1] in FOREIGN
            assert known, f"{page}: elasticdl has no flag `{named[1]}`"


@pytest.fixture(scope="session")
def flags(elasticdl: Path) -> set[str]:
    """Every flag of every command, hidden ones too: completions know them all."""
    script = subprocess.run(
        [elasticdl, "completions", "bash"], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"--[a-z][a-z_-]*", script))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ +(.*)$", prose(page), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@EVERY_PAGE
def test_trainingjobs_have_words_that_exist(page: Path, elasticdl: Path) -> None:
    known = definition(elasticdl)["spec"]["properties"]
    for block in blocks(page):
        if block.language != "yaml":
            continue
        for thing in yaml.safe_load_all(block.text):
            if isinstance(thing, dict) and thing.get("kind") == "TrainingJob":
                unknown = set(thing["spec"]) - set(known)
                assert not unknown, f"{block.place}: no TrainingJob has {unknown}"


@EVERY_PAGE
def test_metrics_exist(page: Path) -> None:
    files = ("edl-master/src/metrics.rs", "edl-operator/src/metrics.rs")
    known = {name for file in files for name, *_ in registered(CRATES / file)}
    for name in re.findall(r"\belasticdl_(?:master|operator)_[a-z_]+", page.read_text()):
        assert name in known, f"{page}: nobody shows a metric `{name}`"


def test_messages_of_the_troubleshooting_page_are_said() -> None:
    """Each message there is made of pieces that stand in the source, in strings of the program."""
    sources = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/elasticdl/**/*.py")]
    said = "\n".join(squeezed(file.read_text()) for file in sources)
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"^\| (message|reason) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert tables
    for kind, rows in tables:
        for row in rows.splitlines():
            cells = [cell.strip() for cell in row.strip("|").split(" | ")]
            message = cells[0] if kind == "message" else cells[1]
            for piece in message.split("…"):
                piece = piece.strip(" ;,:")
                assert message == "as above" or piece in said, f"nobody says `{piece}`"
            if kind == "reason":
                assert f'"{cells[0].strip("`")}"' in said, f"there is no reason {cells[0]}"


def squeezed(source: str) -> str:
    """Without backticks and braces around names, and with strings of several lines in one."""
    source = re.sub(r"\\\n\s*", "", source)
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    return source.replace("`", "")
