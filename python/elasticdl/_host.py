# SPDX-License-Identifier: Apache-2.0
"""The Python side of a worker: loads the user's model for the training loop in Rust."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from elasticdl import _elasticdl, _output, _reader, _stacks, _trial, _zoo
from elasticdl._reader import Reader
from elasticdl._zoo import Zoo, ZooError

_PACKAGE = str(Path(__file__).parent)

# Fields of the job description that name data.
_DATA = ("training_data", "validation_data", "prediction_data")


class Batch:
    """One batch: columns by name, and the indices of its records in the data set."""

    __slots__ = ("columns", "records")

    def __init__(self, columns: dict[str, Any], records: np.ndarray) -> None:
        self.columns = columns
        self.records = records

    def __len__(self) -> int:
        return len(self.records)


class Hosted:
    """Wraps a framework adapter in the interface that the training loop calls."""

    def __init__(self, adapter: Any, zoo: Zoo, job: dict[str, Any]) -> None:
        self._adapter = adapter
        self._zoo = zoo
        self._job = job
        self._processor = zoo.prediction_outputs_processor
        self._readers: dict[str, Reader] = {}
        self.dense: np.ndarray = adapter.dense
        self.train = getattr(adapter, "train_in_pieces", self._train)
        self.evaluate = adapter.evaluate

    def spec_json(self) -> str:
        spec = self._adapter.spec
        # The job does not decode records from a custom data reader.
        return json.dumps({**spec, "inputs": []} if self._zoo.custom_data_reader else spec)

    def memory(self) -> np.ndarray | None:
        """Returns an array for all parameters that passes can read, or None if they need copies."""
        make = getattr(self._adapter, "memory", None)
        return None if make is None else make()

    def first_rows(self, table: int) -> np.ndarray:
        return self._adapter.first_rows(table)

    def bind(self, dense: np.ndarray) -> None:
        """Makes passes read from `dense`: the adapter's own array, or one from `memory`."""
        self._adapter.bind(dense)

    def batch(
        self, columns: dict[str, Any], records: np.ndarray, source: str | None = None
    ) -> Batch:
        """Creates a batch for the adapter; `source` names the data if a custom reader reads it."""
        if source is None:
            return Batch(columns, records)
        if source not in self._readers:
            self._readers[source] = _reader.reopen(self._zoo, self._job, source)
        return Batch(self._readers[source].columns(records.tolist()), records)

    def begin_trial(self) -> None:
        """The passes from now on only show whether the model fits its data.

        They do not call the processor of predictions. An error also shows what `feed` returned.
        """
        self._processor = None
        self._adapter.begin_trial(self._show)
        for name in ("lookups", "train", "evaluate", "predict"):
            setattr(self, name, self._with_fed(getattr(self, name)))

    def _show(self, features: Any, labels: Any) -> None:
        self._fed = "\n" + _trial.fed(features, labels)

    def _with_fed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self._fed = ""
            try:
                return function(*args)
            except Exception as error:
                raise ZooError(explain(error) + self._fed) from error

        return run

    def lookups(self, batch: Batch) -> list[np.ndarray]:
        found = self._adapter.lookups(batch)
        return [np.ascontiguousarray(ids).reshape(-1).astype(np.uint64) for ids in found]

    def _train(self, batch: Batch, rows: list[np.ndarray], seed: int) -> tuple[Any, ...]:
        """Returns the loss, the gradient in pieces, and the row gradients."""
        loss, row_gradients = self._adapter.train(batch, rows, seed)
        return loss, [self._adapter.gradient], row_gradients

    def predict(self, batch: Batch, rows: list[np.ndarray]) -> np.ndarray:
        predictions = np.ascontiguousarray(self._adapter.predict(batch, rows), dtype=np.float32)
        if len(predictions) != len(batch):
            raise ZooError(
                f"the model returned {len(predictions)} predictions for {len(batch)} records; the "
                "first axis of its output must be the record"
            )
        if self._processor is not None:
            worker = int(os.environ.get("ELASTICDL_WORKER_ID", "0"))
            self._processor.process(predictions, worker)
        return predictions

    def export(
        self, folder: str, dense: np.ndarray, tables: dict[str, tuple[np.ndarray, np.ndarray]]
    ) -> list[str]:
        return self._adapter.export(folder, dense, tables)


def open_model(job_json: str, indexes: Any = None) -> Hosted:
    """Opens the model that the job description (JSON) names.

    `indexes` is a folder that can have the index of the job's data.
    """
    _stacks.log_when_asked()
    _output.survive_a_full_disk()
    job = json.loads(job_json)
    zoo = _load(job)
    schema = _schema(zoo, job, job_json, indexes)
    columns, job["_raw"] = schema["fields"], schema["has_raw_records"]
    # A schedule that is not a known formula is evaluated for each step.
    job["epoch_steps"] = schema["n_steps"] // job["num_epochs"] if job["num_epochs"] else 0
    job["max_step"] = job["max_step"] or schema["n_steps"]
    with _importing():
        if _zoo.framework(zoo) == "torch":
            from elasticdl._torch import TorchAdapter as Adapter
        else:
            from elasticdl._keras import KerasAdapter as Adapter
    return Hosted(Adapter(zoo, job, columns), zoo, job)


def settle(job_json: str, original_json: str) -> str:
    """Returns the job with its data replaced by that of the custom reader, if there is one.

    `original_json` is the job as the user described it: in `job_json`, values that look like paths
    may have been made absolute.
    """
    job, original = json.loads(job_json), json.loads(original_json)
    zoo = _load(job)
    if zoo.custom_data_reader is None:
        return job_json
    for name in _DATA:
        if job[name] and not job[name].startswith(_reader.PREFIX):
            origin = job[name] if os.path.exists(job[name]) else original[name] or job[name]
            job[name] = _reader.make(zoo, job, origin).location
    return json.dumps(job)


_loaded: dict[str, Zoo] = {}


def _load(job: dict[str, Any]) -> Zoo:
    """Loads the user's module, at most once per process."""
    key = json.dumps({name: value for name, value in job.items() if name not in _DATA})
    if key not in _loaded:
        with _importing():
            _loaded[key] = _zoo.load(job)
    return _loaded[key]


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Collects no garbage during imports: searching the many objects of a framework for it takes
    up to a third of the time. They remain until the process exits, so it never searches them."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _schema(zoo: Zoo, job: dict[str, Any], job_json: str, indexes: Any) -> dict[str, Any]:
    """Returns the schema of the job's data."""
    data = {"train": "training", "evaluate": "validation", "predict": "prediction"}
    location = job[f"{data[job['job_type']]}_data"]
    if not location:
        flag = f"--{data[job['job_type']]}_data"
        raise ZooError(f"{flag} is missing; specify a file, folder, glob or URL")
    try:
        schema = json.loads(_elasticdl.schema(location, job_json, indexes))
    except ValueError as error:
        raise ZooError(str(error)) from None
    if zoo.custom_data_reader is not None:
        reader = _reader.reopen(zoo, job, location)
        schema["fields"], schema["has_raw_records"] = reader.schema()
    return schema


def explain(error: BaseException) -> str:
    """Returns the message of a `ZooError`, or the traceback without this package's frames."""
    if isinstance(error, ZooError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    lines = ["Traceback (most recent call last):\n"]
    lines += traceback.format_list(users or frames)
    lines += traceback.format_exception_only(type(error), error)
    return "".join(lines).rstrip()
