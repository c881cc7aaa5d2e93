# SPDX-License-Identifier: Apache-2.0
"""Runs a custom training loop as a worker of a job.

The job's loop, in Rust, runs on a separate thread and decides which records come next. Each pass
that it requests is one iteration of the user's loop. The job takes the optimizer steps in Rust, or
the loop takes them (`_own_step.py`); in both cases, the state of the optimizer is part of the job.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import dis
import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from elasticdl import _output, _records, _stacks, _stream, _tracking
from elasticdl._best import Best
from elasticdl._evaluate import Evaluating
from elasticdl._first_step import Alone, Description
from elasticdl._log import Logging
from elasticdl._own_step import OwnStep, Request
from elasticdl._zoo import ZooError

# Set if the script only has to describe its model and data: the folder for the description.
_DESCRIBE = "ELASTICDL_DESCRIBE"
_MASTER_ADDR = "ELASTICDL_MASTER_ADDR"
_WORKER_ID = "ELASTICDL_WORKER_ID"
# Default: the folder of the key file.
_JOB_DIR = "ELASTICDL_JOB_DIR"
_KEY_FILE = "ELASTICDL_JOB_KEY_FILE"
_IN_POD = "ELASTICDL_IN_POD"
# Set if a supervisor holds the standard input of this process.
_SUPERVISED = "ELASTICDL_SUPERVISED"
_LANES = "ELASTICDL_LANES"
# The number of workers that the job started with.
_WORLD_SIZE = "ELASTICDL_WORLD_SIZE"
# The folder of the trained model.
_OUTPUT = "ELASTICDL_OUTPUT"

# Signals that the worker handles during the loop.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# How long the master may take to write the final status after it has notified its workers.
_STATUS_DELAY_SECS = 1.0
# On shared storage, a new file becomes visible later.
_SHARED_STATUS_DELAY_SECS = 6.0
_ENDS = ("succeeded", "failed", "stopped")


_LEFT = (
    "the script exited before the job was done; iterate over `job.batches(…)` to its end, or end "
    "training with `break` or `job.stop()`"
)
# The instructions by which `break` and `return` drop the iterator of a loop.
_DROPS = ("POP_TOP", "POP_ITER")


_REQUESTED_TWICE = (
    "the job's batches were requested twice; request them once, with the number of epochs: "
    "`job.batches(dataset, epochs=3)`, or once in each epoch of `for epoch in job.epochs(3)`"
)
_OTHER_BATCHES = (
    "the batches of an epoch are not those of the epoch before; request the same dataset, batch "
    "size, order and loader options in every epoch"
)
_OTHER_STREAM = (
    "`epoch_steps` or the batch size of the stream is not what the job started with; restore it, "
    "or start a new job"
)


def init(
    model: Any = None,
    optimizer: Any = None,
    lr_schedule: Any = None,
    schedule_every: str | None = None,
    **state: Any,
) -> Job:
    """Makes this process a worker of the job that started it.

    Without a job, the process trains alone, with the same result as a job of as many lanes.

    `model` is a `torch.nn.Module`, `optimizer` is the `torch.optim.Optimizer` of its parameters,
    and `lr_schedule` is an `LRScheduler` or a function from the step to the learning rate. With
    `schedule_every="epoch"`, it counts epochs instead of steps. You can also pass them later to
    `Job.attach`.

    If your loop calls `optimizer.step()`, pass everything else that a step depends on or changes by
    any name, for example `scheduler=scheduler, ema=ema`: objects with `state_dict` and
    `load_state_dict`. New workers and checkpoints then get their state.

    This call seeds torch, numpy and `random` with the same seed in every worker, so data that is
    generated or split at random afterwards is the same in all workers.
    """
    folder = os.environ.get(_DESCRIBE)
    if folder:
        job = Job(lambda job: Description(Path(folder), job, job._join))
        sys.excepthook = _show_shortly
    elif os.environ.get(_MASTER_ADDR):
        job = Job(_open_loop)
        job._watch()
    else:
        job = Job(lambda job: Alone(job, _Worker))
    if not is_alone():
        _tracking.check()
    _records.reseed(0)
    job.attach(model, optimizer, lr_schedule, schedule_every, **state)
    return job


@dataclass(frozen=True)
class Plan:
    """The data that the loop trains on, and for how long."""

    n_records: int
    batch_size: int
    epochs: int
    shuffle: bool

    def __post_init__(self) -> None:
        for name in ("n_records", "batch_size", "epochs"):
            number = getattr(self, name)
            if number < 1:
                what = "the dataset has no records" if name == "n_records" else f"{name}={number}"
                raise ValueError(f"{what}; at least 1 is required")

    def epoch_steps(self, n_lanes: int) -> int:
        """Returns the number of steps per epoch."""
        return -(-self.n_records // (self.batch_size * n_lanes))


class Job(Evaluating, Logging):
    """The connection of a worker to its job.

    One iteration of the loop takes a batch and calls `allreduce` and `commit`. A batch may be
    processed more than once: by the same worker, if the job did not know its model yet or compares
    the results of machines, and by another worker, if a worker was lost before the step was taken.
    Even so, each record is committed exactly once per epoch. The result of an iteration must
    therefore depend only on its batch and the model. torch, numpy and `random` are reseeded for
    each iteration.

    Between two iterations, the model has the parameters of the previous iteration. After the last
    one, it has the final parameters of the job.
    """

    def __init__(self, open_loop: Callable[[Any], Any]) -> None:
        self._open_loop = open_loop
        self._loop: Any = None
        self._is_over = False
        self._turn: _Turn | None = None
        self._module: Any = None
        # The module as it was passed, perhaps compiled.
        self._passed: Any = None
        self._optimizer: Any = None
        self._schedule: Any = None
        self._schedule_every: str | None = None
        self._model: Any = None
        self._plan: Plan | None = None
        self._own = OwnStep(self._set_place)
        self._leads: bool | None = None
        # Of the random numbers of this iteration.
        self._seed = 0
        # Reads batches with other processes.
        self._read: Callable[[np.ndarray], Any] | None = None
        # The contents of the dataset, the collate function and the options of the loader.
        self._read_from: Any = None
        self._close_reader: Callable[[], None] = lambda: None
        # The number of epochs and the epoch of this iteration, if the script loops over epochs.
        self._n_epochs: int | None = None
        self._epoch = 0
        # Whether the batches of an epoch were requested and not all of them were taken.
        self._is_in_epoch = False
        # A batch that was received and not passed on yet.
        self._pending: Request | None = None
        # The last step, if the script has ended training.
        self._stop_after: int | None = None
        # Whether this process can train after it has described the job.
        self.continues = _SUPERVISED in os.environ
        # Shows uncaught exceptions.
        self._show = sys.excepthook
        self._early = []
        # Whether the next steps change nothing; their records are not read.
        self.is_passing_over = False
        # The data, if it is a stream, whose records have no numbers.
        self._stream: _stream.Stream | None = None
        self.worker_id = int(os.environ.get(_WORKER_ID, "0"))
        # The number of workers that the job started with; it may have others now.
        self.world_size = int(os.environ.get(_WORLD_SIZE, "1"))
        # Micro-batches per step of the job.
        self.lanes = int(os.environ.get(_LANES, "1"))
        # Steps that the job has taken before this iteration; the same in every worker.
        self.step = 0

    @property
    def rank(self) -> int:
        """The number of this worker. New workers get new numbers, so it may exceed `world_size`."""
        return self.worker_id

    @property
    def is_leader(self) -> bool:
        """Whether this worker should write files and print.

        Before the loop, worker 0 leads. In the loop and after it, the worker that trains the first
        micro-batch of each step does: if it is lost, another worker leads from the next step on. In
        the first iteration of a new worker, which checks its results, it does not lead.
        """
        return self.worker_id == 0 if self._leads is None else self._leads

    @property
    def module(self) -> Any:
        """The model, without wrappers."""
        return self._module

    @property
    def is_stream(self) -> bool:
        """Whether the data is a stream."""
        return self._stream is not None

    @property
    def is_described(self) -> bool:
        """Whether this is the first step of the script, before the job."""
        return _DESCRIBE in os.environ

    @property
    def is_rehearsal(self) -> bool:
        """Whether the script only runs up to its first step here, and workers run it again."""
        return self.is_described and not self.continues

    @property
    def is_step(self) -> bool:
        """Whether the parameters have the gradients of a step that your code takes now.

        It is false after `allreduce` if this worker has more batches in the step. Calls to `step()`
        and `update()` of registered objects then do nothing.
        """
        return self._own.is_step

    @property
    def next_step(self) -> int:
        """The step of the batch that the job waits for, or that was taken."""
        pending = self._own.pending
        return self.step if pending is None else pending[2]

    @property
    def steps_taken(self) -> int:
        """The number of steps that the model of this worker has taken."""
        return self.step + self._own.is_taken

    @property
    def has_ended(self) -> bool:
        """Whether the job has trained its last step, so that this worker has the final model."""
        return self._loop is not None and self._is_over

    def pass_over(self) -> None:
        """Takes a step that leaves the model and the optimizer as they are."""
        self._own.pass_over()

    @property
    def loss(self) -> float | None:
        """The mean loss over all records of the step that your code takes; same in every worker.

        It is None before the first step, and if the job takes the steps.
        """
        return self._own.loss

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of an epoch, once the batches were requested."""
        if self._plan is None:
            raise RuntimeError(
                "the number of steps is not known yet; first call `job.batches(…)` or create the "
                "`ElasticSampler`"
            )
        return self._plan.epoch_steps(self.lanes)

    @property
    def total_steps(self) -> int:
        """The number of steps of all epochs, once the batches were requested."""
        return self.steps_per_epoch * (self._plan.epochs if self._plan else 0)

    @property
    def epoch(self) -> int:
        """The number of epochs before this iteration."""
        return self.step // self.steps_per_epoch

    def attach(
        self,
        model: Any = None,
        optimizer: Any = None,
        lr_schedule: Any = None,
        schedule_every: str | None = None,
        **state: Any,
    ) -> None:
        """Sets the model, optimizer and schedule of the job; omitted arguments are unchanged.

        From then on, the job manages the model's parameters. Parameters that are not in an
        optimizer are frozen. `state` is as for `init`.
        """
        for name, value in state.items():
            if self._model is not None and self._model.depends_on(value):
                raise RuntimeError(
                    f"`{name}` was attached after the model and the optimizer; pass all of them to "
                    "the same call"
                )
            if hasattr(value, "param_groups"):
                from elasticdl import _torch_loop

                _torch_loop.check_kind(value)
            self._own.register(name, value)
            if isinstance(value, Best):
                value.connect(self)
        if model is not None:
            self._attach_module(model)
        if optimizer is not None:
            self._attach_optimizer(optimizer)
        if lr_schedule is not None:
            if self._model is not None:
                raise RuntimeError(
                    "the learning-rate schedule was attached after the optimizer; pass both to "
                    "`job.attach(model, optimizer, lr_schedule)`"
                )
            self._schedule, self._schedule_every = lr_schedule, schedule_every
        if self._model is None and self._module is not None and self._optimizer is not None:
            from elasticdl._torch_loop import LoopModel

            registered = list(self._own.objects.values())
            self._model = LoopModel(
                self._passed, self._optimizer, self._schedule, self._schedule_every, registered
            )
            if hasattr(self._schedule, "state_dict"):
                self._own.register("lr_schedule", self._schedule)
            self._connect()

    def attach_trained(self, model: Any, optimizer: Any, **state: Any) -> None:
        """Like `attach`, for a model that has what the loop calls of a `LoopModel`."""
        for name, value in {"optimizer": optimizer, **state}.items():
            self._own.register(name, value)
        self._optimizer = optimizer
        self._model = self._module = self._passed = model
        self._connect()

    def batches(
        self,
        dataset: Any,
        batch_size: int = 64,
        epochs: int = 1,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> Iterator[Any]:
        """Iterates over the batches assigned to this worker until the end of the job.

        `dataset` has a length and one item per record: a map-style `Dataset`, a list, an array, a
        tensor, or a tuple of arrays or tensors, which gives tuples of their rows. `collate` turns
        items into a batch; the default is that of `DataLoader`. A stream (`elasticdl.data.stream`)
        is read in order, whatever `shuffle` is.

        `loader` are options of `DataLoader`. With `num_workers=4`, four other processes read the
        batches ahead; `prefetch_factor`, `pin_memory`, `worker_init_fn`, `timeout` and
        `multiprocessing_context` have the same meaning as there. Other options are rejected, except
        `persistent_workers`: the processes run until the end of the job in any case.

        A step of the job consists of one batch for each of its lanes. The iterator covers all
        `epochs`, so call this method only once; or call it once in each epoch of `job.epochs(…)`.
        """
        fetch, n_records, shuffle = self._data(dataset, batch_size, shuffle, collate)
        read = self._reader(fetch, loader)
        return map(read, self.records(n_records, batch_size, epochs, shuffle))

    def steps(
        self,
        dataset: Any,
        batch_size: int = 64,
        epochs: int = 1,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        **loader: Any,
    ) -> Iterator[Iterator[Any]]:
        """Iterates over the steps of the job; each step iterates over this worker's batches.

        Compute the gradients of each batch in the inner loop, and take the step after it:

            for step in job.steps(dataset, batch_size=64):
                for x, y in step:
                    loss_of(model(x), y).backward()
                optimizer.step()

        The arguments are those of `batches`. A worker may have no batch in a step.
        """
        fetch, n_records, shuffle = self._data(dataset, batch_size, shuffle, collate)
        read = self._reader(fetch, loader)
        self._open(n_records, batch_size, epochs, shuffle)
        self._loop.is_nested = True
        return self._steps(read)

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """Iterates over the epochs, for scripts with a loop over epochs:

            for epoch in job.epochs(3):
                for x, y in job.batches(dataset, batch_size=64):
                    ...

        What follows the inner loop belongs to the last step of the epoch. A worker that joins later
        starts with the epoch of the job, after one batch of the first epoch that checks it.
        """
        if self._n_epochs is not None or self._loop is not None:
            raise RuntimeError(
                "`job.epochs(…)` was called after the job's batches were requested; call it once, "
                "in the outermost loop"
            )
        self._n_epochs = n_epochs
        if self._plan is not None:
            self._plan = dataclasses.replace(self._plan, epochs=n_epochs)
        return self._epoch_numbers()

    def stop(self) -> None:
        """Ends training after this step, in all workers.

        The iterator of the batches then ends. The job succeeds with the model of this step, even if
        only one worker calls this.
        """
        self.stop_after(self.step)

    def stop_after(self, step: int) -> None:
        """Ends training after a step that may be complete."""
        self._stop_after = step

    def print(self, *values: Any, **options: Any) -> None:
        """Prints in the leader only."""
        if self.is_leader:
            print(*values, **{"flush": True, **options})

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clips the gradient of the step, after `allreduce` and before `optimizer.step()`.

        Returns its norm before, or None if this worker has more batches in this step.
        """
        if not self._own.is_on:
            raise RuntimeError(
                "`job.clip_grad_norm()` was called, but there is no gradient of a step yet, or the "
                "job takes the steps; call it after `job.allreduce(model)`, and with --step=rust "
                "use --clip_norm instead"
            )
        self._own.is_changed = True
        return self._model.clip(max_norm, norm_type) if self._own.is_step else None

    def records(
        self, n_records: int, batch_size: int = 64, epochs: int = 1, shuffle: bool = True
    ) -> Iterator[np.ndarray]:
        """Like `batches`, but returns only the indices of the records (int64)."""
        self._open(n_records, batch_size, epochs, shuffle)
        return self._turns()

    def _data(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        collate: Callable[[list[Any]], Any] | None,
    ) -> tuple[_records.Fetch | _stream.Fetch, int, bool]:
        """Returns what makes batches, the number of records, and whether the job shuffles them."""
        if self._stream is not None and dataset is not self._stream:
            raise RuntimeError(_OTHER_BATCHES)
        if not isinstance(dataset, _stream.Stream):
            return _records.Fetch(dataset, collate), _records.count(dataset), shuffle
        self._stream = dataset
        n_records = dataset.epoch_steps * self.lanes * batch_size
        folder = job_folder()
        if folder is not None:
            spec = json.loads((folder / "job.json").read_text())
            given = f"stream:{n_records}", batch_size
            if (spec["training_data"], spec["minibatch_size"]) != given:
                raise RuntimeError(_OTHER_STREAM)
        dataset.connect(folder)
        return _stream.Fetch(dataset, self, batch_size, collate), n_records, False

    def _reader(
        self, fetch: _records.Fetch | _stream.Fetch, loader: dict[str, Any]
    ) -> Callable[[np.ndarray], Any]:
        """Returns a function that reads the batch of an iteration, with these loader options.

        Processes of the loader start now: once the job is open, they would share its connections.
        """
        _records.check_options(loader)
        if loader and self.is_stream:
            raise TypeError(
                f"the loader option `{min(loader)}` does not work with a stream, which is read in "
                "the process of the worker; omit it"
            )
        if not loader and self._read is None:
            return lambda records: _records.read_here(fetch, records, self._seed)
        request = _records.contents((fetch.dataset, fetch.collate, loader))
        if self._loop is None:
            from elasticdl import _read_ahead

            reader = _read_ahead.Reader(fetch, loader)
            self._close_reader = reader.close
            self._read = lambda records: reader.read(records, self._seed, self._loop.upcoming)
            self._read_from = request
        elif self._n_epochs is None:
            raise RuntimeError(_REQUESTED_TWICE)
        elif self._read is None or not _records.is_same(self._read_from, request):
            # The processes have the dataset and the options of the first epoch.
            raise RuntimeError(_OTHER_BATCHES)
        return self._read

    def _open(self, n_records: int, batch_size: int, epochs: int, shuffle: bool) -> None:
        before = self._plan
        self.plan(n_records, batch_size, epochs, shuffle)
        if self._loop is None:
            self._loop = self._open_loop(self)
            self._connect()
        elif self._n_epochs is None or self._is_in_epoch:
            raise RuntimeError(_REQUESTED_TWICE)
        elif self._plan != before:
            raise RuntimeError(_OTHER_BATCHES)
        self._is_in_epoch = True

    def plan(self, n_records: int, batch_size: int, epochs: int, shuffle: bool) -> None:
        """Sets the data of the loop, from which the number of steps follows."""
        if self._n_epochs is not None:
            if epochs not in (1, self._n_epochs):
                raise RuntimeError(
                    f"the number of epochs is both {epochs} and {self._n_epochs}; pass it to "
                    "`job.epochs(…)` only"
                )
            epochs = self._n_epochs
        self._plan = Plan(n_records, batch_size, epochs, shuffle)

    @property
    def steps_per_iteration(self) -> int:
        """The number of steps that one iterator of the batches covers."""
        return self.total_steps if self._n_epochs is None else self.steps_per_epoch

    def allreduce(self, model: Any = None, loss: Any = None) -> None:
        """Passes the gradients of this iteration to the job and clears them.

        `loss` is the mean loss of the batch, for reports.
        """
        turn = self._current("allreduce")
        if turn.is_reduced:
            raise RuntimeError(
                "`job.allreduce()` was called twice for one batch; call it once, after all calls "
                "to `backward()`"
            )
        self.attach(model)
        self._check_known()
        if self._own.is_on:
            self._own.hand_over(_number(loss))
        elif turn.has_parameters:
            self._model.take()
        turn.is_reduced = True
        turn.loss = loss

    # The same call works with and without parameter servers.
    push = allreduce

    def pull(self, model: Any = None) -> None:
        """Does nothing: the model gets the job's parameters before each iteration."""
        self.attach(model)

    def commit(self, loss: Any = None) -> None:
        """Ends the iteration: the job can take the step and mark the batch's records as done.

        If your code takes the steps, it has taken this one before the call.
        """
        turn = self._current("commit")
        if not turn.is_reduced:
            raise RuntimeError(
                "`job.commit()` was called before `job.allreduce(model)`; call `allreduce` first"
            )
        self._turn = None
        if self._own.is_on:
            self._loop.committed(self._own)
            if self._own.is_on:
                self._own.commit(self._is_schedule_due(), is_open=self._ends_epoch())
        elif turn.has_parameters:
            loss = turn.loss if loss is None else loss
            self._loop.computed(_number(loss))
        else:
            self._loop.again()

    def preemption(self) -> float | None:
        """Returns None, or the seconds until this process ends.

        A number means that the job was asked to stop or this worker was asked to exit. The job
        saves its own state; use the time to save anything else. After the iteration in progress,
        `batches` raises `SystemExit`, so a `finally` block around the loop also runs in time.
        """
        return None if self._loop is None else self._loop.preemption()

    def _attach_module(self, model: Any) -> None:
        from elasticdl import _torch_loop

        module = _torch_loop.bare(model)
        if self._module is None:
            _torch_loop.check_model(module)
            self._module, self._passed = module, model
        elif self._module is not module:
            raise RuntimeError("the job already has another model; it can only train one")

    def _attach_optimizer(self, optimizer: Any) -> None:
        from elasticdl import _torch_loop

        bare = _torch_loop.bare_optimizer(optimizer)
        if self._optimizer is None:
            _torch_loop.check_optimizer(bare)
            self._own.register("optimizer", bare)
            self._optimizer = bare
        elif self._optimizer is not bare:
            raise RuntimeError("the job already has another optimizer; it can only use one")

    def _connect(self) -> None:
        """Connects the model to the loop once both exist."""
        if self._loop is not None and self._model is not None:
            self._model.keep()
            self._model.plan(self.total_steps, self.steps_per_epoch)
            self._loop.attach(self._model)

    def _check_known(self) -> None:
        if self._module is None:
            raise RuntimeError("the job does not know the model; call `job.allreduce(model)`")
        if self._optimizer is None:
            raise RuntimeError(
                "the job does not know the optimizer and cannot take steps; call "
                "`job.attach(model, optimizer)` before the loop"
            )

    def _current(self, call: str) -> _Turn:
        if self._turn is None:
            raise RuntimeError(
                f"`job.{call}()` was called without a batch; call it once per iteration of "
                "`for batch in job.batches(…)`"
            )
        return self._turn

    def _replace_loop(self, loop: Any) -> None:
        """Continues with another loop, which waits for nothing yet."""
        self._loop = loop
        self._own.replace_loop(loop)

    def _epoch_numbers(self) -> Iterator[int]:
        with self._leaving():
            yield 0
            while not self._is_over:
                if self._loop is None or self._is_in_epoch:
                    raise RuntimeError(
                        "the next epoch was requested before the end of this one; iterate over its "
                        "batches to the end. To end training early, call `job.stop()`, or leave "
                        "the loop over epochs, too"
                    )
                request = self._peek()
                if request is None:
                    return
                self._epoch = request[2] // self.steps_per_epoch
                yield self._epoch

    def _turns(self) -> Iterator[np.ndarray]:
        with self._leaving(is_inner=self._n_epochs is not None):
            while True:
                # The user's own step needs no `commit`.
                if self._turn is not None and not (self._own.is_on and self._turn.is_reduced):
                    raise RuntimeError(
                        "the next batch was requested before `job.commit()`; call it at the end of "
                        "each iteration, and set `num_workers` only for the `DataLoader` of torch"
                    )
                if self._is_epoch_over():
                    break
                yield self._begin(self._take())
        self._is_in_epoch = False

    def _steps(self, fetch: Callable[[np.ndarray], Any]) -> Iterator[Iterator[Any]]:
        with self._leaving(is_inner=self._n_epochs is not None):
            while not self._is_epoch_over():
                if not self._own.is_on:
                    raise RuntimeError(
                        "`job.steps()` needs steps that your code takes, but the job takes them; "
                        "use `job.batches()`, or start the job without --step=rust"
                    )
                yield self._lanes(fetch)
                is_whole = self._own.is_step or self._own.is_over or self._skips_epochs()
                if not is_whole:
                    raise RuntimeError(
                        "the next step was requested before the last batch of this one; iterate "
                        "over each step of `job.steps(…)` to its end"
                    )
        self._is_in_epoch = False

    def _is_epoch_over(self) -> bool:
        """Whether the iterator of the batches ends: with the epoch, or with the job."""
        if self._ends_epoch() and self._own.is_taken:
            return True  # The step stays open for what follows the loop.
        request = self._peek()
        if request is None:
            return True
        if self._own.is_on:
            return self._skips_epochs()
        is_over = self._is_of_other_epoch(request)
        if is_over and self._model is not None:
            self._model.receive()
        return is_over

    def _is_of_other_epoch(self, request: Request) -> bool:
        return self._n_epochs is not None and request[2] // self.steps_per_epoch != self._epoch

    def _skips_epochs(self) -> bool:
        """Whether this worker has not trained the last step of this epoch: it was new, or went back
        to a checkpoint. What follows the loop then changes nothing.
        """
        request = self._own.pending
        is_skipped = request is not None and self._is_of_other_epoch(request)
        if is_skipped:
            self._own.idle()
        return is_skipped

    def _ends_epoch(self) -> bool:
        """Whether this step is the last one of an epoch of `epochs`."""
        return self._n_epochs is not None and (self.step + 1) % self.steps_per_epoch == 0

    def _peek(self) -> Request | None:
        """Waits for the next batch, which stays the next one; None at the end of training."""
        if self._is_over and self._loop is not None and self._pending is None:
            return None
        request = self._pending or self._next(self._own.peek)
        self._pending = None if self._own.is_on else request
        if request is not None and self._stop_after is not None and request[2] > self._stop_after:
            self._leave()
            return None
        return request

    def _take(self) -> Request:
        """Returns the batch that `_peek` has found."""
        turn, self._pending = self._pending, None
        return self._own.next_turn() if turn is None else turn

    def _lanes(self, fetch: Callable[[np.ndarray], Any]) -> Iterator[Any]:
        while not self._skips_epochs() and (turn := self._own.next_lane()) is not None:
            records = self._begin(turn)
            yield None if self.is_passing_over else fetch(records)
            if self._turn is not None and not self._turn.is_reduced:
                self.allreduce()
            self._turn = None

    def _begin(self, turn: Request) -> np.ndarray:
        """Prepares an iteration; returns the indices of its records."""
        records, seed, step, leads = turn
        self._seed = seed
        self._set_place(step, leads)
        self._turn = _Turn(has_parameters=self._model is not None)
        if self._model is not None:
            self._model.begin(seed, step)
        else:
            _records.reseed(seed)
        return records.astype(np.int64)

    def _set_place(self, step: int, leads: bool) -> None:
        self.step, self._leads = step, leads
        if self._log is not None:
            self._log.at(step, leads)

    def _is_schedule_due(self) -> bool:
        """Whether a schedule that the job was given advances after this step."""
        is_last = (self.step + 1) % self.steps_per_epoch == 0
        return is_last or not self._model.is_per_epoch

    def _next(self, own_next: Callable[[], Request | None]) -> Request | None:
        self._turn = None
        if self._own.is_on:
            turn = own_next()
        else:
            self._is_over = True  # If the job's loop has failed.
            turn = self._loop.next()
            self._is_over = turn is None
            if turn is not None and self._loop.is_script:
                self._own.start(self._loop, self._model, turn)
                turn = own_next()
        if turn is None:
            self._end()
        return turn

    @contextlib.contextmanager
    def _leaving(self, is_inner: bool = False) -> Iterator[None]:
        """Ends training if the user's code leaves the loop, by `break` or `return`.

        An inner loop is not enough: the loop around it follows, or requests the next epoch.
        """
        try:
            yield
        except GeneratorExit:
            is_open = self._loop is not None and not self._is_over
            if is_inner or not is_open or not _is_dropped(sys._getframe()):
                raise
            try:
                self._leave()
            except BaseException as error:
                # It cannot be raised here: the interpreter ignores it, and the code after the loop
                # would run with a model that is not the final one.
                _exit_with(error)
            raise

    def _leave(self) -> None:
        """Ends training with the steps that were taken, and waits for the end of the job."""
        is_asked = self._turn is not None or self._pending is not None
        self._turn = self._pending = None
        if self._own.is_on:
            is_asked = self._own.leave()
        if is_asked:
            self._loop.quit()
        while (request := self._loop.next()) is not None:
            if not self._own.serve(request):
                self._loop.quit()
        self._end()

    def _end(self) -> None:
        """Continues with what follows the loop, with the final parameters of the job."""
        self._is_over = True
        self._own.unguard()
        self._close_reader()
        end = self._loop.end()
        if end is None or not self._loop.has_succeeded():
            # The job continues without this worker, failed or was stopped. The code after the loop
            # is only for a trained model.
            sys.exit(0)
        self._set_place(*end)
        _handle_signals()
        if self._model is not None:
            self._model.end()
            folder = os.environ.get(_OUTPUT)
            if folder and self._leads:
                self._model.save(Path(folder))

    def _join(self, env: dict[str, str]) -> _Member:
        """Makes the process that has described the job the worker with this environment."""
        del os.environ[_DESCRIBE]
        os.environ.update(env)
        _lead_group()
        self.worker_id, self._leads = int(os.environ[_WORKER_ID]), None
        if sys.excepthook is _show_shortly:
            sys.excepthook = self._show
        self._watch()
        if self._stream is not None:
            self._stream.connect(job_folder())
        self._log_early()
        return _open_loop(self)

    def _watch(self) -> None:
        """Prepares this process for its job, which learns if the script exits before it is done."""
        _stacks.log_when_asked()
        _output.survive_a_full_disk()
        show = sys.excepthook

        def tell_and_show(kind: Any, error: BaseException, trace: Any) -> None:
            # The terminal shows the failure that was reported, and nothing that is printed after
            # the end of the job: that is only in the log. A worker that has not joined yet may
            # have to wait long until it can report anything.
            is_told_first = isinstance(error, Exception) and self._loop is not None
            if not is_told_first:
                show(kind, error, trace)
            try:
                if isinstance(error, Exception):
                    from elasticdl._host import explain

                    is_told = self._fail(explain(error))
                    if is_told and is_told_first:
                        _final_state()
            finally:
                self._is_over = True
                if is_told_first:
                    show(kind, error, trace)

        sys.excepthook = tell_and_show
        atexit.register(self._fail, _LEFT)

    def _fail(self, why: str) -> bool:
        """Fails the job; returns whether the master received the reason."""
        if self._is_over:
            return False
        self._is_over = True
        with contextlib.suppress(RuntimeError):
            if self._loop is None:
                # The script never requested batches. If it just exited, it would be restarted, so
                # it joins the job to report why it does not train.
                self._loop = self._open_loop(self)
            # A failure can only be reported during an iteration.
            is_asked = bool(self._turn or self._pending or self._own.is_asked)
            if not is_asked and self._loop.next() is None:
                return False
            self._loop.fail(why)
            return True
        return False


def _exit_with(error: BaseException) -> NoReturn:
    """Ends the process as an uncaught exception does."""
    is_exit = isinstance(error, SystemExit)
    try:
        if not is_exit:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0 if is_exit else 1)


