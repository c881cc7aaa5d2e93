# SPDX-License-Identifier: Apache-2.0
"""A script that logs in every step, as jobs with `--track` run it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import elasticdl
from faults import Faults

N_STEPS, BATCH = 8, 4
X = torch.arange(2.0 * BATCH * N_STEPS).reshape(-1, 1) / 100


def main(folder: Path, n_workers: int, kills: list[int]) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults = Faults(folder, n_workers, kills)
    job = elasticdl.init(model, optimizer)
    job.log_config({"momentum_of_the_day": "high", "model": model})
    for step in job.steps(X, BATCH, shuffle=False):
        for x in step:
            model(x).square().mean().backward()
        optimizer.step()
        if not job.is_described:
            faults.between(job.step, job.is_leader)
        job.log({"loss": job.step * 0.5, "test/a b": float("nan")})
    job.log({"at the end": 1})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(kill) for kill in sys.argv[3:]])
