# SPDX-License-Identifier: Apache-2.0
"""A script whose loader reads shards ahead in other processes, as jobs and the test run it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import elasticdl
import elasticdl.data
import elasticdl.torch
from faults import Faults

N_LANES, BATCH, EPOCHS = 4, 4, 3


def decode(record: dict[str, bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds noise, as augmentation does."""
    x = torch.frombuffer(bytearray(record["x"]), dtype=torch.float32)
    return x + 0.1 * torch.rand(len(x)), torch.tensor(int(record["y"]))


def main(folder: Path, n_loaders: int, n_workers: int, kills: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    dataset = elasticdl.data.shards(f"{folder.parent}/*.tar", map=decode)

    def start(_number: int) -> None:
        (folder / f"loader-{os.getpid()}").touch()

    job = elasticdl.init()
    elasticdl.torch.DistributedDataParallel(model, job)
    optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)
    sampler = elasticdl.torch.ElasticSampler(job, len(dataset), batch_size=BATCH, epochs=EPOCHS)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=n_loaders, worker_init_fn=start)
    faults = Faults(folder, n_workers, kills)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if "ELASTICDL_DESCRIBE" not in os.environ:
            faults.between(job.step)
        optimizer.step(loss=loss)


if __name__ == "__main__":
    n_loaders, n_workers, *kills = map(int, sys.argv[2:])
    main(Path(sys.argv[1]), n_loaders, n_workers, kills)