def _handle_signals() -> None:
    """Lets Python handle signals again, as it did before the loop."""
    with contextlib.suppress(ValueError):  # Only the main thread can do this.
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


def _lead_group() -> None:
    """Makes this process and its children a group of their own: Ctrl-C is for the supervisor."""
    with contextlib.suppress(PermissionError):  # It leads a session, and so a group.
        os.setpgid(0, 0)
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # It has ended, or become another program.
            os.setpgid(child.pid or 0, os.getpid())


def _job_dir() -> Path:
    beside_key = Path(os.environ.get(_KEY_FILE, "")).parent
    return Path(os.environ.get(_JOB_DIR, beside_key))


def job_folder() -> Path | None:
    """The folder of the job that this process is a worker of."""
    is_worker = os.environ.get(_MASTER_ADDR) and not os.environ.get(_DESCRIBE)
    return _job_dir() if is_worker else None


def is_alone() -> bool:
    """Whether there is no job."""
    return not os.environ.get(_MASTER_ADDR) and not os.environ.get(_DESCRIBE)


def _check_same(shapes: dict[str, list[int]], doubles: set[str]) -> None:
    """Rejects a model that the job did not start with."""
    try:
        params = json.loads((_job_dir() / "model.json").read_text())["params"]
    except OSError:
        return  # The job's loop cannot start without it.
    expected = {param["name"]: param["shape"] for param in params}
    odd = doubles ^ {param["name"] for param in params if param.get("is_double")}
    for name in {**expected, **shapes}:
        ours, theirs = shapes.get(name), expected.get(name)
        if ours == theirs and name not in odd:
            continue
        if ours is None or theirs is None:
            what = f"it has {'no' if ours is None else 'a'} parameter or buffer `{name}`"
        elif ours != theirs:
            what = f"`{name}` has shape {ours} instead of {theirs}"
        else:
            what = f"`{name}` is {'' if name in doubles else 'not '}of float64"
        raise RuntimeError(
            f"the model of worker-{os.environ.get(_WORKER_ID, '0')} is not the one that the job "
            f"started with: {what}; the script must build the same model in every worker"
        )


