# SPDX-License-Identifier: Apache-2.0
"""A training loop with Accelerate as an elastic job: two changed lines.

    accelerator = elasticdl.accelerate.Accelerator()
    ...
    for epoch in accelerator.epochs(3):

The first loader that is prepared is trained: the job assigns its records. A lane of the job takes
the place of a process, with `gradient_accumulation_steps` batches. `backward` passes the gradients
of a lane to the job; after the last lane of a worker, the optimizer takes the step. Without a job,
it is an ordinary accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

try:
    import accelerate
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import send_to_device
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ModuleNotFoundError(
        "Accelerate is not installed; install it with `pip install accelerate`", name="accelerate"
    ) from None

from elasticdl import _trainers
from elasticdl._trainers import Kept, Trained
from elasticdl._zoo import ZooError

__all__ = ["Accelerator"]

# The job's seed comes first, so that a model that the script creates is the same in every worker.
_trainers.job()


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator`, elastic in a job of `elasticdl run`.

    `job` is the job that trains, or None if the script was started without one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.job = _trainers.job()
        self._loader: _Loader | None = None
        self._is_attached = False
        # What was passed to `init_trackers`, for a worker that leads later.
        self._tracking: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        super().__init__(*args, **kwargs)
        if self.job is not None:
            self._check()

    def epochs(self, n_epochs: int) -> Iterable[int]:
        """Iterates over the epochs. A worker that joins starts with the epoch of the job."""
        return range(n_epochs) if self.job is None else self.job.epochs(n_epochs)

    # ---- Preparation ---------------------------------------------------------------------------

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        if self.job is None or self._loader is not None:
            return super().prepare_data_loader(data_loader, *args, **kwargs)
        self._loader = _Loader(self, data_loader)
        return self._loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)
        if self.job is None or not isinstance(prepared, AcceleratedScheduler):
            return prepared
        self._schedulers[-1] = _Scheduler(self.job, scheduler, prepared)
        return self._schedulers[-1]

    def attach(self) -> None:
        """Passes everything that was prepared to the job, once."""
        if self._is_attached:
            return
        self._is_attached = True
        if len(self._models) != 1 or not self._optimizers:
            raise ZooError(
                f"{len(self._models)} models and {len(self._optimizers)} optimizers were passed to "
                "`prepare()`; a job needs one model and at least one optimizer"
            )
        first, *others = [optimizer.optimizer for optimizer in self._optimizers]
        state = {f"optimizer_{number}": other for number, other in enumerate(others, 2)}
        kept = {"scheduler": self._schedulers, "registered": self._custom_objects}
        for name, values in kept.items():
            state |= {f"{name}_{number}": Kept(value) for number, value in enumerate(values, 1)}
        if self.scaler is not None:
            state["scaler"] = self.scaler
        self.job.attach(Trained.of(self.unwrap_model(self._models[0])), first, **state)

    def _check(self) -> None:
        if self.num_processes > 1:
            raise ZooError(
                f"this process trains with {self.num_processes - 1} others; start it with "
                "`elasticdl run`, without another launcher"
            )
        for name in ("split_batches", "dispatch_batches"):
            if getattr(self, name):
                raise ZooError(f"{name}=True does not work in a job: the job assigns the records")
        for name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
            if getattr(self.state, name, None) is not None:
                raise ZooError(f"{name} does not work in a job: the job adds up the gradients")

    # ---- The loop ------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        if self.job is None:
            return
        if self._loader is None or not self._loader.is_in_batch:
            raise RuntimeError(
                "`accelerator.backward()` was called without a batch of the first loader that was "
                "prepared, which is the one that the job trains"
            )
        self._loader.add(loss.detach())
        if self._loader.is_end_of_lane:
            self.job.allreduce(loss=self._loader.mean_loss())
        # Whether the optimizer and the schedulers take the step.
        self.gradient_state._set_sync_gradients(self.job.is_step)

    def _do_sync(self) -> None:
        if self.job is None:
            super()._do_sync()
        else:
            # Until `backward`.
            self.gradient_state._set_sync_gradients(False)

    # ---- Output, by one worker -----------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        if self.job is None:
            return super().is_main_process
        return self.job.is_leader and not _trainers.is_described()

    @property
    def is_local_main_process(self) -> bool:
        return super().is_local_main_process if self.job is None else self.is_main_process

    @property
    def is_last_process(self) -> bool:
        return super().is_last_process if self.job is None else self.is_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Any = None) -> Any:
        if self.job is None:
            return super().on_main_process(function)

        def only_there(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return only_there

    on_local_main_process = on_main_process

    def init_trackers(
        self, project_name: str, config: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        self._tracking = (project_name, config, *args), kwargs
        if self.job is not None:
            self.job.log_config(config or {})
        if self.is_main_process:
            super().init_trackers(project_name, config, *args, **kwargs)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if self.job is not None:
            # A loop that counts its steps itself starts at 0 in a new worker.
            self.job.log_from_trainer(values)
        if not self.is_main_process:
            return
        if not self.trackers and self._tracking is not None:
            super().init_trackers(*self._tracking[0], **self._tracking[1])
        super().log(values, *args, **kwargs)

    def get_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().get_state_dict(*args, **kwargs)
        # In a job, all parameters are parts of one tensor, which safetensors does not save.
        copies = {id(value): value.clone() for value in state.values() if torch.is_tensor(value)}
        return {name: copies.get(id(value), value) for name, value in state.items()}

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            super().save(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> Any:
        return super().save_model(*args, **kwargs) if self.is_main_process else None

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        return super().save_state(*args, **kwargs) if self.is_main_process else None

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        if self.job is not None:
            raise ZooError(
                "`load_state()` cannot be used in a job: the job keeps the position in the data; "
                "continue it with `elasticdl run --resume JOB`"
            )
        return super().load_state(*args, **kwargs)


class _Loader:
    """The batches that the job assigns to this worker."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader) -> None:
        name = "the first loader that was passed to `prepare()`"
        self._is_shuffled = _trainers.check_loader(name, loader)
        self._accelerator, self.dataset = accelerator, loader.dataset
        self.batch_size = loader.batch_size
        self._collate = functools.partial(_trainers.split, loader.collate_fn, loader.batch_size)
        self._options = _trainers.loader_options(loader)
        self._n_records = loader.batch_size * accelerator.gradient_accumulation_steps
        # Whether the user's code has a batch, and whether it is the last one of its lane.
        self.is_in_batch = self.is_end_of_lane = False
        self._losses: list[torch.Tensor] = []
        accelerator.job.plan(len(loader.dataset), self._n_records, 1, self._is_shuffled)

    def __len__(self) -> int:
        """The number of batches of a lane in an epoch, as for a process of Accelerate."""
        accelerator = self._accelerator
        return accelerator.job.steps_per_epoch * accelerator.gradient_accumulation_steps

    def __iter__(self) -> Iterator[Any]:
        accelerator, job = self._accelerator, self._accelerator.job
        accelerator.attach()
        lanes = job.batches(
            self.dataset,
            self._n_records,
            shuffle=self._is_shuffled,
            collate=self._collate,
            **self._options,
        )
        for batches in lanes:
            self._losses.clear()
            for number, batch in enumerate(batches, 1):
                self.is_in_batch, self.is_end_of_lane = True, number == len(batches)
                yield send_to_device(batch, accelerator.device)
            self.is_in_batch = False

    def add(self, loss: torch.Tensor) -> None:
        self._losses.append(loss)

    def mean_loss(self) -> torch.Tensor:
        return torch.stack(self._losses).mean()


class _Scheduler:
    """A scheduler that steps with the job's steps, and as often as in that many processes."""

    def __init__(self, job: Any, scheduler: Any, prepared: AcceleratedScheduler) -> None:
        self._job, self.scheduler = job, scheduler
        is_shared = prepared.step_with_optimizer and not prepared.split_batches
        self._n_steps = job.lanes if is_shared else 1
        self._optimizers = prepared.optimizers if prepared.step_with_optimizer else []

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._job.is_step or any(one.step_was_skipped for one in self._optimizers):
            return
        for _ in range(self._n_steps):
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # Before `__init__`, for example during a copy.
            raise AttributeError(name)
        return getattr(self.scheduler, name)
