# SPDX-License-Identifier: Apache-2.0
"""Compares samples per second of a PyTorch model in elasticdl with PyTorch alone in the same run.

Compares one worker with a bare loop in one process, and two workers (AllReduce) with torch's
DistributedDataParallel over gloo on two processes, alternately. Then it compares a custom loop
whose records take 20 ms to read with the same loop and four loader processes. `make bench` runs it
with an interpreter that has the wheel and torch.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
N_ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
# Enough for a few seconds on one core.
N_STEPS = {"mlp": 3000, "cnn": 120}
BATCH = 64


def peer(run: str, model: str) -> float:
    """PyTorch alone."""
    script = str(Path(__file__).with_name("torch_bench.py"))
    command = [sys.executable, script, run, model, str(N_STEPS[model])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["samples_per_s"]


def ours(n_workers: int, model: str) -> float:
    """The same model, loss, optimizer and batch in a job."""
    with tempfile.TemporaryDirectory() as home:
        command = [
            *[sys.executable, "-m", "elasticdl", "train", "--job_name=bench"],
            f"--model_def={ROOT / 'model_zoo/mnist/mnist_torch.py'}",
            f"--model_params=kind={model}",
            f"--training_data={ROOT / 'data/fashion_mnist/train'}",
            *["--distribution_strategy=AllreduceStrategy", f"--num_workers={n_workers}"],
            *[f"--minibatch_size={BATCH}", "--num_epochs=1000", f"--max_step={N_STEPS[model]}"],
            *["--checkpoint_secs=0", "--evaluation_epochs=false"],
        ]
        return rate(command, Path(home))


def loader(n_processes: int) -> float:
    """A custom loop whose records are slow to read."""
    with tempfile.TemporaryDirectory() as home:
        script = str(Path(__file__).with_name("slow_records.py"))
        command = [sys.executable, "-m", "elasticdl", "run", "--workers=1", "--job_name=bench"]
        return rate([*command, script, str(n_processes)], Path(home))


def rate(command: list[str], home: Path) -> float:
    """Runs a job; returns its records per second."""
    environment = {**os.environ, "ELASTICDL_HOME": str(home)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    lines = (home / "jobs/bench/metrics.jsonl").read_text().splitlines()
    points = [point for point in map(json.loads, lines) if point["kind"] == "training"]
    # The first steps are for warm-up, as in the other programs.
    first, last = points[len(points) // 10], points[-1]
    n_records = last["records_done"] - first["records_done"]
    return n_records / (last["at_secs"] - first["at_secs"])


def main() -> None:
    for model in N_STEPS:
        rounds = [
            (peer("bare", model), ours(1, model), peer("ddp", model), ours(2, model))
            for _ in range(N_ROUNDS)
        ]
        bare, one, ddp, two = (statistics.median(rates) for rates in zip(*rounds))
        print(f"{model}: samples/s, median of {N_ROUNDS} rounds")
        print(f"  bare loop {bare:,.0f}, one worker {one:,.0f}: {one / bare:.2f}x")
        print(f"  DDP gloo x2 {ddp:,.0f}, two workers {two:,.0f}: {two / ddp:.2f}x")
    rounds = [(loader(0), loader(4)) for _ in range(N_ROUNDS)]
    none, four = (statistics.median(rates) for rates in zip(*rounds))
    print(f"records of 20 ms: records/s, median of {N_ROUNDS} rounds")
    print(f"  no loader process {none:,.1f}, four {four:,.1f}: {four / none:.2f}x")


if __name__ == "__main__":
    main()
