# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps in the user's loop, against a stand-in for the job's loop."""

from __future__ import annotations

import json
import os
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import elasticdl  # noqa: E402
from elasticdl import ZooError  # noqa: E402

DATA = torch.linspace(-1, 1, 48).reshape(16, 3)
# The records of each lane of each step.
LANES = [[[0, 1, 2], [3, 4]], [[5, 6], [7, 8, 9]], [[10, 11], [12, 13]], [[13, 14, 15], [2, 1]]]


class Lion(torch.optim.Optimizer):
    """An optimizer that the job does not know, with its own state."""

    def __init__(self, params, lr=0.01, beta=0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["m"], state["n"] = torch.zeros_like(parameter), 0
                state["n"] += 1
                state["m"].mul_(group["beta"]).add_(parameter.grad, alpha=1 - group["beta"])
                noise = torch.rand_like(parameter) * 1e-3
                parameter.add_(state["m"].sign() + noise, alpha=-group["lr"])


class Ema:
    """An average of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.25)

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state) -> None:
        self.values = dict(state)


def made():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
    groups[1]["params"] = [*model[1].parameters(), *model[2].parameters()]
    optimizer = Lion(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return model, optimizer, scheduler, Ema(model)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


class FakeLoop:
    """A job whose steps have the lanes of `steps`, all of them or the first of them here."""

    steps = LANES
    is_script = True
    # Steps after which another worker gets the state, and before which it is replaced.
    asked: dict[int, bytes] = {}
    load: dict[int, tuple[np.ndarray, bytes]] = {}
    is_idle = False
    # The lanes of a last step that is not taken.
    skipped: list[list[int]] = []
    # Places at the start of vectors that hold numbers of 64 bits.
    n_double = 0

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.script = self.play()
        self.answer = None
        FakeLoop.last = self

    def attach(self, dense: np.ndarray, gradient: np.ndarray) -> None:
        self.dense, self.gradient = dense, gradient

    def parts(self, vector: np.ndarray) -> list[np.ndarray]:
        """Returns the numbers of 64 and of 32 bits in a vector."""
        return [vector[: self.n_double].view(np.float64), vector[self.n_double :]]

    def play(self):
        """Asks as the job asks; each yield returns when it is answered."""
        yield np.array([0, 1], np.uint64), 3, 0, False  # The probe.
        dense = self.dense.copy()
        for number, lanes in enumerate(self.steps):
            if number in self.load:
                dense, state = self.load[number]
                dense = dense.copy()
                yield "load", state, number, False
                assert self.answer == "loaded"
            total = np.zeros_like(self.gradient)
            for lane, records in enumerate(lanes):
                if self.is_idle:
                    break
                self.dense[:] = dense
                yield np.array(records, np.uint64), 100 * number + lane, number, lane == 0
                assert self.answer == "computed"
                with np.errstate(over="ignore"):
                    for part, numbers in zip(self.parts(total), self.parts(self.gradient)):
                        part += numbers * np.float32(len(records))
            if self.is_idle:
                total[:] = 0.5
            self.dense[:] = dense
            for part in self.parts(total):
                part /= np.float32(sum(map(len, lanes)))
            self.gradient[:] = total
            yield "step", (1000 + number, 0.5 * number), number, True
            assert self.answer == "stepped"
            dense = self.dense.copy()
            if number in self.asked:
                yield "state", None, number, True
                self.asked[number] = (dense, self.answer)
        for lane, records in enumerate(self.skipped):
            self.dense[:] = dense
            yield np.array(records, np.uint64), lane, len(self.steps), lane == 0
            assert self.answer == "computed"
        self.dense[:] = dense

    def next(self):
        return next(self.script, None)

    def end(self):
        return len(self.steps), True

    def preemption(self) -> None:
        return None

    def hear(self, what) -> None:
        self.answer = what
        self.heard.append(what if isinstance(what, str) else "state")

    def computed(self, _loss: float) -> None:
        self.hear("computed")

    def stepped(self) -> None:
        self.hear("stepped")

    def quit(self) -> None:
        self.hear("quit")
        self.script = iter(())

    def loaded(self) -> None:
        self.hear("loaded")

    def state(self, state: bytes) -> None:
        self.hear(state)

    def again(self) -> None:
        raise AssertionError("the model is known")

    def fail(self, why: str) -> None:
        self.hear(why)


@pytest.fixture(autouse=True)
def worker(monkeypatch, become_worker):
    become_worker(FakeLoop)
    monkeypatch.setattr(FakeLoop, "asked", {})
    monkeypatch.setattr(FakeLoop, "load", {})


def flat():
    """Trains with one loop over all batches."""
    model, optimizer, scheduler, ema = made()
    job = elasticdl.init(model, optimizer, scheduler=scheduler, ema=ema)
    steps = []
    for batch in job.batches(DATA, batch_size=3):
        loss = loss_of(model, batch)
        loss.backward()
        job.allreduce(model, loss)
        steps.append(job.is_step)
        optimizer.step()
        scheduler.step()
        ema.update(model)
        job.commit()
    return model, optimizer, ema, steps


def nested():
    """Trains with a loop over steps around that over batches."""
    model, optimizer, scheduler, ema = made()
    job = elasticdl.init(model, optimizer, scheduler=scheduler, ema=ema)
    for step in job.steps(DATA, batch_size=3):
        for batch in step:
            loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
        ema.update(model)
    return model, optimizer, ema


def plain():
    """Trains without a job, on the same lanes."""
    model, optimizer, scheduler, ema = made()
    trained = list(model.parameters())
    norm = model[1]
    for number, lanes in enumerate(LANES):
        sums = [torch.zeros_like(parameter) for parameter in trained]
        before = [norm.running_mean.clone(), norm.running_var.clone()]
        changes = [torch.zeros_like(buffer) for buffer in before]
        n_records = sum(map(len, lanes))
        for lane in lanes:
            optimizer.zero_grad()
            with torch.no_grad():
                norm.running_mean.copy_(before[0])
                norm.running_var.copy_(before[1])
            loss_of(model, DATA[lane]).backward()
            for total, parameter in zip(sums, trained):
                total += parameter.grad * len(lane)
            for total, old, new in zip(changes, before, (norm.running_mean, norm.running_var)):
                total += (new - old) * len(lane)
        with torch.no_grad():
            norm.running_mean.copy_(before[0] + changes[0] / n_records)
            norm.running_var.copy_(before[1] + changes[1] / n_records)
        for total, parameter in zip(sums, trained):
            parameter.grad = total / n_records
        torch.manual_seed(1000 + number)
        optimizer.step()
        scheduler.step()
        ema.update(model)
    return model, optimizer, ema


def numbers(model, optimizer, ema, *_):
    state = optimizer.state_dict()
    parts = [*model.parameters(), model[1].running_mean, model[1].running_var]
    parts += [entry["m"] for entry in state["state"].values()] + list(ema.values.values())
    rates = [group["lr"] for group in state["param_groups"]]
    return torch.cat([part.detach().flatten() for part in parts]).tolist(), rates


def test_steps_are_those_of_a_loop_without_a_job():
    expected = numbers(*plain())
    trained = flat()
    assert numbers(*trained) == expected
    # The probe, and then two lanes for each step.
    assert trained[3] == [False] + [False, True] * 4
    assert numbers(*nested()) == expected


@pytest.mark.parametrize("train", [flat, nested])
def test_the_process_that_describes_a_script_trains_from_the_state_before(
    tmp_path, monkeypatch, train
):
    expected = numbers(*plain())
    read, write = os.pipe()
    os.write(write, b'{"env": {"ELASTICDL_MASTER_ADDR": "me:1", "ELASTICDL_WORKER_ID": "7"}}\nrest')
    monkeypatch.setattr("elasticdl._first_step._STDIN", read)
    monkeypatch.setattr("elasticdl._job._lead_group", lambda: None)
    monkeypatch.setattr("elasticdl._stacks.log_when_asked", lambda: None)
    described = tmp_path / "described"
    described.mkdir()
    for name in ("DESCRIBE", "SUPERVISED", "WORKER_ID"):
        monkeypatch.setenv(f"ELASTICDL_{name}", str(described))
    monkeypatch.delenv("ELASTICDL_WORKER_ID")
    monkeypatch.delenv("ELASTICDL_MASTER_ADDR")
    trained = train()
    assert numbers(*trained) == expected
    if train is flat:
        # The first step, the probe, and then two lanes for each step.
        assert trained[3] == [True, False] + [False, True] * 4
    assert json.loads((described / "model.json").read_text())["continues"]
    assert (os.environ["ELASTICDL_WORKER_ID"], os.read(read, 9)) == ("7", b"rest")
    os.close(read)
    os.close(write)


def test_a_step_that_is_passed_over_changes_nothing():
    model, optimizer, scheduler, ema = made()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    job = elasticdl.init(model, optimizer, scheduler=scheduler, ema=ema)
    for batch in job.batches(DATA, batch_size=3):
        loss_of(model, batch).backward()
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
        job.allreduce(model)
        if job.is_step:
            job.pass_over()
        job.commit()
    assert FakeLoop.last.heard.count("stepped") == len(LANES)
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    assert optimizer.state_dict()["state"] == {}


def test_a_new_worker_continues_from_the_state_of_another():
    FakeLoop.asked = {1: b""}
    expected = numbers(*flat())
    dense, state = FakeLoop.asked[1]
    FakeLoop.asked = {}
    for train in (flat, nested):
        FakeLoop.steps, FakeLoop.load = LANES, {2: (dense, state)}
        # What it computes before that does not count.
        assert numbers(*train()) == expected, train.__name__
    assert FakeLoop.last.heard.count("loaded") == 1


def test_a_worker_without_a_lane_takes_the_step(monkeypatch):
    monkeypatch.setattr(FakeLoop, "is_idle", True)
    *_, steps = trained = flat()
    assert steps == [True] * 4, "it gets batches that do not count"
    assert numbers(*nested()) == numbers(*trained)
    assert FakeLoop.last.heard == ["computed"] + ["stepped"] * 4


class Exact(Lion):
    """An optimizer that keeps its state in float64 and replaces the tensors of parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["m"].add_(parameter.grad.double() / 3)
                parameter.data = (parameter.double() - group["lr"] * state["m"]).float()


def exact(is_in_job: bool = True):
    """Trains with it, with and without a job."""
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    optimizer = Exact(model.parameters())
    if is_in_job:
        job = elasticdl.init(model, optimizer)
        for batch in job.batches(DATA, batch_size=3):
            loss_of(model, batch).backward()
            job.allreduce(model)
            optimizer.step()
            job.commit()
        dense = job._model.dense
        assert dense.tolist() == [*model.weight.flatten().tolist(), *model.bias.tolist()]
    else:
        for lanes in LANES:
            sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
            for lane in lanes:
                model.zero_grad()
                loss_of(model, DATA[lane]).backward()
                for total, parameter in zip(sums, model.parameters()):
                    total += parameter.grad * len(lane)
            for total, parameter in zip(sums, model.parameters()):
                parameter.grad = total / sum(map(len, lanes))
            optimizer.step()
    moments = [state["m"] for state in optimizer.state.values()]
    assert {moment.dtype for moment in moments} == {torch.float64}
    return [part.tolist() for part in (*model.parameters(), *moments)]


def test_parameters_may_be_replaced_and_state_keeps_its_type():
    FakeLoop.asked = {1: b""}
    expected = exact(is_in_job=False)
    assert exact() == expected
    FakeLoop.load, FakeLoop.asked = {2: FakeLoop.asked[1]}, {}
    assert exact() == expected, "a new worker gets the state as it is"


@pytest.mark.parametrize("train", [flat, nested])
def test_the_code_after_the_loop_runs_if_the_last_step_is_skipped(train, monkeypatch):
    monkeypatch.setattr(FakeLoop, "steps", LANES[:3])
    expected = numbers(*train())
    # The job skips the fourth step: its loss is not finite.
    monkeypatch.setattr(FakeLoop, "skipped", LANES[3])
    assert numbers(*train()) == expected
    assert FakeLoop.last.heard[-3:] == ["stepped", "computed", "computed"]


def test_a_gradient_scaler_skips_steps_that_overflow():
    scaler_of = getattr(torch.amp, "GradScaler", None)
    if scaler_of is None:
        pytest.skip("this torch has no gradient scaler for the CPU")
    model, optimizer, *_ = made()
    scaler = scaler_of("cpu", init_scale=2.0**127, backoff_factor=2.0**-8)
    job = elasticdl.init(model, optimizer, scaler=scaler)
    before, changed = model[0].weight.tolist(), []
    for batch in job.batches(DATA, batch_size=3):
        scaler.scale(loss_of(model, batch)).backward()
        job.allreduce(model)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if job.is_step:
            changed.append(model[0].weight.tolist() != before)
        job.commit()
    n_skipped = changed.index(True)
    assert changed == [False] * n_skipped + [True] * (4 - n_skipped)
    assert n_skipped > 0 and scaler.get_scale() == 2.0 ** (127 - 8 * n_skipped)
    kind = job._model.script_spec(follows_schedule=False)["optimizer"]["kind"]
    assert kind == {"script": {"nonfinite": True}}


def implicit(every: str, **options):
    """Trains with a loop that leaves the steps to `commit`, as the wrapped optimizer does."""
    model, optimizer, *_ = made()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    job = elasticdl.init(model, optimizer, schedule, every)
    for batch in job.batches(DATA, batch_size=3, **options):
        loss_of(model, batch).backward()
        job.allreduce(model)
        job.commit()
    return model, optimizer, schedule


def test_commit_takes_the_step_if_the_loop_does_not():
    *_, first = implicit("step")
    assert first.last_epoch == 4
    # 16 records in batches of 3: an epoch has 6 steps, but this job ends after 4.
    assert implicit("epoch")[2].last_epoch == 0
    model, optimizer, schedule = implicit("epoch", epochs=8, shuffle=False)
    assert [state["n"] for state in optimizer.state.values()] == [4] * 6
    # The scheduler is the user's again after the loop.
    schedule.step()
    model, optimizer, *_ = made()
    job = elasticdl.init(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), "step")
    with pytest.raises(RuntimeError, match="of the learning-rate schedule was called, but the job"):
        for batch in job.batches(DATA, batch_size=3):
            loss_of(model, batch).backward()
            job.allreduce(model)
            job._schedule.step()


