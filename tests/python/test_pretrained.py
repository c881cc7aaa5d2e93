# SPDX-License-Identifier: Apache-2.0
"""Pretrained embeddings in jobs with parameter servers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import Cluster

N_WORDS, DIM = 40_000, 16

MODULE = f"""
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        values = torch.arange({N_WORDS} * {DIM}, dtype=torch.float32).reshape({N_WORDS}, {DIM})
        self.words = nn.Embedding.from_pretrained(values, freeze=False)
        self.out = nn.Linear({DIM}, 1)

    def forward(self, word):
        return self.out(self.words(word))[:, 0]


def custom_model():
    return Words()


def loss(labels, predictions):
    return ((predictions - labels) ** 2).mean()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.0)
"""


@pytest.mark.parametrize(
    ("strategy", "n_servers"), [("ParameterServerStrategy", 2), ("HybridStrategy", 1)]
)
def test_a_pretrained_embedding_keeps_its_values(
    cluster: Cluster, tmp_path: Path, strategy: str, n_servers: int
) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "words.py").write_text(MODULE)
    lines = [f"{word},{word % 7}.0" for word in range(0, N_WORDS, 500)]
    (tmp_path / "data.csv").write_text("\n".join(["word,label", *lines]) + "\n")
    cluster.run(
        "train",
        f"--model_def={tmp_path / 'words.py'}",
        f"--training_data={tmp_path / 'data.csv'}",
        f"--distribution_strategy={strategy}",
        f"--num_ps_pods={n_servers}",
        "--num_workers=2",
        "--minibatch_size=10",
        "--num_epochs=1",
        "--job_name=words",
    )
    state = torch.load(cluster.job("words") / "output" / "model.pt")
    expected = np.arange(N_WORDS * DIM, dtype=np.float32).reshape(N_WORDS, DIM)
    np.testing.assert_array_equal(state["words.weight"].numpy(), expected)
