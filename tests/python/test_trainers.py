# SPDX-License-Identifier: Apache-2.0
"""What the adapters for trainers of other libraries share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import elasticdl  # noqa: E402
from elasticdl import _torch_trainers, _trainers  # noqa: E402


class Numbers(IterableDataset):
    def __iter__(self):
        yield from range(3)


@pytest.mark.parametrize(
    ("dataset", "options", "sentence"),
    [
        (Numbers(), {}, "an iterable dataset"),
        ([1, 2, 3], {"drop_last": True}, "drop_last=True"),
        ([1, 2, 3], {"sampler": WeightedRandomSampler([1.0] * 3, 3)}, "a custom sampler"),
        ([1, 2, 3], {"sampler": RandomSampler(range(3), replacement=True)}, "replacement=True"),
        ([1, 2, 3], {"sampler": RandomSampler(range(3), num_samples=2)}, "num_samples=2"),
        ([1, 2, 3], {"sampler": SequentialSampler(range(2))}, "the dataset has 3 records"),
    ],
)
def test_loaders_that_a_job_cannot_follow_are_refused(
    dataset: object, options: dict, sentence: str
) -> None:
    with pytest.raises(elasticdl.ZooError, match=f"^it has .*{sentence}"):
        _torch_trainers.check_loader("it", DataLoader(dataset, batch_size=2, **options))


def test_a_loader_keeps_how_it_reads() -> None:
    plain = DataLoader([1, 2, 3], batch_size=2, shuffle=True)
    assert _torch_trainers.check_loader("it", plain) and _torch_trainers.loader_options(plain) == {}
    options = {
        **{"num_workers": 2, "prefetch_factor": 3, "timeout": 7, "persistent_workers": True},
        **{"pin_memory": True, "worker_init_fn": print},
        "multiprocessing_context": multiprocessing.get_context("spawn"),
    }
    assert _torch_trainers.loader_options(DataLoader([1, 2, 3], **options)) == options


def test_parameters_in_no_optimizer_are_frozen_before_training(
    become_worker: Callable[[type], None],
) -> None:
    become_worker(type("Loop", (), {}))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    trained = _torch_trainers.Trained.of(model)
    elasticdl.init(trained, torch.optim.SGD(model[0].parameters(), lr=0.1))
    trained.settle()
    trained.check()
    model[0].bias.requires_grad_(False)
    with pytest.raises(elasticdl.ZooError, match="`requires_grad` of the parameter `0.bias`"):
        trained.check()


def test_a_spawned_process_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICDL_MASTER_ADDR", "127.0.0.1:1")
    assert _trainers.is_worker()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert not pool.apply(_trainers.is_worker)


def test_a_job_trains_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_trainers, "_HAS_TRAINED", False)
    _trainers.begin("`fit()` was called")
    with pytest.raises(elasticdl.ZooError, match="^`train\\(\\)` was called, but this script has"):
        _trainers.begin("`train()` was called")


def test_a_job_starts_from_the_checkpoint_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order, found = {"lanes": 2}, {"lanes": 2, "seed": 1}
    origin = _trainers.Origin("ckpt_path='a'")
    assert not origin.is_after(0), "not before the state is known"
    with pytest.raises(elasticdl.ZooError, match="^ckpt_path='a' cannot start a job: no job has w"):
        origin.start(None, order, 5)
    with pytest.raises(elasticdl.ZooError, match="^ckpt_path='a' was written by a job with lanes"):
        origin.start(found, {"lanes": 3}, 5)
    origin.start(found, order, 5)
    assert [origin.is_after(step) for step in (4, 5)] == [True, False]
    origin.check_left(6)
    with pytest.raises(elasticdl.ZooError, match="after step 5, and this job has 5 steps; train"):
        origin.check_left(5)
    worker = _trainers.Origin("ckpt_path='a'")
    worker.load_state_dict(origin.state_dict())
    assert worker.state_dict() == origin.state_dict() and worker.is_after(4)
    monkeypatch.setattr(_trainers, "job_seed", lambda: 7)
    with pytest.raises(elasticdl.ZooError, match="with seed=1, but this one has 7"):
        worker.load_state_dict(origin.state_dict())


class History(_trainers.Progress):
    """A trainer that only has logs and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []
        self.n_steps = 0

    def collect(self) -> dict:
        return {"n_steps": self.n_steps}

    def logs(self) -> list:
        return self.kept

    def apply(self, state: dict) -> None:
        self.n_steps, self.kept = state["n_steps"], state["logs"]


class Uncopied:
    def __deepcopy__(self, _: object) -> None:
        raise AssertionError("logs are not copied in every step")


def test_the_state_before_a_step_has_the_logs_of_then() -> None:
    progress = History()
    progress.kept.append(first := Uncopied())
    progress.mark()
    progress.n_steps = 1
    progress.kept.append({"loss": 1.0})
    assert progress.state_dict() == {"n_steps": 0, "logs": [first]}
    progress.unmark()
    assert progress.state_dict() == {"n_steps": 1, "logs": [first, {"loss": 1.0}]}
    progress.load_state_dict({"n_steps": 5, "logs": [{"loss": 2.0}]})
    assert (progress.n_steps, progress.kept) == (5, [{"loss": 2.0}])