def _final_state() -> str:
    """Waits for the final state of the job, which has ended."""
    is_shared = _IN_POD in os.environ
    limit = time.monotonic() + (_SHARED_STATUS_DELAY_SECS if is_shared else _STATUS_DELAY_SECS)
    state = ""
    while state not in _ENDS and time.monotonic() < limit:
        state = _tracking.state_of(_job_dir()) or state
        time.sleep(0.01)
    return state


def _number(loss: Any) -> float:
    if loss is None:  # Reporting the loss is optional.
        return 0.0
    return float(loss.item() if hasattr(loss, "item") else loss)


@dataclass
class _Turn:
    """A batch that has not been committed yet."""

    # Whether the model had the job's parameters when the iteration started.
    has_parameters: bool
    is_reduced: bool = False
    loss: Any = None


class _Worker:
    """The job's loop, in Rust."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.next = loop.next
        self.end = loop.end
        self.computed = loop.computed
        self.again = loop.again
        self.fail = loop.fail
        self.preemption = loop.preemption
        # For steps that the user's code takes.
        self.stepped = loop.stepped
        self.loaded = loop.loaded
        self.is_nested = False

    @property
    def is_script(self) -> bool:
        """Whether the user's code takes the steps; known with the first batch."""
        return self._loop.is_script

    def upcoming(self, n: int) -> list[tuple[np.ndarray, int]]:
        """Returns the records and seeds of batches that probably follow, at most `n`."""
        return self._loop.upcoming(n)

    def state(self, dump: Callable[[], bytes]) -> None:
        self._loop.state(dump())

    def committed(self, _own: OwnStep) -> None:
        pass

    def quit(self) -> None:
        self._loop.quit()

    def attach(self, model: Any) -> None:
        self._loop.attach(model.incoming, model.gradient)

    def has_succeeded(self) -> bool:
        return True


class _Member(_Worker):
    """The same, with other workers."""

    def attach(self, model: Any) -> None:
        _check_same(model.shapes(), model.doubles())
        super().attach(model)

    def has_succeeded(self) -> bool:
        return _final_state() == "succeeded"


def _open_loop(_job: Job) -> _Member:
    from elasticdl import _elasticdl

    return _Member(_elasticdl.Loop())


def _is_dropped(frame: FrameType) -> bool:
    """Whether the user's code drops an iterator now; if not, it raises an exception.

    Generators in between are closed with the iterator.
    """
    user: FrameType | None = frame
    while user is not None:
        if dis.opname[user.f_code.co_code[user.f_lasti]] in _DROPS:
            return True
        module = user.f_globals.get("__name__", "").split(".")[0]
        is_generator = user.f_code.co_flags & inspect.CO_GENERATOR
        if not is_generator and module not in ("elasticdl", "torch", "contextlib"):
            return False
        user = user.f_back
    return False


def _show_shortly(_kind: Any, error: BaseException, _trace: Any) -> None:
    if isinstance(error, ZooError):
        print(error, file=sys.stderr)
        return
    from elasticdl._host import explain

    print(explain(error), file=sys.stderr)
