# SPDX-License-Identifier: Apache-2.0
"""Samples per second of the zoo's torch models without elasticdl, for `make bench` to compare with.

Usage: torch_bench.py RUN MODEL [STEPS]. RUN is `bare` (a plain loop in one process), `ddp` (torch's
DistributedDataParallel over gloo, two processes) or `adapter` (a plain loop and elasticdl's adapter
alternately, both without an optimizer); MODEL is `mlp` or `cnn`. Prints one line of JSON. All use
the zoo's model, loss and optimizer, 64 records per batch and process, one thread, and Fashion-MNIST
in memory, whose pixels are converted to floats batch by batch.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(f"no torch: {error}", flush=True)
    sys.exit(0)

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data/fashion_mnist/train"
BATCH = 64
N_PROCESSES = 2
N_WARM_UP = 10
# Enough for a few seconds on one core.
N_STEPS = {"mlp": 1500, "cnn": 60}
# Number of steps of one side before the other side continues.
N_STEPS_IN_TURN = {"mlp": 5, "cnn": 1}

GZIP = 2
Batch = dict[str, np.ndarray]


def main() -> None:
    run, model, *rest = sys.argv[1:]
    n_steps = int(rest[0]) if rest else N_STEPS[model]
    torch.set_num_threads(1)
    if run == "ddp" and len(rest) < 2:
        figures = run_ddp(model, n_steps)
    elif run == "ddp":
        figures = ddp_process(model, n_steps, int(rest[1]), rest[2])
    elif run == "adapter":
        figures = run_adapter(model, n_steps)
    else:
        figures = bare(model, n_steps)
    print(json.dumps({"run": run, "model": model, **figures}), flush=True)


def bare(model: str, n_steps: int) -> dict[str, float]:
    zoo = load_zoo()
    torch.manual_seed(0)
    module = zoo.custom_model(model)
    return timed(trainer(zoo, module), batches(0, 1), n_steps)


def run_ddp(model: str, n_steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "ddp", model, str(n_steps)]
        store = f"{folder}/store"
        started = [
            subprocess.Popen([*command, str(rank), store], stdout=subprocess.PIPE, text=True)
            for rank in range(N_PROCESSES)
        ]
        figures = [json.loads(process.communicate()[0]) for process in started]
    per_second = sum(figure["samples_per_s"] for figure in figures)
    return {"samples_per_s": per_second, "loss": figures[0]["loss"]}


def ddp_process(model: str, n_steps: int, rank: int, store: str) -> dict[str, float]:
    address = f"file://{store}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=N_PROCESSES)
    zoo = load_zoo()
    torch.manual_seed(0)
    module = torch.nn.parallel.DistributedDataParallel(zoo.custom_model(model))
    figures = timed(trainer(zoo, module), batches(rank, N_PROCESSES), n_steps, dist.barrier)
    dist.destroy_process_group()
    return figures


def run_adapter(model: str, n_steps: int) -> dict[str, float]:
    """CPU time of a pass, because wall time depends on other load on the machine."""
    from elasticdl._torch import TorchAdapter
    from elasticdl._zoo import Zoo

    zoo = load_zoo()
    columns = [
        {"name": "image", "dtype": "u8", "shape": [784], "is_label": False},
        {"name": "label", "dtype": "i64", "shape": [], "is_label": True},
    ]
    job = {"seed": 0, "threads_per_worker": 1, "job_type": "train", "max_step": 0}
    job["distribution_strategy"] = "AllreduceStrategy"
    parts = {name: getattr(zoo, name) for name in ("loss", "optimizer", "feed", "eval_metrics_fn")}
    opened = Zoo(module=zoo, name=model, custom_model=lambda: zoo.custom_model(model), **parts)
    adapter = TorchAdapter(opened, job, columns)
    torch.manual_seed(0)
    steps = {
        "bare": trainer(zoo, zoo.custom_model(model), has_optimizer=False),
        "train": lambda columns: adapter.train(Records(columns), [], 1),
        "train_in_pieces": lambda columns: adapter.train_in_pieces(Records(columns), [], 1),
    }
    source = batches(0, 1)
    n_in_turn = N_STEPS_IN_TURN[model]
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(n_steps // n_in_turn + 1):
        for name, step in steps.items():
            step(next(source))  # Loads its own memory into the caches again.
            start = time.process_time()
            for _ in range(n_in_turn):
                step(next(source))
            if turn > 0:
                seconds[name].append((time.process_time() - start) / n_in_turn)
    figures = {}
    for name, times in seconds.items():
        # The lowest decile, because other load on the machine can only add time.
        figures[f"{name}_ms"] = 1e3 * statistics.quantiles(times, n=10)[0]
        ratios = [ours / theirs for ours, theirs in zip(times, seconds["bare"])]
        figures[f"{name}_of_bare"] = figures[f"{name}_ms"] / figures["bare_ms"]
        figures[f"{name}_median_of_ratios"] = statistics.median(ratios)
    return figures


class Records:
    """A batch as elasticdl passes it to an adapter."""

    def __init__(self, columns: Batch) -> None:
        self.columns = columns
        self.records = np.arange(len(columns["label"]), dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.records)


def trainer(zoo, module: torch.nn.Module, has_optimizer: bool = True) -> Callable[[Batch], float]:
    """One step of a loop as users would write it."""
    module.train()
    optimizer = zoo.optimizer(module.parameters())

    def step(columns: Batch) -> float:
        images, labels = zoo.feed(columns, "training", None)
        optimizer.zero_grad()
        loss = zoo.loss(torch.from_numpy(labels), module(images))
        loss.backward()
        if has_optimizer:
            optimizer.step()
        return loss.item()

    return step


def timed(
    step: Callable[[Batch], float],
    source: Iterator[Batch],
    n_steps: int,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    for _ in range(N_WARM_UP):
        step(next(source))
    wait()
    start, start_work = time.perf_counter(), time.process_time()
    for _ in range(n_steps):
        loss = step(next(source))
    wait()
    n_samples = n_steps * BATCH
    return {
        "samples_per_s": n_samples / (time.perf_counter() - start),
        "samples_per_cpu_s": n_samples / (time.process_time() - start_work),
        "loss": loss,
    }


def load_zoo():
    path = ROOT / "model_zoo/mnist/mnist_torch.py"
    spec = importlib.util.spec_from_file_location("mnist_torch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(rank: int, n_ranks: int) -> Iterator[Batch]:
    """Every `n_ranks`-th batch, repeated endlessly."""
    examples = [one for path in sorted(DATA.glob("*.recordio")) for one in records(path)]
    parsed = [example(one) for one in examples]
    images = np.frombuffer(b"".join(image for image, _ in parsed), np.uint8).reshape(-1, 784).copy()
    labels = np.array([label for _, label in parsed], np.int64)
    starts = range(0, len(labels) - BATCH + 1, BATCH)[rank::n_ranks]
    while True:
        for start in starts:
            end = start + BATCH
            yield {"image": images[start:end], "label": labels[start:end]}


def records(path: Path) -> Iterator[bytes]:
    """The records of a RecordIO file; crates/edl-data/src/recordio.rs describes the format."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        _, _, compressor, size, n_records = struct.unpack_from("<5I", data, at)
        body = data[at + 20 : at + 20 + size]
        body = gzip.decompress(body) if compressor == GZIP else body
        at += 20 + size
        place = 0
        for _ in range(n_records):
            (length,) = struct.unpack_from("<I", body, place)
            yield body[place + 4 : place + 4 + length]
            place += 4 + length


def example(record: bytes) -> tuple[bytes, int]:
    """The image and the label of a tf.train.Example."""
    features = dict(fields(record))[1]
    found = {}
    for _, entry in fields(features):
        key, value = (part for _, part in fields(entry))
        _, values = next(fields(value))
        found[key] = next(fields(values))[1]
    label = found[b"label"]
    return found[b"image"], label if isinstance(label, int) else label[0]


def fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a protobuf message that has only varints and byte strings."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        value, at = varint(message, at)
        if tag & 7 == 2:
            value, at = message[at : at + value], at + value
        yield tag >> 3, value


def varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


main()
