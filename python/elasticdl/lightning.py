# SPDX-License-Identifier: Apache-2.0
"""Lightning's `Trainer` as an elastic job: two changed lines.

    import elasticdl.lightning
    trainer = Trainer(strategy="elasticdl", ...)

One batch of the trainer is one step of the job. A lane of the job takes the place of a device: it
trains one batch of the loader. Without a job, the strategy trains on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import CUDAAccelerator
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "Lightning is not installed; install it with `pip install lightning`", name="lightning"
    ) from None

from elasticdl import _state, _torch_trainers, _trainers
from elasticdl._torch_trainers import Trained
from elasticdl._trainers import Feed, Kept, Moved, Origin, Progress
from elasticdl._zoo import ZooError

__all__ = ["ElasticStrategy"]

# Arguments of the trainer that only work with these values in a job, and why.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "accumulate_grad_batches": ((1,), "make the batches of the loader larger"),
    "fast_dev_run": ((False,), "the job trains every record once per epoch"),
    "limit_train_batches": ((None, 1.0), "the job trains every record once per epoch"),
    "num_nodes": ((1,), "start more workers instead"),
    "overfit_batches": ((0, 0.0), "the job trains every record once per epoch"),
    "reload_dataloaders_every_n_epochs": ((0,), "the job knows the records of one loader"),
}
# The entry of a checkpoint that says which records were trained.
_ENTRY = "elasticdl"
_TRANSFERS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")

# The job's seed comes first, so that a model that the script creates is the same in every worker.
_trainers.job()


class ElasticStrategy(SingleDeviceStrategy):
    """Trains on this worker's device, together with the other workers of the job."""

    strategy_name = "elasticdl"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The job that trains, or None if the script was started without one.
        self.job = _trainers.job()
        self._trainer: Trainer | None = None
        self._feed: Feed | None = None
        self._trained: Trained | None = None
        self._progress: _Progress | None = None
        # The checkpoint that the job starts from, and its entry, if this process describes the job.
        self._origin: Origin | None = None
        self._entry: dict[str, Any] = {}
        # What decides which records each step trains.
        self._order: dict[str, int] = {}
        # The batches of the current step, and the one that is trained now.
        self._step = _Batches(iter(()))
        self._batch: Any = None

    # ---- Before training -----------------------------------------------------------------------

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CUDAAccelerator):
            self._root_device = torch.device("cuda", 0)
        super().setup_environment()
        trainer = self.lightning_module.trainer
        if self.job is not None and not _trainers.is_described() and trainer.state.fn == "fit":
            _leave_checkpoint(trainer._checkpoint_connector)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.job is None or trainer.state.fn != "fit":
            return
        vars(trainer._checkpoint_connector).pop("resume_start", None)
        _trainers.begin("`fit()` was called")
        _check(trainer, self.lightning_module)
        self._trainer = trainer
        if trainer.ckpt_path is not None:
            self._origin = Origin(f"ckpt_path={str(trainer.ckpt_path)!r}")
            self.job.continues = False
        trainer.fit_loop.epoch_loop.run = self._run_epoch
        self._follow_logs()
        self.job.log_config(dict(self.lightning_module.hparams))
        self._lead()

    def process_dataloader(self, dataloader: Any) -> Any:
        if self.job is None or not self._trainer or not self._trainer.training:
            return dataloader
        if self._feed is not None:
            raise ZooError("the trainer has several training loaders; a job trains on one")
        loader = _Loader(self, dataloader, self._trainer)
        self._trained = Trained.of(self.lightning_module)
        self._progress = _Progress(self._trainer)
        first, *others = self.optimizers
        state = {f"optimizer_{number}": other for number, other in enumerate(others, 2)}
        for number, config in enumerate(self.lr_scheduler_configs, 1):
            state[f"scheduler_{number}"] = Kept(config.scheduler)
        if self._scaler is not None:
            state["scaler"] = self._scaler
        self._order = loader.order()
        if self._origin is not None:
            state["origin"] = self._origin
            self._start()
        self.job.attach(self._trained, first, trainer=self._progress, **state)
        self._trained.settle()
        self._feed = loader.open()
        return loader

    # ---- Checkpoints of the trainer ------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self._order:
            order = {**self._order, "seed": _trainers.job_seed()}
            due = _due_plateaus(self._trainer) if "lr_schedulers" in checkpoint else []
            checkpoint[_ENTRY] = {"order": order, "plateaus": due}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not self.is_global_zero and not _trainers.is_described():
            _trainers.wait_for_leader(checkpoint_path)
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._entry = checkpoint.get(_ENTRY, {})
        return checkpoint

    def _start(self) -> None:
        """Starts the job at a checkpoint, which Lightning has loaded; workers get it from the job.

        Lightning has not updated the schedulers that wait for a metric of the epoch.
        """
        if not _trainers.is_described():
            return
        trainer, origin = self._trainer, self._origin
        origin.start(self._entry.get("order"), self._order, trainer.global_step)
        origin.check_left(self.job.total_steps)
        for number, value in self._entry["plateaus"]:
            if value is None:
                raise origin.refusal(
                    "it was written before the validation at the end of an epoch, which "
                    "ReduceLROnPlateau needs; use one that was written later or earlier"
                )
            scheduler = self.lr_scheduler_configs[number].scheduler
            self.lightning_module.lr_scheduler_step(scheduler, value)

    # ---- The loop ------------------------------------------------------------------------------

    def _run_epoch(self, data_fetcher: Any) -> None:
        """Runs the steps of an epoch, and continues at another place if state was loaded."""
        loop = self._trainer.fit_loop.epoch_loop
        loop.reset()
        loop.on_run_start(data_fetcher)
        while not loop.done:
            try:
                loop.advance(data_fetcher)
                loop.on_advance_end(data_fetcher)
            except StopIteration:  # The job has ended.
                self._trainer.should_stop = True
                break
            except Moved:
                self._progress.settle()
                iter(data_fetcher)  # It counts what it has fetched, too.
                data_fetcher.fetched = loop.batch_progress.current.ready
            finally:
                loop.on_iteration_done()

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch, _Batches):
            return batch
        return super().batch_to_device(batch, *args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, _Batches):
            self._step = batch
            self._lead()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.job is not None:
            args = (self._batch, *args[1:])
        return super().training_step(*args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if self.job is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if isinstance(closure, Closure):  # For a worker without a lane in this step.
            closure._result = ClosureResult(None)
        loss = None
        for batch in self._step.lanes:
            loss = self._train_lane(batch, closure)
        if self._progress.has_moved or not self.job.is_step:
            raise self._feed.move()
        self._progress.unmark()
        self._trained.check()
        self._feed.begin_step()
        self._lead()
        self._take_step(optimizer, model or self.lightning_module, **kwargs)
        if _trainers.is_described():
            # Waits for the job: nothing is evaluated or saved before it.
            self._feed.has_step()
            raise self._feed.move()
        return loss

    def _take_step(self, optimizer: Any, model: Any, **kwargs: Any) -> None:
        """Takes the step with the gradients of all lanes, as the precision plugin does."""
        plugin, scaler = self.precision_plugin, self._scaler
        if scaler is None:
            plugin._after_closure(model, optimizer)
            optimizer.step(**kwargs)
            return
        # Before clipping, and before the hooks that see the gradients.
        scaler.unscale_(optimizer)
        plugin._after_closure(model, optimizer)
        scaler.step(optimizer, **kwargs)
        scaler.update()

    @property
    def _scaler(self) -> Any:
        """What scales the loss with `precision="16-mixed"`."""
        return getattr(self.precision_plugin, "scaler", None)

    def _train_lane(self, batch: Any, closure: Callable[[], Any]) -> Any:
        self._batch = self.batch_to_device(self.precision_plugin.convert_input(batch))
        # What `self.log` takes the size of the batch from.
        results = self._trainer._results
        results.batch, results.batch_size = self._batch, None
        loss = closure()
        if loss is None:
            raise RuntimeError(
                "`training_step` returned None, but a job trains every record; return a loss"
            )
        self.job.allreduce(loss=loss)
        return loss

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._feed is not None:
            self._feed.end()
            self._lead()

    # ---- Output, by one worker -----------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        return self.job is None or (self.job.is_leader and not self.job.is_rehearsal)

    def _follow_logs(self) -> None:
        """Also logs with the job what the trainer logs, in every worker.

        Its first logger gets everything: `self.log`, and what is passed to `self.logger`. Without a
        logger, the trainer logs nothing, but still decides when it would.
        """
        trainer, job = self._trainer, self.job
        logger = trainer.logger
        if logger is not None:
            log = logger.log_metrics

            def log_metrics(metrics: Any, step: int | None = None, *args: Any, **kw: Any) -> None:
                job.log_from_trainer(metrics, _step_of_logs(trainer) if step is None else step)
                log(metrics, step, *args, **kw)

            logger.log_metrics = log_metrics
            return

        def log_without(metrics: Any, step: int | None = None) -> None:
            shown = {"epoch": trainer.current_epoch, **metrics} if metrics else {}
            own_step = shown.pop("step", None)
            if step is None:
                step = _step_of_logs(trainer) if own_step is None else int(own_step)
            job.log_from_trainer(shown, step)

        trainer._logger_connector.log_metrics = log_without

    def _lead(self) -> None:
        """Tells Lightning whether this worker prints and logs."""
        rank_zero_only.rank = 0 if self.is_global_zero else 1


class _Batches:
    """A batch of the trainer: this worker's batches of a step."""

    def __init__(self, lanes: Iterator[Any]) -> None:
        self.lanes = lanes


class _Loader:
    """Stands in for the trainer's loader: one item for each step."""

    def __init__(self, strategy: ElasticStrategy, loader: Any, trainer: Trainer) -> None:
        self._strategy = strategy
        is_shuffled = _torch_trainers.check_loader("the training loader", loader)
        self.dataset, self._collate = loader.dataset, loader.collate_fn
        self._options = _torch_trainers.loader_options(loader)
        job = strategy.job
        job.plan(len(self.dataset), loader.batch_size, 1, is_shuffled)
        n_epochs = trainer.fit_loop.max_epochs
        if n_epochs is None or n_epochs < 0:
            n_epochs = math.ceil(trainer.max_steps / job.steps_per_epoch)
        if n_epochs < 1:
            raise ZooError("max_epochs=-1 does not work in a job; set `max_epochs` or `max_steps`")
        self._plan = (loader.batch_size, n_epochs, is_shuffled)
        job.plan(len(self.dataset), *self._plan)

    def __len__(self) -> int:
        return self._strategy.job.steps_per_epoch

    def __iter__(self) -> Iterator[_Batches]:
        feed, origin = self._strategy._feed, self._strategy._origin
        while feed.has_step():
            if origin is not None and origin.is_after(self._strategy.job.next_step):
                feed.pass_over()  # It was taken before the checkpoint.
                continue
            taken = feed.take()
            self._strategy._progress.mark()
            yield _Batches(taken)

    def order(self) -> dict[str, int]:
        """What decides which records a step trains, except for the seed."""
        batch_size, _, is_shuffled = self._plan
        return {
            "lanes": self._strategy.job.lanes,
            "batch_size": batch_size,
            "records": len(self.dataset),
            "shuffle": int(is_shuffled),
        }

    def open(self) -> Feed:
        """Joins the job."""
        job = self._strategy.job
        steps = job.steps(self.dataset, *self._plan, collate=self._collate, **self._options)
        return Feed(job, steps)


class _Progress(Progress):
    """The counters of a trainer and the state of its callbacks."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def collect(self) -> dict[str, Any]:
        callbacks = {one.state_key: one.state_dict() for one in self._trainer.callbacks}
        return {
            "loops": self._trainer.fit_loop.state_dict(),
            "should_stop": self._trainer.should_stop,
            "callbacks": {key: state for key, state in callbacks.items() if state},
        }

    def apply(self, state: dict[str, Any]) -> None:
        loop = self._trainer.fit_loop
        loop.load_state_dict(state["loops"])
        # It continues, and does not restart.
        for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            one._loaded_from_state_dict = one._resuming_from_checkpoint = False
        loop.epoch_loop.restarting = loop._restarting = False
        self._trainer.should_stop = state["should_stop"]
        for callback in self._trainer.callbacks:
            kept = state["callbacks"].get(callback.state_key)
            if kept is not None:
                _load_state(callback, kept)


def _step_of_logs(trainer: Trainer) -> int:
    """The step with which a trainer logs: optimizer steps before this batch."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _leave_checkpoint(connector: Any) -> None:
    """Lets this worker load no checkpoint: it gets the state from the job, where it can be newer.

    The file may be gone, too.
    """

    def resume_start(path: Any = None, *_: Any, **__: Any) -> None:
        connector._ckpt_path = path

    connector.resume_start = resume_start


def _due_plateaus(trainer: Trainer) -> list[list[Any]]:
    """Returns the schedulers that wait for a metric of this epoch, whose batches were all trained.

    With each of them, the metric, or None if it is not known yet.
    """
    loop, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epoch, batch = loop.epoch_progress.current, batches.batch_progress.current
    if epoch.completed == epoch.ready or not batches._num_ready_batches_reached():
        return []
    due = []
    for number, config in enumerate(trainer.lr_scheduler_configs):
        is_due = config.interval == "epoch" and not (epoch.ready % config.frequency)
        if config.reduce_on_plateau and is_due:
            value = trainer.callback_metrics.get(config.monitor)
            is_known = value is not None and batch.completed == batch.ready
            due.append([number, float(value) if is_known else None])
    return due


def _load_state(callback: Any, state: dict[str, Any]) -> None:
    callback.load_state_dict(state)
    found = callback.state_dict()
    for name, value in state.items():
        # What the callback leaves out, such as the last score of a ModelCheckpoint.
        if _state.difference(found.get(name), value) is not None and hasattr(callback, name):
            setattr(callback, name, value)


def _check(trainer: Trainer, module: Any) -> None:
    for name, (values, why) in _ONLY.items():
        value = getattr(trainer, name, values[0])
        if value not in values:
            raise ZooError(f"{name}={value!r} does not work in a job: {why}")
    if not module.automatic_optimization:
        raise ZooError("manual optimization does not work in a job; use `automatic_optimization`")
    if len(trainer.device_ids) > 1:
        raise ZooError(f"devices={len(trainer.device_ids)} does not work in a job: one per worker")
    for name in _TRANSFERS:
        if is_overridden(name, module):
            raise ZooError(f"`{name}` is overridden, but a batch of the trainer is a step of a job")


StrategyRegistry.register(
    ElasticStrategy.strategy_name, ElasticStrategy, description="trains in an elastic job"
)