def check_refused(sentence: str, step) -> None:
    model, optimizer, *_ = made()
    job = elasticdl.init(model, optimizer)
    with pytest.raises(RuntimeError, match=sentence):
        for batch in job.batches(DATA, batch_size=3):
            loss_of(model, batch).backward()
            job.allreduce(model)
            step(job, optimizer)
            job.commit()


def test_mistakes_are_reported_with_what_to_do():
    def step_once(job, optimizer):
        if job.step == 0:
            optimizer.step()

    check_refused("ended without a call to the `step", step_once)
    check_refused("called with a closure", lambda _, optimizer: optimizer.step(lambda: None))

    def step_late(job, optimizer):
        optimizer.step()
        job.commit()
        optimizer.step()

    check_refused(r"`optimizer.step\(\)` was called outside a step", step_late)
    model, optimizer, *_ = made()
    with pytest.raises(ZooError, match="`ema` is of type int, which has no `state_dict`"):
        elasticdl.init(model, optimizer, ema=3)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(RuntimeError, match="`other` was attached after the model and"):
        elasticdl.init(model, optimizer).attach(other=other)
    wrapper = types.SimpleNamespace(optimizer=optimizer)
    with pytest.raises(ZooError, match="the optimizer is a SimpleNamespace"):
        elasticdl.init(model, wrapper)
    job = elasticdl.init(model)
    assert job.loss is None
    with pytest.raises(RuntimeError, match="does not know the model or the optimizer"):
        next(job.batches(DATA))
    for is_complete, sentence in [(False, "to its end"), (True, "ended without a call")]:
        model, optimizer, *_ = made()
        job = elasticdl.init(model, optimizer)
        with pytest.raises(RuntimeError, match=sentence):
            for lanes in job.steps(DATA, batch_size=3):
                for batch in lanes if is_complete else ():
                    loss_of(model, batch).backward()


