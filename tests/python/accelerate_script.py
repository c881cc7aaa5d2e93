# SPDX-License-Identifier: Apache-2.0
"""A training loop with Accelerate, as jobs and the test run it."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from pathlib import Path

import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticdl import ZooError, _state, _torch_flat
from elasticdl.accelerate import Accelerator
from faults import Faults

N_LANES, BATCH, ACCUMULATION, EPOCHS = 3, 4, 2, 2
LANE = BATCH * ACCUMULATION
# The last step of an epoch has fewer records.
N_RECORDS = 125
STEPS_PER_EPOCH = -(-N_RECORDS // (N_LANES * LANE))
N_STEPS = EPOCHS * STEPS_PER_EPOCH
# A checkpoint is written after so many steps, in the middle of an epoch, and after each epoch.
SAVE_STEP = 4
# The same in every worker: the job sets the seed before the script creates its model.
DRAWN = random.random()
X = torch.randn(N_RECORDS, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))
        self.model[0].bias.requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.99**n)


def plain() -> nn.Module:
    """Trains without a job, on the same lanes."""
    _torch_flat.make_repeatable(1)
    training = Training()
    model = training.model
    trained = [p for p in model.parameters() if p.requires_grad]
    for first in [*range(0, N_RECORDS, N_LANES * LANE)] * EPOCHS:
        end = min(first + N_LANES * LANE, N_RECORDS)
        n_lanes = min(N_LANES, (end - first) // 2)
        borders = [first + (end - first) * lane // n_lanes for lane in range(n_lanes + 1)]
        sums = [lane_sum(model, trained, a, b) for a, b in itertools.pairwise(borders)]
        total = sums[0]
        for other in sums[1:]:
            total = [a + b for a, b in zip(total, other)]
        for parameter, gradient in zip(trained, total):
            parameter.grad = gradient / (end - first) if n_lanes > 1 else gradient
        nn.utils.clip_grad_norm_(trained, 1.0)
        training.optimizer.step()
        for _ in range(N_LANES):
            training.scheduler.step()
    return model


def lane_sum(model, trained, first: int, end: int) -> list[torch.Tensor]:
    model.zero_grad()
    for at in range(first, end, BATCH):
        chosen = slice(at, min(at + BATCH, end))
        loss = nn.functional.cross_entropy(model(X[chosen]), Y[chosen])
        (loss / ACCUMULATION).backward()
    return [parameter.grad * (end - first) for parameter in trained]


class Counter:
    """A registered object: the steps that were taken, and the epochs that ended."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def state_dict(self) -> dict:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict) -> None:
        self.seen = list(state["seen"])


def main(folder: Path, n_workers: int, kills: list[int]) -> None:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION, cpu=True, project_config=project
    )
    training, faults, counter = Training(), Faults(folder, n_workers, kills), Counter()

    def start(_number: int) -> None:
        (folder / f"loader-{os.getpid()}").touch()

    data = TensorDataset(X, Y)
    loader = DataLoader(data, batch_size=BATCH, num_workers=1, worker_init_fn=start)
    evaluated = DataLoader(TensorDataset(X[:50], Y[:50]), batch_size=20)
    model, optimizer, loader, evaluated, scheduler = accelerator.prepare(
        training.model, training.optimizer, loader, evaluated, training.scheduler
    )
    assert len(loader) == STEPS_PER_EPOCH * ACCUMULATION
    accelerator.register_for_checkpointing(counter)
    start = 0
    if "RESUMED" in os.environ:
        place = Path(os.environ["RESUMED"])
        accelerator.load_state(str(place))
        start = json.loads((place / "elasticdl.json").read_text())["step"]
        n_skipped = start % STEPS_PER_EPOCH * ACCUMULATION
        loader = accelerator.skip_first_batches(loader, n_skipped)
    for epoch in accelerator.epochs(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and "ELASTICDL_DESCRIBE" not in os.environ:
                with torch.no_grad():
                    torch.rand(len([model(x) for x, _ in evaluated]))
                counter.seen.append(f"step {accelerator.job.step}")
                faults.between(accelerator.job.step, accelerator.is_main_process)
                accelerator.log({"loss": loss, "note": "not a number"}, step=-1)
                if accelerator.job.step + 1 == SAVE_STEP:
                    accelerator.save_state()
        if accelerator.job.step + 1 == (epoch + 1) * STEPS_PER_EPOCH:  # Not in a new worker.
            counter.seen.append(f"epoch {epoch}")
        accelerator.save_state()
    accelerator.wait_for_everyone()
    accelerator.save_state()
    accelerator.print(f"ended after {accelerator.job.step} steps")
    with torch.no_grad():
        model[0].weight.zero_()
    n_before = (start < SAVE_STEP) + EPOCHS - start // STEPS_PER_EPOCH
    accelerator.load_state(str(folder / "checkpoints" / f"checkpoint_{n_before}"))
    states = {"model": model.state_dict(), "lr": scheduler.get_last_lr(), "seen": counter.seen}
    states["drawn"] = DRAWN
    states["optimizer"] = training.optimizer.state_dict()
    try:
        next(iter(loader))
    except ZooError as error:
        states["again"] = str(error)
    (folder / f"end-{os.getpid()}").write_bytes(_state.dump(states))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(kill) for kill in sys.argv[3:]])
