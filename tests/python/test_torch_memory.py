# SPDX-License-Identifier: Apache-2.0
"""Parameters of torch modules in shared memory that is written between passes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from elasticdl import ZooError  # noqa: E402
from torch_fixtures import adapter, images  # noqa: E402


def cross_entropy(labels, predictions):
    return functional.cross_entropy(predictions, labels)


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 10)
    )


class Clipping(nn.Module):
    """Changes its own parameters in a pass, in a way that torch tracks or does not track."""

    def __init__(self, change) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)
        self.change = change
        self.n_passes = 0

    def forward(self, x):
        self.n_passes += 1
        self.change(self)
        return self.linear(x.flatten(1))


def tracked(model: Clipping) -> None:
    with torch.no_grad():
        model.linear.weight.clamp_(-0.01, 0.01)


def untracked(model: Clipping) -> None:
    model.linear.weight.data.clamp_(-0.01, 0.01)


def test_a_pass_reads_the_written_values_and_is_bit_identical():
    ours, copied = adapter(normed, cross_entropy), adapter(normed, cross_entropy)
    memory = ours.memory()
    memory[:] = ours.dense
    ours.bind(memory)
    for step in range(3):
        loss, pieces, _ = ours.train_in_pieces(images(8, step), [], step)
        expected, expected_pieces, _ = copied.train_in_pieces(images(8, step), [], step)
        gradient = np.concatenate(pieces)
        assert loss == expected
        assert np.array_equal(gradient, np.concatenate(expected_pieces))
        memory -= 0.1 * gradient
        copied.dense -= 0.1 * gradient
        assert ours.evaluate(images(8), []) == copied.evaluate(images(8), [])
    assert np.array_equal(memory, copied.dense)


@pytest.mark.parametrize("change", [tracked, untracked])
def test_a_module_that_changes_its_parameters_gets_copies(change):
    model = adapter(lambda: Clipping(change), cross_entropy)
    own = model.dense
    memory = model.memory()
    memory[:] = model.dense
    before = memory.copy()
    model.bind(memory)
    model.train_in_pieces(images(8), [], 1)
    assert np.array_equal(memory, before), "the shared values are not changed"
    assert model.memory() is None
    model.bind(own)
    model.train_in_pieces(images(8), [], 1)
    assert not np.array_equal(own, before), "its own copy can be changed"


def test_a_later_change_is_reported():
    def later(model: Clipping) -> None:
        if model.n_passes > 2:
            tracked(model)

    model = adapter(lambda: Clipping(later), cross_entropy)
    model.bind(model.memory())
    for _ in range(2):
        model.train_in_pieces(images(8), [], 1)
    with pytest.raises(ZooError, match="changed its parameter `linear.weight` in a pass"):
        model.train_in_pieces(images(8), [], 1)
