# SPDX-License-Identifier: Apache-2.0
"""A script whose model has parameters of four types, as jobs and the test run it.

The model `parts` is compiled; it has tied, frozen, parametrized and once lazy layers, buffers that
a pass changes and buffers that it does not, autocast, and a block with dropout that is computed
again in the backward pass. The model `device` is on a second device.

`tensors_script.py FOLDER plain MODEL` trains without a job, by the random numbers of a job.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

import elasticdl
import faults
from elasticdl import _state

N_LANES, BATCH, EPOCHS, N_WORDS = 4, 8, 6, 16
X = torch.randint(N_WORDS, (192, 3), generator=torch.Generator().manual_seed(1))
N_STEPS = EPOCHS * len(X) // (N_LANES * BATCH)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(N_WORDS, 8)
        self.short = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25), nn.Tanh()).bfloat16()
        self.norm = nn.BatchNorm1d(8)
        self.fine = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.lazy = nn.LazyLinear(8)
        self.lazy(torch.zeros(1, 8))
        self.frozen = nn.Linear(8, 8).half().requires_grad_(False)
        self.head = nn.Linear(8, N_WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("order", torch.arange(7, -1, -1))
        self.register_buffer("mask", torch.tensor([True, False] * 4))
        self.register_buffer("largest", torch.zeros(8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x).mean(1)
        x = x + checkpoint.checkpoint(self.short, x.bfloat16(), use_reentrant=False).float()
        x = self.norm(x)[:, self.order]
        with torch.no_grad():
            self.largest.lerp_(x.amax(0).bfloat16(), 0.25)
        x = x + self.fine(x.double()).float() * self.mask
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x + self.lazy(torch.relu(self.normed(x)))
        return self.head(x + self.frozen(x.half()).float() + self.largest.float())


class Distant(nn.Module):
    """A model on a device that gets its input from the host."""

    def __init__(self) -> None:
        super().__init__()
        import torch_device

        self.words = nn.Embedding(N_WORDS, 8)
        self.norm = nn.BatchNorm1d(8)
        self.short = nn.Linear(8, 8).bfloat16()
        self.fine = nn.Linear(8, 8).double()
        self.head = nn.Linear(8, N_WORDS)
        self.to(torch_device.NAME)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(x.to(self.words.weight.device)).mean(1))
        x = torch.tanh(self.short(x.bfloat16()).float())
        return self.head(x + self.fine(x.double()).float()).cpu()


class Training:
    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = {"parts": Parts, "device": Distant}[kind]()
        self.called = self.model
        if kind == "parts":
            self.called = torch.compile(self.model, backend="aot_eager")
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1, momentum=0.9)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        x = X[records]
        return nn.functional.cross_entropy(self.called(x), x[:, 0])

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()

    def dump(self) -> bytes:
        states = {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}
        return _state.dump(states)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers that are added up."""
    numbers = tensor.detach().cpu()
    return numbers if numbers.dtype == torch.float64 else numbers.float()


def train_plainly(kind: str, seeds: dict[str, int]) -> bytes:
    """Trains without a job, on the same lanes and with the same random numbers."""
    torch.set_num_threads(1)
    training = Training(kind)
    floats = [buffer for buffer in training.model.buffers() if buffer.is_floating_point()]
    norms = [layer for layer in training.model.modules() if isinstance(layer, nn.BatchNorm1d)]
    for step in range(N_STEPS):
        first = step * N_LANES * BATCH % len(X)
        lanes = torch.arange(first, first + N_LANES * BATCH).reshape(N_LANES, BATCH)
        before = [buffer.clone() for buffer in floats]
        values = []
        for lane in lanes:
            for parameter in training.trained:
                parameter.grad = None
            for buffer, value in zip(floats, before):
                buffer.copy_(value)
            torch.manual_seed(seeds[f"{step}-{int(lane[0])}"])
            training.forward(lane).backward()
            parts = [wide(parameter.grad) for parameter in training.trained]
            parts += [wide(new) - wide(old) for new, old in zip(floats, before)]
            values.append([part * BATCH for part in parts])
        a, b, c, d = values
        means = [((w + x) + (y + z)) / lanes.numel() for w, x, y, z in zip(a, b, c, d)]
        for parameter, mean in zip(training.trained, means):
            parameter.grad = mean.to(parameter.dtype).to(parameter.device)
        for buffer, value, mean in zip(floats, before, means[len(training.trained) :]):
            buffer.copy_((wide(value) + mean).to(buffer.dtype))
        for norm in norms:
            norm.num_batches_tracked.fill_(step + 1)
        torch.manual_seed(seeds[f"{step}-step"])
        training.step()
    return training.dump()


def read_seeds(folder: Path) -> dict[str, int]:
    lines = [line for path in folder.glob("seeds-*") for line in path.read_text().splitlines()]
    seeds = dict(line.split() for line in lines)
    assert len(set(lines)) == len(seeds) == N_STEPS * (N_LANES + 1), "all workers have the same"
    return {name: int(seed) for name, seed in seeds.items()}


def main(folder: Path, kind: str, n_workers: int, kills: list[int]) -> None:
    training = Training(kind)
    faults.PACE_SECS = 2.0  # The compiler makes new workers slow.
    injected = faults.Faults(folder, n_workers, kills)
    job = elasticdl.init(training.called, training.optimizer)

    def note(name: str) -> None:
        if not job.is_described:
            with (folder / f"seeds-{os.getpid()}").open("a") as file:
                print(f"{job.step}-{name}", torch.initial_seed(), file=file)

    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
    for lanes in job.steps(torch.arange(len(X)), **options):
        for batch in lanes:
            loss = training.forward(batch)
            note(str(int(batch[0])))
            loss.backward()
        if not job.is_step:  # The job ended in the first pass of a new worker.
            continue
        note("step")
        training.step()
        if not job.is_described:
            injected.between(job.step)
    (folder / f"end-{os.getpid()}").write_bytes(training.dump())


if __name__ == "__main__":
    folder, kind, *rest = sys.argv[1:]
    if kind == "plain":
        Path(folder, "plain").write_bytes(train_plainly(rest[0], read_seeds(Path(folder))))
    else:
        main(Path(folder), kind, int(rest[0]), [int(kill) for kill in rest[1:]])
