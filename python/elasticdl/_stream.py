# SPDX-License-Identifier: Apache-2.0
"""Streams: data whose records have no numbers, so that they can only be read one after another.

Each lane of the job reads its own share of the stream. Before the gradient of a batch is passed to
the job, the position after this batch is appended to a file of the lane in the job's folder, with
the step that begins there. A worker that takes over a lane continues at the position of the step
that it trains, or at the last one before it. So no record is passed over, but records after a
position that was lost are trained again.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticdl import _state
from elasticdl._records import collate_items
from elasticdl._zoo import ZooError

if TYPE_CHECKING:
    from elasticdl._job import Job

# Of the job's folder.
_FOLDER = "stream_positions"
# The steps whose positions are in one file. Of a file that is not one of the last two, only the
# last position is kept.
_FILE_STEPS = 10_000

# Makes the share of a lane: `source(lane, n_lanes)`.
Source = Callable[[int, int], Any]


class Stream:
    """The data of a job that is read in order; see `elasticdl.data.stream`."""

    def __init__(self, source: Source, epoch_steps: int) -> None:
        self._source = source
        self.epoch_steps = epoch_steps
        self._lanes: dict[int, _Lane] = {}
        self._folder: Path | None = None
        # The batch that was read last.
        self._last: list[Any] = []
        # The first batch of a process is not part of the training: it shows the model, or compares
        # the results of workers.
        self._is_first = True

    def connect(self, folder: Path | None) -> None:
        """Keeps positions in the folder of the job, if there is one."""
        folder = None if folder is None else folder / _FOLDER
        if folder != self._folder:
            # What was read before has only described the job.
            self._folder, self._lanes, self._is_first = folder, {}, True

    def read(self, step: int, lane: int, n_lanes: int, batch_size: int) -> list[Any]:
        """Returns the records of a lane's batch, or this batch if the share consists of batches."""
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(self._source, lane, n_lanes, self._folder)
        self._last = self._lanes[lane].read(step, batch_size, is_kept=not self._is_first)
        self._is_first = False
        return self._last

    def read_again(self) -> list[Any]:
        """Returns the last batch, for a worker without a lane in this step."""
        return self._last

    def gives_batches(self, lane: int) -> bool:
        return self._lanes[lane].gives_batches


