# SPDX-License-Identifier: Apache-2.0
"""A Lightning module and its trainer, as jobs and the test run them."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, get_worker_info

import elasticdl.lightning  # noqa: F401
from elasticdl import ZooError, _state, _torch_flat
from faults import Faults

N_LANES, BATCH, EPOCHS = 3, 8, 2
# Processes that read batches ahead.
N_LOADERS = 1
# The last step of an epoch has fewer records.
N_RECORDS = 125
STEPS_PER_EPOCH = -(-N_RECORDS // (N_LANES * BATCH))
N_STEPS = EPOCHS * STEPS_PER_EPOCH
# The trainer writes a checkpoint after every so many steps, the first in the middle of an epoch.
SAVE_STEPS = 4
X = torch.randn(N_RECORDS, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


class Noted(TensorDataset):
    """Notes which processes read records."""

    def __init__(self, folder: Path) -> None:
        super().__init__(X, Y)
        self._folder = folder

    def __getitem__(self, record: int) -> tuple[torch.Tensor, ...]:
        (self._folder / f"{'loader' if get_worker_info() else 'worker'}-{os.getpid()}").touch()
        return super().__getitem__(record)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The state of a batch norm, and a scheduler that waits for a metric.
        self.is_odd = "ODD" in os.environ
        norm = nn.BatchNorm1d(5) if self.is_odd else nn.LayerNorm(5)
        self.net = nn.Sequential(nn.Linear(6, 5), norm, nn.Linear(5, 2))
        # In no optimizer.
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        torch.rand(3)  # Random numbers outside the step do not matter.
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        if self.is_odd:
            # The loss never improves by so much.
            waiting = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, threshold=0.9, patience=0, factor=0.5
            )
            return [optimizer], [{"scheduler": waiting, "monitor": "val_loss"}]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        plateau = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}, {"scheduler": plateau}]


class Seen(Callback):
    """A callback with state: what it has seen. It also kills workers."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.seen: list[str] = []
        self._faults = faults

    def state_dict(self) -> dict:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict) -> None:
        self.seen = list(state["seen"])

    def on_train_batch_end(self, trainer, *_) -> None:
        self.seen.append(f"step {trainer.current_epoch} {trainer.global_step}")
        if self._faults is not None:
            self._faults.between(trainer.global_step, trainer.is_global_zero)

    def on_validation_epoch_end(self, trainer, *_) -> None:
        if not trainer.sanity_checking:
            self.seen.append(f"validated {trainer.callback_metrics['val_loss']:.6f}")

    def on_train_epoch_end(self, trainer, *_) -> None:
        self.seen.append(f"epoch {trainer.current_epoch}")


def plain(precision: str = "32-true") -> nn.Module:
    """Trains without a job, on the same lanes."""
    _torch_flat.make_repeatable(1)
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    sums = torch.promote_types(dtype, torch.float32)
    module, x = Classifier().to(dtype), X.to(dtype)
    is_mixed = precision == "16-mixed"
    scaler = torch.amp.GradScaler("cpu", enabled=is_mixed)
    trained = [*module.net.parameters()]
    [optimizer], schedules = module.configure_optimizers()
    for _ in range(EPOCHS):
        for first in range(0, N_RECORDS, N_LANES * BATCH):
            end = min(first + N_LANES * BATCH, N_RECORDS)
            n_lanes = min(N_LANES, (end - first) // 2)
            borders = [first + (end - first) * lane // n_lanes for lane in range(n_lanes + 1)]
            total = None
            for a, b in itertools.pairwise(borders):
                module.zero_grad()
                with torch.autocast("cpu", torch.half, enabled=is_mixed, cache_enabled=False):
                    loss = nn.functional.cross_entropy(module.net(x[a:b]), Y[a:b])
                scaler.scale(loss).backward()
                lane = [parameter.grad.to(sums) * (b - a) for parameter in trained]
                total = lane if total is None else [one + two for one, two in zip(total, lane)]
            for parameter, gradient in zip(trained, total):
                parameter.grad = (gradient / (end - first)).to(parameter.dtype)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained, 0.5)
            scaler.step(optimizer)
            scaler.update()
            schedules[0]["scheduler"].step()
        schedules[1]["scheduler"].step()
    return module


def precision_options(precision: str) -> dict:
    """What a trainer is given; it would not use 16-mixed on a CPU otherwise."""
    if precision == "16-mixed":
        return {"plugins": [MixedPrecision(precision, "cpu")]}
    return {"precision": precision}


def main(folder: Path, n_workers: int, kills: list[int]) -> None:
    is_logging = "LOGGER" in os.environ
    seen = Seen(Faults(folder, n_workers, kills))
    best = ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=-1)
    module = Classifier()
    saved = ModelCheckpoint(folder / "steps", every_n_train_steps=SAVE_STEPS, save_top_k=-1)
    callbacks = [seen, best, EarlyStopping("val_loss", patience=5), saved]
    # It logs with the loggers of the trainer.
    callbacks += [LearningRateMonitor()] if is_logging else []
    trainer = Trainer(
        strategy="elasticdl",
        accelerator="cpu",
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        logger=CSVLogger(folder, "", "") if is_logging else False,
        log_every_n_steps=2,
        enable_progress_bar=False,
        default_root_dir=folder,
        **precision_options(os.environ.get("PRECISION", "32-true")),
    )
    loader = DataLoader(Noted(folder), batch_size=BATCH, num_workers=N_LOADERS)
    evaluated = DataLoader(TensorDataset(X[:50], Y[:50]), batch_size=20)
    trainer.fit(module, loader, evaluated, ckpt_path=os.environ.get("RESUMED"))
    states = {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "seen": [*seen.seen],
        "best": [Path(best.best_model_path).name, best.best_model_score],
        "end": [trainer.current_epoch, trainer.global_step],
    }
    [last] = trainer.validate(module, evaluated, verbose=False)
    [tested] = trainer.test(module, evaluated, ckpt_path="best", verbose=False)
    try:
        trainer.fit(module, loader, evaluated)
    except ZooError as error:
        states["again"] = str(error)
    states["evaluated"] = [last["val_loss"], tested["test_loss"]]
    (folder / f"end-{os.getpid()}").write_bytes(_state.dump(states))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(kill) for kill in sys.argv[3:]])
