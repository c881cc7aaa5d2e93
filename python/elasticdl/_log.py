# SPDX-License-Identifier: Apache-2.0
"""Metrics that a custom training loop logs.

Each worker writes to its own file in the job's folder, from which the master takes them; a metric
counts once per step. Usually only the leader writes. If it is lost before it does, although the
other workers have completed the step, these write what is missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticdl import _tracking

# What other workers do not find in the files of the leader after so many steps is missing.
_DELAY_STEPS = 2
# Different metrics of a script, at most.
_MAX_NAMES = 200


class Log:
    """What this worker logs; `folder` has the files of all workers."""

    def __init__(
        self, folder: Path, worker_id: int, on_write: Callable[[], None] = lambda: None
    ) -> None:
        self._path = folder / f"worker-{worker_id}.jsonl"
        self._on_write = on_write
        self._names: set[str] = set()
        # What the leader should have written, by the step of the job: metrics with their steps,
        # which trainers of other libraries count themselves.
        self._pending: dict[int, dict[int, dict[str, float | None]]] = {}
        self._lines = _tracking.Lines(folder, {})

    def add(
        self,
        step: int,
        metrics: dict[str, Any],
        leads: bool,
        is_after_step: bool,
        own_step: int | None = None,
    ) -> None:
        """Logs metrics of a step, which can be shown with another number. After the step, the
        leader may be lost and the step is not repeated, so other workers remember them.
        """
        numbers = check(metrics)
        if not numbers:
            return
        names = self._names | numbers.keys()
        if len(names) > _MAX_NAMES:
            raise ValueError(
                f"more than {_MAX_NAMES} different metrics were logged; use fixed names, without "
                "the number of a step"
            )
        self._names = names
        shown = step if own_step is None else own_step
        if leads:
            self._write(shown, numbers)
        elif is_after_step:
            self._pending.setdefault(step, {}).setdefault(shown, {}).update(numbers)

    def at(self, step: int, leads: bool) -> None:
        """This worker is at a step of the job."""
        due = [at for at in self._pending if leads and at < step or at + _DELAY_STEPS <= step]
        for at in due:
            logged = self._pending.pop(at)
            if step > at + _DELAY_STEPS:
                continue  # It has not trained the steps in between: that was only a check.
            with contextlib.suppress(OSError):
                self._lines.read()
            for shown, metrics in logged.items():
                known = self._lines.known
                missing = {name: metrics[name] for name in metrics if (shown, name) not in known}
                if missing:
                    self._write(shown, missing)

    def _write(self, step: int, metrics: dict[str, float | None]) -> None:
        line = json.dumps({"step": step, "at_secs": time.time(), "metrics": metrics})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A line that was not completed, on a full disk, does not spoil this one.
            data = f"\n{line}\n".encode()
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                while data:
                    data = data[os.write(file, data) :]
            finally:
                os.close(file)
        except OSError as error:
            warnings.warn(f"cannot log metrics: {error}", RuntimeWarning, stacklevel=2)
        else:
            self._on_write()


def check(metrics: dict[str, Any]) -> dict[str, float | None]:
    """Returns the metrics as numbers; those that are not finite as None, because of JSON."""
    if not isinstance(metrics, dict):
        raise TypeError('metrics are logged by name, as in `job.log({"accuracy": 0.9})`')
    numbers: dict[str, float | None] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise ValueError(f"{name!r} cannot be the name of a metric; use 1 to 200 characters")
        try:
            number = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):
            kind = type(value).__name__
            raise TypeError(f"the metric `{name}` is a {kind}, not a number") from None
        numbers[name] = number if math.isfinite(number) else None
    return numbers


def numbers_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the metrics that are numbers, of what a library logs."""
    found = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(value, str):
                check({name: value})
                found[name] = value
    return found


class Logging:
    """The part of `Job` that logs."""

    _log: Log | None = None
    # What was logged before the loop and before there was a job, with the steps of a trainer.
    _early: list[tuple[dict[str, float], int | None]]
    _config: dict[str, Any] | None = None

    def log_config(self, config: dict[str, Any]) -> None:
        """Adds hyper-parameters to the run of W&B or MLflow (`--track`), before the first metric.

        Only numbers, strings and lists of these are kept. The options of the job and of its
        optimizer are there without it.
        """
        self._config = {**(self._config or {}), **_tracking.plain(config)}

    def log(self, metrics: dict[str, Any]) -> None:
        """Logs metrics by name, with the step of the job: `job.log({"accuracy": 0.9})`.

        Call it in every worker: the leader writes them, and if it is lost, another worker does. A
        metric has one value per step; the first one counts. `elasticdl status`, the job's page and
        TensorBoard show them. Without a job, they are printed.
        """
        from elasticdl._job import is_alone

        if self._add(metrics):
            return
        numbers = check(metrics)
        if is_alone():
            shown = [
                f"{name} {math.nan if value is None else value:.6g}"
                for name, value in numbers.items()
            ]
            print(f"step {self.step}: {', '.join(shown)}", flush=True)

    def log_from_trainer(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Logs what the trainer of another library logs, with its own step.

        It never fails the job: what is not a number is left out.
        """
        try:
            self._add(numbers_of(metrics), step)
        except ValueError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)

    def _log_early(self) -> None:
        """Logs what was logged before there was a job."""
        early, self._early = self._early, []
        for metrics, own_step in early:
            self._add(metrics, own_step)

    def _add(self, metrics: dict[str, Any], own_step: int | None = None) -> bool:
        """Logs in a job; returns whether this is one."""
        from elasticdl._job import job_folder

        folder = job_folder()
        if folder is None:
            if self.is_described and self._leads is None:
                numbers = check(metrics).items()
                kept = {name: math.nan if value is None else value for name, value in numbers}
                self._early.append((kept, own_step))
            return False
        if self._log is None:
            self._log = self._open_log(folder / "logged")
        is_after_step = self._turn is None or self._own.is_step
        self._log.add(self.step, metrics, self.is_leader, is_after_step, own_step)
        return True

    def _open_log(self, folder: Path) -> Log:
        if _tracking.service() is None:
            return Log(folder, self.worker_id)
        try:
            tracker = _tracking.Tracker(folder, lambda: self._is_over)
        except OSError as error:  # Training does not depend on it.
            _tracking.warn_of(error)
            return Log(folder, self.worker_id)
        return Log(folder, self.worker_id, lambda: tracker.start(self._hyper_parameters()))

    def _hyper_parameters(self) -> dict[str, Any]:
        """What is known of the optimizer, and what the script has added."""
        known = {"optimizer": type(self._optimizer).__name__} if self._optimizer else {}
        known |= _tracking.plain(getattr(self._optimizer, "defaults", {}))
        return {**known, **(self._config or {})}
