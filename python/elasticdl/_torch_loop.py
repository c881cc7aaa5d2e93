# SPDX-License-Identifier: Apache-2.0
"""A `torch.nn.Module` in a custom training loop.

The job can write parameters into `incoming` at any time. The module gets them when the loop
requests its next batch, so user code between two batches sees a single version.
"""

from __future__ import annotations

import functools
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
from elasticdl.torch import DistributedDataParallel, DistributedOptimizer, Embedding

# Makes the seed of a pass from that of its iteration.
_OF_PASS = 0x5DEECE66D
# Optimizers of torch that cannot take a step with a gradient of the job, and why.
_REFUSED = {
    "LBFGS": "it needs a closure, which each worker would compute with its own records",
    "SparseAdam": "the gradients of a step are added up as dense tensors; use Adam",
}
# Entries of a parameter group that are not options.
_MEMBERS = ("params", "param_names")


def bare(model: Any) -> Any:
    """Unwraps a module."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif _is_compiled(model):
            model = model._orig_mod
        else:
            return model


def bare_optimizer(optimizer: Any) -> Any:
    """Unwraps an optimizer."""
    return optimizer.optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer


def check_model(model: Any) -> None:
    """Rejects models that a custom loop cannot train."""
    if not isinstance(model, nn.Module):
        raise ZooError(f"the model is a {type(model).__name__}; use a torch.nn.Module")
    _torch_layout.check_loop(model)
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
    check_kind(optimizer)


def check_kind(optimizer: Any) -> None:
    """Rejects optimizers of torch whose steps cannot be taken in a job."""
    for kind in type(optimizer).__mro__:
        why = _REFUSED.get(kind.__name__)
        if why is not None and kind.__module__.startswith("torch.optim"):
            raise ZooError(f"the optimizer `{kind.__name__}` cannot train in a job: {why}")


class LoopModel:
    """The module with its flat vectors, and the optimizer with the job's hyperparameters."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any = None,
        schedule_every: str | None = None,
        registered: list[Any] | None = None,
    ) -> None:
        _torch_flat.make_repeatable(torch.get_num_threads())
        registered = [optimizer, *(registered or [])]
        _torch_flat.freeze_unheld(bare(model), *filter(_is_optimizer, registered))
        self._is_scaled = any(map(_is_scaler, registered))
        self.module = module = bare(model)
        self._optimizer = optimizer
        self._schedule = schedule
        self.is_per_epoch = _schedules.interval(schedule, schedule_every) == "epoch"
        # Steps of the job, and of an epoch.
        self._n_steps = self._epoch_steps = 0
        self._options = _options(optimizer)
        # The learning rate and the momentum of each step, if a schedule changes them.
        self._rates: np.ndarray | None = None
        self._momenta: np.ndarray | None = None
        self._reseeder = _Reseeder()
        self._unhook = self._reseeder.watch(model)
        self._flat = Flat(module, keeps_strides=True)
        self.dense, self.gradient = self._flat.dense, self._flat.gradient
        self.incoming = self.dense.copy()
        self._refusal = optimizer.register_step_pre_hook(_refuse_step)
        # Whether the user's code takes the steps.
        self._is_script = False

    @staticmethod
    def depends_on(value: Any) -> bool:
        """Whether an object must be registered before the model is prepared."""
        return _is_optimizer(value) or _is_scaler(value)

    def plan(self, n_steps: int, epoch_steps: int) -> None:
        """The job takes `n_steps` steps, `epoch_steps` per epoch."""
        self._n_steps, self._epoch_steps = n_steps, epoch_steps

    def spec(self) -> dict[str, Any]:
        """Returns the model's spec, if the job can take the steps."""
        odd = self._flat.layout.not_float32()
        if odd is not None:
            raise ZooError(
                f"{odd}, but the job can only take steps of float32; pass model and optimizer to "
                "`elasticdl.init(model, optimizer)`, and take the steps in Python (--step=python)"
            )
        counted = self._epoch_steps if self.is_per_epoch else None
        optimizer = _optimizers.from_torch(self._optimizer, self._schedule, self._n_steps, counted)
        return self._spec(self._flat.spec(self._optimizer), optimizer)

    def check_schedule(self, error: ZooError | None = None) -> None:
        """Rejects schedules that cannot be followed if steps are taken in Python.

        `error` says why they are not taken in Rust.
        """
        if self._schedule is not None and not _schedules.is_steppable(self._schedule):
            raise error or ZooError(
                "steps are taken in Python, which cannot follow the learning-rate schedule; use a "
                "scheduler of torch.optim.lr_scheduler, such as LambdaLR. If it needs a metric, "
                "call `optimizer.step()` and `scheduler.step(metric)` in your loop"
            )

    def script_spec(self, follows_schedule: bool) -> dict[str, Any]:
        """Returns the model's spec for a job whose script takes the steps."""
        if self._schedule is not None and not follows_schedule:
            raise ZooError(
                "a learning-rate schedule was passed to the job, but your loop takes the optimizer "
                "steps; pass a scheduler by another name, as in `elasticdl.init(model, optimizer, "
                "scheduler=scheduler)`, and call its `step()` after `optimizer.step()`"
            )
        rate = float(self._optimizer.param_groups[0].get("lr", 0.0))
        kind = {"script": {"nonfinite": self._is_scaled}}
        params = self._flat.layout.spec(lambda _: False)
        return self._spec(params, {"kind": kind, "learning_rate": rate})

    def _spec(self, params: Any, optimizer: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": type(self.module).__name__,
            "params": params,
            "tables": [],
            "inputs": [],
            "metrics": _metrics.describe(None),
            "optimizer": optimizer,
        }

    def shapes(self) -> dict[str, list[int]]:
        """Returns the shapes of all parameters and buffers."""
        params = self._flat.layout.spec(lambda _: False)
        return {param["name"]: param["shape"] for param in params}

    def doubles(self) -> set[str]:
        """Returns the names of all parameters and buffers of float64."""
        params = self._flat.layout.spec(lambda _: False)
        return {param["name"] for param in params if "is_double" in param}

    def keep(self) -> None:
        """Makes the current values of the module its initial values, as after `load_state_dict`."""
        self._flat.layout.check_kept()
        self._flat.keep()
        np.copyto(self.incoming, self.dense)

    def begin(self, seed: int, step: int) -> None:
        """Prepares the module and the optimizer for an iteration."""
        if not self._is_script:
            self.check_options()
            self._follow_schedule(step)
        self.receive()
        self._flat.forget_gradients()
        self._flat.reseed(seed)
        # Random numbers that only some workers draw before the pass do not change it.
        self._reseeder.forget()
        self._reseeder.reseed = lambda: self._flat.reseed(seed ^ _OF_PASS)

    def end(self) -> None:
        """Copies the job's final parameters into the module."""
        self.receive()
        self._unhook()

    def save(self, folder: Path) -> None:
        """Writes `model.pt`, the module's state dict."""
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".model-{os.getpid()}.pt"
        torch.save(self._state_dict(), unfinished)
        unfinished.replace(folder / "model.pt")

    def receive(self) -> None:
        """Copies the job's parameters into the module."""
        np.copyto(self.dense, self.incoming)
        self._flat.give_values()
        self._flat.reset()

    def allow_steps(self) -> None:
        """Lets the user's code take the steps."""
        self._refusal.remove()
        self._is_script = True

    def refuse_steps(self) -> None:
        """Takes that back, before the first step."""
        self._refusal = self._optimizer.register_step_pre_hook(_refuse_step)
        self._is_script = False
        self._flat.forget_gradients()

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clips the gradient of a step; returns its norm before."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def begin_step(self, seed: int) -> None:
        """Prepares the module for a step by the mean gradient of all lanes, in `gradient`."""
        self.receive()
        self._reseeder.forget()
        self._flat.give_gradients()
        self._flat.reseed(seed)

    def end_step(self) -> None:
        """Passes the parameters and buffers after a step to the job."""
        self._flat.layout.check_kept()
        self._flat.check_constants()
        self._flat.forget_gradients()
        self._flat.take_values()
        np.copyto(self.incoming, self.dense)

    def take(self) -> None:
        """Fills `gradient` with the gradients of the iteration."""
        if not self._is_script:
            self.check_options()
        self._flat.layout.check_kept()
        self._reseeder.forget()
        self._flat.take_changes()
        self._flat.fill_gradient()

    def _state_dict(self) -> dict[str, Any]:
        """Returns the module's state dict, on the CPU."""
        if self._flat.layout.device_types() <= {"cpu"}:
            return self.module.state_dict()
        state = self._flat.layout.state_dict(self.module, torch.from_numpy(self.dense))
        return {
            name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }

    def _follow_schedule(self, step: int) -> None:
        """Shows the values of the schedule to the user's code."""
        if self._schedule is None:
            return
        if self._rates is None:
            counted = self._epoch_steps if self.is_per_epoch else None
            values = _schedules.torch_values(self._schedule, self._n_steps, counted)
            self._rates, self._momenta = values
        step = min(step, len(self._rates) - 1)
        rate = float(self._rates[step])
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            if self._momenta is not None:
                _schedules.set_momentum(group, float(self._momenta[step]))
        self._options = _options(self._optimizer)
        if hasattr(self._schedule, "get_last_lr"):
            self._schedule._last_lr = [rate] * len(self._options)

    def check_options(self) -> None:
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


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "param_groups")


