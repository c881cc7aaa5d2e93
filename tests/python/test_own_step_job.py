# SPDX-License-Identifier: Apache-2.0
"""Whole jobs whose scripts take their own optimizer steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import own_step_script  # noqa: E402
from conftest import LIMIT, Cluster  # noqa: E402
from elasticdl import _state  # noqa: E402
from elasticdl._export import read_safetensors  # noqa: E402

SCRIPT = own_step_script.__file__
LANES = f"--lanes={own_step_script.N_LANES}"


def command(folder: Path, n_workers: int, loop: str = "flat", kills: tuple[int, ...] = ()):
    folder.mkdir(exist_ok=True)
    words = [SCRIPT, str(folder), loop, str(n_workers), *map(str, kills)]
    # Half of them continue without waiting for the others.
    workers = [f"--workers={n_workers}", f"--min_workers={-(-n_workers // 2)}"]
    return ["run", *workers, LANES, f"--job_name={folder.name}", *words]


def check(cluster: Cluster, folder: Path) -> dict[int, int]:
    """The job has the bits of a loop without a job, in its workers and in its export; returns the
    seeds of its steps.
    """
    cluster.run("audit", folder.name)
    lines = {line for path in folder.glob("seeds-*") for line in path.read_text().splitlines()}
    seeds = [tuple(map(int, line.split())) for line in lines]
    assert len(seeds) == own_step_script.N_STEPS, "those of a step are the same in all workers"
    seeds = dict(seeds)
    expected = own_step_script.plain(seeds)
    ends = [path.read_bytes() for path in folder.glob("end-*")]
    states = _state.parse(expected.dump())
    for end in ends:
        for name, state in _state.parse(end).items():
            assert _state.dump({"": state}) == _state.dump({"": states[name]}), name
    assert ends
    output = cluster.job(folder.name) / "output"
    exported = torch.load(output / "model.pt")
    assert _state.dump({"": dict(exported)}) == _state.dump({"": states["model"]})
    tensors = read_safetensors(output / "model.safetensors")
    for name, value in states["model"].items():
        found = torch.tensor(tensors[name])
        assert torch.equal(found.to(value.dtype), value), name
        assert found.dtype == value.dtype or value.dtype == torch.int64, name
    return seeds


def without_job(folder: Path, loop: str = "flat") -> bytes:
    """The end of the script when it is run without a job."""
    folder.mkdir()
    command = [sys.executable, SCRIPT, str(folder), loop, "1"]
    lanes = str(own_step_script.N_LANES)
    env = {**os.environ, "PYTHONPATH": "", "ELASTICDL_LANES": lanes, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True, timeout=LIMIT)
    (end,) = folder.glob("end-*")
    return end.read_bytes()


def joined(folder: Path) -> list[int]:
    """The first steps of all workers that took steps."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("joined-*"))


def test_workers_that_are_killed_in_a_step_change_no_bit(cluster: Cluster, tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    cluster.run(*command(alone, 1))
    seeds = check(cluster, alone)
    rounded = own_step_script.plain(seeds, adds_in=torch.float32).model
    exported = torch.load(cluster.job("alone") / "output" / "model.pt")
    assert not torch.equal(rounded[2].weight, exported["2.weight"]), "sums have 64 bits"
    (end,) = alone.glob("end-*")
    assert without_job(tmp_path / "without") == end.read_bytes()
    kills = (10, 11)
    cluster.run(*command(killed, 4, kills=kills))
    assert all((killed / f"killed-{kill}").exists() for kill in kills)
    assert len(joined(killed)) == 4 + len(kills)
    assert joined(killed)[-1] > kills[-1], "a worker got the state from another one"
    check(cluster, killed)


def test_a_loop_over_epochs_that_is_left_ends_the_job_with_the_same_bits(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "left"
    kill = own_step_script.N_STEPS // own_step_script.EPOCHS + 5  # In the second epoch.
    cluster.run(*command(folder, 2, loop="epochs", kills=(kill,)))
    assert joined(folder)[-1] > kill, "a worker joined in a later epoch"
    ends = {path.read_bytes() for path in folder.glob("end-*")}
    assert ends == {without_job(tmp_path / "without", "epochs")}
    status = cluster.status(folder.name)
    assert (status["state"], status["step"]) == ("succeeded", own_step_script.QUIT_STEP + 1)
    cluster.run("audit", folder.name)


def test_a_stopped_job_resumes_with_the_state_of_its_script(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "resumed"
    folder.mkdir()
    (folder / "slow").touch()
    job = cluster.start(*command(folder, 2, loop="nested"))

    def is_training() -> bool:
        if job.poll() is not None:
            raise AssertionError("it ended early:\n" + job.communicate()[1])
        status = cluster.written_status(folder.name)
        return bool(status) and status["step"] > 5

    cluster.wait("training", is_training)
    cluster.run("stop", folder.name)
    job.communicate(timeout=LIMIT)
    assert not [*folder.glob("end-*")], "it was stopped in the middle"
    (folder / "slow").unlink()
    cluster.run("run", "--resume", folder.name)
    assert joined(folder)[-1] > 5, "it continued from its checkpoint"
    check(cluster, folder)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["run", "--clip_norm=1", SCRIPT, "{folder}", "flat", "1"], "--clip_norm has no effect"),
        (
            [
                "train",
                "--distribution_strategy=ParameterServerStrategy",
                f"--job_command={sys.executable} {SCRIPT} {{folder}} flat 1",
            ],
            "which parameter servers cannot do",
        ),
    ],
)
def test_what_a_script_cannot_have_is_refused_before_the_job(
    cluster: Cluster, tmp_path: Path, flags: list[str], sentence: str
) -> None:
    done = cluster.run(*(flag.format(folder=tmp_path) for flag in flags), code=2)
    assert sentence in done.stderr
    assert not [*cluster.home.glob("jobs/*")]
