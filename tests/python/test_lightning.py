# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer: whole jobs, and what they refuse."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from lightning.pytorch import Trainer  # noqa: E402
from torch import nn  # noqa: E402

import elasticdl.lightning  # noqa: E402
import lightning_script as script  # noqa: E402
from conftest import ROOT, Cluster  # noqa: E402
from elasticdl import _state  # noqa: E402


def train(cluster: Cluster, folder: Path, n_workers: int, *kills: int, **env: str) -> dict:
    """Runs a job; returns what its workers have at the end."""
    folder.mkdir()
    words = [script.__file__, str(folder), str(n_workers), *map(str, kills)]
    _, end = cluster.train(folder, words, n_workers, kills, script.N_LANES, **env)
    assert [*folder.glob("loader-*")] and not [*folder.glob("worker-*")], "loaders have read all"
    return _state.parse(end)


def check(end: dict, folder: Path, precision: str = "32-true") -> None:
    trained = script.plain(precision)
    wanted = trained.state_dict()
    assert end["model"].keys() == wanted.keys()
    assert all(torch.equal(end["model"][name], values) for name, values in wanted.items())
    assert end["end"] == [script.EPOCHS, script.N_STEPS]
    epoch = [*["step"] * script.STEPS_PER_EPOCH, "validated", "epoch"]
    assert [event.split()[0] for event in end["seen"]] == epoch * script.EPOCHS
    best = torch.load(folder / "best" / end["best"][0])
    assert all(torch.equal(best["state_dict"][name], values) for name, values in wanted.items())
    with torch.no_grad():
        dtype = next(trained.parameters()).dtype
        loss = nn.functional.cross_entropy(trained.net(script.X[:50].to(dtype)), script.Y[:50])
    tolerance = 1e-6 if precision == "32-true" else 1e-2
    assert end["evaluated"] == pytest.approx([float(loss)] * 2, rel=tolerance)
    assert end["again"].startswith("`fit()` was called, but this script has already trained")


def check_logs(logged: dict[str, list[int]]) -> None:
    ends = [(epoch + 1) * script.STEPS_PER_EPOCH - 1 for epoch in range(script.EPOCHS)]
    assert logged["loss_epoch"] == ends
    assert logged["val_loss"] == [*ends, script.N_STEPS], "also after training"
    assert logged["test_loss"] == [script.N_STEPS]
    assert logged["loss_step"] == [*range(1, script.N_STEPS, 2)]


def test_a_trainer_has_the_bits_of_one_process_after_a_kill(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    end = train(cluster, folder, 2, script.STEPS_PER_EPOCH)
    check(end, folder)
    check_logs(cluster.logged("killed"))
    # Another job continues from a checkpoint of the trainer, in the middle of an epoch.
    place = folder / "steps" / f"epoch=0-step={script.SAVE_STEPS}.ckpt"
    again = train(cluster, tmp_path / "resumed", 1, RESUMED=str(place))
    check(again, tmp_path / "resumed")
    assert _state.difference(end["optimizer"], again["optimizer"]) is None
    assert again["seen"] == end["seen"]
    names = {path.name for path in (tmp_path / "resumed" / "steps").iterdir()}
    assert names == {"epoch=1-step=8.ckpt", "epoch=1-step=12.ckpt"}, "no step is trained again"


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "64-true"])
def test_a_trainer_has_the_bits_of_one_process_with_16_bits(
    cluster: Cluster, tmp_path: Path, precision: str
) -> None:
    folder = tmp_path / "half"
    env = {"LOGGER": "1"} if precision == "bf16-true" else {}
    check(train(cluster, folder, 1, PRECISION=precision, **env), folder, precision)
    logged = cluster.logged("half")
    check_logs(logged)
    if env:
        with (folder / "metrics.csv").open() as file:
            rows = [*csv.DictReader(file)]
        kept = {
            name: sorted({int(row["step"]) for row in rows if row[name]})
            for name in rows[0]
            if name != "step"
        }
        assert kept == logged and "lr-AdamW-1" in kept, "what the trainer's logger got"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("accumulate_grad_batches", 2),
        ("fast_dev_run", True),
        ("limit_train_batches", 0.5),
        ("overfit_batches", 1),
        ("reload_dataloaders_every_n_epochs", 1),
    ],
)
def test_arguments_that_a_job_cannot_follow_are_refused(option: str, value: object) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, barebones=False, **{option: value})
    with pytest.raises(elasticdl.ZooError, match=f"^{option}=.* does not work in a job: "):
        elasticdl.lightning._check(trainer, script.Classifier())


def test_the_example_changes_two_lines() -> None:
    code = (ROOT / "examples" / "lightning_classify.py").read_text()
    lines = [line.strip() for line in code.splitlines()[8:] if "elasticdl" in line]
    assert lines == ["import elasticdl.lightning  # noqa: F401", 'strategy="elasticdl",']
