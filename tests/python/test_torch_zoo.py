# SPDX-License-Identifier: Apache-2.0
"""The torch models of the zoo, opened as in a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from elasticdl import _zoo  # noqa: E402
from elasticdl._torch import TorchAdapter  # noqa: E402
from torch_fixtures import Batch, fields, job  # noqa: E402

ZOO = Path(__file__).parents[2] / "model_zoo"


def opened(model_def: str, batch: Batch, **model_params: str) -> TorchAdapter:
    words = job(model_def=model_def, model_zoo=str(ZOO), model_params=model_params)
    return TorchAdapter(_zoo.load(words), words, fields(batch.columns))


def losses_of_sgd(model: TorchAdapter, batch: Batch, lr: float, n_steps: int) -> list[float]:
    """Training passes do not read batch-norm statistics, so it does not matter that they change."""
    losses = []
    for step in range(n_steps):
        losses.append(model.train(batch, [], step)[0])
        model.dense -= lr * model.gradient
    return losses


@pytest.mark.parametrize(("kind", "n_params", "lr"), [("cnn", 11, 0.02), ("mlp", 6, 0.1)])
def test_mnist_learns_a_batch(kind, n_params, lr):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (16, 784), np.uint8)
    batch = Batch({"image": image, "label": rng.integers(0, 10, 16)})
    model = opened("mnist.mnist_torch.custom_model", batch, kind=kind, lr="0.25")
    assert len(model.spec["params"]) == n_params
    assert model.spec["optimizer"]["learning_rate"] == 0.25
    assert [metric["name"] for metric in model.spec["metrics"]] == ["accuracy", "loss"]
    losses = losses_of_sgd(model, batch, lr, 8)
    assert losses[-1] < 0.8 * losses[0]
    assert model.predict(Batch({"image": image}), []).shape == (16, 10)


def test_the_language_model_learns_a_text(tmp_path):
    make_data = ZOO / "transformer/make_data.py"
    text = tmp_path / "library/text.py"
    text.parent.mkdir()
    text.write_text('"""' + "To be or not to be, that is the question. " * 20 + '"""\n')
    command = [sys.executable, make_data, tmp_path, "16", text.parent]
    subprocess.run(command, check=True, capture_output=True)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    tokens = np.array([json.loads(line)["tokens"] for line in lines])
    assert tokens.shape[1] == 17
    assert bytes(tokens[0].tolist()) == b"To be or not to b"
    assert np.array_equal(tokens[:-1, -1][:8], tokens[1:, 0][:8])
    assert (tmp_path / "test.jsonl").read_text()

    batch = Batch({"tokens": tokens})
    model = opened("transformer.transformer_lm.custom_model", batch, length="16", width="32")
    names = [param["name"] for param in model.spec["params"]]
    assert "tokens.weight" in names and "head.weight" not in names, "the two are tied"
    losses = losses_of_sgd(model, batch, 0.5, 12)
    assert losses[-1] < 0.8 * losses[0]
    loss, sums = model.evaluate(batch, [])
    assert sums["entropy"][0] / sums["entropy"][1] == pytest.approx(loss / np.log(2), rel=1e-5)
