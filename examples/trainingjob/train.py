# SPDX-License-Identifier: Apache-2.0
"""The training loop of the example job: linear regression on any number of workers.

To run it without a cluster: `elasticdl run --workers 2:6 examples/trainingjob/train.py`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.torch


def points(n_records: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(n_records, 13, generator=draw)
    slope = torch.linspace(-1.0, 1.0, 13)
    return TensorDataset(x, (x @ slope + 0.5).unsqueeze(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    model = nn.Linear(13, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = points(20_000)
    job = elasticdl.init()
    model = elasticdl.torch.DistributedDataParallel(model, job)
    optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)
    sampler = elasticdl.torch.ElasticSampler(job, len(dataset), batch_size=50, epochs=epochs)
    for x, y in DataLoader(dataset, batch_sampler=sampler):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)


if __name__ == "__main__":
    main()
