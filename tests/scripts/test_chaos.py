# SPDX-License-Identifier: Apache-2.0
"""The chaos driver finds leftovers of a job, and counts only faults that took effect."""

from __future__ import annotations

import json
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import chaos


@pytest.fixture
def job(tmp_path: Path) -> chaos.Job:
    """A job that has left nothing behind."""
    job = chaos.Job("false", tmp_path, "asynchronous", 1, 1)
    job.environment()
    complete = job.folder / "checkpoints" / "version-1"
    complete.mkdir(parents=True)
    (complete / "manifest.json").write_text("{}")
    return job


def counted(counts: list[float]) -> bytes:
    numbers = struct.pack(f"<{len(counts)}f", *counts)
    header = json.dumps({"count.rows": {"data_offsets": [0, len(numbers)]}}).encode()
    return struct.pack("<Q", len(header)) + header + numbers


def test_a_record_with_a_wrong_count_is_found() -> None:
    right = [float(chaos.EPOCHS)] * chaos.N_RECORDS
    chaos.check_counts(counted(right))
    for wrong in ([4.0, *right[1:]], [0.0, *right[1:]], right[1:]):
        with pytest.raises(chaos.Failure):
            chaos.check_counts(counted(wrong))


def test_a_job_without_leftovers_passes(job: chaos.Job) -> None:
    chaos.check_leftovers(job)


def test_a_socket_is_found(job: chaos.Job) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(job.folder / "s"))
        with pytest.raises(chaos.Failure, match="left behind"):
            chaos.check_leftovers(job)


@pytest.mark.parametrize("name", ["tmp/x", "jobs/job/.status.json.tmp", "jobs/job/checkpoints/v/p"])
def test_a_temporary_file_or_an_unfinished_checkpoint_is_found(job: chaos.Job, name: str) -> None:
    left = job.home / name
    left.parent.mkdir(exist_ok=True)
    left.touch()
    with pytest.raises(chaos.Failure, match="left behind"):
        chaos.check_leftovers(job)


def test_a_process_is_found_and_a_fault_counts_only_if_it_took_effect(job: chaos.Job) -> None:
    rng = random.Random(0)
    process = subprocess.Popen(["sleep", "60"], env=job.environment())
    try:
        assert job.leftover_processes() == [process.pid]
        assert not chaos.kill_worker(job, rng), "the job shows no worker"
        shown = {"role": "worker", "id": 0, "pid": process.pid}
        (job.folder / "status.json").write_text(json.dumps({"instances": [shown]}))
        assert chaos.freeze(job, rng)
        assert chaos.state_of(process.pid) == "T"
        assert chaos.kill_worker(job, rng)
        assert not job.leftover_processes()
        assert not chaos.kill_worker(job, rng), "the worker has exited"
    finally:
        process.kill()
        process.wait()
