# SPDX-License-Identifier: Apache-2.0
"""Access to the records of a dataset by index, for custom training loops."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def count(dataset: Any) -> int:
    """Returns the number of records in a dataset."""
    columns = _columns(dataset)
    if columns is not None:
        lengths = {len(column) for column in columns}
        if len(lengths) > 1:
            text = " and ".join(str(length) for length in sorted(lengths))
            raise ValueError(f"the arrays of the dataset have {text} records; use equal lengths")
        return lengths.pop()
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(
            f"the dataset, a {type(dataset).__name__}, has no length; use a map-style dataset with "
            "`__len__` and `__getitem__`"
        ) from None


def fetcher(
    dataset: Any, collate: Callable[[list[Any]], Any] | None
) -> Callable[[np.ndarray], Any]:
    """Returns a function that makes a batch of the records with the given indices."""
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
    """Seeds all random number generators for an iteration."""
    if "torch" in sys.modules:
        from elasticdl import _torch_flat

        _torch_flat.reseed(seed)
    else:
        np.random.seed(seed & 0xFFFF_FFFF)
        random.seed(seed)


def _columns(dataset: Any) -> tuple[Any, ...] | None:
    """Returns the arrays of a dataset, or None if it does not consist of arrays."""
    columns = dataset if isinstance(dataset, tuple) else (dataset,)
    is_array = all(hasattr(column, "shape") and hasattr(column, "dtype") for column in columns)
    return columns if columns and is_array else None


def _items(dataset: Any, records: np.ndarray) -> list[Any]:
    if hasattr(dataset, "__getitems__"):  # PyTorch's batched `__getitem__`.
        return dataset.__getitems__(records.tolist())
    return [dataset[record] for record in records.tolist()]


def _collate(items: list[Any]) -> Any:
    if "torch" not in sys.modules:
        return items
    from torch.utils.data import default_collate

    return default_collate(items)
