# SPDX-License-Identifier: Apache-2.0
"""A script that evaluates in its loop: `elasticdl run --workers 2 examples/torch_evaluate.py`.

The workers share each evaluation. The best model is kept, and training ends when the accuracy does
not improve any more. The images are synthetic.
"""

from __future__ import annotations

import torch
from torch import nn
from torch_mnist import images

import elasticdl


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.25), nn.Linear(8 * 12 * 12, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    best = elasticdl.Best(mode="max", patience=2)

    job = elasticdl.init(model, optimizer, best=best)
    training_data, test_data = images(2000, seed=1), images(1000, seed=2)
    for epoch in job.epochs(8):
        for x, y in job.batches(training_data, batch_size=50):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            job.allreduce(model, loss)
            job.commit()

        for x, y in job.evaluate(test_data, batch_size=100):
            output = model(x)
            job.record(loss=nn.functional.cross_entropy(output, y), right=output.argmax(1) == y)
        accuracy = job.mean("right")
        job.log({"test/loss": job.mean("loss"), "test/accuracy": accuracy})
        job.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        best.update(accuracy)

    job.print(f"accuracy {best.value:.3f}")


if __name__ == "__main__":
    main()
