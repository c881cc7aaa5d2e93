# SPDX-License-Identifier: Apache-2.0
"""Evaluation in a custom training loop, shared among the workers of a job.

The records are divided into chunks, which do not depend on the number of workers. A worker claims a
chunk, computes it, and publishes the results in the job's folder. It takes the results of all other
chunks from there. The merged result depends only on the model and the data, so it does not matter
who computes a chunk: a chunk whose worker is lost or slow is computed again, and the first result
that is published counts for all workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elasticdl import _records

# Chunks of an evaluation, at most.
_MAX_CHUNKS = 256
# How long results of others are waited for without progress: at least this long, and so many times
# the longest chunk that this worker has computed.
_PATIENCE_SECS = 2.0
_PATIENCE_CHUNKS = 3
_POLL_SECS = 0.02
# Makes the seeds of batches.
_SEED = 0x2545_F491_4F6C_DD1D

Results = dict[str, Any]


@dataclass(frozen=True)
class Chunks:
    """The records of an evaluation, in batches, and these in chunks."""

    n_records: int
    batch_size: int

    @property
    def n_batches(self) -> int:
        return -(-self.n_records // self.batch_size)

    @property
    def _n_each(self) -> int:
        return -(-self.n_batches // _MAX_CHUNKS)

    def __len__(self) -> int:
        return -(-self.n_batches // self._n_each)

    def batches(self, chunk: int) -> range:
        """Returns the batches of a chunk."""
        first = chunk * self._n_each
        return range(first, min(first + self._n_each, self.n_batches))

    def records(self, batch: int) -> np.ndarray:
        """Returns the records of a batch."""
        first = batch * self.batch_size
        return np.arange(first, min(first + self.batch_size, self.n_records), dtype=np.int64)


class Board:
    """The chunks of one evaluation that workers have claimed and published, in a folder.

    Trouble with the folder never stops an evaluation: this worker then computes what is missing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._found: set[str] = set()
        self._try(lambda: folder and folder.mkdir(parents=True, exist_ok=True))

    def look(self) -> bool:
        """Finds what others have done; returns whether there is more than before."""
        found = self._try(lambda: set(os.listdir(self._folder)) if self._folder else set()) or set()
        is_more = not found <= self._found
        self._found = found
        return is_more

    def claim(self, chunk: int) -> bool:
        """Claims a chunk; False if another worker has."""
        if self._folder is None:
            return True
        name = f"{chunk}.claim"
        if name in self._found:
            return False

        def create() -> bool:
            try:
                os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                return False
            return True

        is_claimed = self._try(create)
        return True if is_claimed is None else is_claimed

    def read(self, chunk: int) -> list[Results] | None:
        """Returns the results of a chunk, if they are published."""
        from elasticdl import _state
        from elasticdl._zoo import ZooError

        if self._folder is None or f"{chunk}.part" not in self._found:
            return None
        data = self._try((self._folder / f"{chunk}.part").read_bytes)
        try:
            return None if data is None else _state.parse(data)["batches"]
        except ZooError:
            return None  # It is computed again.

    def publish(self, chunk: int, results: list[Results]) -> list[Results]:
        """Publishes the results of a chunk; returns those that count."""
        if self._folder is None:
            return results
        from elasticdl import _state

        data = _state.dump({"batches": results})
        part = self._folder / f"{chunk}.part"
        unfinished = self._folder / f".{chunk}-{os.getpid()}-{time.monotonic_ns()}"

        def write() -> bool:
            """Whether it is the first one."""
            try:
                unfinished.write_bytes(data)
                try:
                    os.link(unfinished, part)
                except FileExistsError:
                    return False
                except OSError:  # Not every file system has hard links.
                    if part.exists():
                        return False
                    unfinished.replace(part)
                return True
            finally:
                with contextlib.suppress(OSError):
                    unfinished.unlink(missing_ok=True)

        if self._try(write) is False:
            self._found.add(part.name)
            return self.read(chunk) or results
        return results

    def _try(self, act: Callable[[], Any]) -> Any:
        """Returns the result, or None if the folder cannot be used; then it is not used again."""
        try:
            return act()
        except FileNotFoundError:
            # It was removed, because this worker is late.
            self._folder = None
        except OSError as error:
            self._folder = None
            warnings.warn(
                f"cannot share the evaluation, so this worker computes the rest of it: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return None


class Evaluation:
    """One evaluation: its batches for this worker, and its merged results."""

    def __init__(self, chunks: Chunks, board: Board) -> None:
        self._chunks, self._board = chunks, board
        self._results: dict[int, list[Results]] = {}
        # Of the batch that the loop has.
        self._recorded: Results | None = None
        self.is_complete = False
        self._longest = 0.0

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Iterates over the batches that this worker computes: their numbers and records."""
        while (chunk := self._next_chunk()) is not None:
            start, results = time.monotonic(), []
            for batch in self._chunks.batches(chunk):
                self._recorded = {}
                yield batch, self._chunks.records(batch)
                recorded, self._recorded = self._recorded, None
                if not recorded:
                    raise RuntimeError(
                        "nothing was recorded for a batch of `job.evaluate(…)`, so other workers "
                        "would not get its results; call `job.record(loss=loss, …)` for each batch"
                    )
                results.append(recorded)
            self._longest = max(self._longest, time.monotonic() - start)
            self._results[chunk] = self._board.publish(chunk, results)
        self.is_complete = True

    def record(self, values: Results) -> None:
        if self._recorded is None:
            raise RuntimeError(
                "`job.record()` was called without a batch of an evaluation; call it in the loop "
                "`for batch in job.evaluate(…)`"
            )
        for name, value in values.items():
            if name in self._recorded:
                raise RuntimeError(f"`{name}` was recorded twice for one batch")
            self._recorded[name] = _plain(name, value)

    def values(self, name: str) -> list[tuple[Any, int]]:
        """Returns the values of all batches, in order, with the numbers of their records."""
        if not self.is_complete:
            raise RuntimeError(
                "the evaluation was left before its end, so there is no result; iterate over all "
                "batches of `job.evaluate(…)`"
            )
        values = []
        for chunk in range(len(self._chunks)):
            for batch, results in zip(self._chunks.batches(chunk), self._results[chunk]):
                if name not in results:
                    known = ", ".join(sorted(results))
                    raise RuntimeError(
                        f"no `{name}` was recorded for batch {batch} of the evaluation, only "
                        f"{known}; record the same names for every batch"
                    )
                values.append((results[name], len(self._chunks.records(batch))))
        return values

    def _next_chunk(self) -> int | None:
        """Waits until there is a chunk for this worker; None when all of them have results."""
        since = time.monotonic()
        while True:
            if self._board.look():
                since = time.monotonic()
            missing = []
            for chunk in range(len(self._chunks)):
                if chunk in self._results:
                    continue
                results = self._board.read(chunk)
                if results is None:
                    missing.append(chunk)
                else:
                    self._results[chunk] = results
            for chunk in missing:
                if self._board.claim(chunk):
                    return chunk
            if not missing:
                return None
            # Other workers compute the rest, unless they are lost.
            patience = max(_PATIENCE_SECS, _PATIENCE_CHUNKS * self._longest)
            if time.monotonic() - since > patience:
                return missing[0]
            time.sleep(_POLL_SECS)


class Evaluating:
    """The part of `Job` that evaluates."""

    _evaluation: Evaluation | None = None
    # Where in the loop the last evaluation was, and how many there were.
    _evaluated_at: tuple[Any, ...] = ()
    _evaluated_in: Any = None
    _n_evaluations = 0

    def evaluate(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Iterates over this worker's share of an evaluation:

            for x, y in job.evaluate(test_data, batch_size=256):
                output = model(x)
                job.record(loss=loss_of(output, y), right=output.argmax(1) == y)
            loss, accuracy = job.mean("loss"), job.mean("right")

        All workers that get here share the batches, so one of them may get none. After the loop,
        `mean` and `gather` return the results of all batches, the same in every worker and for any
        number of workers. If a worker is lost, others compute its batches.

        `dataset` and `collate` are as for `batches`. A `DataLoader` gives its dataset, its batch
        size (default: 64) and its `collate_fn`; the records are read in order, in this process.

        During the loop, the model is in evaluation mode, and gradients are off.
        """
        if _is_loader(dataset):
            loader, dataset = dataset, dataset.dataset
            batch_size = batch_size or loader.batch_size
            collate = collate or loader.collate_fn
            fetch = _records.Fetch(dataset, collate, by_item=True)
            n_records = _records.count(dataset)
            if loader.drop_last and batch_size:
                n_records -= n_records % batch_size
        else:
            fetch, n_records = _records.Fetch(dataset, collate), _records.count(dataset)
        batch_size = 64 if batch_size is None else batch_size
        if n_records < 1 or batch_size < 1:
            what = "the dataset has no records" if n_records < 1 else f"batch_size={batch_size}"
            raise ValueError(f"{what}; at least 1 is required")
        return self._evaluate(Chunks(n_records, batch_size), fetch)

    def record(self, **values: Any) -> None:
        """Keeps results of a batch of `evaluate`, by any name: numbers, tensors, arrays or lists.

        Call it for every batch, with the same names.
        """
        self._last_evaluation("record").record(values)

    def mean(self, name: str, weight: str | None = None) -> float:
        """Returns the mean of what was recorded as `name` in the last evaluation.

        A number counts as often as its batch has records, and each element of a tensor once.
        `weight` is the name of recorded numbers that are the weights instead.
        """
        evaluation = self._last_evaluation("mean")
        values = evaluation.values(name)
        weights = [None] * len(values)
        if weight is not None:
            weights = [float(value) for value, _ in evaluation.values(weight)]
        sums, total = [], []
        for (value, n_records), given in zip(values, weights):
            numbers = _numbers(name, value)
            is_one = np.ndim(numbers) == 0
            if given is not None:
                each = given if is_one else given / max(1, numbers.size)
            else:
                each = n_records if is_one else 1
            numbers = np.ravel(numbers)
            sums.extend((numbers * each).tolist())
            total.append(each * numbers.size)
        whole = math.fsum(total)
        return _sum(sums) / whole if whole else math.nan

    def gather(self, name: str) -> Any:
        """Returns what was recorded as `name` in the last evaluation, in the order of the records.

        Tensors are concatenated along their first dimension; numbers become a tensor with one
        element per batch; lists become one list.
        """
        import torch

        values = [value for value, _ in self._last_evaluation("gather").values(name)]
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        tensors = [torch.as_tensor(value) for value in values]
        is_one = tensors[0].dim() == 0
        return torch.stack(tensors) if is_one else torch.cat(tensors)

    def _last_evaluation(self, call: str) -> Evaluation:
        if self._evaluation is None:
            raise RuntimeError(
                f"`job.{call}()` was called before an evaluation; first iterate over "
                "`job.evaluate(…)`"
            )
        return self._evaluation

    def _evaluate(self, chunks: Chunks, fetch: _records.Fetch) -> Iterator[Any]:
        self._evaluation = evaluation = Evaluation(chunks, Board(self._board_folder(chunks)))
        with _undisturbed(self._module):
            for batch, records in evaluation:
                _records.reseed(_SEED * (batch + 1) % (1 << 63))
                yield fetch(records)

    def _board_folder(self, chunks: Chunks) -> Path | None:
        """Returns the folder that workers at the same place share; None if there is only one."""
        from elasticdl._job import job_folder

        folder = job_folder()
        if folder is None or self._module is None or self._loop is None:
            return None
        model = _digest(self._module)
        # A worker with several batches in a step may get here once for each of them.
        place = (self.step, self._own.is_step, model)
        is_same = place == self._evaluated_at and self._turn is self._evaluated_in
        self._n_evaluations = self._n_evaluations + 1 if is_same else 0
        self._evaluated_at, self._evaluated_in = place, self._turn
        shape = f"{chunks.n_records}x{chunks.batch_size}"
        folder = folder / "evaluations"
        if self.is_leader:
            _remove_before(folder, self.step - 1)
        return folder / f"{self.step}-{model}-{self._n_evaluations}-{shape}"


def _is_loader(value: Any) -> bool:
    if "torch" not in sys.modules:
        return False
    from torch.utils.data import DataLoader

    return isinstance(value, DataLoader)


def _remove_before(folder: Path, step: int) -> None:
    """Removes evaluations that no worker can be in any more."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            first = name.split("-")[0]
            if first.isdigit() and int(first) < step:
                shutil.rmtree(folder / name, ignore_errors=True)


def _digest(module: Any) -> str:
    """Identifies the parameters and buffers of a model."""
    import torch

    digest = hashlib.blake2b(digest_size=12)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return digest.hexdigest()


@contextlib.contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    """Evaluation mode without gradients; what follows finds everything as it was."""
    if "torch" not in sys.modules:
        yield
        return
    import torch

    modes = [] if module is None else [(part, part.training) for part in module.modules()]
    is_grad = torch.is_grad_enabled()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        if module is not None:
            module.eval()
        torch.set_grad_enabled(False)
        yield
    finally:
        for part, training in modes:
            part.training = training
        torch.set_grad_enabled(is_grad)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _plain(name: str, value: Any) -> Any:
    """Returns a value that can be passed to other workers."""
    import torch

    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, np.generic):
        value = value.item()
    is_list = isinstance(value, (list, tuple))
    items = value if is_list else [value]
    is_plain = all(isinstance(item, (bool, int, float, str)) for item in items)
    if is_plain and (is_list or not isinstance(value, str)):
        return list(value) if is_list else value
    raise TypeError(
        f"`{name}` was recorded as a {type(value).__name__}; record numbers, tensors, arrays, or "
        "lists of numbers or strings"
    )


def _numbers(name: str, value: Any) -> np.ndarray:
    numbers = value
    if hasattr(value, "double"):  # A tensor; numpy has no bfloat16.
        numbers = value.double().numpy()
    try:
        return np.asarray(numbers, np.float64)
    except ValueError:
        raise TypeError(f"`{name}` has no mean: it was not recorded as numbers") from None


def _sum(numbers: list[float]) -> float:
    """Returns the exact sum, rounded once; of any order."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # Infinite numbers of both signs, or too large ones.
        return float(np.sum(np.asarray(numbers)))
