# SPDX-License-Identifier: Apache-2.0
"""The package runs on the oldest Python that `pyproject.toml` allows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from conftest import ROOT

PACKAGE = ROOT / "python" / "elasticdl"
MODULES = sorted(path.name for path in PACKAGE.glob("*.py"))
# Arguments that later versions have added.
NEW_ARGUMENTS = {"dataclass": {"slots", "kw_only"}, "zip": {"strict"}}


def oldest() -> tuple[int, int]:
    found = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    return 3, int(found[1])


def evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are evaluated: all except annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from evaluated(child)


def unsupported(node: ast.AST) -> str | None:
    """What Python 3.9 does not have."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = (node.left, node.right)
        if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
            return "`X | None`; use `Optional[X]`"
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    if node.func.id in ("isinstance", "issubclass") and isinstance(node.args[1], ast.BinOp):
        return "`isinstance(x, X | Y)`; use a tuple"
    new = NEW_ARGUMENTS.get(node.func.id, set()) & {word.arg for word in node.keywords}
    return f"`{node.func.id}({new.pop()}=…)`" if new else None


@pytest.mark.parametrize("module", MODULES)
def test_a_module_runs_on_the_oldest_python(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(), module, feature_version=oldest())
    found = [(node.lineno, what) for node in evaluated(tree) if (what := unsupported(node))]
    assert oldest() == (3, 9) and not found
