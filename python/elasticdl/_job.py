# SPDX-License-Identifier: Apache-2.0
"""A training loop of the user's own as a worker of a job.

The job's loop, in Rust, runs on a thread of its own and decides which records come next; each
pass that it asks for is one turn of the user's loop. The step itself is taken by the job, so what
an optimizer keeps survives the death of any worker.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from elasticdl import _records
from elasticdl._zoo import ZooError

# Set for a script that is only asked what it is: the folder for its answer.
_DESCRIBE = "ELASTICDL_DESCRIBE"
_MASTER_ADDR = "ELASTICDL_MASTER_ADDR"
_WORKER_ID = "ELASTICDL_WORKER_ID"
# Unset: the folder of the key.
_JOB_DIR = "ELASTICDL_JOB_DIR"
_KEY_FILE = "ELASTICDL_JOB_KEY_FILE"
_IN_POD = "ELASTICDL_IN_POD"

# What the master takes to write down how the job ended after it has told its workers.
_STATUS_DELAY_SECS = 1.0
# Storage that several machines share shows a new file later.
_SHARED_STATUS_DELAY_SECS = 6.0
_ENDS = ("succeeded", "failed", "stopped")


_LEFT = (
    "the script ended before the job; go through `job.batches(…)` to its end, and say how long to "
    "train by its `epochs`"
)


def init(model: Any = None, optimizer: Any = None, lr_schedule: Any = None) -> Job:
    """Makes this process a worker of the job that started it.

    `model` is a `torch.nn.Module`, `optimizer` the `torch.optim.Optimizer` of its parameters and
    `lr_schedule` an `LRScheduler` or a function of the step that gives the learning rate. They can
    be given later, by `Job.attach`.

    Random numbers of torch, numpy and `random` start from the same seed here in every worker, so
    that data which is made or split at random afterwards is the same in all of them.
    """
    folder = os.environ.get(_DESCRIBE)
    if folder:
        job = Job(lambda plan: _Description(Path(folder), plan))
        sys.excepthook = _show_shortly
    elif os.environ.get(_MASTER_ADDR):
        job = Job(_open_loop)
        job._watch()
    else:
        raise RuntimeError(
            "this process is no worker of a job; start the script by "
            f"`elasticdl run --workers 2 {sys.argv[0] or 'SCRIPT'}`"
        )
    _records.reseed(0)
    job.attach(model, optimizer, lr_schedule)
    return job


@dataclass(frozen=True)
class Plan:
    """What the loop goes through."""

    n_records: int
    batch_size: int
    epochs: int
    shuffle: bool

    def __post_init__(self) -> None:
        for name in ("n_records", "batch_size", "epochs"):
            number = getattr(self, name)
            if number < 1:
                what = "the dataset has no records" if name == "n_records" else f"{name}={number}"
                raise ValueError(f"{what}; there must be at least 1")

    def max_steps(self) -> int:
        """The most that the job can take."""
        return self.epochs * -(-self.n_records // self.batch_size)


class Job:
    """A worker's place in its job.

    One turn of the loop is a batch, `allreduce` and `commit`. A batch may come more than once: to
    the same worker, when the job did not know its model yet or compares what machines compute,
    and to another one, when a worker was lost before the step was taken. Each record is committed
    once in an epoch all the same. So what a turn computes must depend on its batch and on the
    model alone; random numbers of torch, numpy and `random` are reseeded for each turn.

    Between two turns the model has the parameters of the turn before; after the last one it has
    those that the job ends with.
    """

    def __init__(self, open_loop: Callable[[Any], Any]) -> None:
        self._open_loop = open_loop
        self._loop: Any = None
        self._is_over = False
        self._turn: _Turn | None = None
        self._module: Any = None
        self._optimizer: Any = None
        self._schedule: Any = None
        self._model: Any = None
        self.worker_id = int(os.environ.get(_WORKER_ID, "0"))
        # Turns that this process has committed.
        self.step = 0

    @property
    def is_leader(self) -> bool:
        """Whether this is worker 0, the one to write files and to print.

        There is at most one at any time, but workers come and go: for a while there may be none,
        and the next one starts the script from its beginning. The trained model is written by the
        job itself.
        """
        return self.worker_id == 0

    def attach(self, model: Any = None, optimizer: Any = None, lr_schedule: Any = None) -> None:
        """Tells the job what it trains; what is left out stays as it is.

        From then on the parameters of the model are the job's. Parameters that the optimizer does
        not hold are frozen.
        """
        if model is not None:
            self._attach_module(model)
        if optimizer is not None:
            self._attach_optimizer(optimizer)
        if lr_schedule is not None:
            if self._model is not None:
                raise RuntimeError(
                    "the learning-rate schedule came after the optimizer; give both at once, in "
                    "`job.attach(model, optimizer, lr_schedule)`"
                )
            self._schedule = lr_schedule
        if self._model is None and self._module is not None and self._optimizer is not None:
            from elasticdl._torch_loop import LoopModel

            self._model = LoopModel(self._module, self._optimizer, self._schedule)
            self._connect()

    def batches(
        self,
        dataset: Any,
        batch_size: int = 64,
        epochs: int = 1,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """The batches that this worker is to compute, until the end of the job.

        `dataset` has a length and an item for each record: a map-style `Dataset`, a list, an
        array, a tensor, or a tuple of arrays or tensors, which becomes a tuple of their rows.
        Items become a batch by `collate`, or as a `DataLoader` does it.

        A step of the job takes one batch for each of its lanes. All `epochs` come in one go, so
        this is called once.
        """
        fetch = _records.fetcher(dataset, collate)
        n_records = _records.count(dataset)
        return map(fetch, self.records(n_records, batch_size, epochs, shuffle))

    def records(
        self, n_records: int, batch_size: int = 64, epochs: int = 1, shuffle: bool = True
    ) -> Iterator[np.ndarray]:
        """The same as `batches`, but only the numbers of the records (int64)."""
        plan = Plan(n_records, batch_size, epochs, shuffle)
        if self._loop is not None:
            raise RuntimeError(
                "the job's batches were asked for twice; ask once, and give the number of epochs: "
                "`job.batches(dataset, epochs=3)`"
            )
        self._loop = self._open_loop(plan)
        self._connect()
        return self._turns()

    def allreduce(self, model: Any = None, loss: Any = None) -> None:
        """Hands the gradients of this turn over; `loss` is their batch's mean, for reports.

        The parameters have no gradients afterwards.
        """
        turn = self._current("allreduce")
        if turn.is_reduced:
            raise RuntimeError(
                "`job.allreduce()` was called twice for one batch; call it once, after all calls "
                "of `backward()`"
            )
        self.attach(model)
        self._check_known()
        if turn.has_parameters:
            self._model.take()
        turn.is_reduced = True
        turn.loss = loss

    # With parameter servers or without, gradients go to whoever takes the step.
    push = allreduce

    def pull(self, model: Any = None) -> None:
        """Does nothing: the parameters are the job's before each turn."""
        self.attach(model)

    def commit(self, loss: Any = None) -> None:
        """Ends the turn: the job may take its step, and count the batch's records as done."""
        turn = self._current("commit")
        if not turn.is_reduced:
            raise RuntimeError(
                "`job.commit()` came before `job.allreduce(model)`; hand the gradients over first"
            )
        self._turn = None
        if turn.has_parameters:
            loss = turn.loss if loss is None else loss
            self._loop.computed(_number(loss))
            self.step += 1
        else:
            self._loop.again()

    def _attach_module(self, model: Any) -> None:
        from elasticdl import _torch_loop

        module = _torch_loop.bare(model)
        if self._module is None:
            _torch_loop.check_model(module)
            self._module = module
        elif self._module is not module:
            raise RuntimeError("the job has another model already; it trains one")

    def _attach_optimizer(self, optimizer: Any) -> None:
        from elasticdl import _torch_loop

        bare = getattr(optimizer, "optimizer", optimizer)
        if self._optimizer is None:
            _torch_loop.check_optimizer(bare)
            self._optimizer = bare
        elif self._optimizer is not bare:
            raise RuntimeError("the job has another optimizer already; it uses one")

    def _connect(self) -> None:
        """Lets the job write parameters, once both are there."""
        if self._loop is not None and self._model is not None:
            self._model.keep()
            self._loop.attach(self._model)

    def _check_known(self) -> None:
        if self._module is None:
            raise RuntimeError("the job does not know the model; call `job.allreduce(model)`")
        if self._optimizer is None:
            raise RuntimeError(
                "the job does not know the optimizer, and so cannot take steps; call "
                "`job.attach(model, optimizer)` before the loop"
            )

    def _current(self, call: str) -> _Turn:
        if self._turn is None:
            raise RuntimeError(
                f"`job.{call}()` was called without a batch; call it inside of "
                "`for batch in job.batches(…)`, once for each"
            )
        return self._turn

    def _turns(self) -> Iterator[np.ndarray]:
        while True:
            if self._turn is not None:
                raise RuntimeError(
                    "the next batch was asked for before `job.commit()`; call it at the end of "
                    "each turn, and leave `num_workers` of a DataLoader at 0"
                )
            turn = self._next()
            if turn is None:
                return
            records, seed = turn
            self._turn = _Turn(has_parameters=self._model is not None)
            if self._model is not None:
                self._model.begin(seed)
            else:
                _records.reseed(seed)
            yield records.astype(np.int64)

    def _next(self) -> Any:
        self._is_over = True  # If the job's loop has failed.
        turn = self._loop.next()
        self._is_over = turn is None
        if turn is not None:
            return turn
        if not _has_succeeded():
            # It goes on without this worker, or ended otherwise; what follows the loop is for
            # workers of a trained model.
            sys.exit(0)
        if self._model is not None:
            self._model.receive()
        return None

    def _watch(self) -> None:
        """Tells the job how the script ends, if that is not by the end of the job."""
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
                # It never asked for batches. A worker that just ended would be started again, so
                # it joins the job to say why it does not train.
                self._loop = self._open_loop(None)
            # It is heard in a turn alone.
            if self._turn is None and self._loop.next() is None:
                return
            self._loop.fail(why)


