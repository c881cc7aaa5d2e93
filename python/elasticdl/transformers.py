# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's `Trainer` as an elastic job: one changed line.

    from elasticdl.transformers import ElasticTrainer as Trainer

For a trainer of another library, use the mix-in: `class Trainer(ElasticMixin, SFTTrainer): pass`.

One step of the trainer is one step of the job. A lane of the job takes the place of a device: it
trains `per_device_train_batch_size × gradient_accumulation_steps` records. Without a job, the
trainer is an ordinary one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

try:
    from transformers import Trainer, TrainerCallback
    from transformers.integrations import rewrite_logs
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "Transformers is not installed; install it with `pip install transformers[torch]`",
        name="transformers",
    ) from None

from elasticdl import _trainers
from elasticdl._torch_trainers import Trained
from elasticdl._trainers import Feed, Kept, Moved, Progress
from elasticdl._zoo import ZooError

__all__ = ["ElasticMixin", "ElasticTrainer"]

if not hasattr(Trainer, "_run_epoch"):
    raise ImportError(
        "elasticdl.transformers needs transformers 5; update it with `pip install -U transformers`"
    )

# Arguments that only work with these values in a job, and why.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "auto_find_batch_size": ((False,), "the batch size is part of the job"),
    "data_seed": ((None,), "the job shuffles the records; set the `--seed` of `elasticdl run`"),
    "dataloader_drop_last": ((False,), "a job trains every record once per epoch"),
    "deepspeed": ((None,), "the job adds up the gradients"),
    "enable_jit_checkpoint": ((False,), "the job saves its state when it is asked to stop"),
    "fsdp": ((None, False, "", []), "the job adds up the gradients"),
    "include_num_input_tokens_seen": (("no",), "each worker sees only its own records"),
    "parallelism_config": ((None,), "the job adds up the gradients"),
    "torch_compile": ((False,), "compile the model in your script instead"),
    "train_sampling_strategy": (("random", "sequential"), "the job assigns the records"),
}
# Settings of `accelerator_config` that change which records a process gets.
_SHARING = ("split_batches", "dispatch_batches")
# Parts of the trainer's state that belong to one worker.
_OWN_FIELDS = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")
# A part of it that grows with every log.
_LOGS = "log_history"
# In a checkpoint: what decides which records each step trains.
_ORDER = "elasticdl.json"
# In it, too: the state of the optimizer and of the scheduler.
_TRAINING = ("optimizer.pt", "scheduler.pt")
# The buffer with the sums of a step, if losses are averaged over tokens.
_TOKENS = "tokens_and_loss_per_record"

# The job's seed comes first, so that a model that the script creates is the same in every worker.
_trainers.job()


