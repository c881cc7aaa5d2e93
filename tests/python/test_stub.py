# SPDX-License-Identifier: Apache-2.0
"""The stub of the extension module names what the module has."""

from __future__ import annotations

import ast

from conftest import ROOT
from elasticdl import _elasticdl


def names(body: list[ast.stmt]) -> set[str]:
    return {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def public(value: object) -> set[str]:
    return {name for name in vars(value) if not name.startswith("_")}


def test_the_stub_has_the_names_of_the_module() -> None:
    stub = ast.parse((ROOT / "python" / "elasticdl" / "_elasticdl.pyi").read_text())
    assert names(stub.body) == public(_elasticdl)
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            members = names(node.body) - {"__init__"}
            assert members == public(getattr(_elasticdl, node.name))
