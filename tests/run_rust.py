# SPDX-License-Identifier: Apache-2.0
"""Runs the Rust tests: `run_rust.py [FILTER]`.

Cargo runs one test binary at a time, and end-to-end tests mostly wait. This script runs several
at a time: each end-to-end test in its own process, and all other binaries as a whole.
A test that cannot run prints a line `skipped: why`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from schedule import Counts, Part, Run, Unit, skipped

ROOT = Path(__file__).parents[1]
CARGO = os.environ.get("CARGO", "cargo")
# Every test of these binaries starts processes and waits for them.
APART = {"elasticdl/e2e"}
# For results that several tests share; removed when the run ends.
SHARED = tempfile.TemporaryDirectory(prefix="elasticdl-tests-")
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", re.M)
IGNORED = re.compile(r"^test (\S+) \.\.\. ignored(?:, (.*))?$", re.M)
SKIPPED = re.compile(r"^skipped: (.*)$", re.M)
# The line that `--show-output` prints before the output of a test.
OUTPUT_OF = re.compile(r"^---- (\S+) stdout ----$", re.M)
# A test that another target runs does not count as skipped.
LATER = "`make soak`"


def cargo_test(*args: str) -> list[str]:
    # Neither has tests. `maturin` builds the Python extension, with other flags; a procedural macro
    # would need the compiler's libraries to run.
    excluded = ["--exclude=edl-python", "--exclude=edl-commit"]
    return [CARGO, "test", "--release", "--workspace", *excluded, "--locked", *args]


def build() -> list[dict]:
    """Builds all test binaries; returns cargo's messages about them."""
    # Examples are not built: lints check them, and benchmarks run them.
    args = ["--lib", "--bins", "--tests", "--no-run", "--message-format=json-render-diagnostics"]
    done = subprocess.run(cargo_test(*args), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    messages = map(json.loads, done.stdout.splitlines())
    return [m for m in messages if m.get("executable") and m["profile"]["test"]]


def tests_of(binary: str, cwd: Path) -> list[str]:
    listing = [binary, "--list", "--format=terse"]
    found = subprocess.run(listing, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True)
    return [line.removesuffix(": test") for line in found.stdout.splitlines()]


def units_of(artifact: dict, wanted: str) -> list[Unit]:
    folder = Path(artifact["manifest_path"]).parent
    name = f"{folder.name}/{artifact['target']['name']}"
    binary = artifact["executable"]
    env = {
        "CARGO": CARGO,
        "CARGO_MANIFEST_DIR": str(folder),
        "ELASTICDL_TEST_SHARED": SHARED.name,
    }
    tests = [test for test in tests_of(binary, folder) if wanted in test]
    if not tests:
        return []
    command = [binary, "--show-output"]
    if name in APART:
        return [Unit(f"{name} {t}", [*command, "--exact", t], folder, env) for t in tests]
    return [Unit(name, [*command, *filter(None, [wanted])], folder, env)]


def doctests() -> Unit:
    """Of the whole workspace, as its tests: with other features, crates are compiled again."""
    return Unit("doc", cargo_test("--doc"), ROOT)


def judge(unit: Unit, counts: Counts) -> bool:
    results = [list(map(int, numbers)) for numbers in RESULT.findall(unit.output)]
    for passed, failed, ignored in results:
        counts.passed += passed
        counts.failed += failed
        counts.ignored += ignored
    for test, why in IGNORED.findall(unit.output):
        skipped("note" if LATER in why else "skip", f"{unit.name} {test}: {why or 'ignored'}")
    # [before the first test, name, its output, name, its output, …]
    pieces = OUTPUT_OF.split(unit.output)
    for test, output in zip(pieces[1::2], pieces[2::2]):
        if found := SKIPPED.search(output):
            counts.passed -= 1
            counts.ignored += 1
            skipped("skip", f"{unit.name} {test}: {found[1]}")
    is_good = unit.code == 0 and bool(results)
    # A binary that crashed reports nothing about its tests.
    if not is_good and not any(failed for _, failed, _ in results):
        counts.failed += 1
    return is_good


def part(wanted: str = "") -> Part:
    units = [unit for artifact in build() for unit in units_of(artifact, wanted)]
    if not wanted:
        units.append(doctests())
    return Part("rust", units, judge, is_complete=not wanted)


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    tests = part(wanted)
    if not tests.units:
        print(f"rust: no test matches `{wanted}`")
        return 1
    return 0 if Run([tests]).all() else 1


if __name__ == "__main__":
    sys.exit(main())