class ElasticMixin:
    """Makes a trainer elastic: `class T(ElasticMixin, SomeTrainer)`.

    `job` is the job that trains, or None if the script was started without one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.job = _trainers.job()
        self._feed: Feed | None = None
        self._trained: Trained | None = None
        self._progress = _Progress(self)
        self._resumed: _Resumed | None = None
        super().__init__(*args, **kwargs)
        if self.job is not None:
            # The first one: others see what it sets.
            self.callback_handler.callbacks.insert(0, _Place(self))

    # ---- Before training -----------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        if self.job is not None:
            _check_arguments(self.args)
        super().create_accelerator_and_postprocess()

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.job is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        _trainers.begin("`train()` was called")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_checkpoint(self.args.output_dir)
        if resume_from_checkpoint:
            self._resumed = _Resumed(resume_from_checkpoint)
            self.job.continues = False
        # The job gets its first state from the process that describes it; workers get it from the
        # job, where it can be newer.
        path = resume_from_checkpoint if _trainers.is_described() else None
        return super().train(path or None, *args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        if self.job is not None:
            raise ZooError("`hyperparameter_search()` trains many models, but a job trains one")
        return super().hyperparameter_search(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        if self.job is None:
            return super().get_train_dataloader()
        if self.train_dataset is None:
            raise ZooError("a job needs the `train_dataset` of the trainer")
        if not hasattr(self.train_dataset, "__len__"):
            raise ZooError(
                "the `train_dataset` has no length; a job needs a dataset with `__len__` and "
                "`__getitem__`, such as `elasticdl.data.shards(sources, open=…)`"
            )
        if _overrides(type(self), "_get_train_sampler"):
            raise ZooError("`_get_train_sampler` is overridden, but the job assigns the records")
        return _Loader(self)

    def get_total_train_batch_size(self, args: Any) -> int:
        n_lanes = 1 if self.job is None else self.job.lanes
        return super().get_total_train_batch_size(args) * n_lanes

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, *args: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, *args)
        if self.job is None:
            return prepared
        if not isinstance(train_dataloader, _Loader):
            raise ZooError("`get_train_dataloader` is overridden, but the job assigns the records")
        sums = {_TOKENS: torch.zeros(2)} if self.args.average_tokens_across_devices else {}
        self._order = train_dataloader.order()
        if self._resumed is not None:
            self._resumed.check(self._order)
        self._trained = Trained.of(self.model, **sums)
        state = {"trainer": self._progress, "scheduler": Kept(self.lr_scheduler)}
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self.job.attach(self._trained, optimizer, **state)
        self._trained.settle()
        self.job.log_config(self.args.to_sanitized_dict())
        self._feed = train_dataloader.open()
        return prepared

    # ---- The loop ------------------------------------------------------------------------------

    def _run_epoch(self, *, epoch: int, num_update_steps_per_epoch: int, **rest: Any) -> None:
        n_steps = num_update_steps_per_epoch
        if self.job is None:
            super()._run_epoch(epoch=epoch, num_update_steps_per_epoch=n_steps, **rest)
            return
        # The job has the place in the data.
        rest["resume_from_checkpoint"] = None
        while self._feed.has_step():
            if self._resumed is not None and self.job.next_step < self.state.global_step:
                self._feed.pass_over()  # It was taken before the checkpoint.
                if self._sums is not None:
                    self._sums.zero_()
                continue
            if self.state.global_step // n_steps > epoch:
                return  # Other workers have trained it.
            self._progress.settle()
            left = n_steps - self.state.global_step % n_steps
            # In this class, `training_step` is for one batch.
            self.training_step = self._take_step
            try:
                super()._run_epoch(epoch=epoch, num_update_steps_per_epoch=left, **rest)
            except Moved:
                continue
            finally:
                del self.training_step
            self._check_end_of_epoch(n_steps)
            return
        # The job has ended.
        self._progress.settle()
        self.control.should_training_stop = True

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self.job is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        step = next(epoch_iterator, None)
        if step is None:
            return [], None
        self._progress.mark()
        # All of them are computed in the last one, after which the trainer takes the step.
        return [_NOTHING] * (num_batches - 1) + [step], None

    def floating_point_ops(self, inputs: Any) -> int:
        # No worker sees the inputs of the others.
        return 0 if isinstance(inputs, _Batches) else super().floating_point_ops(inputs)

    def _take_step(self, model: Any, step: _Batches, _n_items: Any = None) -> torch.Tensor:
        """Computes this worker's lanes; sets the mean gradient of all lanes, returns their loss."""
        if step is _NOTHING:
            return torch.zeros((), device=self.args.device)
        for n_records, batches in step.lanes:
            self.job.allreduce(loss=self._train_lane(model, n_records, batches))
        if self._progress.has_moved or not self.job.is_step:
            raise self._feed.move()
        self._progress.unmark()
        self._trained.check()
        self._feed.begin_step()
        return torch.tensor(self._end_of_lanes(), device=self.args.device)

    def _train_lane(self, model: Any, n_records: int, batches: list[Any]) -> torch.Tensor:
        n_items = self._get_num_items_in_batch(batches, self.args.device)
        self.current_gradient_accumulation_steps = len(batches)
        take = type(self).training_step
        loss = sum(take(self, model, batch, n_items) for batch in batches)
        if n_items is not None and self._sums is not None:
            # The job weighs lanes by their records, the trainer by their tokens.
            tokens = float(n_items) / n_records
            self._sums.add_(torch.tensor([tokens, tokens * float(loss)]))
            self._scale_gradients(tokens)
        return loss

    def _end_of_lanes(self) -> float:
        """Divides the gradients by the mean number of tokens, if they count; returns the loss."""
        if self._sums is None or self._sums[0] == 0:
            return self.job.loss
        tokens, loss = self._sums.tolist()
        self._sums.zero_()
        self._scale_gradients(1 / tokens)
        return loss / tokens

    @property
    def _sums(self) -> torch.Tensor | None:
        """The tokens and the loss per record, if losses are averaged over tokens."""
        return getattr(self._trained, _TOKENS, None)

    def _scale_gradients(self, factor: float) -> None:
        gradients = [p.grad for p in self._trained.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, factor)

    def _check_end_of_epoch(self, n_steps: int) -> None:
        is_stopped = self.control.should_training_stop or self._feed.is_over
        if self.state.global_step % n_steps and not is_stopped:
            raise RuntimeError(
                "a callback set `should_epoch_stop`, but a job trains every record once per epoch; "
                "set `should_training_stop` instead"
            )

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._feed is not None:
            self._feed.end()
            self._set_place()
        return super()._finalize_training(*args, **kwargs)

    # ---- Output, by one worker -----------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        if self.job is None:
            return super().is_world_process_zero()
        return self.job.is_leader and not self.job.is_rehearsal

    def is_local_process_zero(self) -> bool:
        return super().is_local_process_zero() if self.job is None else self.is_world_process_zero()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if self.job is None or self.is_world_process_zero():
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.job is None:
            super()._save_checkpoint(model, trial)
        elif self.is_world_process_zero():
            super()._save_checkpoint(model, trial)
            folder = f"checkpoint-{self.state.global_step}"
            path = os.path.join(self._get_output_dir(trial), folder, _ORDER)
            if os.path.isdir(os.path.dirname(path)):
                with open(path, "w") as file:
                    json.dump({**self._order, "seed": _trainers.job_seed()}, file)
        elif self.state.best_global_step:
            # As the leader sees it, which may still be writing this one.
            folder = os.path.join(
                self._get_output_dir(trial), f"checkpoint-{self.state.best_global_step}"
            )
            if self.state.best_global_step == self.state.global_step or os.path.exists(folder):
                self.state.best_model_checkpoint = folder

    def _set_place(self) -> None:
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()


