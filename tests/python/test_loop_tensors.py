# SPDX-License-Identifier: Apache-2.0
"""Models of other types, on other devices, and with parts that change how a model computes.

The job's loop is a stand-in; `test_loop_tensors_job.py` trains such models with whole jobs.
"""

from __future__ import annotations

import copy
import functools
import io

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402
from torch.utils import checkpoint  # noqa: E402

import elasticdl  # noqa: E402
from elasticdl import ZooError, _state  # noqa: E402
from elasticdl._torch_loop import _OF_PASS, _Reseeder  # noqa: E402
from test_own_step import DATA, LANES, FakeLoop  # noqa: E402


@pytest.fixture(autouse=True)
def worker(monkeypatch, become_worker):
    become_worker(FakeLoop)
    monkeypatch.setattr(FakeLoop, "asked", {})
    monkeypatch.setattr(FakeLoop, "load", {})
    monkeypatch.setattr(FakeLoop, "n_double", 0)


class Mixed(nn.Module):
    """Layers of three types, a buffer of 16 bits that a pass changes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 8).bfloat16()
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8).half()
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(8, 1)
        self.register_buffer("largest", torch.zeros(8, dtype=torch.bfloat16))
        self.register_buffer("signs", torch.tensor([1, -1] * 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x.to(self.first.weight.dtype)).float())
        if self.training:
            with torch.no_grad():
                self.largest.lerp_(x.detach().amax(0).to(self.largest.dtype), 0.25)
        x = self.drop(self.second(x.to(self.second.weight.dtype)).float() * self.signs)
        return self.last(torch.tanh(x) + self.largest.float())


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.02, momentum=0.9, nesterov=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, call=nn.Module.__call__):
    """Trains with a job."""
    job = elasticdl.init(model, optimizer)
    for batch in job.batches(DATA, batch_size=3):
        loss_of(functools.partial(call, model), batch).backward()
        job.allreduce(model)
        if job.is_step:
            optimizer.step()
        job.commit()
    return model, optimizer


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers that are added up."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, wide=wide):
    """Trains without a job, on the same lanes."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for number, lanes in enumerate(LANES):
        before = [buffer.clone() for buffer in floats]
        n_records = sum(map(len, lanes))
        sums = None
        for index, lane in enumerate(lanes):
            for buffer, value in zip(floats, before):
                buffer.copy_(value)
            model.zero_grad()
            torch.manual_seed((100 * number + index) ^ _OF_PASS)
            loss_of(model, DATA[lane]).backward()
            gradients = [wide(parameter.grad) for parameter in trained]
            changes = [wide(new) - wide(old) for new, old in zip(floats, before)]
            parts = [part * len(lane) for part in gradients + changes]
            sums = parts if sums is None else [a + b for a, b in zip(sums, parts)]
        means = [total / n_records for total in sums]
        for parameter, mean in zip(trained, means):
            parameter.grad = mean.to(parameter.dtype)
        for buffer, old, mean in zip(floats, before, means[len(trained) :]):
            buffer.copy_((wide(old) + mean).to(buffer.dtype))
        for buffer in model.buffers():
            if buffer.dtype == torch.int64 and buffer.dim() == 0:
                buffer.fill_(number + 1)
        torch.manual_seed(1000 + number)
        optimizer.step()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    return _state.dump({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


def trained_equally(make) -> nn.Module:
    """Trains a model with and without a job, and in a worker that gets the state of another."""
    expected = make()
    expected = bits(*train_plainly(expected, optimizer_of(expected)))
    for load in (False, True):
        FakeLoop.load = {2: FakeLoop.asked[1]} if load else {}
        FakeLoop.asked = {} if load else {1: b""}
        model = make()
        assert bits(*train(model, optimizer_of(model))) == expected
    return model


def test_layers_of_different_types_are_trained_as_without_a_job():
    model = trained_equally(Mixed)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16, torch.float16}
    assert model.largest.dtype == torch.bfloat16 and model.largest.any()


class Doubles(nn.Module):
    """Parameters and buffers of float64 between others, trainable and frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(3, 5)
        self.wide = nn.Linear(5, 7).double()
        self.norm = nn.BatchNorm1d(7).double()
        self.frozen = nn.Linear(7, 7).double().requires_grad_(False)
        self.short = nn.Linear(7, 3).bfloat16()
        self.last = nn.Linear(3, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.first.weight.dtype
        x = self.frozen(torch.tanh(self.norm(self.wide(self.first(x.to(dtype)).double()))))
        return self.last(torch.tanh(self.short(x.to(self.short.weight.dtype))).double())


@pytest.mark.parametrize("is_whole", [False, True])
def test_parameters_of_64_bits_are_trained_as_without_a_job(is_whole, monkeypatch):
    def make() -> nn.Module:
        return Doubles().double() if is_whole else Doubles()

    first = make().state_dict()
    n_places = sum(2 * value.numel() for value in first.values() if value.dtype == torch.float64)
    monkeypatch.setattr(FakeLoop, "n_double", n_places)
    trained = trained_equally(make).state_dict()
    torch.save(trained, io.BytesIO())
    changed = {name for name, value in trained.items() if not torch.equal(value, first[name])}
    assert changed > {"first.weight", "wide.weight", "norm.running_var", "last.weight"}
    assert changed.isdisjoint({"frozen.weight", "frozen.bias"})
    rounded = make()
    train_plainly(rounded, optimizer_of(rounded), torch.Tensor.float)
    assert not torch.equal(rounded.wide.weight, trained["wide.weight"]), "32 bits are too few"


def test_strides_of_parameters_are_kept():
    class Conv(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x[:, :, None, None].expand(-1, -1, 4, 4)).mean((2, 3))

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Conv(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 2))
        return model.to(memory_format=torch.channels_last)

    model = trained_equally(make)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


class Deep(nn.Module):
    """A model with dropout, whose block can be computed again in the backward pass."""

    def __init__(self, repeats_block: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.block = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh())
        self.last = nn.Linear(8, 1)
        self.repeats_block = repeats_block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.repeats_block:
            return self.last(checkpoint.checkpoint(self.block, x, use_reentrant=False))
        return self.last(self.block(x))


@pytest.mark.parametrize("how", ["block", "whole", "reentrant"])
def test_a_pass_that_is_computed_again_has_the_same_random_numbers(how, monkeypatch):
    once, again = Deep(), Deep(repeats_block=how == "block")

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        is_reentrant = how == "reentrant"
        return checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=is_reentrant)

    repeated = train(again, optimizer_of(again), *([] if how == "block" else [call]))
    if how == "reentrant":
        # Its first pass computes no gradients, so that it keeps the seed of its iteration.
        monkeypatch.setattr(_Reseeder, "watch", lambda *_: lambda: None)
    assert bits(*repeated) == bits(*train(once, optimizer_of(once)))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_parts_of_a_model_are_trained_as_without_a_job():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Doubled())
            self.lazy = nn.LazyLinear(3)
            self.lazy(torch.zeros(1, 3))
            self.frozen = nn.Linear(3, 3).bfloat16().requires_grad_(False)
            self.tied = nn.Linear(3, 3)
            self.tied.weight = self.lazy.weight
            self.last = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.lazy(self.first(x))
            x = self.frozen(x.bfloat16()).float()
            return self.last(self.tied(x))

    model = trained_equally(Parts)
    assert model.tied.weight is model.lazy.weight
    before = Parts().frozen.weight
    assert torch.equal(model.frozen.weight, before)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_compiled_model_is_watched_from_outside(is_wrapped):
    def make() -> nn.Module:
        torch._dynamo.reset()
        model = Deep()
        # `fullgraph`: nothing of the job may get in the way of the compiler.
        if is_wrapped:
            return torch.compile(model, backend="eager", fullgraph=True)
        model.compile(backend="eager", fullgraph=True)
        return model

    model = trained_equally(make)
    assert ("_orig_mod.last.weight" in model.state_dict()) == is_wrapped


def replaced(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replaced, "`weight` was replaced by another object .* without assign=True"),
        (lambda m: m.bfloat16(), "`weight` was converted from float32 on `cpu` to bfloat16 on"),
        (lambda m: m.bias.requires_grad_(), "`bias` was frozen or in no optimizer"),
        (lambda m: m.codes.add_(1), "changed the integer buffer `codes`"),
    ],
)
@pytest.mark.parametrize("is_in_step", [True, False])
def test_changes_of_a_model_in_the_loop_are_refused(change, sentence, is_in_step):
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(False)
    model.register_buffer("codes", torch.arange(3))
    optimizer = optimizer_of(model)
    job = elasticdl.init(model, optimizer)
    with pytest.raises(ZooError, match=sentence):
        for batch in job.batches(DATA, batch_size=3):
            loss_of(model, batch).backward()
            if not is_in_step:
                change(model)
            job.allreduce(model)
            if job.is_step:
                optimizer.step()
                change(model)
            job.commit()


def aliased() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Linear(2, 1, device="meta"), "`weight` has no values, because it is on the"),
        (lambda: nn.LazyLinear(1), "`weight` gets its shape from the first batch; .* run a batch"),
        (
            lambda: nn.LazyBatchNorm1d(affine=False),
            "the buffer `running_mean` gets its shape from the first batch",
        ),
        (aliased, "`0.weight` and `1.weight` share memory, but are different objects"),
        (lambda: nn.Linear(2, 1).to(torch.float8_e4m3fn), "`weight` is float8_e4m3fn, but param"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_by_name(make, sentence):
    with pytest.raises(ZooError, match=sentence):
        elasticdl.init(make())


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_job_only_takes_steps_of_32_bits(dtype):
    model = nn.Linear(3, 1).to(getattr(torch, dtype))
    job = elasticdl.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sentence = rf"`weight` is {dtype}, but the job can only take .* \(--step=python"
    with pytest.raises(ZooError, match=sentence):
        job._model.spec()


def test_frozen_parameters_of_16_bits_do_not_matter_to_the_job():
    frozen = nn.Sequential(nn.Linear(3, 3).bfloat16().requires_grad_(False), nn.Linear(3, 1))
    job = elasticdl.init(frozen, torch.optim.SGD(frozen[1].parameters(), lr=0.1))
    job._model.plan(4, 1)
    assert [entry["name"] for entry in job._model.spec()["params"]][:2] == ["1.weight", "1.bias"]
