# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of the Python package: `run_python.py [NAME]`, with a Python that has the package.

TensorFlow and PyTorch cannot be loaded into one process, so every test file runs in its own.
Tests that start jobs mostly wait for other processes, so each of them runs in its own, too.
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
BACKENDS = {"jax": ["test_layers.py"], "torch": ["test_keras_adapter.py"]}
COUNTED = re.compile(r"(\d+) (passed|failed|error|skipped)")


def units_of(file: Path, python: str) -> list[Unit]:
    tests = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    jobs = [node.name for node in tests if JOBS in {arg.arg for arg in node.args.args}]
    units = [unit(python, f"{file.name}::{name}", [f"{file}::{name}"]) for name in jobs]
    if len(jobs) < len(tests):
        without = [f"--deselect={file.relative_to(ROOT)}::{name}" for name in jobs]
        units.append(unit(python, file.name, [str(file), *without]))
    return units


def unit(python: str, name: str, words: list[str], **env: str) -> Unit:
    # Several processes would write pytest's cache at once.
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return Unit(name, command, ROOT, env)


def judge(unit: Unit, counts: Counts) -> bool:
    last = unit.output.rstrip().rsplit("\n", 1)[-1]
    found = {what: int(number) for number, what in COUNTED.findall(last)}
    counts.passed += found.get("passed", 0)
    counts.ignored += found.get("skipped", 0)
    n_failed = found.get("failed", 0) + found.get("error", 0)
    # A process that crashed reports nothing about its tests.
    counts.failed += n_failed or int(unit.code != 0)
    return unit.code == 0


def part(python: str, wanted: str = "") -> Part:
    files = sorted(FOLDER.glob("test_*.py"))
    units = [unit for file in files for unit in units_of(file, python)]
    for backend, names in BACKENDS.items():
        for name in names:
            words = ["-m", "backends", str(FOLDER / name)]
            units.append(unit(python, f"{name} on {backend}", words, KERAS_BACKEND=backend))
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
