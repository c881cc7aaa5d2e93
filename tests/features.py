# SPDX-License-Identifier: Apache-2.0
"""Checks that binary, tests and Python extension use every crate with the same features.

Otherwise, cargo compiles crates twice, including the engine. This only queries cargo and builds
nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CARGO = os.environ.get("CARGO", "cargo")
WHOLE = ["--workspace", "--edges=normal,build,dev"]
# What is built; each must be a subset of the whole.
PARTS = {
    "tests": [*WHOLE, "--exclude=edl-python"],
    "binary": ["--package=elasticdl", "--edges=normal,build"],
    "extension": ["--package=edl-python", "--edges=normal,build"],
}


def crates(args: list[str]) -> set[str]:
    """Crates with their features; a crate that build scripts use may occur twice."""
    command = [CARGO, "tree", "--locked", "--prefix=none", "--format={p} with {f}", *args]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {line.removesuffix(" (*)") for line in done.stdout.splitlines()}


def main() -> int:
    whole = crates(WHOLE)
    bad = [f"{name}: {crate}" for name, args in PARTS.items() for crate in crates(args) - whole]
    for line in sorted(bad):
        print(f"compiled a second time for the {line}")
    if bad:
        print("name these crates in crates/elasticdl/Cargo.toml, with the features of tests")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
