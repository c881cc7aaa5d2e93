# SPDX-License-Identifier: Apache-2.0
"""A custom loop on records that take 20 ms to read, for `python_bench.py`."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import elasticdl

READ_SECS = 0.02


class Slow(Dataset):
    def __len__(self) -> int:
        return 800

    def __getitem__(self, record: int) -> torch.Tensor:
        time.sleep(READ_SECS)
        return torch.full((4,), float(record))


def main(n_processes: int) -> None:
    model = nn.Linear(4, 1)
    job = elasticdl.init(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    for x in job.batches(Slow(), batch_size=8, num_workers=n_processes):
        loss = model(x).square().mean()
        loss.backward()
        job.allreduce(model, loss)
        job.commit()


if __name__ == "__main__":
    main(int(sys.argv[1]))