@pytest.fixture
def describe(tmp_path, monkeypatch):
    """Describes a script, and returns its error."""
    monkeypatch.setenv("ELASTICDL_DESCRIBE", str(tmp_path))
    monkeypatch.setattr(os, "_exit", sys.exit)

    def run(loop: str, choice: str = "auto") -> str:
        monkeypatch.setenv("ELASTICDL_STEP", choice)
        try:
            exec(BEFORE + loop, {})
        except SystemExit:
            return ""
        except (RuntimeError, ZooError) as error:
            return str(error)
        raise AssertionError("the script ran beyond its first step")

    return run


BEFORE = """
import torch, elasticdl
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = torch.ones(8, 2)
"""
LOOP = """
job = elasticdl.init(model, optimizer)
for batch in job.batches(data, batch_size=4):
    model(batch).sum().backward()
    job.allreduce(model)
    {step}
    job.commit()
"""
NESTED = """
job = elasticdl.init(model, optimizer)
for step in job.steps(data, batch_size=4):
    for batch in step:
        model(batch).sum().backward()
    optimizer.step()
"""


GROUPS = """
optimizer = torch.optim.SGD([
    {"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
"""
BETAS = """
optimizer = torch.optim.NAdam(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
"""


def given(words: str, step: str) -> str:
    """Returns the loop with more arguments of `init`."""
    return LOOP.format(step=step).replace("optimizer)", f"optimizer, {words})", 1)


