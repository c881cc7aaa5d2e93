# SPDX-License-Identifier: Apache-2.0
"""How a training loop ends early, and loops over epochs, against a stand-in for the job's loop."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import elasticdl  # noqa: E402
import elasticdl.torch  # noqa: E402

# Three epochs of two steps, each with one lane of two records.
DATA = torch.arange(8, dtype=torch.float32).reshape(4, 2)
N_EPOCHS, EPOCH_STEPS, BATCH = 3, 2, 2
N_STEPS = N_EPOCHS * EPOCH_STEPS


class FakeLoop:
    """A job that asks this worker for steps from `first` on, after a probe."""

    is_script = False
    first = 0

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.n_done = self.first
        self.requests = self.ask()
        FakeLoop.last = self

    def attach(self, dense: np.ndarray, gradient: np.ndarray) -> None:
        self.dense, self.gradient = dense, gradient

    def ask(self) -> Iterator[tuple]:
        yield np.array([0, 1], np.uint64), 3, 0, False  # The probe.
        for step in range(self.first, N_STEPS):
            first = step * BATCH % len(DATA)
            yield np.arange(first, first + BATCH, dtype=np.uint64), step, step, True
            if self.is_script:
                yield "step", (step, 0.5), step, True
            else:
                self.dense -= self.gradient
            self.n_done += 1

    def next(self) -> tuple | None:
        return next(self.requests, None)

    def end(self) -> tuple[int, bool]:
        return self.n_done, True

    def preemption(self) -> None:
        return None

    def computed(self, _loss: float) -> None:
        self.heard.append("computed")

    def stepped(self) -> None:
        self.heard.append("stepped")

    def quit(self) -> None:
        self.heard.append("quit")
        self.requests = iter(())

    def fail(self, why: str) -> None:
        self.heard.append(why)
        self.requests = iter(())

    again = state = loaded = None


@pytest.fixture(autouse=True)
def worker(monkeypatch, become_worker):
    become_worker(FakeLoop)
    monkeypatch.setattr(FakeLoop, "is_script", False)
    monkeypatch.setattr(FakeLoop, "first", 0)


@pytest.fixture(params=[False, True], ids=["rust", "python"])
def is_script(request, monkeypatch):
    monkeypatch.setattr(FakeLoop, "is_script", request.param)
    return request.param


def started(**options):
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return elasticdl.init(model, optimizer, **options), model, optimizer


def turn(job, model, batch, optimizer=None) -> None:
    model(batch).mean().backward()
    job.allreduce(model)
    if optimizer is not None and job._own.is_on:
        optimizer.step()
    job.commit()


def after_steps(n_steps: int) -> list[float]:
    """The weights that the job has after so many steps."""
    _, model, optimizer = started()
    for step in range(n_steps):
        first = step * BATCH % len(DATA)
        optimizer.zero_grad()
        nn.Linear.forward(model, DATA[first : first + BATCH]).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
    return model.weight.flatten().tolist()


def test_break_ends_training_with_the_steps_that_were_taken(is_script):
    job, model, optimizer = started()
    for batch in job.batches(DATA, batch_size=BATCH, epochs=N_EPOCHS):
        turn(job, model, batch, optimizer)
        if job.step == 2:
            break
    assert FakeLoop.last.heard[-1] == "quit"
    assert (job.step, FakeLoop.last.n_done) == (3, 3)
    assert model.weight.flatten().tolist() == after_steps(3)
    job._fail("the script ended")
    assert FakeLoop.last.heard[-1] == "quit", "that is no failure"


def test_break_before_a_batch_is_trained_leaves_it_out(is_script):
    job, model, optimizer = started()
    for batch in job.batches(DATA, batch_size=BATCH, epochs=N_EPOCHS):
        if job.step == 2:
            break
        turn(job, model, batch, optimizer)
    assert (job.step, model.weight.flatten().tolist()) == (2, after_steps(2))


def test_return_from_a_loop_over_steps_ends_training(monkeypatch):
    monkeypatch.setattr(FakeLoop, "is_script", True)
    job, model, optimizer = started()

    def train() -> str:
        for step in job.steps(DATA, batch_size=BATCH, epochs=N_EPOCHS):
            for batch in step:
                model(batch).mean().backward()
            optimizer.step()
            if job.step == 2:
                return "done"

    assert train() == "done"
    assert FakeLoop.last.heard[-2:] == ["stepped", "quit"], "the step that was taken counts"
    assert model.weight.flatten().tolist() == after_steps(3)


def test_a_loader_that_is_left_ends_training():
    job, model, _ = started()
    sampler = elasticdl.torch.ElasticSampler(job, len(DATA), BATCH, epochs=N_EPOCHS)

    def wrapped(loader):
        yield from loader  # As libraries wrap loaders.

    for (batch,) in wrapped(DataLoader(TensorDataset(DATA), batch_sampler=sampler)):
        turn(job, model, batch)
        break
    assert FakeLoop.last.heard == ["computed", "quit"]


@pytest.mark.parametrize("where", ["next", "end", "state"])
def test_an_error_while_the_loop_is_left_ends_the_process(monkeypatch, capsys, where):
    def fail(*_):
        raise RuntimeError("the connection is gone")

    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr(FakeLoop, "is_script", where == "state")
    job, model, optimizer = started()
    for batch in job.batches(DATA, batch_size=BATCH, epochs=N_EPOCHS):
        turn(job, model, batch, optimizer)
        if where == "state":
            FakeLoop.last.quit = lambda: None
            FakeLoop.last.requests = iter([("state", None, 1, True)])
            monkeypatch.setattr(job._own, "dump", fail)
            FakeLoop.last.state = lambda dump: None
            job._loop.state = lambda dump: dump()
        else:
            setattr(job._loop, where, fail)
        break
    assert codes == [1]
    assert "RuntimeError: the connection is gone" in capsys.readouterr().err
    if where == "state":
        assert "the connection is gone" in FakeLoop.last.heard[-1], "the job knows"


def test_a_failure_is_shown_after_the_end_of_the_job(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr("sys.excepthook", lambda *_: seen.append("shown"))
    monkeypatch.setattr("elasticdl._job._final_state", lambda: seen.append("ended"))
    monkeypatch.setattr(FakeLoop, "fail", lambda _, why: seen.append(why))
    job, model, _ = started()
    for batch in job.batches(DATA, batch_size=BATCH):
        turn(job, model, batch)
        sys.excepthook(KeyError, KeyError("no such key"), None)
        break
    assert "no such key" in seen[0] and seen[1:] == ["ended", "shown"]


def test_an_exception_in_the_loop_is_not_an_end_of_training():
    job, model, _ = started()
    with pytest.raises(ZeroDivisionError):
        for batch in job.batches(DATA, batch_size=BATCH):
            turn(job, model, batch)
            1 / 0  # noqa: B018
    assert FakeLoop.last.heard == ["computed"]
    job._fail("division by zero")
    assert FakeLoop.last.heard[1] == "division by zero"


def test_stop_ends_the_loop_after_the_step(is_script):
    job, model, optimizer = started()
    batches = job.batches(DATA, batch_size=BATCH, epochs=N_EPOCHS)
    for batch in batches:
        if job.step == 2:
            job.stop()
        turn(job, model, batch, optimizer)
    assert (job.step, model.weight.flatten().tolist()) == (3, after_steps(3))


def test_a_worker_whose_script_left_the_loop_still_serves_its_state(monkeypatch):
    monkeypatch.setattr(FakeLoop, "is_script", True)
    job, model, optimizer = started()
    states = []

    def quit_later(loop) -> None:
        loop.heard.append("quit")
        loop.requests = iter([("state", None, 1, True)])

    monkeypatch.setattr(FakeLoop, "quit", quit_later)
    monkeypatch.setattr(FakeLoop, "state", lambda loop, state: states.append(state))
    for batch in job.batches(DATA, batch_size=BATCH):
        turn(job, model, batch, optimizer)
        if job.step == 1:
            break
    assert len(states) == 1 and b"optimizer" in states[0]


@pytest.mark.parametrize("first", [0, 3])
def test_a_loop_over_epochs_may_stay(is_script, monkeypatch, first):
    monkeypatch.setattr(FakeLoop, "first", first)
    job, model, optimizer = started()
    sampler = elasticdl.torch.ElasticSampler(job, len(DATA), BATCH)
    loader = DataLoader(TensorDataset(DATA), batch_sampler=sampler)
    seen = []
    for epoch in job.epochs(N_EPOCHS):
        sampler.set_epoch(epoch)
        assert len(loader) == EPOCH_STEPS
        for (batch,) in loader:
            assert job.epoch == epoch
            seen.append((epoch, job.step))
            turn(job, model, batch, optimizer)
        seen.append((epoch, "end"))
    probe = [(0, 0)] if first == 0 else [(0, 0), (0, "end")]
    steps = [(step // EPOCH_STEPS, step) for step in range(first, N_STEPS)]
    for epoch in (2, 1, 0):
        if epoch >= first // EPOCH_STEPS:
            last = max(place for place, (of, _) in enumerate(steps) if of == epoch)
            steps.insert(last + 1, (epoch, "end"))
    assert seen == probe + steps
    assert (job.total_steps, job.step) == (N_STEPS, N_STEPS)


def test_what_follows_an_epoch_belongs_to_its_last_step(monkeypatch):
    """So a worker that joins later gets a state that includes it."""
    monkeypatch.setattr(FakeLoop, "is_script", True)
    monkeypatch.setattr(FakeLoop, "first", 2)
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    job = elasticdl.init(model, optimizer, scheduler=scheduler)
    rates = []
    for _ in job.epochs(N_EPOCHS):
        for step in job.steps(DATA, batch_size=BATCH):
            for batch in step:
                model(batch).mean().backward()
            if job.is_step:
                optimizer.step()
        n_stepped = FakeLoop.last.heard.count("stepped")
        scheduler.step()
        rates.append((n_stepped, optimizer.param_groups[0]["lr"]))
    # The first epoch only checks this worker.
    assert rates == [(0, 1.0), (1, 0.5), (3, 0.25)]
    assert FakeLoop.last.heard.count("stepped") == 4


def test_an_epoch_that_is_left_ends_training_only_with_the_loop_around_it():
    job, model, _ = started()
    with pytest.raises(RuntimeError, match="before the end of this one; .* call `job.stop\\(\\)`"):
        for _ in job.epochs(N_EPOCHS):
            for batch in job.batches(DATA, batch_size=BATCH):
                turn(job, model, batch)
                break
    job, model, _ = started()
    for _ in job.epochs(N_EPOCHS):
        for batch in job.batches(DATA, batch_size=BATCH):
            turn(job, model, batch)
            break
        break
    assert FakeLoop.last.heard == ["computed", "quit"]


def test_batches_that_were_never_requested_cannot_be_left(monkeypatch):
    monkeypatch.setattr(FakeLoop, "last", None)
    job, _, _ = started()
    for _ in job.epochs(N_EPOCHS):
        break
    assert FakeLoop.last is None
    job._fail("the script exited")
    assert FakeLoop.last.heard == ["the script exited"]


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (lambda job: job.batches(DATA, batch_size=BATCH), "requested twice"),
        (lambda job: job.epochs(2), "call it once, in the outermost loop"),
    ],
)
def test_batches_are_requested_once(second, sentence):
    job, _, _ = started()
    batches = job.batches(DATA, batch_size=BATCH)
    with pytest.raises(RuntimeError, match=sentence):
        second(job)
    del batches


def test_every_epoch_has_the_same_batches():
    job, model, _ = started()
    sizes = iter([BATCH, 1])
    with pytest.raises(RuntimeError, match="the same dataset, batch size, order and loader"):
        for _ in job.epochs(N_EPOCHS):
            for batch in job.batches(DATA, batch_size=next(sizes)):
                turn(job, model, batch)


OTHER = {
    "dataset": lambda epoch: {"dataset": DATA if epoch == 0 else DATA + 1, "timeout": 0},
    "collate": lambda epoch: {"collate": torch.stack if epoch == 0 else list, "timeout": 0},
    "collate with other values": lambda epoch: {
        "collate": lambda items: torch.stack(items) * epoch,
        "timeout": 0,
    },
    "options": lambda epoch: {"pin_memory": False} if epoch == 0 else {"timeout": 0},
    "no options": lambda epoch: {"pin_memory": False} if epoch == 0 else {},
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER.keys())
def test_what_a_loader_reads_cannot_change_after_an_epoch(other):
    job, model, _ = started()
    with pytest.raises(RuntimeError, match="the batches of an epoch are not those of the epoch be"):
        for epoch in job.epochs(N_EPOCHS):
            request = {"dataset": DATA, **other(epoch)}
            for batch in job.batches(batch_size=BATCH, **request):
                turn(job, model, batch)
    assert job.epoch == 0


def test_a_collate_function_can_be_defined_in_each_epoch():
    job, model, _ = started()
    n_batches, half = 0, 0.5
    for _ in job.epochs(N_EPOCHS):
        collate = functools.partial(lambda by, items: items[0][0] * by * half, 2)
        for batch in job.batches((DATA,), batch_size=BATCH, collate=collate, timeout=0):
            turn(job, model, batch)
            n_batches += 1
    assert n_batches == N_STEPS + 1


def test_a_collate_function_with_a_variable_of_the_loop_is_refused():
    job, model, _ = started()
    with pytest.raises(RuntimeError, match="request the same dataset"):
        for epoch in job.epochs(N_EPOCHS):
            collate = lambda items: torch.stack(items) * epoch  # noqa: B023, E731
            for batch in job.batches(DATA, batch_size=BATCH, collate=collate, timeout=0):
                turn(job, model, batch)


def test_a_loader_over_epochs_keeps_its_dataset():
    job, model, _ = started()
    sampler = elasticdl.torch.ElasticSampler(job, len(DATA), batch_size=BATCH)
    with pytest.raises(RuntimeError, match="request the same dataset"):
        for epoch in job.epochs(N_EPOCHS):
            for batch in DataLoader(DATA + epoch, batch_sampler=sampler):
                turn(job, model, batch)
    assert job.epoch == 0


def test_the_gradient_of_a_step_is_clipped(monkeypatch):
    monkeypatch.setattr(FakeLoop, "is_script", True)
    job, model, optimizer = started()
    norms = []
    for batch in job.batches(DATA, batch_size=BATCH):
        (100 * model(batch).mean()).backward()
        job.allreduce(model)
        norms.append(job.clip_grad_norm(0.5))
        if job.is_step:
            total = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
            assert total.item() == pytest.approx(0.5)
        optimizer.step()
    assert norms[0] is None and all(norm > 100 for norm in norms[1:])


def test_a_gradient_that_the_job_applies_cannot_be_clipped():
    job, model, _ = started()
    for batch in job.batches(DATA, batch_size=BATCH):
        model(batch).mean().backward()
        job.allreduce(model)
        with pytest.raises(RuntimeError, match="use --clip_norm instead"):
            job.clip_grad_norm(0.5)
        break


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ([("weight", [1, 2]), ("bias", [2])], "`bias` has shape \\[1\\] instead of \\[2\\]"),
        ([("weight", [1, 2])], "it has a parameter or buffer `bias`"),
        ([("weight", [1, 2]), ("bias", [1]), ("scale", [1])], "it has no .* `scale`"),
        ([("bias", [1], True), ("weight", [1, 2])], "`bias` is not of float64"),
    ],
)
def test_a_model_that_differs_from_that_of_the_job_is_named(tmp_path, params, what):
    params = [dict(zip(("name", "shape", "is_double"), param)) for param in params]
    (tmp_path / "model.json").write_text(json.dumps({"params": params}))
    job, _, _ = started()
    with pytest.raises(RuntimeError, match=f"worker-0 is not the one .* started with: {what}"):
        job.batches(DATA, batch_size=BATCH)


def test_only_the_leader_prints(capsys, monkeypatch):
    monkeypatch.setenv("ELASTICDL_WORKER_ID", "4")
    monkeypatch.setenv("ELASTICDL_WORLD_SIZE", "2")
    job, model, _ = started()
    assert (job.rank, job.world_size) == (4, 2)
    for batch in job.batches(DATA, batch_size=BATCH):
        job.print("step", job.step, end="!\n")
        turn(job, model, batch)
        if job.step == 1:
            break
    assert capsys.readouterr().out == "step 0!\nstep 1!\n"
