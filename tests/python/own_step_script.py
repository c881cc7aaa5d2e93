# SPDX-License-Identifier: Apache-2.0
"""A script that takes its own optimizer steps, as jobs and the test run it.

Its model has parameters of float32, and parameters and buffers of float64. It has two optimizers,
one of them unknown to the job and with groups of different rates, two schedulers, one of them by
the loss, gradient clipping, weight clipping and an average.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import elasticdl
from elasticdl import _state
from faults import Faults

N_LANES, BATCH, EPOCHS = 4, 8, 4
X = torch.randn(640, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
N_STEPS = EPOCHS * len(X) // (N_LANES * BATCH)
# The step after which the loop over epochs is left, in the last of them.
QUIT_STEP = N_STEPS - 10


class SignDescent(torch.optim.Optimizer):
    """An optimizer that the job does not know, with state and random numbers."""

    def __init__(self, params, lr=0.003) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["m"] = torch.zeros_like(parameter)
                update = state["m"].lerp(parameter.grad, 1 - beta_1).sign_()
                parameter.sub_(update + 0.1 * torch.rand_like(update), alpha=group["lr"])
                state["m"].lerp_(parameter.grad, 1 - beta_2)


class Model(nn.Sequential):
    def __init__(self) -> None:
        body = nn.Linear(6, 5)
        super().__init__(body, nn.BatchNorm1d(5).double(), nn.Linear(5, 2).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x).double()))


class Training:
    """Everything that a step changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        body = [{"params": self.model[0].parameters(), "lr": 0.01}]
        body.append({"params": self.model[1].parameters()})
        head = self.model[2].parameters()
        of = torch.optim.lr_scheduler
        self.objects = {"optimizer": SignDescent(body), "head": torch.optim.RAdam(head, lr=0.05)}
        self.objects |= {
            "scheduler": of.LambdaLR(self.objects["optimizer"], lambda step: 0.99**step),
            "plateau": of.ReduceLROnPlateau(self.objects["head"], patience=1, factor=0.9),
            "ema": torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True),
        }

    def backward(self, records: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(X[records]), Y[records])
        loss.backward()
        return loss.detach().float()

    def step(self, loss: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.objects["optimizer"].step()
        self.objects["head"].step()
        self.objects["scheduler"].step()
        self.objects["plateau"].step(loss)
        self.objects["ema"].update_parameters(self.model)
        with torch.no_grad():
            self.model[0].weight.clamp_(-0.5, 0.5)

    def dump(self) -> bytes:
        states = {name: value.state_dict() for name, value in self.objects.items()}
        return _state.dump({**states, "model": self.model.state_dict()})


def plain(seeds: dict[int, int], adds_in: torch.dtype | None = None) -> Training:
    """Trains without a job, on the same lanes, and with the same random numbers in each step.

    Gradients are added in their own type, unless there is another one.
    """
    torch.set_num_threads(1)
    training = Training()
    model = training.model
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    for step in range(N_STEPS):
        first = step * N_LANES * BATCH % len(X)
        lanes = torch.arange(first, first + N_LANES * BATCH).reshape(N_LANES, BATCH)
        before = [buffer.clone() for buffer in floats]
        values = []
        for lane in lanes:
            model.zero_grad()
            for buffer, value in zip(floats, before):
                buffer.copy_(value)
            loss = training.backward(lane)
            changes = [buffer - value for buffer, value in zip(floats, before)]
            parts = [*(parameter.grad for parameter in model.parameters()), *changes, loss]
            values.append([part.to(adds_in or part.dtype) * BATCH for part in parts])
        a, b, c, d = values
        means = [((w + x) + (y + z)) / len(lanes.view(-1)) for w, x, y, z in zip(a, b, c, d)]
        loss = means.pop()
        for parameter, mean in zip(model.parameters(), means):
            parameter.grad = mean.to(parameter.dtype)
        for buffer, value, mean in zip(floats, before, means[-len(floats) :]):
            buffer.copy_(value + mean)
        model[1].num_batches_tracked.fill_(step + 1)
        torch.manual_seed(seeds[step])
        training.step(loss.item())
    return training


def main(folder: Path, loop: str, n_workers: int, kills: list[int]) -> None:
    training = Training()
    model, faults = training.model, Faults(folder, n_workers, kills)
    job = elasticdl.init(model=model, **training.objects)

    def take_step() -> None:
        seed = torch.initial_seed()
        training.step(job.loss)
        if "ELASTICDL_DESCRIBE" in os.environ:  # Before the job.
            return
        with (folder / f"seeds-{os.getpid()}").open("a") as file:
            print(job.step, seed, file=file)
        faults.between(job.step)

    records = torch.arange(len(X))
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False}
    if loop == "flat":
        for batch in job.batches(records, **options):
            loss = training.backward(batch)
            job.allreduce(model, loss)
            if job.is_step:
                take_step()
            job.commit()
    elif loop == "epochs":
        for _ in job.epochs(options.pop("epochs")):
            for lanes in job.steps(records, **options):
                for batch in lanes:
                    job.allreduce(loss=training.backward(batch))
                if job.is_step:
                    take_step()
                if job.step == QUIT_STEP:
                    break
            if job.step == QUIT_STEP:
                break
            training.objects["scheduler"].step()
    else:
        for lanes in job.steps(records, **options):
            for batch in lanes:
                job.allreduce(loss=training.backward(batch))
            take_step()
    (folder / f"end-{os.getpid()}").write_bytes(training.dump())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), [int(kill) for kill in sys.argv[4:]])