@pytest.mark.parametrize(
    ("loop", "choice", "kind"),
    [
        (LOOP.format(step="optimizer.step()"), "auto", "script"),
        (LOOP.format(step="optimizer.step()"), "python", "script"),
        (LOOP.format(step="pass"), "auto", "momentum"),
        (LOOP.format(step="pass"), "rust", "momentum"),
        (LOOP.format(step="pass"), "python", "script"),
        (NESTED, "auto", "script"),
        # What Rust does not know.
        (GROUPS + LOOP.format(step="pass"), "auto", "script"),
        (BETAS + given("schedule", step="pass"), "auto", "script"),
    ],
)
def test_who_takes_the_steps_follows_from_the_loop(tmp_path, describe, loop, choice, kind):
    assert describe(loop, choice) == ""
    model = json.loads((tmp_path / "model.json").read_text())["model"]
    assert kind in json.dumps(model["optimizer"]["kind"])
    assert (tmp_path / "first_state.bin").exists() == (kind == "script")
    torch.manual_seed(1)
    first = [value for p in nn.Linear(2, 1).parameters() for value in p.flatten().tolist()]
    values = np.fromfile(tmp_path / "first_values.f32", "<f4")
    assert values.tolist() == first, "those before the step"


LBFGS = "optimizer = torch.optim.LBFGS(model.parameters())\n"
SPARSE = "other = torch.optim.SparseAdam(model.parameters())\n"
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 'epoch'"
STATE = """
class X:
    def state_dict(self): return {"a": [1, lambda: 2]}
    def load_state_dict(self, state): pass
class Y(X):
    def __init__(self): self.n = 0
    def state_dict(self):
        self.n += 1
        return {"a": [0, self.n]}
"""


