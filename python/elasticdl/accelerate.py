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
import itertools
import json
import os
import re
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

from elasticdl import _records, _torch_trainers, _trainers
from elasticdl._torch_trainers import Trained
from elasticdl._trainers import Kept, Origin
from elasticdl._zoo import ZooError

__all__ = ["Accelerator"]

# In a folder of `save_state`: which records were trained.
_ORDER = "elasticdl.json"

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
        # The checkpoint that the job starts from.
        self._origin: Origin | None = None
        # What was passed to `init_trackers`, for a worker that leads later.
        self._tracking: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        super().__init__(*args, **kwargs)
        if self.job is not None:
            self._check()

    def epochs(self, n_epochs: int) -> Iterable[int]:
        """Iterates over the epochs. A worker that joins starts with the epoch of the job."""
        return range(n_epochs) if self.job is None else self._epochs(n_epochs)

    def _epochs(self, n_epochs: int) -> Iterator[int]:
        for epoch in self.job.epochs(n_epochs):
            # Without this, the code after the loop over batches would run for epochs before it.
            if self._origin is None or self._loader.has_batch():
                yield epoch

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
        _trainers.begin("the first loader that was passed to `prepare()` was iterated over")
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
        if self._origin is not None:
            state["origin"] = self._origin
            self._origin.check_left(self.job.total_steps)
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
        return self.job.is_leader and not self.job.is_rehearsal

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
        # The process that describes the job may turn out to be a rehearsal; `log` opens them later.
        if self.is_main_process and not _trainers.is_described():
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

    # ---- Checkpoints ---------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.job is None:
            return super().save_state(output_dir, *args, **kwargs)
        if not self.is_main_process:
            return None
        if self.project_configuration.automatic_checkpoint_naming:
            # Another worker may have written the last one, in this job or in the one before.
            written = [number for number, _ in self._checkpoints()]
            configuration = self.project_configuration
            configuration.iteration = max([configuration.iteration - 1, *written]) + 1
        folder = super().save_state(output_dir, *args, **kwargs)
        if self._loader is not None:
            order = {**self._loader.order(), "seed": _trainers.job_seed()}
            with open(os.path.join(folder, _ORDER), "w") as file:
                json.dump({"order": order, "step": self.job.steps_taken}, file)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.job is None:
            return super().load_state(input_dir, *args, **kwargs)
        if self.job.has_ended:
            if input_dir is not None and not self.is_main_process:
                _trainers.wait_for_leader(os.path.join(os.path.expanduser(input_dir), _ORDER))
            # Until now, all parameters are parts of one tensor, which safetensors does not load.
            for tensor in _tensors(self.unwrap_model(self._models[0])):
                tensor.data = tensor.data.clone()
            return super().load_state(input_dir, *args, **kwargs)
        if self._is_attached or self._loader is None:
            raise ZooError(
                "in a job, call `load_state()` after `prepare()` and before the loop over the "
                "training loader, or after training"
            )
        self._origin = Origin(f"load_state({'' if input_dir is None else repr(input_dir)})")
        if _trainers.is_described():
            self.job.continues = False
            found = self._read_order(input_dir)
            self._origin.start(found.get("order"), self._loader.order(), found.get("step", 0))
            return super().load_state(input_dir, *args, **kwargs)
        # Workers get the state from the job, where it can be newer.
        return None

    def register_for_checkpointing(self, *objects: Any) -> None:
        if self._is_attached and not self.job.has_ended:
            raise ZooError(
                "`register_for_checkpointing()` was called during training, so other workers would "
                "not get this state; call it before the loop over the training loader"
            )
        super().register_for_checkpointing(*objects)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if self.job is None or dataloader is not self._loader:
            return super().skip_first_batches(dataloader, num_batches)
        if self._origin is None and num_batches:
            raise ZooError(
                f"skip_first_batches(num_batches={num_batches}) of the training loader does not "
                "work in a job without `load_state()`: the job trains every record once per epoch"
            )
        n_before = self._loader.batches_before()
        if n_before not in (None, num_batches):
            raise ZooError(
                f"skip_first_batches(num_batches={num_batches}) does not work in a job: the "
                f"checkpoint was written after {n_before} batches of each process in its epoch"
            )
        return dataloader  # The job knows its place.

    def _read_order(self, folder: str | None) -> dict[str, Any]:
        if folder is None:
            folder = max(self._checkpoints(), default=(0, ""))[1]
        try:
            with open(os.path.join(os.path.expanduser(folder), _ORDER)) as file:
                return json.load(file)
        except OSError:
            return {}

    def _checkpoints(self) -> list[tuple[int, str]]:
        """Returns the numbers and folders of checkpoints with automatic names."""
        above = os.path.join(self.project_dir or "", "checkpoints")
        names = os.listdir(above) if os.path.isdir(above) else []
        found = [(re.fullmatch(r"checkpoint_(\d+)", name), name) for name in names]
        return [(int(match[1]), os.path.join(above, name)) for match, name in found if match]


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


