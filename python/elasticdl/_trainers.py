# SPDX-License-Identifier: Apache-2.0
"""What the adapters for trainers of other libraries share.

A trainer has its own loop, with counters that a worker of a job cannot follow: a worker that
joins starts in the middle of an epoch, and one that was behind continues with the state of another
worker. An adapter therefore registers the trainer's counters as state of the job, and enters the
trainer's loop again at the right place whenever state was loaded.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from elasticdl import _job
from elasticdl._zoo import ZooError

_JOB: _job.Job | None = None
# What adapters do when this process joins its job.
ON_JOIN: list[Callable[[_job.Job], None]] = []
# Whether a training has begun in this process.
_HAS_TRAINED = False

# How long other workers wait for a file that the leader writes.
_LEADER_SECS = 10.0
_POLL_SECS = 0.02


def job() -> _job.Job | None:
    """Returns the job of this process, or None if it was not started by one."""
    global _JOB
    if _JOB is None and is_worker():
        _JOB = _job.init()
        for prepare in ON_JOIN:
            prepare(_JOB)
    return _JOB


def is_worker() -> bool:
    """Whether a job has started this process."""
    # Loader processes that are spawned import the script again, and have its environment.
    is_child = multiprocessing.parent_process() is not None
    return not is_child and (is_described() or bool(os.environ.get(_job._MASTER_ADDR)))


def is_described() -> bool:
    """Whether this process only shows what the script trains, before the job exists."""
    return bool(os.environ.get(_job._DESCRIBE))


def begin(what: str) -> None:
    """Training begins, because of `what`; a job trains once, no matter how."""
    global _HAS_TRAINED
    if _HAS_TRAINED:
        raise ZooError(
            f"{what}, but this script has already trained, and a job trains once; to train again, "
            "write a second script that loads the saved model, and run it as another job"
        )
    _HAS_TRAINED = True


def wait_for_leader(path: Any) -> None:
    """Waits for a file that the leader writes, and which this worker is about to read.

    If the file does not appear, the caller fails to read it.
    """
    end = time.monotonic() + _LEADER_SECS
    while not os.path.exists(path) and time.monotonic() < end:
        time.sleep(_POLL_SECS)


class Moved(Exception):
    """This worker continues with the state of another one, maybe after another step."""


class Feed:
    """The steps of a job, for a loop that asks for one more than it takes.

    `has_step` waits for the next step without taking it. A step is an iterator over this worker's
    batches.
    """

    def __init__(self, job: _job.Job, steps: Iterator[Iterator[Any]]) -> None:
        self._job = job
        self._steps: Any = steps
        self._next: Iterator[Any] | None = None
        self.is_over = False
        # The random numbers of a step that was put back.
        self._random: tuple[Any, ...] | None = None

    def has_step(self) -> bool:
        """Ends the step that was taken and waits for the next one; False at the end of the job."""
        if self._next is None and not self.is_over:
            self._next = next(self._steps, None)
            self.is_over = self._next is None
        return not self.is_over

    def take(self) -> Iterator[Any]:
        """Returns the batches of the next step."""
        if not self.has_step():
            return iter(())
        taken, self._next = self._next, None
        return taken or iter(())

    def pass_over(self) -> None:
        """Takes the next step without reading its records or changing anything."""
        self._job.is_passing_over = True
        for _ in self.take():
            pass
        self._job.is_passing_over = False
        if self._job.is_step:
            self._job.pass_over()

    def move(self) -> Moved:
        """Puts the current step back, after its batches, because state was loaded in it."""
        if self._job.is_step:
            self._next, self._random = iter(()), _random_state()
        return Moved()

    def begin_step(self) -> None:
        """Sets the random numbers of a step that was put back."""
        if self._random is not None:
            _set_random_state(self._random)
            self._random = None

    def end(self) -> None:
        """Ends the job, or waits for its end after the last step."""
        if self.is_over:
            return
        if self._job.step + 1 < self._job.total_steps:
            self._job.stop()
        if self.has_step():
            raise RuntimeError("the trainer ended before the job")


class Kept:
    """The state of something that is not to be guarded by the job, such as a scheduler."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._value.load_state_dict(state)


