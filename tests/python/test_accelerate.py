# SPDX-License-Identifier: Apache-2.0
"""Training loops with Accelerate: whole jobs, and what they refuse."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import accelerate_script as script  # noqa: E402
import elasticdl  # noqa: E402
from conftest import ROOT, Cluster  # noqa: E402
from elasticdl import _state  # noqa: E402
from elasticdl.accelerate import Accelerator  # noqa: E402


def train(cluster: Cluster, folder: Path, n_workers: int, *kills: int, **env: str) -> dict:
    """Runs a job; returns what its workers have at the end."""
    folder.mkdir()
    words = [script.__file__, str(folder), str(n_workers), *map(str, kills)]
    done, end = cluster.train(folder, words, n_workers, kills, script.N_LANES, **env)
    assert done.stdout.count("ended after") + done.stderr.count("ended after") == 1
    assert [*folder.glob("loader-*")], "a loader has read ahead"
    return _state.parse(end)


def check(found: dict[str, torch.Tensor]) -> None:
    wanted = script.plain().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], values) for name, values in wanted.items())


def place(folder: Path, number: int, steps: int) -> dict[str, str]:
    """Returns how a job is started from a checkpoint, which was written after so many steps."""
    path = folder / "checkpoints" / f"checkpoint_{number}"
    assert json.loads((path / "elasticdl.json").read_text())["step"] == steps
    return {"RESUMED": str(path)}


def test_a_loop_has_the_bits_of_one_process_after_a_kill(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    # After the first checkpoint, by the worker that wrote it.
    end = train(cluster, folder, 2, script.SAVE_STEP)
    check(end["model"])
    check(load_file(folder / "checkpoints" / "checkpoint_2" / "model.safetensors"))
    assert cluster.logged("killed") == {"loss": [*range(script.N_STEPS)]}
    steps = [f"step {step}" for step in range(script.N_STEPS)]
    half = script.STEPS_PER_EPOCH
    assert end["seen"] == [*steps[:half], "epoch 0", *steps[half:], "epoch 1"]
    assert "trains once; use `for epoch in accelerator.epochs(n)`" in end["again"]
    # Another job continues from a checkpoint of the loop, in the middle of an epoch.
    place(folder, 1, half)
    again = train(cluster, tmp_path / "resumed", 1, **place(folder, 0, script.SAVE_STEP))
    assert _state.difference(end, again) is None
    assert cluster.logged("resumed") == {"loss": [*range(script.SAVE_STEP, script.N_STEPS)]}


class Ended:
    """A job that has trained its last step."""

    has_ended, lanes, step, steps_per_epoch, steps_taken = True, 2, 6, 3, 6

    def plan(self, *_: object) -> None:
        pass


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Accelerator:
    """An accelerator that is prepared for a job, in the process that describes it."""
    monkeypatch.setattr(elasticdl._trainers, "job", lambda: Ended())
    monkeypatch.setenv("ELASTICDL_DESCRIBE", str(tmp_path))
    made = Accelerator(cpu=True)
    made.job.has_ended = False
    made.loader = made.prepare(DataLoader(range(6), batch_size=1))
    return made


def test_checkpoints_that_cannot_start_a_job_are_refused(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    def refused(found: dict | None) -> str:
        if found is not None:
            (tmp_path / "elasticdl.json").write_text(json.dumps(found))
        with pytest.raises(elasticdl.ZooError) as caught:
            accelerator.load_state(str(tmp_path))
        return str(caught.value)

    assert "cannot start a job: no job has written it" in refused(None)
    order = {**accelerator._loader.order(), "seed": 1}
    assert "with batch_size=9, but this one has 1" in refused(
        {"order": {**order, "batch_size": 9}, "step": 4}
    )
    accelerator._origin = None
    with pytest.raises(elasticdl.ZooError, match=r"num_batches=3\) of the training loader"):
        accelerator.skip_first_batches(accelerator.loader, 3)
    accelerator._origin = elasticdl._trainers.Origin("load_state()")
    accelerator._origin.start(order, accelerator._loader.order(), 4)
    assert accelerator.skip_first_batches(accelerator.loader, 1) is accelerator.loader
    with pytest.raises(elasticdl.ZooError, match="the checkpoint was written after 1 batches"):
        accelerator.skip_first_batches(accelerator.loader, 2)
    accelerator._is_attached = True
    assert "call `load_state()` after `prepare()` and before the loop" in refused(None)
    with pytest.raises(elasticdl.ZooError, match="was called during training, so other workers"):
        accelerator.register_for_checkpointing(accelerator)


def test_the_example_changes_two_lines_and_runs_without_a_job(cluster: Cluster) -> None:
    example = ROOT / "examples" / "accelerate_classify.py"
    code = example.read_text()
    text = ast.get_docstring(ast.parse(code), clean=False)
    changed = [
        line for line in code.replace(text, "").splitlines() if re.search("elasticdl|epochs", line)
    ]
    assert len(changed) == 2, changed
    import runpy

    runpy.run_path(str(example), run_name="__main__")
