# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that evaluate in their loop."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import evaluate_script  # noqa: E402
from conftest import Cluster  # noqa: E402
from read_protobuf import fields  # noqa: E402

SCRIPT = evaluate_script.__file__
LANES = f"--lanes={evaluate_script.N_LANES}"
N_BATCHES = -(-len(evaluate_script.TEST_X) // evaluate_script.TEST_BATCH)


def run(cluster: Cluster, folder: Path, loop: str, n_workers: int, *more: str) -> None:
    folder.mkdir()
    flags = [f"--workers={n_workers}", "--min_workers=1", LANES, f"--job_name={folder.name}"]
    flags.append(f"--tensorboard_dir={folder / 'tensorboard'}")
    cluster.run("run", *flags, SCRIPT, str(folder), loop, str(n_workers), *more)
    cluster.run("audit", folder.name)


def results(folder: Path) -> dict[int, set[str]]:
    """What all workers got from each evaluation."""
    found: dict[int, set[str]] = {}
    for path in folder.glob("results-*"):
        for line in path.read_text().splitlines():
            place, values = line.split(" ", 1)
            found.setdefault(int(place), set()).add(values)
    return found


def shares(folder: Path, place: int) -> list[int]:
    """How many batches each worker computed."""
    lines = [line.split() for path in folder.glob("shares-*") for line in path.open()]
    return sorted(int(share) for at, share in lines if int(at) == place)


def logged(cluster: Cluster, folder: Path) -> dict[str, tuple[int, float]]:
    status = cluster.status(folder.name)
    return {metric["name"]: (metric["step"], metric["value"]) for metric in status["logged"]}


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve in the files for TensorBoard, in the order of their steps."""
    found = []
    for path in (folder / "tensorboard").iterdir():
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = dict(fields(data[at + 12 : at + 12 + length]))
            at += length + 16
            if 5 in event:
                value = dict(fields(dict(fields(event[5]))[1]))
                if value[1].decode() == tag:
                    found.append((event.get(2, 0), struct.unpack("<f", value[2])[0]))
    return sorted(found)


def test_a_leader_that_is_killed_in_an_evaluation_changes_no_bit(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed-in-evaluation"
    run(cluster, alone, "own", 1)
    run(cluster, killed, "own", 2, "kill")
    pid = (killed / "killed").read_text()
    place = evaluate_script.KILL_EPOCH
    assert f"results-{pid}" in [path.name for path in killed.glob("results-*")], "it was a worker"
    kinds = {event["kind"] for event in cluster.status(killed.name)["events"]}
    assert "worker_killed" in kinds
    assert sum(shares(killed, place - 1)) == N_BATCHES, "the workers shared an evaluation"
    assert min(shares(killed, place - 1)) > 1 and len(shares(killed, place - 1)) == 2
    last_epoch = evaluate_script.BEST_EPOCH + evaluate_script.PATIENCE
    for folder in (alone, killed):
        assert sorted(results(folder)) == list(range(last_epoch + 1))
        assert all(len(values) == 1 for values in results(folder).values()), "all workers agree"
    assert results(alone) == results(killed)
    ends = [{path.read_text() for path in folder.glob("end-*")} for folder in (alone, killed)]
    assert ends[0] == ends[1] and len(ends[0]) == 1
    states = []
    for folder in (alone, killed):
        output = cluster.job(folder.name) / "output"
        note = json.loads((output / "best_model.json").read_text())
        step = (evaluate_script.BEST_EPOCH + 1) * evaluate_script.N_STEPS - 1
        assert note["step"] == step, "training ended after the best model"
        models = [torch.load(output / name) for name in ("best_model.pt", "model.pt")]
        assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])
        states.append((note, models))
    assert states[0][0] == states[1][0]
    for one, other in zip(states[0][1], states[1][1]):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert logged(cluster, alone) == logged(cluster, killed) != {}
    steps = [(epoch + 1) * evaluate_script.N_STEPS - 1 for epoch in range(last_epoch + 1)]
    for folder in (alone, killed):
        assert [step for step, _ in points(folder, "accuracy")] == steps, "once per step"
    assert points(alone, "test/loss") == points(killed, "test/loss")
    shown = cluster.run("status", killed.name).stdout
    assert f"accuracy {logged(cluster, killed)['accuracy'][1]:.3}"[:12] in shown


def test_a_loop_whose_steps_the_job_takes_can_evaluate_too(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone, two = tmp_path / "alone", tmp_path / "two"
    run(cluster, alone, "rust", 1)
    run(cluster, two, "rust", 2)
    n_steps = 2 * evaluate_script.N_STEPS
    places = [*range(evaluate_script.EVERY, n_steps, evaluate_script.EVERY), n_steps]
    for folder in (alone, two):
        assert sorted(results(folder)) == places
        assert all(len(values) == 1 for values in results(folder).values())
        # What the script logs after the job is there, too.
        assert [step for step, _ in points(folder, "accuracy")] == places
        assert logged(cluster, folder)["accuracy"][0] == n_steps
    assert results(alone) == results(two)
    assert logged(cluster, alone) == logged(cluster, two)
