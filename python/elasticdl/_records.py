# SPDX-License-Identifier: Apache-2.0
"""Access to the records of a dataset by index, for custom training loops."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

# Distinguishes the seed of reading a batch from that of training it.
_READING = 0x9E37_79B9_7F4A_7C15


def count(dataset: Any) -> int:
    """Returns the number of records in a dataset."""
    columns = _columns(dataset)
    if columns is not None:
        lengths = {len(column) for column in columns}
        if len(lengths) > 1:
            text = " and ".join(str(length) for length in sorted(lengths))
            raise ValueError(f"the arrays of the dataset have {text} records; use equal lengths")
        return lengths.pop()
    name = type(dataset).__name__
    advice = (
        "use a map-style dataset with `__len__` and `__getitem__`, or divide it into shards that "
        "can be read again: `elasticdl.data.shards(sources, open=…)`"
    )
    if _is_iterable(dataset):
        raise TypeError(f"the records of the dataset, a {name}, have no numbers; {advice}")
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(f"the dataset, a {name}, has no length; {advice}") from None


class Fetch:
    """Makes a batch of the records with the given indices."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, by_item: bool = False
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        # Arrays give whole batches, unless the caller wants items.
        self._columns = None if by_item else _columns(dataset)
        # Whether it may draw random numbers.
        self.is_random = self._columns is None or collate is not None

    def __call__(self, records: np.ndarray) -> Any:
        if self._columns is None:
            return (self._collate or _collate)(_items(self.dataset, records))
        parts = tuple(column[records] for column in self._columns)
        is_tuple = isinstance(self.dataset, tuple)
        if self._collate is not None:
            return self._collate(list(zip(*parts)) if is_tuple else list(parts[0]))
        return parts if is_tuple else parts[0]


def read(fetch: Fetch, records: np.ndarray, seed: int) -> Any:
    """Reads a batch with random numbers that only depend on its seed."""
    if fetch.is_random:
        # Not those that the loop draws.
        reseed(seed ^ _READING)
    return fetch(records)


def read_here(fetch: Fetch, records: np.ndarray, seed: int) -> Any:
    """Reads a batch in this process, and leaves the random numbers of the loop as they were."""
    batch = read(fetch, records, seed)
    if fetch.is_random:
        reseed(seed)
    return batch


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


def _is_iterable(dataset: Any) -> bool:
    """Whether it is an `IterableDataset`; it may have a length, but no records by number."""
    if "torch" not in sys.modules:
        return False
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _items(dataset: Any, records: np.ndarray) -> list[Any]:
    if hasattr(dataset, "__getitems__"):  # PyTorch's batched `__getitem__`.
        return dataset.__getitems__(records.tolist())
    return [dataset[record] for record in records.tolist()]


def _collate(items: list[Any]) -> Any:
    if "torch" not in sys.modules:
        return items
    from torch.utils.data import default_collate

    return default_collate(items)