class ElasticTrainer(ElasticMixin, Trainer):
    """Hugging Face's `Trainer`, elastic in a job of `elasticdl run`."""


class _Batches:
    """An item of the trainer's loop: this worker's batches of a step."""

    def __init__(self, lanes: Iterator[Any]) -> None:
        self.lanes = lanes


_NOTHING = _Batches(iter(()))


class _Loader:
    """Stands in for the trainer's loader: one item for each batch of a lane."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.dataset, self._collate = _data(trainer)
        args, job = trainer.args, trainer.job
        self._n_records = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._is_shuffled = args.train_sampling_strategy == "random"
        job.plan(len(self.dataset), self._n_records, 1, self._is_shuffled)
        is_limited = args.max_steps > 0
        n_epochs = args.max_steps / job.steps_per_epoch if is_limited else args.num_train_epochs
        self._n_epochs = math.ceil(n_epochs)
        self._n_steps = job.steps_per_epoch
        if job.is_leader and not job.is_rehearsal:
            print(
                f"elasticdl: a step trains {self._n_records * job.lanes} records: "
                f"per_device_train_batch_size={args.per_device_train_batch_size} × "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} × "
                f"{job.lanes} lanes",
                flush=True,
            )

    def __len__(self) -> int:
        return self._n_steps * self._trainer.args.gradient_accumulation_steps

    def __iter__(self) -> Iterator[_Batches]:
        feed = self._trainer._feed
        while feed.has_step():
            yield _Batches(feed.take())

    def order(self) -> dict[str, int]:
        """What decides which records a step trains, except for the seed."""
        return {
            "lanes": self._trainer.job.lanes,
            "records_per_lane": self._n_records,
            "records": len(self.dataset),
            "shuffled": int(self._is_shuffled),
        }

    def open(self) -> Feed:
        """Joins the job."""
        job = self._trainer.job
        plan = (self._n_records, self._n_epochs, self._is_shuffled)
        args = self._trainer.args
        collate = functools.partial(_split, self._collate, args.per_device_train_batch_size)
        options = _loader_options(args)
        return Feed(job, job.steps(self.dataset, *plan, collate=collate, **options))


class _Resumed:
    """The checkpoint of a trainer that a job starts from."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._order: dict[str, int] = {}
        try:
            with open(os.path.join(path, _ORDER)) as file:
                self._order = json.load(file)
        except OSError:
            if not _trainers.is_described():
                return  # The job has its state, and perhaps deleted it since.
            raise ZooError(
                f"resume_from_checkpoint={path!r} cannot start a job: no job has written it, so "
                "it does not say which records were trained; load its weights with "
                "`from_pretrained` instead, or continue a job with `elasticdl run --resume JOB`"
            ) from None
        # The trainer would start with new ones.
        missing = [name for name in _TRAINING if not os.path.exists(os.path.join(path, name))]
        if missing and _trainers.is_described():
            raise ZooError(
                f"resume_from_checkpoint={path!r} cannot start a job: it has no {missing[0]}; "
                "checkpoints that are written with `save_only_model=True` only have weights, which "
                "`from_pretrained` loads"
            )

    def check(self, order: dict[str, int]) -> None:
        """Refuses what would not continue where the checkpoint was written."""
        _trainers.check_order(f"resume_from_checkpoint={self._path!r}", self._order, order)


