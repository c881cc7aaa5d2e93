# SPDX-License-Identifier: Apache-2.0
"""What a worker prints when its log has no room."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import os, sys
from elasticdl import _output
_output.survive_a_full_disk()
print("x" * 100_000, flush=True)
print("y", file=sys.stderr, flush=True)
print("z")
assert sys.stdout.write_through == bool(os.environ.get("PYTHONUNBUFFERED"))
os.write(int(sys.argv[1]), b"trained on")
"""


def prints_to(path: Path | str, worker: bool = True) -> tuple[int, bytes]:
    environment = {**os.environ, **({"ELASTICDL_WORKER_ID": "0"} if worker else {})}
    read, write = os.pipe()
    with open(path, "ab") as log:
        code = subprocess.run(
            [sys.executable, "-c", PRINTS, str(write)],
            stdout=log,
            stderr=log,
            pass_fds=[write],
            env=environment,
            check=False,
        ).returncode
    os.close(write)
    with os.fdopen(read, "rb") as said:
        return code, said.read()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_worker_prints_to_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    log = tmp_path / "log"
    log.write_text("before\n")
    assert prints_to(log) == (0, b"trained on")
    assert log.read_text().split() == ["before", "x" * 100_000, "y", "z"]


def test_a_worker_on_a_full_disk_prints_nothing_and_does_not_fail() -> None:
    assert prints_to("/dev/full") == (0, b"trained on")


def test_other_programs_fail_when_they_cannot_print() -> None:
    code, said = prints_to("/dev/full", worker=False)
    assert code != 0 and said == b""
