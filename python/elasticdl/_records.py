# SPDX-License-Identifier: Apache-2.0
"""The records of a dataset by their numbers, for training loops of the user's own."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def count(dataset: Any) -> int:
    """How many records a dataset has."""
    columns = _columns(dataset)
    if columns is not None:
        lengths = {len(column) for column in columns}
        if len(lengths) > 1:
            text = " and ".join(str(length) for length in sorted(lengths))
            raise ValueError(f"the arrays of the dataset have {text} records; give all the same")
        return lengths.pop()
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(
            f"the dataset, a {type(dataset).__name__}, has no length; give one that has `__len__` "
            "and `__getitem__`, so that each record can be counted once"
        ) from None


def fetcher(
    dataset: Any, collate: Callable[[list[Any]], Any] | None
) -> Callable[[np.ndarray], Any]:
    """Makes a batch of the records with these numbers."""
    columns = _columns(dataset)
    if columns is None:
        return lambda records: (collate or _collate)(_items(dataset, records))

    def fetch(records: np.ndarray) -> Any:
        parts = tuple(column[records] for column in columns)
        if collate is not None:
            return collate(list(zip(*parts)) if isinstance(dataset, tuple) else list(parts[0]))
        return parts if isinstance(dataset, tuple) else parts[0]

    return fetch


def reseed(seed: int) -> None:
    """Starts all random numbers of a turn from `seed`."""
    if "torch" in sys.modules:
        from elasticdl import _torch_flat

        _torch_flat.reseed(seed)
    else:
        np.random.seed(seed & 0xFFFF_FFFF)
        random.seed(seed)


def _columns(dataset: Any) -> tuple[Any, ...] | None:
    """The arrays that a dataset consists of, if it does."""
    columns = dataset if isinstance(dataset, tuple) else (dataset,)
    is_array = all(hasattr(column, "shape") and hasattr(column, "dtype") for column in columns)
    return columns if columns and is_array else None


def _items(dataset: Any, records: np.ndarray) -> list[Any]:
    if hasattr(dataset, "__getitems__"):  # torch's word for several at once.
        return dataset.__getitems__(records.tolist())
    return [dataset[record] for record in records.tolist()]


def _collate(items: list[Any]) -> Any:
    if "torch" not in sys.modules:
        return items
    from torch.utils.data import default_collate

    return default_collate(items)
