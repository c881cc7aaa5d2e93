# SPDX-License-Identifier: Apache-2.0
"""Reads batches ahead of a custom training loop, in the processes of a torch `DataLoader`.

The job predicts which batches follow the current one. The prediction holds until the workers of the
job change; batches that are no longer needed are then dropped, and the batches that are trained are
the same. Every batch has its own random numbers, so it does not matter which process reads it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from elasticdl import _fork_server, _records

# A batch: the seed of its random numbers, and its records.
_Key = tuple[int, bytes]
# What a process reads: a place in `_Source._cancelled`, the seed and the records; None for nothing.
_Task = Optional[tuple[int, int, np.ndarray]]
# Gives the records and seeds of batches that probably follow, at most as many as requested.
Upcoming = Callable[[int], list[tuple[np.ndarray, int]]]


class Reader:
    """Reads the batches of a loop.

    `options` are arguments of `DataLoader`. Its processes start at once, before the job opens
    connections that they would keep open after the end of this process.
    """

    def __init__(self, fetch: _records.Fetch, options: dict[str, Any]) -> None:
        self._n_workers: int = options.get("num_workers", 0)
        self._depth = self._n_workers * (options.get("prefetch_factor") or 2)
        # For each task on its way: whether its batch is not wanted any more.
        self._cancelled = torch.zeros(max(self._depth, 1), dtype=torch.uint8).share_memory_()
        source = _Source(fetch, self._cancelled)
        start = _Start(source, options.get("worker_init_fn"))
        # The batches that are wanted next, in order, and those among them that no process has.
        self._wanted: dict[_Key, tuple[int, np.ndarray]] = {}
        self._unsent: deque[_Key] = deque()
        # The tasks on their way, in order; None for those without a batch that is wanted.
        self._pending: deque[_Key | None] = deque()
        self._ready: dict[_Key, Any] = {}
        self._n_sent = 0
        # With `persistent_workers`, a loader that is kept would keep its processes.
        loader = DataLoader(
            source,
            batch_sampler=_Tasks(self._next_task),
            collate_fn=_as_it_is,
            # Random numbers of the loop stay the same, with or without processes.
            generator=torch.Generator(),
            **{**options, "worker_init_fn": start},
        )
        self._batches: Iterator[Any] = iter(loader)

    def read(self, records: np.ndarray, seed: int, upcoming: Upcoming) -> Any:
        """Returns a batch, and lets the processes read those that probably follow."""
        key = _key(records, seed)
        wanted = [(records, seed), *upcoming(self._depth)] if self._n_workers else [(records, seed)]
        self._want({_key(*batch): (batch[1], batch[0]) for batch in wanted})
        while key not in self._ready or (self._unsent and self._pending[0] is None):
            self._receive()
        if not self._n_workers:
            _records.reseed(seed)
        return self._ready.pop(key)

    def close(self) -> None:
        """Ends the processes."""
        self._cancelled.fill_(1)
        self._batches = iter(())
        self._ready.clear()

    def _want(self, wanted: dict[_Key, tuple[int, np.ndarray]]) -> None:
        self._wanted = wanted
        self._ready = {key: batch for key, batch in self._ready.items() if key in wanted}
        first = self._n_sent - len(self._pending)
        for place, key in enumerate(self._pending):
            if key is not None and key not in wanted:
                self._pending[place] = None
                self._cancelled[(first + place) % len(self._cancelled)] = 1
        on_the_way = {*self._ready, *self._pending}
        self._unsent = deque(key for key in wanted if key not in on_the_way)

    def _receive(self) -> None:
        """Takes the next batch of the processes, which get a new task for it."""
        batch = next(self._batches)
        key = self._pending.popleft()
        if key is not None:
            self._ready[key] = batch

    def _next_task(self) -> _Task:
        place = self._n_sent % len(self._cancelled)
        self._n_sent += 1
        key = self._unsent.popleft() if self._unsent else None
        self._pending.append(key)
        if key is None:
            return None
        self._cancelled[place] = 0
        return place, *self._wanted[key]


class _Tasks:
    """A `batch_sampler` that never ends: a process without a batch to read gets nothing to do."""

    def __init__(self, next_task: Callable[[], _Task]) -> None:
        self._next_task = next_task

    def __iter__(self) -> Iterator[_Task]:
        while True:
            yield self._next_task()


class _Source:
    """What the processes of a loader read."""

    def __init__(self, fetch: _records.Fetch, cancelled: torch.Tensor) -> None:
        self.fetch = fetch
        self._cancelled = cancelled

    def __getitems__(self, task: _Task) -> Any:
        if task is None:
            return None
        place, seed, records = task
        if self._cancelled[place]:
            return None
        return _records.read(self.fetch, records, seed)


class _Start:
    """Prepares a process of a loader."""

    def __init__(self, source: _Source, start: Callable[[int], None] | None) -> None:
        self._source, self._start = source, start

    def __call__(self, worker_id: int) -> None:
        _exit_with_parent()
        # What the user's function expects to find there.
        object.__setattr__(get_worker_info(), "dataset", self._source.fetch.dataset)
        if self._start is not None:
            self._start(worker_id)


def _exit_with_parent() -> None:
    """Ends this process when its parent does, even if that is killed.

    Where the kernel cannot do this, the process looks for its parent from time to time.
    """
    if not sys.platform.startswith("linux"):
        return
    _fork_server.be_killed_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def _as_it_is(batch: Any) -> Any:
    return batch


def _key(records: np.ndarray, seed: int) -> _Key:
    return seed, records.astype(np.int64).tobytes()