def _has_succeeded() -> bool:
    """Whether the job is over and has its model."""
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
    if loss is None:  # A loop need not say.
        return 0.0
    return float(loss.item() if hasattr(loss, "item") else loss)


@dataclass
class _Turn:
    """A batch that was given out and not committed."""

    # Whether the model had the job's parameters when it began.
    has_parameters: bool
    is_reduced: bool = False
    loss: Any = None


class _Worker:
    """The job's loop, in Rust."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.next = loop.next
        self.computed = loop.computed
        self.again = loop.again
        self.fail = loop.fail

    def attach(self, model: Any) -> None:
        self._loop.attach(model.incoming, model.gradient)


def _open_loop(_plan: Plan | None) -> _Worker:
    from elasticdl import _elasticdl

    return _Worker(_elasticdl.Loop())


class _Description:
    """A script that is run up to its first step, to say what it is; there is no job yet."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._model: Any = None

    def attach(self, model: Any) -> None:
        self._model = model

    def next(self) -> tuple[np.ndarray, int]:
        # Computed even if the model is known: what fails here is told before there is a job.
        plan = self._plan
        return np.arange(min(plan.batch_size, plan.n_records), dtype=np.uint64), 0

    def computed(self, _loss: float) -> None:
        self._write()

    def again(self) -> None:
        self._write()

    def _write(self) -> NoReturn:
        plan, model = self._plan, self._model
        description = {
            "n_records": plan.n_records,
            "minibatch_size": plan.batch_size,
            "num_epochs": plan.epochs,
            "shuffle": plan.shuffle,
            "model": model.spec(plan.max_steps()),
        }
        model.dense.astype("<f4").tofile(self._folder / "first_values.f32")
        (self._folder / "model.json").write_text(json.dumps(description))
        sys.stdout.flush()
        sys.stderr.flush()
        # Whatever else the script would do is for the workers.
        os._exit(0)


def _show_shortly(_kind: Any, error: BaseException, _trace: Any) -> None:
    if isinstance(error, ZooError):
        print(error, file=sys.stderr)
        return
    from elasticdl._host import explain

    print(explain(error), file=sys.stderr)
