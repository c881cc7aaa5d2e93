# SPDX-License-Identifier: Apache-2.0
"""Small adapters and batches for the tests of torch models."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from torch import nn

from elasticdl._torch import TorchAdapter
from elasticdl._zoo import Zoo

SEED = 11
_DTYPES = {"f": "f32", "i": "i64", "u": "u8"}


class Batch:
    """What the training loop passes to an adapter."""

    def __init__(self, columns: dict[str, Any], first_record: int = 0) -> None:
        self.columns = columns
        n_records = len(next(iter(columns.values())))
        self.records = np.arange(first_record, first_record + n_records, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.records)


def images(n_records: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    image = rng.random((n_records, 28, 28), np.float32)
    return Batch({"image": image, "label": rng.integers(0, 10, n_records)})


def job(**changes: Any) -> dict[str, Any]:
    defaults = {
        "seed": SEED,
        "threads_per_worker": 1,
        "job_type": "train",
        "distribution_strategy": "ParameterServerStrategy",
        "max_step": 0,
    }
    return {**defaults, **changes}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def fields(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The columns as described by Rust."""
    return [
        {
            "name": name,
            "dtype": _DTYPES[column.dtype.kind],
            "shape": list(column.shape[1:]),
            "is_label": False,
        }
        for name, column in columns.items()
    ]


def adapter(custom_model: Any, loss: Any, **parts: Any) -> TorchAdapter:
    columns = parts.pop("columns", None) or images(1).columns
    given = parts.pop("job", None) or job()
    parts.setdefault("optimizer", sgd)
    module = types.ModuleType("zoo")
    zoo = Zoo(module=module, name="zoo.custom_model", custom_model=custom_model, loss=loss, **parts)
    return TorchAdapter(zoo, given, fields(columns))


def plain(custom_model: Any) -> nn.Module:
    """The module without an adapter, in its initial state."""
    torch.manual_seed(SEED)
    return custom_model().train()
