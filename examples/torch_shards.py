# SPDX-License-Identifier: Apache-2.0
"""Trains on tar files of WebDataset: `elasticdl run --workers 2 examples/torch_shards.py [FOLDER]`.

Two other processes per worker read the records ahead of the loop. The images are synthetic; they
are written to the folder when the script runs for the first time.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import default_collate

import elasticdl
import elasticdl.data

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/elasticdl-example-shards")
N_SHARDS, SHARD_SIZE = 8, 500


def write_shards() -> None:
    """Writes ten classes of 28 × 28 pixels, like MNIST."""
    draw = torch.Generator().manual_seed(0)
    classes = torch.rand(10, 28, 28, generator=draw)
    partial = Path(tempfile.mkdtemp(dir=FOLDER.parent))
    for shard in range(N_SHARDS):
        with tarfile.open(partial / f"train-{shard:02}.tar", "w") as tar:
            for number in range(SHARD_SIZE):
                label = int(torch.randint(10, (), generator=draw))
                noise = torch.randn(28, 28, generator=draw)
                image = ((classes[label] + noise).clamp(0, 1) * 255).to(torch.uint8)
                files = {"img": image.numpy().tobytes(), "cls": str(label).encode()}
                for suffix, content in files.items():
                    member = tarfile.TarInfo(f"{shard:02}/{number:04}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    partial.rename(FOLDER)


def decode(record: dict[str, bytes]) -> tuple[torch.Tensor, int]:
    """Makes an image and its label of a record; adds noise to the image."""
    image = torch.frombuffer(bytearray(record["img"]), dtype=torch.uint8) / 255
    return image + 0.1 * torch.rand(len(image)), int(record["cls"])


def main() -> None:
    if not FOLDER.exists():
        write_shards()
    dataset = elasticdl.data.shards(f"{FOLDER}/train-*.tar", map=decode)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10))
    job = elasticdl.init(model, torch.optim.Adam(model.parameters(), lr=0.001))
    for image, label in job.batches(dataset, batch_size=50, epochs=2, num_workers=2):
        loss = nn.functional.cross_entropy(model(image), label)
        loss.backward()
        job.allreduce(model, loss)
        job.commit()
    if job.is_leader:
        image, label = default_collate([dataset[number] for number in range(1000)])
        accuracy = (model(image).argmax(1) == label).float().mean()
        print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
