# SPDX-License-Identifier: Apache-2.0
"""A script that trains a stream, as jobs and the test run it.

Its model counts how often each record was trained: every record adds 1 to its weight. A worker that
is killed loses the last positions of its lanes, as with the machine it runs on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elasticdl
import elasticdl.data
from faults import Faults

N_LANES, BATCH, EPOCHS, EPOCH_STEPS = 4, 8, 2, 12
N_STEPS = EPOCHS * EPOCH_STEPS
N_PER_LANE = N_STEPS * BATCH
# The positions of a lane that are lost with a worker.
N_LOST = 3


class Share(IterableDataset):
    """The records of a lane: places in its row of the counts. It has no end."""

    def __init__(self, lane: int) -> None:
        self._lane, self._place = lane, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self._place += 1
            yield self._lane * N_PER_LANE + self._place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(N_LANES * N_PER_LANE))

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return -self.counts[records].sum() / BATCH


class Losing(Faults):
    """Kills workers, and loses the last positions that they have written."""

    def before_kill(self) -> None:
        written = Path(os.environ["ELASTICDL_JOB_DIR"]) / "stream_positions"
        for file in written.glob("*/*"):
            lines = file.read_bytes().splitlines(keepends=True)
            # Each of them follows an empty line.
            file.write_bytes(b"".join(lines[: -2 * N_LOST]))


def main(folder: Path, n_workers: int, kills: list[int]) -> None:
    def open_share(lane: int, n_lanes: int) -> StatefulDataLoader:
        assert n_lanes == N_LANES
        return StatefulDataLoader(Share(lane), batch_size=BATCH)

    faults = Losing(folder, n_workers, kills)
    model = Counts()
    job = elasticdl.init(model, torch.optim.SGD(model.parameters(), lr=N_LANES * BATCH))
    stream = elasticdl.data.stream(open_share, epoch_steps=EPOCH_STEPS, at_least_once=True)
    for records in job.batches(stream, batch_size=BATCH, epochs=EPOCHS):
        loss = model(records)
        loss.backward()
        job.allreduce(model, loss)
        if "ELASTICDL_DESCRIBE" not in os.environ:
            faults.between(job.step)
        job.commit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(kill) for kill in sys.argv[3:]])
