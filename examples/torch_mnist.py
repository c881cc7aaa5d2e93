# SPDX-License-Identifier: Apache-2.0
"""An elastic PyTorch script: `elasticdl run --workers 2 examples/torch_mnist.py`.

`python examples/torch_mnist.py` runs it without a job.

The five numbered lines make an ordinary script elastic. The images are synthetic: ten classes of
28 × 28 pixels, like MNIST.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.torch


def images(n_records: int, seed: int) -> TensorDataset:
    classes = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n_records,), generator=draw)
    noise = torch.randn(n_records, 1, 28, 28, generator=draw)
    return TensorDataset(classes[labels] + noise, labels)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(8 * 12 * 12, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    dataset = images(4000, seed=1)
    job = elasticdl.init()  # 1
    model = elasticdl.torch.DistributedDataParallel(model, job)  # 2
    optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)  # 3
    sampler = elasticdl.torch.ElasticSampler(job, len(dataset), batch_size=50, epochs=2)  # 4
    for image, label in DataLoader(dataset, batch_sampler=sampler):  # 5
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step(loss=loss)

    if job.is_leader:
        image, label = images(1000, seed=2).tensors
        right = model.eval()(image).argmax(1) == label
        print(f"accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