class _Loader:
    """The batches that the job assigns to this worker."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader) -> None:
        name = "the first loader that was passed to `prepare()`"
        self._is_shuffled = _torch_trainers.check_loader(name, loader)
        self._accelerator, self._job = accelerator, accelerator.job
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._collate = functools.partial(_trainers.split, loader.collate_fn, loader.batch_size)
        self._options = _torch_trainers.loader_options(loader)
        self._n_records = loader.batch_size * accelerator.gradient_accumulation_steps
        # Whether the user's code has a batch, and whether it is the last one of its lane.
        self.is_in_batch = self.is_end_of_lane = False
        self._losses: list[torch.Tensor] = []
        # The lanes of an epoch that has begun.
        self._ahead: Iterator[list[Any]] | None = None
        accelerator.job.plan(len(loader.dataset), self._n_records, 1, self._is_shuffled)

    def __len__(self) -> int:
        """The number of batches of a lane in an epoch, as for a process of Accelerate."""
        accelerator = self._accelerator
        return accelerator.job.steps_per_epoch * accelerator.gradient_accumulation_steps

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        lanes, self._ahead = self._ahead or self._lanes(), None
        for batches in lanes:
            self._losses.clear()
            for number, batch in enumerate(batches, 1):
                self.is_in_batch, self.is_end_of_lane = True, number == len(batches)
                yield send_to_device(batch, accelerator.device)
            self.is_in_batch = False

    def has_batch(self) -> bool:
        """Begins an epoch; returns whether this worker has a batch after the checkpoint in it."""
        lanes = self._lanes()
        first = next(lanes, None)
        if first is not None:
            self._ahead = itertools.chain([first], lanes)
        return first is not None

    def _lanes(self) -> Iterator[list[Any]]:
        """The batches of each lane; passes over the steps before the checkpoint."""
        accelerator, job = self._accelerator, self._job
        if job.has_ended:
            raise ZooError(
                "the training loader was iterated over again after the end of the job, and a job "
                "trains once; use `for epoch in accelerator.epochs(n)` around the loop over it"
            )
        accelerator.attach()
        read = job._reader(_records.Fetch(self.dataset, self._collate), self._options)
        for records in job.records(len(self.dataset), self._n_records, shuffle=self._is_shuffled):
            if self._is_before_checkpoint():
                job.allreduce()
                if job.is_step:
                    job.pass_over()
            else:
                yield read(records)

    def _is_before_checkpoint(self) -> bool:
        origin = self._accelerator._origin
        # A worker begins with a batch that only checks it, and does not know the place yet.
        return origin is not None and (origin.step is None or origin.is_after(self._job.step))

    def order(self) -> dict[str, int]:
        """What decides which records a step trains, except for the seed."""
        return {
            "lanes": self._job.lanes,
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self._accelerator.gradient_accumulation_steps,
            "records": len(self.dataset),
            "shuffle": int(self._is_shuffled),
        }

    def batches_before(self) -> int | None:
        """The batches of a lane in its epoch before the checkpoint, if they are known."""
        origin = self._accelerator._origin
        if origin is None or origin.step is None:
            return None
        n_steps = origin.step % self._job.steps_per_epoch
        return n_steps * self._accelerator.gradient_accumulation_steps

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
