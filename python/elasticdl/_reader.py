# SPDX-License-Identifier: Apache-2.0
"""Reads records by index through a custom data reader (`custom_data_reader`).

A reader lists its shards (`create_shards`) and reads ranges of them (`read_records`). The job
numbers the records of all shards consecutively, in the order of the shards, and assigns them to
workers in the same way as records in files. The worker that computes a batch reads its records
here. A reader must therefore return the same records for the same range in every process and at
any time. If a violation is detected, it is an error.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from elasticdl._zoo import ZooError

PREFIX = "reader:"

# The only column of records that are bytes or text.
RECORD = "record"

# Size of the cache, in records; shuffled batches often need neighbouring records.
MAX_KEPT = 65_536


class Reader:
    """A custom reader of one data set."""

    def __init__(self, made: Any, origin: str, block: int) -> None:
        for method in ("create_shards", "read_records"):
            if not callable(getattr(made, method, None)):
                raise ZooError(
                    f"`custom_data_reader` returned a {type(made).__name__} without `{method}`; "
                    "a reader needs `create_shards()` and `read_records(task)`"
                )
        self._made = made
        self._origin = origin
        self._shards = _shards(made.create_shards())
        self._ends = list(itertools.accumulate(n for _, _, n in self._shards))
        self._block = max(1, block)
        self._kept: OrderedDict[tuple[int, int], list[Any]] = OrderedDict()
        self._n_kept = 0
        self._seen: dict[tuple[int, int], bytes] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def location(self) -> str:
        """Identifies these records in the job by their number, shard digest and origin."""
        text = "\n".join(f"{name}\t{start}\t{n}" for name, start, n in self._shards)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{PREFIX}{len(self)}:{digest}:{self._origin}"

    def column_names(self) -> list[str] | None:
        """Returns the column names from the reader's `metadata`."""
        names = getattr(getattr(self._made, "metadata", None), "column_names", None)
        return [str(name) for name in names] if names else None

    def records(self, numbers: Iterable[int]) -> list[Any]:
        """Returns the records with these indices, in the given order."""
        return [self._record(int(number)) for number in numbers]

    def columns(self, numbers: Iterable[int]) -> dict[str, Any]:
        """Returns the records with these indices as columns."""
        return _columns(self.records(numbers), self.column_names())

    def schema(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns the columns of the first record, and whether records are bytes."""
        columns = self.columns([0])
        return [_field(name, values) for name, values in columns.items()], list(columns) == [RECORD]

    def _record(self, number: int) -> Any:
        shard = bisect_right(self._ends, number)
        if number < 0 or shard == len(self._ends):
            raise ZooError(f"there is no record {number}: the reader has {len(self)} records")
        at = number - (self._ends[shard] - self._shards[shard][2])
        block = at // self._block
        return self._read(shard, block)[at - block * self._block]

    def _read(self, shard: int, block: int) -> list[Any]:
        key = (shard, block)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        name, first, n = self._shards[shard]
        start = first + block * self._block
        end = min(start + self._block, first + n)
        task = _task(name, start, end)
        records = list(itertools.islice(iter(self._made.read_records(task)), end - start + 1))
        if len(records) != end - start:
            n = len(records)
            found = f"more than {end - start}" if n > end - start else f"{n}"
            noun = "record" if found == "1" else "records"
            raise ZooError(
                f"`read_records` returned {found} {noun} for {start} to {end} of the shard "
                f"`{name}`, but `create_shards` announced {end - start}; a reader must return "
                "every record of a range exactly once"
            )
        self._check_same(key, records, f"{start} to {end} of the shard `{name}`")
        self._kept[key] = records
        self._n_kept += len(records)
        while self._n_kept > MAX_KEPT and len(self._kept) > 1:
            self._n_kept -= len(self._kept.popitem(last=False)[1])
        return records

    def _check_same(self, key: tuple[int, int], records: list[Any], place: str) -> None:
        digest = hashlib.sha256(repr((records[0], records[-1])).encode()).digest()[:8]
        if self._seen.setdefault(key, digest) != digest:
            raise ZooError(
                f"`read_records` returned different records for {place} than before; a reader must "
                "always return the same records in the same order"
            )


def make(zoo: Any, job: Mapping[str, Any], origin: str) -> Reader:
    """Creates the custom reader for the data that `origin` names."""
    n_records = job["minibatch_size"] * job["num_minibatches_per_task"]
    params = dict(job["data_reader_params"])
    made = zoo.custom_data_reader(data_origin=origin, records_per_task=n_records, **params)
    reader = Reader(made, origin, n_records)
    if not len(reader):
        raise ZooError(f"`create_shards` of `custom_data_reader` found no records in `{origin}`")
    return reader


def reopen(zoo: Any, job: Mapping[str, Any], location: str) -> Reader:
    """Reopens the reader for `location`, and checks that its shards have not changed."""
    n_records, digest, origin = location.removeprefix(PREFIX).split(":", 2)
    reader = make(zoo, job, origin)
    if reader.location != location:
        changed = f"it now has {len(reader)} records, and had {n_records}"
        if len(reader) == int(n_records):
            changed = "the names, sizes or order of its shards differ"
        raise ZooError(
            f"the data that `custom_data_reader` reads from `{origin}` has changed since the job "
            f"started: {changed}; start a new job"
        )
    return reader


def _shards(named: Any) -> list[tuple[str, int, int]]:
    """Returns (name, first record, number of records) from a dict or a list of triples."""
    if isinstance(named, Mapping):
        named = [(name, *place) for name, place in named.items()]
    try:
        shards = [(str(name), int(start), int(n)) for name, start, n in named]
    except (TypeError, ValueError):
        raise ZooError(
            "`create_shards` must return {name: (first record, number of records)}, or a list of "
            f"(name, first record, number of records), not {str(named)[:80]!r}"
        ) from None
    return [shard for shard in shards if shard[2] > 0]


def _task(name: str, start: int, end: int) -> SimpleNamespace:
    """A range of a shard, with the attributes of both old and new ElasticDL versions."""
    shard = SimpleNamespace(name=name, start=start, end=end, indices=[])
    return SimpleNamespace(shard=shard, shard_name=name, start=start, end=end)


def _columns(records: list[Any], names: list[str] | None) -> dict[str, Any]:
    first = records[0]
    if isinstance(first, (bytes, str)):
        return {RECORD: [_bytes(record) for record in records]}
    if isinstance(first, Mapping):
        return {str(name): _column([record[name] for record in records]) for name in first}
    if not isinstance(first, (list, tuple)):
        return {RECORD: _column(records)}
    names = names or [str(place) for place in range(len(first))]
    for record in records:
        if len(record) != len(names):
            raise ZooError(
                f"`read_records` returned a record with {len(record)} values, but the metadata or "
                f"first record has {len(names)}"
            )
    return {name: _column([record[at] for record in records]) for at, name in enumerate(names)}


def _column(values: list[Any]) -> Any:
    if isinstance(values[0], (bytes, str)):
        return [_bytes(value) for value in values]
    array = np.asarray(values)
    if array.dtype.kind in "biu" and array.dtype != np.uint8:
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    if array.dtype == np.uint8:
        return array
    raise ZooError(
        f"`read_records` returned an unsupported value: {str(values[0])[:40]!r}; use numbers, "
        "arrays, text or bytes"
    )


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _field(name: str, values: Any) -> dict[str, Any]:
    dtype, shape = "bytes", []
    if not isinstance(values, list):
        dtype = {"float32": "f32", "int64": "i64", "uint8": "u8"}[values.dtype.name]
        shape = list(values.shape[1:])
    return {"name": name, "dtype": dtype, "shape": shape, "is_label": False}
