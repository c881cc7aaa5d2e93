# SPDX-License-Identifier: Apache-2.0
"""Access to the records of a dataset by index, for custom training loops."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import numpy as np

# Options of a `DataLoader` that say how batches are read. Others would change which batches these
# are, or their order.
LOADER_OPTIONS = (
    *("num_workers", "prefetch_factor", "pin_memory", "timeout", "worker_init_fn"),
    *("persistent_workers", "multiprocessing_context"),
)

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
        "can be read again: `elasticdl.data.shards(sources, open=…)`. If neither is possible, "
        "`elasticdl.data.stream(…, at_least_once=True)` trains each record at least once"
    )
    if _is_iterable(dataset):
        raise TypeError(f"the records of the dataset, a {name}, have no numbers; {advice}")
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(f"the dataset, a {name}, has no length; {advice}") from None


def check_options(options: dict[str, Any]) -> None:
    """Rejects loader options that a job cannot follow."""
    for name in options:
        if name not in LOADER_OPTIONS:
            raise TypeError(
                f"the loader option `{name}` does not exist or does not work in a job; use "
                f"{', '.join(LOADER_OPTIONS)}"
            )


class Fetch:
    """Makes a batch of the records with the given indices."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, by_item: bool = False
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        # Arrays give whole batches, unless the caller wants items.
        self._columns = None if by_item else _columns(dataset)
        # Whether it may draw random numbers.
        self.is_random = self._columns is None or collate is not None

    def __call__(self, records: np.ndarray) -> Any:
        if self._columns is None:
            return collate_items(_items(self.dataset, records), self.collate)
        parts = tuple(column[records] for column in self._columns)
        is_tuple = isinstance(self.dataset, tuple)
        if self.collate is not None:
            return self.collate(list(zip(*parts)) if is_tuple else list(parts[0]))
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


def contents(value: Any) -> Any:
    """Returns the objects that a value consists of now, for `is_same`.

    A function that is defined again in each epoch has the same contents if it uses the same
    objects.
    """
    if isinstance(value, tuple):
        return tuple(map(contents, value))
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return tuple((name, contents(value[name])) for name in sorted(value))
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return contents((value.func, value.args, value.keywords))
    if isinstance(value, FunctionType):
        try:
            used = tuple(cell.cell_contents for cell in value.__closure__ or ())
        except ValueError:  # A variable has no value yet.
            return value
        return contents((value.__code__, value.__defaults__, value.__kwdefaults__)), used
    return value


def is_same(one: Any, other: Any) -> bool:
    """Whether two results of `contents` have the same objects."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return isinstance(one, (bool, int, float, str)) and one == other


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


def collate_items(items: list[Any], collate: Callable[[list[Any]], Any] | None) -> Any:
    """Makes a batch of records; the default is that of `DataLoader`."""
    if collate is not None:
        return collate(items)
    if "torch" not in sys.modules:
        return items
    from torch.utils.data import default_collate

    return default_collate(items)
