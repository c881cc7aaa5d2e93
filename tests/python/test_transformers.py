# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer: whole jobs, and what they refuse."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import elasticdl.transformers  # noqa: E402
import transformers_script as script  # noqa: E402
from conftest import ROOT, Cluster  # noqa: E402
from elasticdl import _state  # noqa: E402

OFFLINE = {"HF_HUB_OFFLINE": "1"}
# Neither the end of an epoch nor of what is logged together.
RESUMED_STEP = 6


def train(
    cluster: Cluster, folder: Path, kind: str, n_workers: int, *kills: int, **env: str
) -> dict:
    """Runs a job; returns what its workers have at the end."""
    folder.mkdir()
    words = [script.__file__, kind, str(folder), str(n_workers), *map(str, kills)]
    env = {**OFFLINE, **env}
    return _state.parse(cluster.train(folder, words, n_workers, kills, script.N_LANES, **env)[1])


def expected(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """What a process trains without a job, on the same lanes."""
    lines = {line for path in folder.glob("seeds-*") for line in path.read_text().splitlines()}
    seeds: dict[str, int] = {}
    for step, text, seed in map(json.loads, lines):
        assert seeds.setdefault(json.dumps([step, text]), seed) == seed
    return script.plain(kind, folder, seeds).state_dict()


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def test_a_trainer_has_the_bits_of_one_process_after_a_kill(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    end = train(cluster, folder, "gpt2", 2, script.STEPS_PER_EPOCH)
    wanted = expected(folder, "gpt2")
    check(end["model"], wanted)
    epoch = ["epoch", *["step"] * script.STEPS_PER_EPOCH, "loss"]
    assert [event.split()[0] for event in end["seen"]] == epoch * script.EPOCHS
    assert end["end"][0] == script.N_STEPS and end["end"][2] == script.EPOCHS
    assert end["again"].startswith("`train()` was called, but this script has already trained")
    saved = transformers.GPT2LMHeadModel.from_pretrained(folder / "saved")
    check(saved.state_dict(), wanted)
    exported = torch.load(cluster.job("killed") / "output" / "model.pt")
    check(exported, wanted)
    assert (folder / "output" / f"checkpoint-{script.N_STEPS}" / "trainer_state.json").exists()
    logged = cluster.logged("killed")
    steps = [*range(2, script.N_STEPS + 1, 2)]
    assert logged["train/loss"] == logged["train/learning_rate"] == steps
    assert logged["eval/loss"] == [script.STEPS_PER_EPOCH, script.N_STEPS]
    assert logged["train/train_loss"] == [script.N_STEPS], "after the last step"
    # Another job continues from a checkpoint of the trainer, in the middle of an epoch.
    place = str(folder / "output" / f"checkpoint-{RESUMED_STEP}")
    again = train(cluster, tmp_path / "resumed", "gpt2", 1, RESUMED=place)
    check(again["model"], wanted)
    assert _state.difference(end["optimizer"], again["optimizer"]) is None
    assert (again["logs"], again["scheduler"]) == (end["logs"], end["scheduler"])
    steps = [event.split()[1] for event in again["seen"] if event.startswith("step")]
    assert steps == [str(step) for step in range(RESUMED_STEP + 1, script.N_STEPS + 1)]


def test_lanes_are_what_devices_are_to_the_arguments(tmp_path: Path) -> None:
    wanted = script.plain("still", tmp_path, {})
    records, evaluated = script.data("still")
    accumulation = script.N_LANES * script.ACCUMULATION
    args = script.arguments("still", tmp_path, gradient_accumulation_steps=accumulation)
    model = script.make_model("still")
    trainer = elasticdl.transformers.ElasticTrainer(model, args, script.collate, records, evaluated)
    assert trainer.job is None, "without a job, it is an ordinary trainer"
    trainer.train()
    assert trainer.state.global_step == script.N_STEPS
    for found, parameter in zip(model.parameters(), wanted.parameters()):
        torch.testing.assert_close(found, parameter, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("auto_find_batch_size", True),
        ("data_seed", 3),
        ("dataloader_drop_last", True),
        ("include_num_input_tokens_seen", True),
        ("optim", "adalomo"),
        ("split_batches", True),
        ("train_sampling_strategy", "group_by_length"),
    ],
)
def test_arguments_that_a_job_cannot_follow_are_refused(
    tmp_path: Path, option: str, value: object
) -> None:
    options = (
        {"accelerator_config": {option: value}} if option == "split_batches" else {option: value}
    )
    args = script.arguments("gpt2", tmp_path, **options)
    with pytest.raises(elasticdl.ZooError, match=f"^{option}.* does not work in a job: "):
        elasticdl.transformers._check_arguments(args)


def test_another_launcher_is_refused() -> None:
    args = SimpleNamespace(accelerator_config=None, optim="adamw_torch", world_size=4, n_gpu=0)
    with pytest.raises(elasticdl.ZooError, match="4 devices; start it with `elasticdl run`"):
        elasticdl.transformers._check_arguments(args)


def test_what_cannot_start_a_job_is_refused_before_it(cluster: Cluster, tmp_path: Path) -> None:
    words = ["run", script.__file__, "gpt2", str(tmp_path), "1"]
    done = cluster.run(*words, code=2, **OFFLINE, RESUMED="old")
    assert "resume_from_checkpoint='old' cannot start a job: no job has written it" in done.stderr
    assert not [*cluster.home.glob("jobs/*")]


@pytest.mark.parametrize("exists", [True, False])
def test_a_job_is_refused_if_there_is_no_checkpoint_to_start_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    last = elasticdl.transformers._last_checkpoint
    folder = tmp_path if exists else tmp_path / "none"
    assert last(str(folder)) == str(folder), "a worker gets the state from the job"
    monkeypatch.setenv("ELASTICDL_DESCRIBE", str(tmp_path))
    with pytest.raises(elasticdl.ZooError, match="^resume_from_checkpoint=True cannot start a job"):
        last(str(folder))
    (folder / "checkpoint-3").mkdir(parents=True)
    assert last(str(folder)) == str(folder / "checkpoint-3")


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_that_only_has_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name in ("elasticdl.json", "optimizer.pt", "scheduler.pt"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setenv("ELASTICDL_DESCRIBE", str(tmp_path))
    elasticdl.transformers._Resumed(str(tmp_path))
    (tmp_path / missing).unlink()
    with pytest.raises(elasticdl.ZooError, match=f"has no {missing}; .* `save_only_model=True`"):
        elasticdl.transformers._Resumed(str(tmp_path))


def test_a_checkpoint_is_refused_if_its_steps_are_those_of_other_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elasticdl.json").write_text('{"lanes": 2, "records": 5, "seed": 1}')
    resumed = elasticdl.transformers._Resumed(str(tmp_path))
    order = {"lanes": 2, "records": 5}
    resumed.check(order)
    with pytest.raises(elasticdl.ZooError, match="with lanes=2, but this one has 3, so its steps"):
        resumed.check({**order, "lanes": 3})
    monkeypatch.setattr(elasticdl._trainers, "job_seed", lambda: 7)
    with pytest.raises(elasticdl.ZooError, match="with seed=1, but this one has 7, so its steps"):
        resumed.check(order)


def test_the_example_changes_one_line() -> None:
    code = (ROOT / "examples" / "transformers_gpt2.py").read_text()
    text = ast.get_docstring(ast.parse(code), clean=False)
    lines = [line for line in code.replace(text, "").splitlines() if "lastic" in line]
    assert lines == ["from elasticdl.transformers import ElasticTrainer as Trainer"]
