# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer as a job: `elasticdl run --workers 2 examples/lightning_classify.py`.

Two lines differ from an ordinary script, those with `elasticdl`; `python` runs it as one. The data
is synthetic.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.lightning  # noqa: F401


def points(n_points: int, seed: int) -> TensorDataset:
    """Points in a square; the label tells whether they are in a circle."""
    x = torch.rand(n_points, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, (x.norm(dim=1) < 0.8).long())


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def main() -> None:
    trainer = Trainer(
        strategy="elasticdl",
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
    )
    train = DataLoader(points(2000, seed=1), batch_size=32, shuffle=True)
    trainer.fit(Classifier(), train, DataLoader(points(500, seed=2), batch_size=100))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
