# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of the Python package: `run_python.py [NAME]`, with a Python that has the package.

TensorFlow and PyTorch cannot be loaded into one process, so every test file runs in its own.
Tests that start jobs mostly wait for other processes, so each of them runs in its own, too.
These processes are forks of one that has already imported pytest, NumPy and the file's framework.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from schedule import Counts, Part, Run, Unit

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "python"
# The fixture that tests use to start jobs.
JOBS = "cluster"
# Tests with the mark `backends` that TensorFlow cannot run; all others run there.
BACKENDS = {
    "jax": ["test_layers.py"],
    "torch": ["test_keras_adapter.py", "test_keras_elastic.py"],
}
# Imported before the fork if a file imports them.
FRAMEWORKS = ("keras", "torch")
# A framework may print lines after pytest's last one.
SUMMARY = re.compile(r"^(?:=+ )?(\d+ .*) in [\d.]+s\b", re.M)
COUNTED = re.compile(r"(\d+) (passed|failed|error|skipped)")


def units_of(file: Path, python: str) -> list[Unit]:
    body = ast.parse(file.read_text()).body
    tests = [
        node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    imported = ("pytest", "numpy", *frameworks(body))
    jobs = [node.name for node in tests if JOBS in {arg.arg for arg in node.args.args}]
    units = [unit(python, f"{file.name}::{name}", [f"{file}::{name}"], imported) for name in jobs]
    if len(jobs) < len(tests) and is_for_tensorflow(body):
        without = [f"--deselect={file.relative_to(ROOT)}::{name}" for name in jobs]
        units.append(unit(python, file.name, [str(file), *without], imported))
    return units


def frameworks(body: list[ast.stmt]) -> list[str]:
    """The frameworks that a file with this content imports: `import NAME`, or `NAME =
    pytest.importorskip("NAME")`."""
    names = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    names |= {
        target.id
        for node in body
        if isinstance(node, ast.Assign) and "importorskip" in ast.dump(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [name for name in FRAMEWORKS if name in names]


def is_for_tensorflow(body: list[ast.stmt]) -> bool:
    """Whether a file has tests for the default backend; its mark may exclude all of them."""
    marks = [ast.dump(node) for node in body if isinstance(node, ast.Assign)]
    return not any("'backends'" in mark and "'tensorflow'" not in mark for mark in marks)


def unit(
    python: str, name: str, args: list[str], imported: tuple[str, ...] = (), **env: str
) -> Unit:
    # Several processes would write pytest's cache at once.
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
    return Unit(name, command, ROOT, env, imported)


def judge(unit: Unit, counts: Counts) -> bool:
    summaries = SUMMARY.findall(unit.output)
    found = {what: int(n) for n, what in COUNTED.findall(summaries[-1])} if summaries else {}
    counts.passed += found.get("passed", 0)
    counts.ignored += found.get("skipped", 0)
    n_failed = found.get("failed", 0) + found.get("error", 0)
    # A process that crashed reports nothing about its tests.
    is_good = unit.code == 0 and bool(found)
    counts.failed += n_failed or int(not is_good)
    return is_good


def part(python: str, wanted: str = "") -> Part:
    files = sorted(FOLDER.glob("test_*.py"))
    units = [unit for file in files for unit in units_of(file, python)]
    for backend, names in BACKENDS.items():
        for name in names:
            args = ["-m", "backends", str(FOLDER / name)]
            units.append(unit(python, f"{name} on {backend}", args, KERAS_BACKEND=backend))
    units = [unit for unit in units if wanted in unit.name]
    return Part("python", units, judge, is_complete=not wanted)


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    tests = part(sys.executable, wanted)
    if not tests.units:
        print(f"python: no test matches `{wanted}`")
        return 1
    return 0 if Run([tests]).all() else 1


if __name__ == "__main__":
    sys.exit(main())
