# SPDX-License-Identifier: Apache-2.0
"""Plants bugs in a copy of the sources, and counts the seeds until the simulation finds each bug.

Usage: `mutate.py [NAME …]`, where a name is a part of a bug's name. `mutate.py --check` only checks
that every bug fits the sources.

A bug is a small textual patch behind a switch, so one build contains all bugs and every run turns
one on. A patch whose text does not occur exactly once is an error, so the list stays in sync with
the sources. Only the copy is changed, so nothing has to be restored.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import CORE, MUTATIONS, Edit

ROOT = Path(__file__).parents[1]
# Apart from other builds: what a bug is planted in has the name of the original there.
TARGET = ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "mutate"
CARGO = os.environ.get("CARGO", "cargo")
PROFILE = os.environ.get("PROFILE", "--release").split()
SEEDS = int(os.environ.get("SEEDS", "10000"))
# Also detects state machines that never return.
LIMIT_SECS = 600
REPLAY = re.compile(r"replay: make sim SEED=(\d+)")
EXECUTABLE = re.compile(r"Executable tests/sim.rs \((.*)\)")
SWITCH = """
/// Whether the planted bug with this number is switched on.
#[must_use]
pub fn is_mutant(number: u32) -> bool {
    static MUTANT: std::sync::LazyLock<Option<u32>> =
        std::sync::LazyLock::new(|| std::env::var("MUTANT").ok()?.parse().ok());
    *MUTANT == Some(number)
}
"""


def copy(to: Path) -> None:
    """Copies the sources, including uncommitted changes."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for name in files.stdout.splitlines():
        source = ROOT / name
        if source.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)


def plant(folder: Path) -> None:
    """Adds every bug, behind its switch."""
    for number, mutation in enumerate(MUTATIONS, 1):
        for edit in mutation.edits():
            plant_one(folder, number, mutation.name, edit)
    library = folder / CORE / "lib.rs"
    library.write_text(library.read_text() + SWITCH)


def plant_one(folder: Path, number: int, name: str, edit: Edit) -> None:
    file = folder / edit.file
    text = file.read_text()
    n_found = text.count(edit.old)
    if n_found != 1 or "MUTANT" not in edit.new:
        sys.exit(f"{name}: the text occurs {n_found} times in {edit.file}, not once")
    crate = "crate" if edit.file.startswith(CORE) else "edl_core"
    new = edit.new.replace("MUTANT", f"{crate}::is_mutant({number})")
    file.write_text(text.replace(edit.old, new))


def build(folder: Path) -> str:
    """Builds the simulation; returns the path of its test binary."""
    command = [CARGO, "test", *PROFILE, "--locked", "--no-run", "-p", "edl-sim", "--test", "sim"]
    env = {**os.environ, "CARGO_TARGET_DIR": str(TARGET)}
    done = subprocess.run(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)
    found = EXECUTABLE.search(done.stderr)
    if done.returncode != 0 or not found:
        sys.exit(f"cannot build:\n{done.stderr}")
    return found[1]


def seeds_needed(binary: str, number: int) -> str:
    """The number of seeds until one fails."""
    env = {**os.environ, "SIM_SEEDS": str(SEEDS), "MUTANT": str(number), "RUST_BACKTRACE": "0"}
    run = subprocess.Popen(
        [binary, "every_job", "--nocapture"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        output, _ = run.communicate(timeout=LIMIT_SECS)
    except subprocess.TimeoutExpired:
        run.kill()
        run.communicate()
        return "never returns"
    failed = [int(seed) for seed in REPLAY.findall(output)]
    return str(min(failed) + 1) if failed else "NOT FOUND"


def main() -> None:
    wanted = sys.argv[1:]
    missed = 0
    n_run = 0
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        folder = Path(name)
        copy(folder)
        plant(folder)
        if wanted == ["--check"]:
            return
        binary = build(folder)
        if seeds_needed(binary, 0) != "NOT FOUND":
            sys.exit("the simulation fails without any bug")
        print(f"{'seeds':>14}  {'secs':>5}  bug", flush=True)
        for number, mutation in enumerate(MUTATIONS, 1):
            if wanted and not any(word in mutation.name for word in wanted):
                continue
            start = time.monotonic()
            found = seeds_needed(binary, number)
            secs = time.monotonic() - start
            print(f"{found:>14}  {secs:>5.1f}  {mutation.name}", flush=True)
            n_run += 1
            missed += found == "NOT FOUND"
    print(f"{n_run - missed} of {n_run} bugs found within {SEEDS} seeds")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
