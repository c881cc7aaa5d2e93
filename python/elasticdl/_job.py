# SPDX-License-Identifier: Apache-2.0
"""Runs a custom training loop as a worker of a job.

The job's loop, in Rust, runs on a separate thread and decides which records come next. Each pass
that it requests is one iteration of the user's loop. The job takes the optimizer steps in Rust, or
the loop takes them (`_own_step.py`); in both cases, the state of the optimizer is part of the job.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from elasticdl import _output, _records, _stacks
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
_LANES = "ELASTICDL_LANES"
# Where the optimizer steps are taken.
_STEP = "ELASTICDL_STEP"
_CHOICES = ("auto", "rust", "python")
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
    "the script exited before the job was done; iterate over `job.batches(…)` to its end, and set "
    "the length of training with `epochs`"
)


def init(
    model: Any = None,
    optimizer: Any = None,
    lr_schedule: Any = None,
    schedule_every: str | None = None,
    **state: Any,
) -> Job:
    """Makes this process a worker of the job that started it.

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
        job = Job(lambda job: _Description(Path(folder), job))
        sys.excepthook = _show_shortly
    elif os.environ.get(_MASTER_ADDR):
        _stacks.log_when_asked()
        _output.survive_a_full_disk()
        job = Job(_open_loop)
        job._watch()
    else:
        raise RuntimeError(
            "this process is not a worker of a job; start the script with "
            f"`elasticdl run --workers 2 {sys.argv[0] or 'SCRIPT'}`"
        )
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


