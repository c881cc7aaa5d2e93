# SPDX-License-Identifier: Apache-2.0
"""Writes training data for the language model from the docstrings of Python's standard library.

Usage: make_data.py DIR [LENGTH [LIBRARY]]. Writes `DIR/train.jsonl` and `DIR/test.jsonl` with one
record per line, `{"tokens": [LENGTH + 1 bytes]}`; every tenth record goes to the test set.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LENGTH = 128


def main() -> None:
    if len(sys.argv) not in (2, 3, 4):
        sys.exit("usage: make_data.py DIR [LENGTH [LIBRARY]]")
    folder = Path(sys.argv[1])
    length = int(sys.argv[2]) if len(sys.argv) > 2 else LENGTH
    library = Path(sys.argv[3] if len(sys.argv) > 3 else sysconfig.get_paths()["stdlib"])
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(doc_strings(library)).encode()
    # Each window starts with the last byte of the previous one, so every byte is predicted.
    windows = [text[at : at + length + 1] for at in range(0, len(text) - length, length)]
    with (folder / "train.jsonl").open("w") as train, (folder / "test.jsonl").open("w") as test:
        for number, window in enumerate(windows):
            line = json.dumps({"tokens": list(window)}) + "\n"
            (test if number % 10 == 9 else train).write(line)
    print(f"wrote {len(windows)} records of {length + 1} bytes to {folder}")


def doc_strings(library: Path) -> Iterator[str]:
    """Yields the docstrings of all modules, except tests and installed packages."""
    for path in sorted(library.rglob("*.py")):
        if {"test", "tests", "site-packages", "dist-packages"} & set(
            path.relative_to(library).parts
        ):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield text


if __name__ == "__main__":
    main()
