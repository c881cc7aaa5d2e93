# SPDX-License-Identifier: Apache-2.0
"""A loop with Accelerate as a job: `elasticdl run --workers 2 examples/accelerate_classify.py`.

Two lines differ from an ordinary script, those with `elasticdl` and `epochs`; `python` runs it as
one. The data is synthetic.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.accelerate import Accelerator


def points(n_points: int, seed: int) -> TensorDataset:
    """Points in a square; the label tells whether they are in a circle."""
    x = torch.rand(n_points, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return TensorDataset(x, (x.norm(dim=1) < 0.8).long())


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
    train_loader = DataLoader(points(2000, seed=1), batch_size=16, shuffle=True)
    eval_loader = DataLoader(points(500, seed=2), batch_size=100)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in accelerator.epochs(2):
        model.train()
        for x, y in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in eval_loader)
        accelerator.print(f"epoch {epoch}: accuracy {right / 500:.3f}")


if __name__ == "__main__":
    main()
