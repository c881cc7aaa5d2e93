# SPDX-License-Identifier: Apache-2.0
"""Runs a `torch.nn.Module` on flat vectors: parameters in, gradient out.

Trainable and frozen parameters are views into `dense`, so they need no copy. `bind` makes them
views into another vector, which the training loop writes between passes. The gradient is read from
autograd's own tensors: accumulating into preset views would be slower, because they would also
have to be cleared and read. Float buffers (batch norm) are in `state`, a copy of the end of each
part of `dense` that each pass starts from and may change. In a custom training loop, parameters and
buffers can also be of 64 bits, which are the other part of the vectors, or of 16 bits or on another
device; the latter two are copied from and to the vectors.

A pass must not change a bound vector. The first pass is compared bitwise: if the module clips or
normalizes its parameters in `forward`, it gets copies from then on, as if each pass had its own.
Later passes are checked with torch's version counters.

A result may depend only on `dense`, the batch and the seed. Every pass therefore reseeds torch,
numpy, `random` and each `torch.Generator` that is an attribute of a module, and resets
non-persistent buffers to their initial values; a persistent integer buffer must not change. Other
state, such as a plain attribute that `forward` changes or a generator inside another object, is
not covered: make it a buffer.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from elasticdl import _optimizers
from elasticdl._torch_layout import Layout
from elasticdl._zoo import ZooError

_CACHE_LINE = 64

# A parameter, and its place in a flat vector.
_Pair = tuple[nn.Parameter, torch.Tensor]


class Flat:
    """A module whose parameters are in the vector `dense` and its gradients in `gradient`."""

    def __init__(self, module: nn.Module, keeps_strides: bool = False) -> None:
        layout = Layout(module, keeps_strides)
        self.layout = layout
        remote = layout.device_types() - {"cpu"}
        zeros = _pinned_zeros if remote else _aligned_zeros
        self.dense = self._own = zeros(layout.n_places)
        self.gradient = zeros(layout.n_places)
        dense, gradient = torch.from_numpy(self.dense), torch.from_numpy(self.gradient)
        # Trainable parameters that are views of `dense` and others, with their gradients.
        changes = layout.views(gradient)
        self._viewed, self._copied = self._divide(changes, layout.trainable)
        self._frozen_changes = changes[len(layout.trainable) : len(layout.parameters)]
        self._state_changes = layout.state(gradient)
        self._states = [torch.zeros_like(change) for change in self._state_changes]
        self._see(dense)
        layout.move(dense, self._states)
        self._kept = [buffer for buffer in layout.buffers if buffer.kept is not None]
        self.keep()
        self._generators = _generators(module)
        self._devices = [getattr(torch, name, None) for name in sorted(remote)]
        self._trainable = [parameter for _, parameter in layout.trainable]
        # Changes of non-trainable state, in a module without float64.
        self.changes = self.gradient[layout.n_trainable :]
        self._before: np.ndarray | None = None
        self._versions: list[int] | None = None
        self._is_watched = False
        self._changes_parameters = False

    def memory(self) -> np.ndarray | None:
        """Returns a vector to `bind`, or None if passes change their parameters."""
        return None if self._changes_parameters else _aligned_zeros(self.layout.n_places)

    def bind(self, dense: np.ndarray) -> None:
        """Makes the parameters views into `dense`."""
        self.dense = dense
        self._see(torch.from_numpy(dense))
        for parameter, view in self._viewed_values:
            parameter.data = view
        is_shared = dense is not self._own
        self._versions = self._count() if is_shared else None
        if is_shared and not self._is_watched:
            self._before = dense.copy()

    def _see(self, dense: torch.Tensor) -> None:
        """Finds the values of all parameters and buffers in `dense`."""
        values = self._divide(self.layout.views(dense), self.layout.parameters)
        self._viewed_values, self._copied_values = values
        self._dense_states = self.layout.state(dense)

    def _divide(
        self, views: list[torch.Tensor], named: list[tuple[str, nn.Parameter]]
    ) -> tuple[list[_Pair], list[_Pair]]:
        viewed: list[_Pair] = []
        copied: list[_Pair] = []
        for (_, parameter), view in zip(named, views):
            (viewed if self.layout.is_view(parameter) else copied).append((parameter, view))
        return viewed, copied

    def check_unchanged(self) -> None:
        """Checks that a pass did not change bound parameters."""
        if self._versions is None:
            return
        if self._before is not None:
            before, self._before, self._is_watched = self._before, None, True
            if not np.array_equal(before.view(np.uint32), self.dense.view(np.uint32)):
                self._changes_parameters = True
                self.dense[:] = before
                self._versions = self._count()
        elif self._versions != self._count():
            changed = zip(self.layout.parameters, self._versions, self._count())
            name = next(name for (name, _), before, after in changed if before != after)
            raise ZooError(
                f"the model changed its parameter `{name}` in a pass, but not in its first pass; "
                "only the optimizer may change parameters"
            )

    def _count(self) -> list[int]:
        return [parameter._version for _, parameter in self.layout.parameters]

    def keep(self) -> None:
        """Makes the current values of the buffers their initial values."""
        self.take_values()
        for constant in self.layout.constants:
            constant.keep_first()

    def reset(self) -> None:
        """Resets the buffers to the values that a pass starts from."""
        for state, value in zip(self._states, self._dense_states):
            state.copy_(value)
        for buffer in self._kept:
            buffer.read()
        for constant in self.layout.constants:
            constant.reset()

    def give_values(self) -> None:
        """Gives the parameters the values in `dense`."""
        with torch.no_grad():
            for parameter, view in self._viewed_values:
                if parameter.data_ptr() != view.data_ptr():  # `parameter.data = …`
                    parameter.data = view
            for parameter, view in self._copied_values:
                parameter.copy_(view)

    def forget_gradients(self) -> None:
        """Drops gradients left by a failed pass."""
        for parameter in self._trainable:
            parameter.grad = None

    def give_gradients(self) -> None:
        """Sets the gradients of the parameters from `gradient`, and adds its changes to buffers."""
        for value, change in zip(self._dense_states, self._state_changes):
            value.add_(change)
        self.reset()
        for parameter, gradient in self._viewed:
            parameter.grad = gradient
        for parameter, gradient in self._copied:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)

    def take_values(self) -> None:
        """Writes the values of the buffers to `dense`, where the parameters are."""
        with torch.no_grad():
            for parameter, view in self._viewed_values:
                if parameter.data_ptr() != view.data_ptr():  # `parameter.data = …`
                    view.copy_(parameter)
                    parameter.data = view
            for parameter, view in self._copied_values:
                view.copy_(parameter)
        for buffer in self.layout.buffers:
            buffer.take_back()
        for value, state in zip(self._dense_states, self._states):
            value.copy_(state)

    def reseed(self, seed: int) -> None:
        """Seeds all random number generators for a pass."""
        reseed(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        for device in self._devices:
            if hasattr(device, "manual_seed_all"):
                device.manual_seed_all(seed)

    def check_constants(self) -> None:
        """Rejects changes of buffers that are not part of the vector, but of the state dict."""
        for constant in self.layout.constants:
            constant.check_unchanged()

    def take_changes(self) -> None:
        """Writes the changes of buffers to the end of `gradient`."""
        self.check_constants()
        for buffer in self.layout.buffers:
            buffer.take_back()
        if self._frozen_changes:
            torch._foreach_zero_(self._frozen_changes)
        for state, value, change in zip(self._states, self._dense_states, self._state_changes):
            torch.sub(state, value, out=change)

    def take_gradients(self) -> list[torch.Tensor]:
        """Returns and clears the gradient of each trainable parameter, all of them views."""
        return [_taken(parameter) for parameter, _ in self._viewed]

    def fill_gradient(self) -> None:
        """Copies the gradients of the pass to the start of `gradient`."""
        if self._viewed:
            taken = [_taken(parameter) for parameter, _ in self._viewed]
            torch._foreach_copy_([gradient for _, gradient in self._viewed], taken)
        for parameter, gradient in self._copied:
            gradient.copy_(_taken(parameter))

    def spec(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Returns the entries of the parameters in the model's spec."""
        return self.layout.spec(lambda parameter: _optimizers.decayed(optimizer, parameter))


