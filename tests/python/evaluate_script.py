# SPDX-License-Identifier: Apache-2.0
"""A script that evaluates, logs, keeps its best model and ends early, as jobs run it."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elasticdl

N_LANES, BATCH, EPOCHS, EVERY = 2, 8, 6, 8
X = torch.randn(192, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
N_STEPS = len(X) // (N_LANES * BATCH)
TEST_X = torch.randn(250, 6, generator=torch.Generator().manual_seed(2))
TEST_Y = (TEST_X.sum(1) > 0).long()
TEST_BATCH = 10
# How long a step takes while a worker is missing, and how long a batch of an evaluation takes.
PACE_SECS, EVALUATION_SECS = 1.0, 0.03
# The evaluation in which the leader is killed, by its epoch.
KILL_EPOCH = 2
# The accuracy that counts for the best model has its highest value at this epoch.
BEST_EPOCH, PATIENCE = 3, 2


class Script:
    def __init__(self, folder: Path, n_workers: int, kills: bool) -> None:
        self.folder, self.n_workers, self.kills = folder, n_workers, kills
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 2)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def is_in_job(self) -> bool:
        return "ELASTICDL_DESCRIBE" not in os.environ

    def note(self, name: str, *values: object) -> None:
        if self.is_in_job():
            with (self.folder / f"{name}-{os.getpid()}").open("a") as file:
                print(*values, file=file)

    def wait(self) -> None:
        """Takes time as long as a worker is missing."""
        if not self.is_in_job():
            return
        (self.folder / f"joined-{os.getpid()}").touch()
        end = time.monotonic() + PACE_SECS
        while len([*self.folder.glob("joined-*")]) < self.n_workers and time.monotonic() < end:
            time.sleep(0.01)

    def evaluate(self, job, place: int) -> float:
        n_batches = 0
        for x, y in job.evaluate((TEST_X, TEST_Y), batch_size=TEST_BATCH):
            time.sleep(EVALUATION_SECS)
            n_batches += 1
            is_killed = self.kills and place == KILL_EPOCH and n_batches == 3 and job.is_leader
            if is_killed and not (self.folder / "killed").exists():
                (self.folder / "killed").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            output = self.model(x)
            job.record(
                loss=nn.functional.cross_entropy(output, y), right=output.argmax(1) == y, out=output
            )
        loss, accuracy = job.mean("loss"), job.mean("right")
        out = hashlib.sha256(job.gather("out").numpy().tobytes()).hexdigest()
        self.note("results", place, loss.hex(), accuracy.hex(), out)
        self.note("shares", place, n_batches)
        job.log({"test/loss": loss, "accuracy": accuracy})
        return loss

    def own(self) -> None:
        best = elasticdl.Best(mode="max", patience=PATIENCE)
        job = elasticdl.init(self.model, self.optimizer, best=best)
        for epoch in job.epochs(EPOCHS):
            for step in job.steps((X, Y), batch_size=BATCH):
                for x, y in step:
                    nn.functional.cross_entropy(self.model(x), y).backward()
                if job.is_step:
                    self.optimizer.step()
                    self.wait()
            if job.is_step:
                loss = self.evaluate(job, epoch)
                best.update(-abs(epoch - BEST_EPOCH) - loss / 100)
        self.note("end", job.step, best.value.hex(), best.step)

    def rust(self) -> None:
        job = elasticdl.init(self.model, self.optimizer)
        for x, y in job.batches((X, Y), batch_size=BATCH, epochs=2):
            if job.step > 0 and job.step % EVERY == 0:
                self.evaluate(job, job.step)
            self.wait()
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            job.allreduce(self.model, loss)
            job.commit()
        self.evaluate(job, job.step)
        self.note("end", job.step)


if __name__ == "__main__":
    script = Script(Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4:] == ["kill"])
    getattr(script, sys.argv[2])()
