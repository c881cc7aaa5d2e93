# SPDX-License-Identifier: Apache-2.0
"""The built-in models in PyTorch, on one thread, for crates/edl-zoo/examples/engine_bench.rs.

For each line `MODEL RECORDS STEPS [NAME=VALUE…]` on stdin, prints the seconds of one step, as wall
time and CPU time. A step is a forward and a backward pass without an optimizer. The rows of
embedding tables are inputs that need gradients, as they come from parameter servers.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    print(f"no torch: {error}", flush=True)
    sys.exit(0)

N_IDS = 14
N_NUMBERS = 6


class DeepFm(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Linear(N_IDS * dim + N_NUMBERS, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, embedding, linear, numbers):
        pairs = embedding.sum(1).square() - embedding.square().sum(1)
        second_order = 0.5 * pairs.sum(1, keepdim=True)
        deep = self.deep(torch.cat([embedding.flatten(1), numbers], 1))
        return linear.sum(1, keepdim=True) + second_order + deep


def mnist_mlp(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def mnist_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(),
        nn.BatchNorm2d(64, eps=1e-3),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 10),
    )


def deepfm_step(n: int, dim: int, hidden: int) -> Callable[[], None]:
    module = DeepFm(dim, hidden)
    rows = [torch.full((n, N_IDS, dim), 0.01), torch.full((n, N_IDS), 0.01)]
    numbers = torch.randn(n, N_NUMBERS)
    labels = torch.randint(2, (n, 1)).float()

    def step() -> None:
        module.zero_grad()
        leaves = [row.detach().requires_grad_() for row in rows]
        logits = module(*leaves, numbers)
        functional.binary_cross_entropy_with_logits(logits, labels).backward()

    return step


def mnist_step(module: nn.Module, n: int) -> Callable[[], None]:
    pixels = torch.randint(256, (n, 1, 28, 28), dtype=torch.uint8)
    labels = torch.randint(10, (n,))

    def step() -> None:
        module.zero_grad()
        functional.cross_entropy(module(pixels.float() / 255), labels).backward()

    return step


@functools.cache
def opened(model: str, n: int, *params: str) -> Callable[[], None]:
    sizes = {name: int(value) for name, value in (param.split("=") for param in params)}
    if model == "deepfm":
        return deepfm_step(n, **sizes)
    module = {"mnist_mlp": mnist_mlp, "mnist_cnn": mnist_cnn}[model](**sizes)
    return mnist_step(module, n)


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        model, n, n_steps, *params = line.split()
        step = opened(model, int(n), *params)
        start, start_work = time.perf_counter(), time.process_time()
        for _ in range(int(n_steps)):
            step()
        cost = time.perf_counter() - start, time.process_time() - start_work
        print(*(seconds / int(n_steps) for seconds in cost), flush=True)


main()