class Progress:
    """The state of a trainer between two steps, as part of the job's state.

    A trainer's loop begins a step before the worker computes its batches, and the job can ask for
    the state while it does. `mark` keeps the state from before the step for this time.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        # The number of logs before the step.
        self._n_logs = 0
        self._loaded: dict[str, Any] | None = None
        # Whether state was loaded since the trainer's loop was at the place of its state.
        self.has_moved = False

    def collect(self) -> dict[str, Any]:
        """Returns the state of the trainer."""
        raise NotImplementedError

    def apply(self, state: dict[str, Any]) -> None:
        """Sets the state of the trainer; it may keep parts of `state`."""
        raise NotImplementedError

    def logs(self) -> list[Any]:
        """Returns the logs of the trainer: a list that only grows, and that can be long."""
        return []

    def mark(self) -> None:
        """A step begins."""
        self._before = copy.deepcopy(self.collect())
        self._n_logs = len(self.logs())

    def unmark(self) -> None:
        """The trainer takes the step."""
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        state, logs = self._before, self.logs()
        if state is None:
            state = self.collect()
        else:
            logs = logs[: self._n_logs]
        return {**state, "logs": logs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._loaded, self.has_moved = None, state, True
        self.apply(copy.deepcopy(state))

    def settle(self) -> None:
        """The trainer's loop is at the place of its state: undoes what it did on the way there."""
        if self._loaded is not None:
            self.apply(copy.deepcopy(self._loaded))
        self._loaded, self.has_moved = None, False


def job_seed() -> int | None:
    """The seed with which the job shuffles records, once there is a job."""
    folder = _job.job_folder()
    return None if folder is None else json.loads((folder / "job.json").read_text())["seed"]


class Origin:
    """The checkpoint of a trainer that a job starts from, as part of the job's state.

    `order` is what decides which records each step trains, and `step` is the number of steps before
    the checkpoint. The process that describes the job sets both; workers get them from the job,
    because the checkpoint may be gone when a worker joins.
    """

    def __init__(self, argument: str) -> None:
        # What the user has written, for messages.
        self._argument = argument
        self._order: dict[str, int] = {}
        self.step: int | None = None

    def start(self, found: dict[str, int] | None, order: dict[str, int], step: int) -> None:
        """Starts the job at a checkpoint that has `found` as the order of its records."""
        if not found:
            raise self.refusal(
                "no job has written it, so it does not say which records were trained; load its "
                "weights instead, or continue a job with `elasticdl run --resume JOB`"
            )
        check_order(self._argument, found, order)
        self._order, self.step = dict(found), step

    def check_left(self, n_steps: int) -> None:
        """Rejects a checkpoint after which there is nothing to train."""
        if self.step is not None and self.step >= n_steps:
            raise self.refusal(
                f"it was written after step {self.step}, and this job has {n_steps} steps; train "
                "more epochs"
            )

    def is_after(self, step: int) -> bool:
        """Whether a step was taken before the checkpoint; False as long as it is not known."""
        return self.step is not None and step < self.step

    def refusal(self, why: str) -> ZooError:
        return ZooError(f"{self._argument} cannot start a job: {why}")

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self.step = state["order"], state["step"]
        check_order(self._argument, self._order, {})


def check_order(argument: str, found: dict[str, int], order: dict[str, int]) -> None:
    """Rejects a checkpoint whose steps have trained other records than those of this job."""
    seed = job_seed()
    ours = order if seed is None else {**order, "seed": seed}
    for name, value in ours.items():
        if found.get(name, value) != value:
            raise ZooError(
                f"{argument} was written by a job with {name}={found[name]}, but this one has "
                f"{value}, so its steps train other records; use the same value"
            )


def split(collate: Callable[[list[Any]], Any], size: int, records: list[Any]) -> list[Any]:
    """Makes the batches of a lane, each with at most `size` records."""
    return [collate(records[first : first + size]) for first in range(0, len(records), size)]


def _random_state() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    return of_torch, np.random.get_state(), random.getstate()


def _set_random_state(state: tuple[Any, ...]) -> None:
    of_torch, of_numpy, of_python = state
    if of_torch is not None:
        sys.modules["torch"].set_rng_state(of_torch)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
