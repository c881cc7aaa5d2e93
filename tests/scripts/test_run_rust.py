# SPDX-License-Identifier: Apache-2.0
"""The runner of Rust tests reports what failed, crashed or was skipped, and leaves nothing behind.

Scripts replace cargo and the test binaries.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUNNER = Path(__file__).parents[1] / "run_rust.py"
OK = "echo 'test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured'"


class Fake:
    """A workspace whose test binaries are scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.artifacts: list[dict] = []
        self.skips = folder / "skips"
        cargo = folder / "cargo"
        # Doctests of the real crates are not run here.
        no_doctests = "echo 'test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured'"
        cargo.write_text(
            f'#!/bin/sh\ncase "$*" in *--doc*) {no_doctests};; *) cat {folder}/artifacts;; esac\n'
        )
        cargo.chmod(0o755)
        self.env = {**os.environ, "CARGO": str(cargo), "ELASTICDL_SKIPS": str(self.skips)}
        self.env["CACHE"] = str(folder / "cache")

    def binary(self, name: str, script: str, *tests: str) -> None:
        crate, target = name.split("/")
        path = self.folder / name.replace("/", "-")
        listing = "\n".join(f"echo '{test}: test'" for test in tests or ("one", "two"))
        path.write_text(f'#!/bin/bash\nif [ "$1" = --list ]; then\n{listing}\nexit\nfi\n{script}\n')
        path.chmod(0o755)
        (self.folder / crate).mkdir(exist_ok=True)
        self.artifacts.append(
            {
                "manifest_path": str(self.folder / crate / "Cargo.toml"),
                "target": {"name": target},
                "executable": str(path),
                "profile": {"test": True},
            }
        )

    def start(self, *args: str) -> subprocess.Popen[str]:
        lines = [json.dumps({"reason": "other"}), *map(json.dumps, self.artifacts)]
        (self.folder / "artifacts").write_text("\n".join(lines) + "\n")
        command = [sys.executable, str(RUNNER), *args]
        return subprocess.Popen(
            command,
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: str) -> tuple[int, str]:
        process = self.start(*args)
        printed, _ = process.communicate(timeout=60)
        return process.returncode, printed


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_passed_tests_are_counted(fake: Fake) -> None:
    fake.binary("a/a", OK)
    fake.binary("b/b", OK)
    code, printed = fake.run()
    assert code == 0
    assert "rust: 4 passed, 0 failed, 0 not run" in printed


def test_a_failed_test_is_shown_with_its_output(fake: Fake) -> None:
    fake.binary("a/a", OK)
    fake.binary(
        "b/b",
        "echo 'the reason'; echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'; exit 101",
    )
    code, printed = fake.run()
    assert code == 1
    assert "the reason" in printed and "FAILED b/b" in printed
    assert "rust: 3 passed, 1 failed" in printed


@pytest.mark.parametrize("script", ["kill -SEGV $$", "exit 0"])
def test_a_binary_that_exits_without_a_result_has_failed(fake: Fake, script: str) -> None:
    fake.binary("a/a", script)
    code, printed = fake.run()
    assert code == 1
    assert "FAILED a/a" in printed and "1 failed" in printed


def test_each_end_to_end_test_runs_in_its_own_process(fake: Fake) -> None:
    script = f'echo "$@" >> {fake.folder}/calls\n{OK.replace("2 passed", "1 passed")}'
    fake.binary("elasticdl/e2e", script, "first", "second")
    code, printed = fake.run()
    assert code == 0
    calls = (fake.folder / "calls").read_text().splitlines()
    assert sorted(calls) == ["--show-output --exact first", "--show-output --exact second"]
    assert "rust: 2 passed" in printed


def test_end_to_end_tests_share_a_folder_that_is_removed_with_the_run(fake: Fake) -> None:
    folder = "$ELASTICDL_TEST_SHARED"
    script = f"test -d {folder} || exit 1\necho {folder} >> {fake.folder}/shared\n{OK}"
    fake.binary("elasticdl/e2e", script, "first", "second")
    code, printed = fake.run()
    assert code == 0, printed
    first, second = (fake.folder / "shared").read_text().splitlines()
    assert first == second and not Path(first).exists()


def test_skips_are_recorded_with_their_reason_and_do_not_count_as_passed(fake: Fake) -> None:
    fake.binary(
        "a/a",
        "echo 'test slow ... ignored, takes minutes; `make soak` runs it'\n"
        "echo 'test lost ... ignored'\n"
        "echo '---- one stdout ----'; echo 'skipped: no browser'; echo\n"
        "echo 'test result: ok. 2 passed; 0 failed; 2 ignored'",
    )
    code, printed = fake.run()
    assert code == 0
    assert "rust: 1 passed, 0 failed, 3 not run" in printed
    assert sorted(fake.skips.read_text().splitlines()) == [
        "note\ta/a slow: takes minutes; `make soak` runs it",
        "skip\ta/a lost: ignored",
        "skip\ta/a one: no browser",
    ]


def test_a_filter_that_matches_nothing_is_an_error(fake: Fake) -> None:
    fake.binary("a/a", OK)
    assert fake.run("tow")[0] == 1
    assert fake.run("two")[0] == 0


def test_durations_of_removed_tests_are_forgotten_and_others_are_kept(fake: Fake) -> None:
    known = fake.folder / "cache" / "durations-rust.json"
    known.parent.mkdir()
    known.write_text('{"a/a": 1.0, "b/b": 2.0, "gone/gone": 3.0}')
    fake.binary("a/a", OK)
    fake.binary("b/b", "exit 1", "three")
    fake.run("two")
    assert "gone/gone" in json.loads(known.read_text()), "a filter removes no test"
    fake.run()
    durations = json.loads(known.read_text())
    assert sorted(durations) == ["a/a", "b/b", "doc"]
    assert durations["a/a"] < 1.0 and durations["b/b"] == 2.0, "of the last run that passed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_kills_all_started_processes(fake: Fake, number: signal.Signals) -> None:
    # One child in the process group of the test, and one outside of it.
    script = f"sleep 1000 &\nsetsid sleep 1000 &\necho $! $$ > {fake.folder}/pids\nwait"
    fake.binary("a/a", script)
    process = fake.start()
    file = fake.folder / "pids"
    end = time.monotonic() + 30
    while not (file.exists() and file.read_text().endswith("\n")) and time.monotonic() < end:
        time.sleep(0.01)
    pids = file.read_text().split()
    process.send_signal(number)
    assert process.wait(timeout=30) == 130
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
