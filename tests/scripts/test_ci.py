# SPDX-License-Identifier: Apache-2.0
"""`.ci/run` checks exactly the commit of its clone, and touches only changed files.

The checks are a script that lists the files.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
PARTS = """
pwd
echo "CI=$CI"
for file in *.txt; do echo "$file: $(cat "$file")"; done
touch left.txt
"""


class Clone:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "clone"
        self.cache = folder / "cache" / "elasticdl"
        (self.folder / ".ci").mkdir(parents=True)
        (self.folder / "tests").mkdir()
        (self.folder / ".ci" / "run").write_bytes(RUN.read_bytes())
        (self.folder / "tests" / "parts.sh").write_text(PARTS)
        for name in ("Cargo.lock", "Cargo.toml"):
            (self.folder / name).touch()
        self.git("init", "--quiet")
        self.commit(a="one", b="two")

    def git(self, *args: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x"]
        subprocess.run(["git", *who, *args], cwd=self.folder, check=True)

    def commit(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name}.txt").write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=change")

    def run(self) -> list[str]:
        env = {**os.environ, "XDG_CACHE_HOME": str(self.cache.parent)}
        env.pop("CARGO_TARGET_DIR", None)
        done = subprocess.run(
            ["bash", ".ci/run"],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_clean_clone_is_checked_in_the_cached_folder(clone: Clone) -> None:
    assert clone.run() == [str(clone.cache / "checkout"), "CI=true", "a.txt: one", "b.txt: two"]
    assert not (clone.folder / "left.txt").exists()


def test_only_changed_files_are_newer_and_no_file_is_left_over(clone: Clone) -> None:
    clone.run()
    kept = clone.cache / "checkout"
    times = {name: (kept / name).stat().st_mtime_ns for name in ("a.txt", "b.txt")}
    time.sleep(0.01)  # So a file that is written now has a different time.
    (kept / "b.txt").write_text("tampered with")
    clone.commit(a="three")
    assert clone.run()[2:] == ["a.txt: three", "b.txt: two"]
    assert (kept / "a.txt").stat().st_mtime_ns > times["a.txt"]

    times = {name: (kept / name).stat().st_mtime_ns for name in ("a.txt", "b.txt")}
    (clone.folder / "a.txt").unlink()
    clone.commit(c="four")
    assert clone.run()[2:] == ["b.txt: two", "c.txt: four"]
    assert (kept / "b.txt").stat().st_mtime_ns == times["b.txt"]


def test_a_tree_with_changes_is_checked_in_place(clone: Clone) -> None:
    (clone.folder / "a.txt").write_text("changed")
    assert clone.run() == [str(clone.folder), "CI=true", "a.txt: changed", "b.txt: two"]


def test_a_concurrent_second_run_uses_its_own_clone(clone: Clone) -> None:
    clone.cache.mkdir(parents=True)
    with subprocess.Popen(
        ["flock", str(clone.cache / "checkout.lock"), "sh", "-c", "echo locked; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == b"locked\n"
        assert clone.run()[0] == str(clone.folder)
        holder.communicate(b"end\n", timeout=10)
