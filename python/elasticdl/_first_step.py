# SPDX-License-Identifier: Apache-2.0
"""The first step of a script, which shows its model, its data and who takes the optimizer steps.

Before a job starts, its script is run up to this step. Then it waits for the job, and continues as
its first worker. A script that is run without a job continues at once. In both cases, it continues
from the state before the step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from elasticdl import _fork_server
from elasticdl._own_step import OwnStep, Request
from elasticdl._zoo import ZooError

if TYPE_CHECKING:
    from elasticdl._job import Job

# Where the optimizer steps are taken.
_STEP = "ELASTICDL_STEP"
_CHOICES = ("auto", "rust", "python")
_STDIN = 0


class FirstStep:
    """Stands in for the job's loop.

    If the script calls `step()` of its optimizer in this step, it takes all steps.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model: Any = None
        self._choice = os.environ.get(_STEP, "auto")
        if self._choice not in _CHOICES:
            raise ZooError(f"{_STEP}={self._choice} is unknown; use {', '.join(_CHOICES)}")
        self.is_nested = False
        self._requests = self._make_requests()
        self._first_values: np.ndarray | None = None
        self._state: bytes | ZooError = b""

    @property
    def is_script(self) -> bool:
        is_wanted = self._choice == "python" or self.is_nested
        return self._choice != "rust" and (is_wanted or self._model is not None)

    def attach(self, model: Any) -> None:
        self._model = model

    def next(self) -> Request | None:
        return next(self._requests, None)

    def preemption(self) -> None:
        return None

    def upcoming(self, _n: int) -> list[tuple[np.ndarray, int]]:
        return []

    def computed(self, _loss: float) -> None:
        self._first_values = self._model.dense.copy()
        if not self.is_script:
            self._end(self._model.spec())

    def again(self) -> None:
        self._end(self._model.spec())

    def quit(self) -> None:
        """The loop was left before its first step."""
        self._requests = iter(())

    def end(self) -> tuple[int, bool]:
        return 0, True

    def state(self, dump: Callable[[], bytes]) -> None:
        # Rejected only if it turns out to be needed.
        try:
            self._state = dump()
        except ZooError as error:
            self._state = error

    def committed(self, own: OwnStep) -> None:
        """Chooses where the steps are taken if the user's code has not taken this one."""
        if own.n_calls > 0:
            return
        extra = own.objects.keys() - {"optimizer", "lr_schedule"} - _updated_after(own).keys()
        if extra:
            raise RuntimeError(
                f"`{min(extra)}` was registered, but the loop does not call `optimizer.step()`; "
                "call it between `job.allreduce(model)` and `job.commit()`"
            )
        own.unguard()
        try:
            spec = None
            if self._choice == "auto" and not own.is_changed and not _updated_after(own):
                self._model.check_options()
                spec = self._model.spec()
        except ZooError as error:
            # Rust would compute other numbers; `commit` takes the step, if the schedule allows it.
            self._model.check_schedule(error)
        else:
            if spec is not None:
                own.stop()
                return self._end(spec)
            self._model.check_schedule()
        own.guard()

    def stepped(self) -> None:
        if isinstance(self._state, ZooError):
            raise self._state
        self._job._own.check_state()
        self._end(self._model.script_spec(self._job._own.is_implicit), self._state)

    def _make_requests(self) -> Iterator[Request]:
        plan = self._job._plan
        # Computed even if the model is known, to report failures before the job is created.
        yield np.arange(min(plan.batch_size, plan.n_records), dtype=np.uint64), 0, 0, False
        yield "state", None, 0, False
        yield "step", (0, 0.0), 0, False

    def _end(self, spec: dict[str, Any], state: bytes = b"") -> None:
        """Everything is known; `state` is that before a step in Python."""
        kept = _updated_after(self._job._own)
        if kept and not state:
            raise ZooError(
                f"`{min(kept)}` was registered, but the job takes the optimizer steps, so it has "
                "no state of the script; start it without --step=rust, and pass model and "
                "optimizer to `elasticdl.init`"
            )
        plan = self._job._plan
        values = self._model.dense if self._first_values is None else self._first_values
        description = {
            "n_records": plan.n_records,
            "minibatch_size": plan.batch_size,
            "num_epochs": plan.epochs,
            "shuffle": plan.shuffle,
            "is_stream": self._job.is_stream,
            "model": spec,
        }
        self._finish(description, values, state)

    def _finish(self, description: dict[str, Any], values: np.ndarray, state: bytes) -> None:
        raise NotImplementedError


def _updated_after(own: OwnStep) -> dict[str, Any]:
    """Registered objects that need steps in Python, but not that the user's code takes them."""
    is_kept = "is_updated_after_steps"
    return {name: value for name, value in own.objects.items() if hasattr(value, is_kept)}


class Description(FirstStep):
    """Writes a description for the job that is about to start, and becomes its first worker.

    On a cluster, and if a trainer has loaded a checkpoint, the process ends instead. `join` makes
    this process the worker that an environment describes; it returns the job's loop.
    """

    def __init__(self, folder: Path, job: Job, join: Callable[[dict[str, str]], Any]) -> None:
        super().__init__(job)
        self._folder, self._join = folder, join

    def has_succeeded(self) -> bool:
        return False

    def fail(self, why: str) -> None:
        """There is no job yet that could fail; the exception is shown."""

    def _finish(self, description: dict[str, Any], values: np.ndarray, state: bytes) -> None:
        if state:
            (self._folder / "first_state.bin").write_bytes(state)
        values.astype("<f4").tofile(self._folder / "first_values.f32")
        partial = self._folder / "model.json.new"
        partial.write_text(json.dumps({**description, "continues": self._job.continues}))
        sys.stdout.flush()
        sys.stderr.flush()
        _fork_server.report_imports()
        # Last: once it exists, everything is there.
        partial.rename(self._folder / "model.json")
        if not self._job.continues:
            os._exit(0)
        worker = self._join(_wait_for_job())
        np.copyto(self._model.incoming, values)
        worker.attach(self._model)
        self._job._replace_loop(worker)
        if state:
            # Now, because the trainers of other libraries go back to it.
            self._job._own.load(state)


def _wait_for_job() -> dict[str, str]:
    """Waits for the environment of a worker; ends this process if there is no job."""
    line = b""
    while not line.endswith(b"\n"):
        # What follows it is for the worker.
        byte = os.read(_STDIN, 1)
        if not byte:
            os._exit(0)
        line += byte
    return json.loads(line)["env"]


class Alone(FirstStep):
    """Continues without a job: this process trains all lanes of every step."""

    def __init__(self, job: Job, worker: Callable[[Any], Any]) -> None:
        super().__init__(job)
        self._worker = worker

    def has_succeeded(self) -> bool:
        return True

    def _finish(self, description: dict[str, Any], values: np.ndarray, state: bytes) -> None:
        from elasticdl import _elasticdl

        text, values = json.dumps(description), values.astype(np.float32)
        worker = self._worker(_elasticdl.Loop.alone(text, values, state, self._job.lanes))
        worker.attach(self._model)
        self._job._replace_loop(worker)