class _Progress(Progress):
    """The state of a trainer and its callbacks."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer

    def collect(self) -> dict[str, Any]:
        trainer = self._trainer
        fields = {field.name for field in dataclasses.fields(trainer.state)}
        fields -= {_LOGS, *_OWN_FIELDS}
        return {
            "state": {name: getattr(trainer.state, name) for name in fields},
            "control": trainer.control.state()["args"],
            "callbacks": [[name, _state_of(callback)] for name, callback in self._callbacks()],
            "loss": trainer._tr_loss,
            "total_loss": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
        }

    def logs(self) -> list[Any]:
        return self._trainer.state.log_history

    def apply(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.state.log_history = state["logs"]
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["control"].items():
            setattr(trainer.control, name, value)
        trainer._tr_loss.copy_(state["loss"])
        trainer._total_loss_scalar = state["total_loss"]
        trainer._globalstep_last_logged = state["last_logged"]
        for (name, callback), (theirs, kept) in zip(self._callbacks(), state["callbacks"]):
            if name != theirs:
                raise ZooError(f"the job's state has the callback {theirs}, but this script {name}")
            _load_state(callback, kept)

    def _callbacks(self) -> list[tuple[str, Any]]:
        callbacks = self._trainer.callback_handler.callbacks
        return [(type(one).__name__, one) for one in callbacks if _has_state(one)]


class _Place(TrainerCallback):
    """Tells the other callbacks where the job is, and whether this worker leads; logs."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._set_place()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        trainer._set_place()
        # The trainer counts from where its loop was entered.
        state.epoch = state.global_step / trainer.job.steps_per_epoch
        if _trainers.is_described():
            # Waits for the job: nothing is evaluated or saved before it.
            trainer._feed.has_step()
            raise trainer._feed.move()

    def on_log(self, _args: Any, state: Any, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        logged = {name: value for name, value in logs.items() if name != "total_flos"}
        # With the names that TensorBoard, W&B and others get.
        self._trainer.job.log_from_trainer(rewrite_logs(logged), state.global_step)


def _check_arguments(args: Any) -> None:
    for name, (values, why) in _ONLY.items():
        value = getattr(args, name, values[0])
        if value not in values:
            raise ZooError(f"{name}={value!r} does not work in a job: {why}")
    for name in _SHARING:
        if getattr(args.accelerator_config, name, None):
            raise ZooError(
                f"{name} of accelerator_config does not work in a job: it shares records"
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise ZooError(f"optim={optim!r} does not work in a job: it steps in the backward pass")
    if args.world_size > 1 or args.n_gpu > 1:
        raise ZooError(
            f"this process trains on {max(args.world_size, args.n_gpu)} devices; start it with "
            "`elasticdl run`, without another launcher, and with one device per worker"
        )


def _last_checkpoint(folder: str) -> str:
    """Returns the last checkpoint of a trainer; it is not needed where the job has its state."""
    found = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    if found is None and _trainers.is_described():
        raise ZooError(
            f"resume_from_checkpoint=True cannot start a job: there is no checkpoint in {folder!r}"
        )
    return found or folder


def _data(trainer: Any) -> tuple[Any, Any]:
    """Returns the dataset and the collator as the trainer would use them."""
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if hasattr(dataset, "column_names"):  # A `datasets.Dataset`.
        return trainer._remove_unused_columns(dataset, description="training"), collate
    return dataset, trainer._get_collator_with_removed_columns(collate, description="training")


def _loader_options(args: Any) -> dict[str, Any]:
    """Returns how the trainer's loader would read batches."""
    # As it is by default, which has no effect without a GPU.
    pins = args.dataloader_pin_memory and torch.cuda.is_available()
    if not args.dataloader_num_workers and not pins:
        return {}
    return {
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "persistent_workers": args.dataloader_persistent_workers,
        "pin_memory": pins,
    }


def _split(collate: Any, size: int, records: list[Any]) -> tuple[int, list[Any]]:
    """Makes the batches of a lane, and counts its records."""
    return len(records), _trainers.split(collate, size, records)


def _overrides(kind: type, name: str) -> bool:
    return getattr(kind, name) is not getattr(Trainer, name)


def _has_state(callback: Any) -> bool:
    return isinstance(callback, ExportableState) or hasattr(callback, "load_state_dict")


def _state_of(callback: Any) -> Any:
    if hasattr(callback, "load_state_dict"):
        return callback.state_dict()
    return callback.state()["attributes"]


def _load_state(callback: Any, state: Any) -> None:
    if hasattr(callback, "load_state_dict"):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)