class Job:
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
        self._optimizer: Any = None
        self._schedule: Any = None
        self._schedule_every: str | None = None
        self._model: Any = None
        self._plan: Plan | None = None
        self._own = OwnStep(self._set_place)
        self._leads: bool | None = None
        self.worker_id = int(os.environ.get(_WORKER_ID, "0"))
        # Micro-batches per step of the job.
        self.lanes = int(os.environ.get(_LANES, "1"))
        # Steps that the job has taken before this iteration; the same in every worker.
        self.step = 0

    @property
    def is_leader(self) -> bool:
        """Whether this worker should write files and print.

        Before the loop, worker 0 leads. In the loop and after it, the worker that trains the first
        micro-batch of each step does: if it is lost, another worker leads from the next step on. In
        the first iteration of a new worker, which checks its results, it does not lead.
        """
        return self.worker_id == 0 if self._leads is None else self._leads

    @property
    def is_step(self) -> bool:
        """Whether the parameters have the gradients of a step that your code takes now.

        It is false after `allreduce` if this worker has more batches in the step. Calls to `step()`
        and `update()` of registered objects then do nothing.
        """
        return self._own.is_step

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
            self._own.register(name, value)
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
                self._module, self._optimizer, self._schedule, self._schedule_every, registered
            )
            if hasattr(self._schedule, "state_dict"):
                self._own.register("lr_schedule", self._schedule)
            self._connect()

    def batches(
        self,
        dataset: Any,
        batch_size: int = 64,
        epochs: int = 1,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """Iterates over the batches assigned to this worker until the end of the job.

        `dataset` has a length and one item per record: a map-style `Dataset`, a list, an array, a
        tensor, or a tuple of arrays or tensors, which gives tuples of their rows. `collate` turns
        items into a batch; the default is that of `DataLoader`.

        A step of the job consists of one batch for each of its lanes. The iterator covers all
        `epochs`, so call this method only once.
        """
        fetch = _records.fetcher(dataset, collate)
        n_records = _records.count(dataset)
        return map(fetch, self.records(n_records, batch_size, epochs, shuffle))

    def steps(
        self,
        dataset: Any,
        batch_size: int = 64,
        epochs: int = 1,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Iterator[Any]]:
        """Iterates over the steps of the job; each step iterates over this worker's batches.

        Compute the gradients of each batch in the inner loop, and take the step after it:

            for step in job.steps(dataset, batch_size=64):
                for x, y in step:
                    loss_of(model(x), y).backward()
                optimizer.step()

        The arguments are those of `batches`. A worker may have no batch in a step.
        """
        fetch = _records.fetcher(dataset, collate)
        self._open(_records.count(dataset), batch_size, epochs, shuffle)
        self._loop.is_nested = True
        return self._steps(fetch)

    def records(
        self, n_records: int, batch_size: int = 64, epochs: int = 1, shuffle: bool = True
    ) -> Iterator[np.ndarray]:
        """Like `batches`, but returns only the indices of the records (int64)."""
        self._open(n_records, batch_size, epochs, shuffle)
        return self._turns()

    def _open(self, n_records: int, batch_size: int, epochs: int, shuffle: bool) -> None:
        self.plan(n_records, batch_size, epochs, shuffle)
        if self._loop is not None:
            raise RuntimeError(
                "the job's batches were requested twice; request them once, with the number of "
                "epochs: `job.batches(dataset, epochs=3)`"
            )
        self._loop = self._open_loop(self)
        self._connect()

    def plan(self, n_records: int, batch_size: int, epochs: int, shuffle: bool) -> None:
        """Sets the data of the loop, from which the number of steps follows."""
        self._plan = Plan(n_records, batch_size, epochs, shuffle)

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
            self._own.commit(self._is_schedule_due())
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
            self._module = module
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

    def _turns(self) -> Iterator[np.ndarray]:
        while True:
            # The user's own step needs no `commit`.
            if self._turn is not None and not (self._own.is_on and self._turn.is_reduced):
                raise RuntimeError(
                    "the next batch was requested before `job.commit()`; call it at the end of "
                    "each iteration, and keep `num_workers` of a DataLoader at 0"
                )
            turn = self._next(self._own.next_turn)
            if turn is None:
                return
            yield self._begin(turn)

    def _steps(self, fetch: Callable[[np.ndarray], Any]) -> Iterator[Iterator[Any]]:
        while self._next(self._own.has_step):
            if not self._own.is_on:
                raise RuntimeError(
                    "`job.steps()` needs steps that your code takes, but the job takes them; use "
                    "`job.batches()`, or start the job without --step=rust"
                )
            yield self._lanes(fetch)
            if not self._own.is_step and not self._own.is_over:
                raise RuntimeError(
                    "the next step was requested before the last batch of this one; iterate over "
                    "each step of `job.steps(…)` to its end"
                )

    def _lanes(self, fetch: Callable[[np.ndarray], Any]) -> Iterator[Any]:
        while (turn := self._own.next_lane()) is not None:
            yield fetch(self._begin(turn))
            if self._turn is not None and not self._turn.is_reduced:
                self.allreduce()
            self._turn = None

    def _begin(self, turn: Request) -> np.ndarray:
        """Prepares an iteration; returns the indices of its records."""
        records, seed, step, leads = turn
        self._set_place(step, leads)
        self._turn = _Turn(has_parameters=self._model is not None)
        if self._model is not None:
            self._model.begin(seed, step)
        else:
            _records.reseed(seed)
        return records.astype(np.int64)

    def _set_place(self, step: int, leads: bool) -> None:
        self.step, self._leads = step, leads

    def _is_schedule_due(self) -> bool:
        """Whether a schedule that the job was given advances after this step."""
        is_last = (self.step + 1) % self.steps_per_epoch == 0
        return is_last or not self._model.is_per_epoch

    def _next(self, own_next: Callable[[], Any]) -> Any:
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
        self._is_over = not turn
        if turn:
            return turn
        self._own.unguard()
        end = self._loop.end()
        if end is None or not _has_succeeded():
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
        return None

    def _watch(self) -> None:
        """Reports to the job if the script exits before the job is done."""
        show = sys.excepthook

        def show_and_tell(kind: Any, error: BaseException, trace: Any) -> None:
            show(kind, error, trace)
            if isinstance(error, Exception):
                from elasticdl._host import explain

                self._fail(explain(error))
            self._is_over = True

        sys.excepthook = show_and_tell
        atexit.register(self._fail, _LEFT)

    def _fail(self, why: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(RuntimeError):
            if self._loop is None:
                # The script never requested batches. If it just exited, it would be restarted, so
                # it joins the job to report why it does not train.
                self._loop = self._open_loop(self)
            # A failure can only be reported during an iteration.
            is_asked = self._turn is not None or self._own.is_asked
            if not is_asked and self._loop.next() is None:
                return
            self._loop.fail(why)


def _handle_signals() -> None:
    """Lets Python handle signals again, as it did before the loop."""
    with contextlib.suppress(ValueError):  # Only the main thread can do this.
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None:
                signal.signal(number, handler)


def _has_succeeded() -> bool:
    """Whether the job has succeeded."""
    beside_key = Path(os.environ.get(_KEY_FILE, "")).parent
    status = Path(os.environ.get(_JOB_DIR, beside_key)) / "status.json"
    is_shared = _IN_POD in os.environ
    limit = time.monotonic() + (_SHARED_STATUS_DELAY_SECS if is_shared else _STATUS_DELAY_SECS)
    state = ""
    while state not in _ENDS and time.monotonic() < limit:
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(status.read_text())["state"]
        time.sleep(0.01)
    return state == "succeeded"


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

    def state(self, dump: Callable[[], bytes]) -> None:
        self._loop.state(dump())

    def committed(self, _own: OwnStep) -> None:
        pass

    def attach(self, model: Any) -> None:
        self._loop.attach(model.incoming, model.gradient)


def _open_loop(_job: Job) -> _Worker:
    from elasticdl import _elasticdl

    return _Worker(_elasticdl.Loop())


class _Description:
    """Runs a script up to its first step to describe its model and data, before the job exists.

    If the script calls `step()` of its optimizer in this step, it takes the steps of the job, too.
    """

    def __init__(self, folder: Path, job: Job) -> None:
        self._folder = folder
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

    def next(self) -> Request:
        return next(self._requests)

    def preemption(self) -> None:
        return None

    def computed(self, _loss: float) -> None:
        if not self.is_script:
            self._write(self._model.spec())
        self._first_values = self._model.dense.copy()

    def again(self) -> None:
        self._write(self._model.spec())

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
        extra = own.objects.keys() - {"optimizer", "lr_schedule"}
        if extra:
            raise RuntimeError(
                f"`{min(extra)}` was registered, but the loop does not call `optimizer.step()`; "
                "call it between `job.allreduce(model)` and `job.commit()`"
            )
        own.unguard()
        try:
            if self._choice == "auto":
                self._model.check_options()
                self._write(self._model.spec())
        except ZooError as error:
            # Rust would compute other numbers; `commit` takes the step, if the schedule allows it.
            self._model.check_schedule(error)
        else:
            self._model.check_schedule()
        own.guard()

    def stepped(self) -> NoReturn:
        if isinstance(self._state, ZooError):
            raise self._state
        self._job._own.check_state()
        spec = self._model.script_spec(self._job._own.is_implicit)
        (self._folder / "first_state.bin").write_bytes(self._state)
        self._write(spec)

    def _make_requests(self) -> Iterator[Request]:
        plan = self._job._plan
        # Computed even if the model is known, to report failures before the job is created.
        yield np.arange(min(plan.batch_size, plan.n_records), dtype=np.uint64), 0, 0, False
        yield "state", None, 0, False
        yield "step", (0, 0.0), 0, False

    def _write(self, spec: dict[str, Any]) -> NoReturn:
        plan = self._job._plan
        values = self._model.dense if self._first_values is None else self._first_values
        description = {
            "n_records": plan.n_records,
            "minibatch_size": plan.batch_size,
            "num_epochs": plan.epochs,
            "shuffle": plan.shuffle,
            "model": spec,
        }
        values.astype("<f4").tofile(self._folder / "first_values.f32")
        (self._folder / "model.json").write_text(json.dumps(description))
        sys.stdout.flush()
        sys.stderr.flush()
        # The rest of the script is for the workers.
        os._exit(0)


def _show_shortly(_kind: Any, error: BaseException, _trace: Any) -> None:
    if isinstance(error, ZooError):
        print(error, file=sys.stderr)
        return
    from elasticdl._host import explain

    print(explain(error), file=sys.stderr)
