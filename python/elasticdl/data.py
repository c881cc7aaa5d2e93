# SPDX-License-Identifier: Apache-2.0
"""Data of custom training loops: datasets of shards, such as files, and streams.

dataset = elasticdl.data.shards("data/train-{0000..0099}.tar", map=decode)
for x, y in job.batches(dataset, batch_size=64, epochs=3, num_workers=4):
    ...

A dataset of shards is trained exactly once per epoch, a stream at least once.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from elasticdl import _shards
from elasticdl._shards import Index, Piece, Shard
from elasticdl._stream import Stream

__all__ = ["Shards", "Stream", "shards", "stream"]

_DESCRIBE = "ELASTICDL_DESCRIBE"
_JOB_DIR = "ELASTICDL_JOB_DIR"
# Of the job's folder.
_INDEX_FOLDER = "data_index"
# So that records around the border of two pieces do not load both again and again.
_MIN_PIECES = 2


def shards(
    sources: Any,
    open: Callable[[Any], Iterable[Any]] | None = None,
    *,
    map: Callable[[Any], Any] | None = None,
    counts: list[int] | None = None,
    index: str | os.PathLike[str] | None = None,
    cache: int = 16_384,
) -> Shards:
    """Makes a dataset of shards, whose records have numbers and can be read in any order.

    `sources` are files: a list, or a pattern such as `data/*.tar` or `train-{0000..0099}.tar`. They
    can be tar files of WebDataset, Parquet or Arrow files, and folders of MosaicML Streaming (MDS).
    `sources` can also be a streaming dataset of Hugging Face.

    For other data, `open` makes an iterable of each source, for example an `IterableDataset`. It
    must give the same records in the same order each time. To read one of these records, all
    records of its shard are read and kept in memory.

    `map` changes each record when it is read. `counts` is the number of records of each shard; by
    default, the shards are scanned once. What was found is kept in the folder `index`, by default
    in the job's folder; `index` is only for files that need no `open`. `cache` is the number of
    records up to which a process keeps shards open or in memory; it keeps at least two shards, or
    two row groups of Parquet.
    """
    if open is not None:
        paths, call = _paths(sources), _number(_name(open))
        listed: list[Shard] = [
            _shards.Stream(source, open, f"{call} {number}") for number, source in enumerate(paths)
        ]
    elif hasattr(sources, "num_shards") and hasattr(sources, "shard"):
        n_shards = sources.num_shards

        def part(number: int) -> Iterable[Any]:
            return sources.shard(num_shards=n_shards, index=number)

        call = f"{_number(_name(sources))} of {n_shards}"
        listed = [_shards.Stream(number, part, call) for number in range(n_shards)]
    else:
        listed = [shard for path in _paths(sources) for shard in _of_path(os.fspath(path))]
    if not listed:
        raise ValueError(f"there are no shards in {sources!r}; pass at least one")
    if counts is not None and len(counts) != len(listed):
        raise ValueError(f"there are {len(listed)} shards, but `counts` has {len(counts)} numbers")
    return Shards(listed, map, counts, Path(index) if index else _job_folder(), cache)


def stream(source: Any, *, epoch_steps: int, at_least_once: bool = False) -> Stream:
    """Makes data of a source that can only be read in order, for `job.batches` and `job.steps`.

    `source` is a function: `source(lane, n_lanes)` returns the share of a lane, an iterable of
    records or a loader of batches with `state_dict` and `load_state_dict`, such as torchdata's
    `StatefulDataLoader`. Each lane of a step trains the next batch of its own share. A share that
    ends is opened again. `source` can also be a streaming dataset of Hugging Face.

    The job has no numbers for these records, so it cannot promise that each of them is trained
    exactly once. After a worker is lost, its lanes continue at the last positions that were saved,
    and what follows them is trained again; `at_least_once=True` accepts this. Steps and gradients
    still count exactly once. An epoch has `epoch_steps` steps; the next one continues where it
    ends.
    """
    if not at_least_once:
        raise ValueError(
            "a stream cannot promise that each record is trained exactly once: if a worker is "
            "lost, records after its last saved position are trained again. Pass "
            "`at_least_once=True` to accept this, or divide the data into shards that can be read "
            "again: `elasticdl.data.shards(sources, open=…)`"
        )
    if epoch_steps < 1:
        raise ValueError(f"epoch_steps={epoch_steps}; at least 1 is required")
    if hasattr(source, "shard") and hasattr(source, "state_dict"):
        return Stream(_share_of(source), epoch_steps)
    if not callable(source):
        raise TypeError(
            f"the source of the stream is a {type(source).__name__}, which cannot be divided among "
            "the lanes of a job; pass a function `source(lane, n_lanes)` that returns the share of "
            "a lane, so that no two lanes have the same records"
        )
    return Stream(source, epoch_steps)


def _share_of(dataset: Any) -> Callable[[int, int], Any]:
    """Divides a streaming dataset of Hugging Face."""

    def share(lane: int, n_lanes: int) -> Any:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, lane, n_lanes)

    return share


# How many datasets of streams this process has made, by the name of what they are made from. The
# workers of a job run the same script, so they count the same.
_N_CALLS: Counter[str] = Counter()


def _number(name: str) -> str:
    _N_CALLS[name] += 1
    return f"{name} {_N_CALLS[name]}"


def _name(source: Any) -> str:
    """Returns a name of a function or a dataset; another one may have the same."""
    fingerprint = getattr(source, "_fingerprint", None)
    kind = source if hasattr(source, "__qualname__") else type(source)
    return f"{kind.__module__}.{kind.__qualname__} {fingerprint or ''}"


class Shards:
    """A map-style dataset; see `shards`."""

    def __init__(
        self,
        listed: list[Shard],
        map: Callable[[Any], Any] | None,
        counts: list[int] | None,
        folder: Path | None,
        cache: int,
    ) -> None:
        self._shards, self._map, self._folder, self._cache = listed, map, folder, cache
        # Of each shard that was used, the number of records up to the end of each piece.
        self._piece_ends: dict[int, np.ndarray] = {}
        # All indexes, if there is no folder that keeps them.
        self._indexes: dict[int, Index] = {}
        self._counts = counts or []
        if counts is None:
            self._counts = [int(self._ends_of(number)[-1]) for number in range(len(listed))]
        self._ends = np.cumsum(self._counts)
        # The pieces that this process has open, the last used at the end.
        self._pieces: OrderedDict[tuple[int, int], tuple[Piece, int]] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, record: int) -> Any:
        return self.__getitems__([record])[0]

    def __getitems__(self, records: list[int]) -> list[Any]:
        places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for position, record in enumerate(records):
            shard, place = self.locate(record)
            ends = self._ends_of(shard)
            number = int(np.searchsorted(ends, place, side="right"))
            first = int(ends[number - 1]) if number else 0
            places.setdefault((shard, number), []).append((place - first, position))
        found: list[Any] = [None] * len(records)
        # Each piece is used once, however the records are mixed.
        for key, wanted in places.items():
            items = self._piece(*key).read([place for place, _ in wanted])
            for item, (_, position) in zip(items, wanted):
                found[position] = item
        return found if self._map is None else [self._map(item) for item in found]

    def locate(self, record: int) -> tuple[int, int]:
        """Returns the number of the shard of a record, and its place there."""
        if not -len(self) <= record < len(self):
            raise IndexError(f"record {record} is out of range: there are {len(self)} records")
        record %= len(self)
        shard = int(np.searchsorted(self._ends, record, side="right"))
        return shard, record - (int(self._ends[shard - 1]) if shard else 0)

    def __getstate__(self) -> dict[str, Any]:
        # Open files are not for other processes.
        return {**self.__dict__, "_pieces": OrderedDict()}

    def _piece(self, shard: int, number: int) -> Piece:
        if self._process != os.getpid():  # After a fork.
            self._process = os.getpid()
            self._pieces.clear()
        key = shard, number
        if key in self._pieces:
            self._pieces.move_to_end(key)
            return self._pieces[key][0]
        n_records = int(np.diff(self._ends_of(shard), prepend=0)[number])
        while len(self._pieces) >= _MIN_PIECES and self._n_open() + n_records > self._cache:
            self._pieces.popitem(last=False)
        piece = self._shards[shard].open(self._index(shard), number)
        self._pieces[key] = piece, n_records
        return piece

    def _n_open(self) -> int:
        return sum(n_records for _, n_records in self._pieces.values())

    def _ends_of(self, number: int) -> np.ndarray:
        if number not in self._piece_ends:
            self._piece_ends[number] = self._index(number)["ends"]
        return self._piece_ends[number]

    def _index(self, number: int) -> Index:
        shard = self._shards[number]
        # What a function makes of its source can change from run to run.
        folder = self._folder if shard.is_file else _job_folder()
        if folder is not None:
            index = _kept(shard, folder)
        else:
            index = self._indexes.get(number) or shard.scan()
            self._indexes[number] = index
        n_records = int(index["ends"][-1])
        if self._counts and n_records != self._counts[number]:
            raise ValueError(
                f"shard `{shard.name}` has {n_records} records, but {self._counts[number]} are "
                "expected; correct `counts`, or do not change the data during a job"
            )
        return index


def _kept(shard: Shard, folder: Path) -> Index:
    """Returns the index of a shard from the folder, which gets it if it is not there yet."""
    name = hashlib.sha256(f"{type(shard).__name__} {shard.version}".encode()).hexdigest()[:32]
    path = folder / f"{name}.npz"
    with contextlib.suppress(FileNotFoundError):
        return _load(path)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        with contextlib.suppress(FileNotFoundError):  # Another worker was faster.
            return _load(path)
        index = shard.scan()
        partial = path.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as file:
            np.savez(file, **index)
        partial.rename(path)
    return index


def _load(path: Path) -> Index:
    with np.load(path) as index:
        return dict(index)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _job_folder() -> Path | None:
    """Returns where a worker keeps indexes; None in a process that is none."""
    job = os.environ.get(_JOB_DIR)
    return None if os.environ.get(_DESCRIBE) or not job else Path(job) / _INDEX_FOLDER


def _of_path(path: str) -> list[Shard]:
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "index.json")):
            return _shards.mds_shards(path)
        raise ValueError(
            f"`{path}` is a folder without `index.json` of MDS; pass its files: `{path}/*.tar`"
        )
    if not os.path.exists(path):
        raise FileNotFoundError(f"shard `{path}` does not exist; download it, or pass `open`")
    name = os.path.basename(path).lower()
    if name.endswith(".tar"):
        return [_shards.Tar(path)]
    if name.endswith(".tgz") or ".tar." in name:
        return [_shards.Stream(path, _shards.stream_tar)]
    if name.endswith((".parquet", ".pq")):
        return [_shards.Parquet(path)]
    if name.endswith((".arrow", ".feather", ".ipc")):
        return [_shards.Arrow(path)]
    raise ValueError(
        f"the format of `{path}` is not known; use .tar, .parquet or .arrow files, or pass `open`, "
        "a function that returns the records of a file"
    )


_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def _paths(sources: Any) -> list[Any]:
    """Returns the sources in a fixed order, with patterns expanded."""
    if not isinstance(sources, (str, os.PathLike)):
        return list(sources)
    pattern = os.fspath(sources)
    span = _RANGE.search(pattern)
    if span:
        width = len(span[1])
        numbers = range(int(span[1]), int(span[2]) + 1)
        names = [f"{pattern[: span.start()]}{n:0{width}}{pattern[span.end() :]}" for n in numbers]
        return [path for name in names for path in _paths(name)]
    if glob.has_magic(pattern):
        # The order of a folder differs between machines.
        return sorted(glob.glob(pattern))
    return [pattern]
