# SPDX-License-Identifier: Apache-2.0
"""The Python half of a worker: opens the user's model for the training loop, which is in Rust."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from elasticdl import _elasticdl, _zoo
from elasticdl._zoo import ZooError

_PACKAGE = str(Path(__file__).parent)


class Batch:
    """The records of one batch: columns by name, and the records' numbers in the data set."""

    __slots__ = ("columns", "records")

    def __init__(self, columns: dict[str, Any], records: np.ndarray) -> None:
        self.columns = columns
        self.records = records

    def __len__(self) -> int:
        return len(self.records)


class Hosted:
    """An adapter as the training loop calls it."""

    def __init__(self, adapter: Any, processor: Any = None) -> None:
        self._adapter = adapter
        self._processor = processor
        self.dense: np.ndarray = adapter.dense
        self.train = getattr(adapter, "train_in_pieces", self._train)
        self.evaluate = adapter.evaluate

    def spec_json(self) -> str:
        return json.dumps(self._adapter.spec)

    def memory(self) -> np.ndarray | None:
        """An array for all parameters that passes can read; none where they need copies."""
        make = getattr(self._adapter, "memory", None)
        return None if make is None else make()

    def bind(self, dense: np.ndarray) -> None:
        """Lets passes read `dense`: the adapter's own, or what `memory` made."""
        self._adapter.bind(dense)

    def batch(self, columns: dict[str, Any], records: np.ndarray) -> Batch:
        return Batch(columns, records)

    def lookups(self, batch: Batch) -> list[np.ndarray]:
        found = self._adapter.lookups(batch)
        return [np.ascontiguousarray(ids).reshape(-1).astype(np.uint64) for ids in found]

    def _train(self, batch: Batch, rows: list[np.ndarray], seed: int) -> tuple[Any, ...]:
        """The loss, the gradient in pieces, and the gradients of rows."""
        loss, row_gradients = self._adapter.train(batch, rows, seed)
        return loss, [self._adapter.gradient], row_gradients

    def predict(self, batch: Batch, rows: list[np.ndarray]) -> np.ndarray:
        predictions = np.ascontiguousarray(self._adapter.predict(batch, rows), dtype=np.float32)
        if len(predictions) != len(batch):
            raise ZooError(
                f"the model made {len(predictions)} predictions of {len(batch)} records; its first "
                "axis must be the record"
            )
        if self._processor is not None:
            worker = int(os.environ.get("ELASTICDL_WORKER_ID", "0"))
            self._processor.process(predictions, worker)
        return predictions

    def export(
        self, folder: str, dense: np.ndarray, tables: dict[str, tuple[np.ndarray, np.ndarray]]
    ) -> list[str]:
        return self._adapter.export(folder, dense, tables)


def open_model(job_json: str) -> Hosted:
    """The model that the job (JSON) names."""
    job = json.loads(job_json)
    zoo = _zoo.load(job)
    schema = _schema(job, job_json)
    columns, job["_raw"] = schema["fields"], schema["has_raw_records"]
    # A schedule that is no formula is read off once per step.
    job["max_step"] = job["max_step"] or schema["n_steps"]
    if _zoo.framework(zoo) == "torch":
        from elasticdl._torch import TorchAdapter as Adapter
    else:
        from elasticdl._keras import KerasAdapter as Adapter
    return Hosted(Adapter(zoo, job, columns), zoo.prediction_outputs_processor)


def _schema(job: dict[str, Any], job_json: str) -> dict[str, Any]:
    """What the data that the job goes through is made of."""
    data = {"train": "training", "evaluate": "validation", "predict": "prediction"}
    location = job[f"{data[job['job_type']]}_data"]
    if not location:
        flag = f"--{data[job['job_type']]}_data"
        raise ZooError(f"{flag} is missing; name a file, a folder, a glob or a URL")
    try:
        return json.loads(_elasticdl.schema(location, job_json))
    except ValueError as error:
        raise ZooError(str(error)) from None


def explain(error: BaseException) -> str:
    """A sentence, or the traceback from the user's own code on."""
    if isinstance(error, ZooError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    lines = ["Traceback (most recent call last):\n"]
    lines += traceback.format_list(users or frames)
    lines += traceback.format_exception_only(type(error), error)
    return "".join(lines).rstrip()
