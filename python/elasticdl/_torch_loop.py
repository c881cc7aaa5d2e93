# SPDX-License-Identifier: Apache-2.0
"""A `torch.nn.Module` in a custom training loop.

The job can write parameters into `incoming` at any time. The module gets them when the loop
requests its next batch, so user code between two batches sees a single version.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from elasticdl import _metrics, _optimizers, _schedules, _torch_flat, _torch_layout
from elasticdl._torch_flat import Flat
from elasticdl._zoo import ZooError
from elasticdl.torch import DistributedDataParallel, Embedding

# Makes the seed of a pass from that of its iteration.
_OF_PASS = 0x5DEECE66D
# Entries of a parameter group that are not options.
_MEMBERS = ("params", "param_names")


def bare(model: Any) -> Any:
    """Unwraps a module."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def check_model(model: Any) -> None:
    """Rejects models that a custom loop cannot train."""
    if not isinstance(model, nn.Module):
        raise ZooError(f"the model is a {type(model).__name__}; use a torch.nn.Module")
    _torch_layout.check(model)
    for path, layer in model.named_modules():
        if isinstance(layer, Embedding):
            raise ZooError(
                f"the embedding `{path or type(layer).__name__}` needs parameter servers, which a "
                "custom training loop does not have; use torch.nn.Embedding instead"
            )


def check_optimizer(optimizer: Any) -> None:
    """Rejects optimizers that the job cannot use."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ZooError(
            f"the optimizer is a {type(optimizer).__name__}; use a torch.optim.Optimizer"
        )


class LoopModel:
    """The module with its flat vectors, and the optimizer with the job's hyperparameters."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any = None,
        schedule_every: str | None = None,
    ) -> None:
        _torch_flat.make_repeatable(torch.get_num_threads())
        _torch_flat.freeze_unheld(module, optimizer)
        self.module = module
        self._optimizer = optimizer
        self._schedule = schedule
        self._is_per_epoch = _schedules.interval(schedule, schedule_every) == "epoch"
        self._options = _options(optimizer)
        # The learning rate and the momentum of each step, if a schedule changes them.
        self._rates: np.ndarray | None = None
        self._momenta: np.ndarray | None = None
        self._reseeder = _Reseeder()
        self._hook = module.register_forward_pre_hook(self._reseeder)
        self._flat = Flat(module)
        self.dense, self.gradient = self._flat.dense, self._flat.gradient
        self.incoming = self.dense.copy()
        optimizer.register_step_pre_hook(_refuse_step)

    def spec(self, n_steps: int, epoch_steps: int) -> dict[str, Any]:
        """Returns the model's spec; the job takes `n_steps` steps, `epoch_steps` per epoch."""
        counted = epoch_steps if self._is_per_epoch else None
        return {
            "name": type(self.module).__name__,
            "params": self._flat.spec(self._optimizer),
            "tables": [],
            "inputs": [],
            "metrics": _metrics.describe(None),
            "optimizer": _optimizers.from_torch(self._optimizer, self._schedule, n_steps, counted),
        }

    def follow(self, n_steps: int, epoch_steps: int) -> None:
        """Evaluates the schedule, so that the optimizer has the learning rate of each step."""
        if self._schedule is not None:
            counted = epoch_steps if self._is_per_epoch else None
            values = _schedules.torch_values(self._schedule, n_steps, counted)
            self._rates, self._momenta = values

    def keep(self) -> None:
        """Makes the current values of the module its initial values, as after `load_state_dict`."""
        self._flat.keep()
        np.copyto(self.incoming, self.dense)

    def begin(self, seed: int, step: int) -> None:
        """Prepares the module and the optimizer for an iteration."""
        self._check_options()
        if self._rates is not None:
            self._set_options(min(step, len(self._rates) - 1))
        self.receive()
        self._flat.forget_gradients()
        self._flat.reseed(seed)
        # Random numbers that only some workers draw before the pass do not change it.
        self._reseeder.reseed = lambda: self._flat.reseed(seed ^ _OF_PASS)

    def end(self) -> None:
        """Copies the job's final parameters into the module."""
        self.receive()
        self._hook.remove()

    def save(self, folder: Path) -> None:
        """Writes `model.pt`, the module's state dict."""
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".model-{os.getpid()}.pt"
        torch.save(self.module.state_dict(), unfinished)
        unfinished.replace(folder / "model.pt")

    def receive(self) -> None:
        """Copies the job's parameters into the module."""
        np.copyto(self.dense, self.incoming)
        self._flat.reset()

    def take(self) -> None:
        """Fills `gradient` with the gradients of the iteration."""
        self._check_options()
        self._reseeder.reseed = None
        self._flat.take_changes()
        self._flat.fill_gradient()

    def _set_options(self, step: int) -> None:
        """Shows the values of the schedule to the user's code."""
        rate = float(self._rates[step])
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            if self._momenta is not None:
                _schedules.set_momentum(group, float(self._momenta[step]))
        self._options = _options(self._optimizer)
        if hasattr(self._schedule, "get_last_lr"):
            self._schedule._last_lr = [rate] * len(self._options)

    def _check_options(self) -> None:
        """Rejects changes of the optimizer in the loop, which would have no effect."""
        for before, now in zip(self._options, _options(self._optimizer)):
            changed = [name for name in now if now[name] != before.get(name)]
            if changed:
                name = changed[0]
                what = "learning rate" if name == "lr" else f"`{name}` of the optimizer"
                raise RuntimeError(
                    f"the {what} was changed from {before.get(name)} to {now[name]} in the loop, "
                    "but the job takes the steps; pass the schedule to `elasticdl.init(model, "
                    "optimizer, lr_schedule)`, and do not call its `step()`"
                )


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [{name: group[name] for name in group if name not in _MEMBERS} for group in groups]


class _Reseeder:
    """Seeds the first training pass of an iteration. Copies of the module get an idle one."""

    def __init__(self) -> None:
        self.reseed: Callable[[], None] | None = None

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        reseed = self.reseed
        if reseed is not None and module.training and torch.is_grad_enabled():
            self.reseed = None
            reseed()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reseeder, ()


def _refuse_step(*_: Any) -> None:
    raise RuntimeError(
        "`optimizer.step()` was called, but the job takes the steps; call `job.commit()` instead, "
        "or use `optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)`"
    )