def _is_scaler(value: Any) -> bool:
    """Whether it is a GradScaler, of any module: torch has moved it."""
    return "GradScaler" in [kind.__name__ for kind in type(value).__mro__]


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [{name: group[name] for name in group if name not in _MEMBERS} for group in groups]


def _is_compiled(model: Any) -> bool:
    """Whether `torch.compile` made it. Its class is in torch's compiler, slow to import."""
    return type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod")


class _Reseeder:
    """Seeds the first training pass of an iteration. Copies of the module get an idle one."""

    def __init__(self) -> None:
        self.reseed: Callable[[], None] | None = None
        # What the pass was seeded with, and the generator's state before that.
        self._again: Callable[[], None] | None = None
        self._before: torch.Tensor | None = None

    def watch(self, model: nn.Module) -> Callable[[], None]:
        """Calls this object before each pass of a model; returns what ends that.

        A compiled model is watched from outside: its compiler cannot follow what happens here.
        """
        module = bare(model)
        hooks = [module.register_forward_pre_hook(self)]
        if module is not model:
            hooks.append(model.register_forward_pre_hook(self))
        compiled = getattr(module, "_compiled_call_impl", None)  # By `model.compile()`.
        if compiled is not None:

            @functools.wraps(compiled)
            def call(*args: Any, **kwargs: Any) -> Any:
                self(module, None)
                return compiled(*args, **kwargs)

            module._compiled_call_impl = call

        def unwatch() -> None:
            for hook in hooks:
                hook.remove()
            if compiled is not None:
                module._compiled_call_impl = compiled

        return unwatch

    def forget(self) -> None:
        """Ends the iteration."""
        self.reseed = self._again = self._before = None

    def __call__(self, module: nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._before is not None:
            # Activation checkpointing repeats a pass in the backward pass, from the same state.
            if torch.equal(torch.get_rng_state(), self._before):
                self._again()
            return
        reseed = self.reseed
        is_backward = torch._C._current_graph_task_id() != -1
        if reseed is None or is_backward or not module.training or not torch.is_grad_enabled():
            return
        self.reseed, self._again, self._before = None, reseed, torch.get_rng_state()
        reseed()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reseeder, ()


def _refuse_step(*_: Any) -> None:
    raise RuntimeError(
        "`optimizer.step()` was called, but the job takes the steps; call `job.commit()` instead, "
        "or use `optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)`. To take the "
        "steps in your loop, pass model and optimizer to `elasticdl.init(model, optimizer)` and "
        "call `optimizer.step()` in every iteration, between `job.allreduce()` and `job.commit()`"
    )