@pytest.mark.parametrize(
    ("loop", "choice", "sentence"),
    [
        (GROUPS + LOOP.format(step="pass"), "rust", "parameter groups differ in `lr`"),
        (LOOP.format(step="optimizer.step()"), "rust", "but the job takes the steps"),
        (NESTED, "rust", "start the job without --step=rust"),
        (given("x=optimizer", step="pass"), "auto", "`x` was registered, but the loop does not"),
        (given("lambda step: 0.1", step="optimizer.step()"), "auto", "but your loop takes the opt"),
        (given(PLATEAU, step="optimizer.step()"), "auto", "but your loop takes the optimizer"),
        (given(PLATEAU, step="pass"), "auto", "depends on a metric, which is not known"),
        (given(PLATEAU, step="pass"), "python", "in Python, which cannot follow the learning-rate"),
        (given("lambda step: 0.1", step="pass"), "python", "in Python, which cannot follow the"),
        (STATE + given("x=X()", step="optimizer.step()"), "auto", "x.a[1] is a function;"),
        (STATE + given("x=Y()", step="optimizer.step()"), "auto", 'not restore x["a"][1] exactly'),
        (LOOP.format(step="optimizer.param_groups[0]['lr'] = 0.1"), "auto", "changed from 0.5 to"),
        (LOOP.format(step="pass"), "Rust", "ELASTICDL_STEP=Rust is unknown"),
        (LBFGS + LOOP.format(step="pass"), "auto", "`LBFGS` cannot train in a job: it needs a"),
        (SPARSE + given("x=other", step="pass"), "auto", "`SparseAdam` cannot train in a job"),
    ],
)
def test_loops_that_do_not_fit_the_choice_are_refused(tmp_path, describe, loop, choice, sentence):
    assert sentence in describe(loop, choice)
    assert not (tmp_path / "model.json").exists()
