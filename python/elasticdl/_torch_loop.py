# SPDX-License-Identifier: Apache-2.0
"""A `torch.nn.Module` in a custom training loop.

The job can write parameters into `incoming` at any time. The module gets them when the loop
requests its next batch, so user code between two batches sees a single version.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from elasticdl import _metrics, _optimizers, _torch_flat, _torch_layout
from elasticdl._torch_flat import Flat
from elasticdl._zoo import ZooError
from elasticdl.torch import DistributedDataParallel, Embedding


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
        self, module: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any = None
    ) -> None:
        _torch_flat.make_repeatable(torch.get_num_threads())
        _torch_flat.freeze_unheld(module, optimizer)
        self.module = module
        self._optimizer = optimizer
        self._schedule = schedule
        self._rates = _rates(optimizer)
        self._flat = Flat(module)
        self.dense, self.gradient = self._flat.dense, self._flat.gradient
        self.incoming = self.dense.copy()
        optimizer.register_step_pre_hook(_refuse_step)

    def spec(self, n_steps: int) -> dict[str, Any]:
        """Returns the model's spec; the job takes at most `n_steps` steps."""
        return {
            "name": type(self.module).__name__,
            "params": self._flat.spec(self._optimizer),
            "tables": [],
            "inputs": [],
            "metrics": _metrics.describe(None),
            "optimizer": _optimizers.from_torch(self._optimizer, self._schedule, n_steps),
        }

    def keep(self) -> None:
        """Makes the current values of the module its initial values, as after `load_state_dict`."""
        self._flat.keep()
        np.copyto(self.incoming, self.dense)

    def begin(self, seed: int) -> None:
        """Prepares the module for an iteration."""
        self.receive()
        self._flat.forget_gradients()
        self._flat.reseed(seed)

    def receive(self) -> None:
        """Copies the job's parameters into the module."""
        np.copyto(self.dense, self.incoming)
        self._flat.reset()

    def take(self) -> None:
        """Fills `gradient` with the gradients of the iteration."""
        if self._schedule is None and _rates(self._optimizer) != self._rates:
            raise RuntimeError(
                f"the learning rate was changed from {self._rates[0]} to "
                f"{_rates(self._optimizer)[0]} in the loop, but the job takes the steps; pass the "
                "schedule to `elasticdl.init(model, optimizer, lr_schedule)` instead"
            )
        self._flat.take_changes()
        self._flat.fill_gradient()


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _refuse_step(*_: Any) -> None:
    raise RuntimeError(
        "`optimizer.step()` was called, but the job takes the steps; call `job.commit()` instead, "
        "or use `optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)`"
    )