def _taken(parameter: nn.Parameter) -> torch.Tensor:
    """Returns and clears the gradient of a parameter."""
    gradient = parameter.grad
    if gradient is None:  # The pass did not use it.
        return torch.zeros_like(parameter, requires_grad=False)
    parameter.grad = None
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach()


def reseed(seed: int) -> None:
    """Seeds torch, numpy and `random`."""
    # Not torch.manual_seed: it checks every device type, which takes longer than a layer.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    random.seed(seed)


def make_repeatable(n_threads: int) -> None:
    """Makes torch compute bit-identical results from the same inputs."""
    # Not torch.use_deterministic_algorithms: it imports torch's compiler, which takes seconds.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    # Otherwise every new tensor would be filled first.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(n_threads)
    with contextlib.suppress(RuntimeError):  # Already running; they do not affect results.
        torch.set_num_interop_threads(1)
    with warnings.catch_warnings():
        # Triggers the once-per-process warning about read-only arrays; columns are never written.
        warnings.simplefilter("ignore")
        read_only = np.zeros(1, np.float32)
        read_only.flags.writeable = False
        torch.from_numpy(read_only)


def freeze_unheld(module: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Freezes parameters that are not in any of the optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.requires_grad_(id(parameter) in held)


def _generators(module: nn.Module) -> list[torch.Generator]:
    held = [value for m in module.modules() for value in vars(m).values()]
    return [value for value in held if isinstance(value, torch.Generator)]


def _pinned_zeros(n_numbers: int) -> np.ndarray:
    """Allocates zeros that devices can copy directly, if they have such memory."""
    try:
        return torch.zeros(n_numbers).pin_memory().numpy()
    except RuntimeError:
        return _aligned_zeros(n_numbers)


def _aligned_zeros(n_numbers: int) -> np.ndarray:
    """Allocates zeros aligned to a cache line, as torch does and numpy does not."""
    zeros = np.zeros(n_numbers + _CACHE_LINE // 4, np.float32)
    first = -zeros.ctypes.data % _CACHE_LINE // 4
    return zeros[first : first + n_numbers]