class Fetch:
    """Makes a batch of the stream, in place of `_records.Fetch`."""

    is_random = True

    def __init__(
        self, stream: Stream, job: Job, batch_size: int, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset, self.collate = stream, collate
        self._job, self._batch_size = job, batch_size

    def __call__(self, records: np.ndarray) -> Any:
        stream, job = self.dataset, self._job
        # The job shares out the numbers of a step in order.
        step_of_epoch, lane = divmod(int(records[0]) // self._batch_size, job.lanes)
        if step_of_epoch == job.step % stream.epoch_steps:
            items = stream.read(job.step, lane, job.lanes, self._batch_size)
        else:
            items = stream.read_again()
        if stream.gives_batches(lane):
            return items[0]
        return collate_items(items, self.collate)


@dataclass(frozen=True)
class _Position:
    """A place in the share of a lane."""

    # The step that begins there.
    step: int
    # How often the share was read before.
    n_read: int
    # The share's state, as bytes.
    state: bytes


class _Lane:
    """The reader of a lane's share."""

    def __init__(self, source: Source, lane: int, n_lanes: int, folder: Path | None) -> None:
        self._source, self._lane, self._n_lanes = source, lane, n_lanes
        self._positions = _Positions(folder and folder / f"{lane}-of-{n_lanes}")
        self._share: Any = None
        self._iterator: Iterator[Any] = iter(())
        # Where the reader is; None if other workers could not continue there.
        self._place: _Position | None = None
        # Whether the share was opened at its start and nothing was read.
        self._is_fresh = False

    @property
    def gives_batches(self) -> bool:
        """Whether the share is a loader, which makes batches itself."""
        return getattr(self._share, "batch_sampler", None) is not None

    def read(self, step: int, batch_size: int, is_kept: bool) -> list[Any]:
        before = self._positions.at(step)
        if before is None or before != self._place:
            self._go_to(before, batch_size)
        items = [self._next(batch_size) for _ in range(1 if self.gives_batches else batch_size)]
        self._place = None
        if is_kept:
            n_read = len(items) + (before.n_read if before else 0)
            self._place = _Position(step + 1, n_read, self._dump())
            self._positions.add(self._place)
        return items

    def _go_to(self, position: _Position | None, batch_size: int) -> None:
        self._share = self._source(self._lane, self._n_lanes)
        _check(self._share, batch_size)
        if position is not None:
            self._share.load_state_dict(_state.parse(position.state)["position"])
        self._iterator = iter(self._share)
        self._is_fresh = position is None

    def _next(self, batch_size: int) -> Any:
        while True:
            try:
                item = next(self._iterator)
            except StopIteration:
                if self._is_fresh:
                    raise ValueError(
                        f"share {self._lane} of {self._n_lanes} of the stream has no records; use "
                        "a source that gives every lane some, or fewer --lanes"
                    ) from None
                self._go_to(None, batch_size)
            else:
                self._is_fresh = False
                return item

    def _dump(self) -> bytes:
        return _state.dump({"position": self._share.state_dict()})


class _Positions:
    """The positions of a lane, in files that its workers append to.

    If several workers have read the batch of a step, one of them may be a worker that the job has
    given up, whose batch did not count. The position that is furthest back then holds: everything
    before it was trained. Trouble with the files never stops the job: an older position holds.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        # The last ones of this worker.
        self._own: deque[_Position] = deque(maxlen=2)
        # Where the last of them is, the size of that file afterwards, and whether no other worker
        # has written to it between the last two.
        self._file: Path | None = None
        self._size = 0
        self._is_alone = True

    def at(self, step: int) -> _Position | None:
        """Returns the last position that is not after the start of a step; None: the beginning."""
        if self._is_unchanged():
            for position in self._own:
                if position.step == step:
                    return position
        return None if self._folder is None else self._find(self._folder, step)

    def add(self, position: _Position) -> None:
        self._own.append(position)
        if self._folder is None:
            return
        text = base64.b64encode(position.state)
        # What another worker was writing when it was killed ends here.
        line = b"\n%d %d %d %b\n" % (position.step, position.n_read, len(text), text)
        file = self._folder / str(position.step // _FILE_STEPS)
        with contextlib.suppress(OSError):
            if file != self._file:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._thin(position.step // _FILE_STEPS - 2)
            with file.open("ab", buffering=0) as opened:
                expected = len(line) + (self._size if file == self._file else 0)
                self._file = file
                try:
                    opened.write(line)
                finally:
                    self._size = os.fstat(opened.fileno()).st_size
                    self._is_alone = self._size == expected

    def _is_unchanged(self) -> bool:
        """Whether no other worker has written positions of late."""
        if self._folder is None:
            return True
        try:
            is_unchanged = self._file is not None and self._file.stat().st_size == self._size
            return is_unchanged and self._is_alone
        except OSError:
            return False

    def _find(self, folder: Path, step: int) -> _Position | None:
        with contextlib.suppress(OSError):
            numbers = sorted(int(name) for name in os.listdir(folder) if name.isdigit())
            for number in reversed(numbers):
                found = _last((folder / str(number)).read_bytes(), step)
                if found is not None:
                    return found
        return None

    def _thin(self, number: int) -> None:
        """Keeps only the last position of a file."""
        file = self._folder / str(number)
        last = _last(file.read_bytes(), (number + 1) * _FILE_STEPS) if file.exists() else None
        if last is None:
            return
        text = base64.b64encode(last.state)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(b"%d %d %d %b\n" % (last.step, last.n_read, len(text), text))
        partial.replace(file)


def _last(lines: bytes, step: int) -> _Position | None:
    """Returns the last position that is not after the start of a step."""
    best: tuple[int, int] | None = None
    state = b""
    for line in lines.split(b"\n"):
        with contextlib.suppress(ValueError):
            at, n_read, length, text = line.split(b" ")
            place = int(at), -int(n_read)
            if place[0] <= step and len(text) == int(length) and (best is None or place >= best):
                best, state = place, text
    return None if best is None else _Position(best[0], -best[1], base64.b64decode(state))


def _check(share: Any, batch_size: int) -> None:
    """Rejects shares whose position cannot be saved."""
    kind = type(share).__name__
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(share, method, None)):
            raise ZooError(
                f"a share of the stream is of type {kind}, which has no `{method}`, so a worker "
                "that takes it over would not know where to continue; return an iterable with "
                "`state_dict` and `load_state_dict`, such as the StatefulDataLoader of torchdata"
            )
    if getattr(share, "num_workers", 0):
        raise ZooError(
            f"a share of the stream is a {kind} with num_workers={share.num_workers}, whose "
            "processes would keep the connections of a worker that is lost; use num_workers=0"
        )
    if _has_buffer(share) or _has_buffer(getattr(share, "dataset", None)):
        raise ZooError(
            f"a share of the stream, a {kind}, is shuffled with a buffer, whose records are not in "
            "its `state_dict`, so they would be lost with a worker; omit `shuffle`, or use "
            "`elasticdl.data.shards(dataset)`, whose records the job shuffles"
        )
    own_size = getattr(share, "batch_size", None)
    if own_size not in (None, batch_size):
        raise ZooError(
            f"a share of the stream makes batches of {own_size} records, but the job's batches "
            f"have {batch_size}; use the same `batch_size` for both"
        )


def _has_buffer(dataset: Any) -> bool:
    """Whether a streaming dataset of Hugging Face has a shuffle buffer."""
    parts = [getattr(dataset, "_ex_iterable", None)]
    for part in parts:
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        parts += [part.ex_iterable] if hasattr(part, "ex_iterable") else []
        parts += getattr(part, "ex_iterables", [])
    return False
