# SPDX-License-Identifier: Apache-2.0
"""The layout of a module's parameters and buffers in one flat vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elasticdl._zoo import ZooError


def check(module: nn.Module) -> None:
    """Rejects modules that cannot be stored in a flat vector of float32."""
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)
    for buffer in _buffers(module):
        if buffer.is_state() and not buffer.is_counter:
            _check_numbers(f"the buffer `{buffer.path}`", buffer.tensor)
    _check_batch_norms(module)


class Layout:
    """The flat vector: trainable parameters, then frozen ones, then float buffers.

    Tied parameters appear once, under their first name. The batch counters of normalization layers
    are part of the vector, as floats. Other integer buffers and non-persistent buffers are not;
    they are `constants`.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.named_parameters())
        self.trainable = [(name, p) for name, p in parameters if p.requires_grad]
        self.parameters = self.trainable + [(n, p) for n, p in parameters if not p.requires_grad]
        self.buffers: list[Buffer] = []
        self.constants: list[Buffer] = []
        for buffer in _buffers(module):
            (self.buffers if buffer.is_state() else self.constants).append(buffer)
        self.shapes = [p.shape for _, p in self.parameters] + [b.tensor.shape for b in self.buffers]
        self.n_trainable = sum(p.numel() for _, p in self.trainable)
        self.n_parameters = sum(p.numel() for _, p in self.parameters)
        self.n_numbers = sum(shape.numel() for shape in self.shapes)

    def move(self, dense: torch.Tensor, state: torch.Tensor) -> None:
        """Makes the parameters views into `dense`, and the float buffers views into `state`."""
        views = self.views(dense)
        with torch.no_grad():
            for (_, parameter), view in zip(self.parameters, views):
                view.copy_(parameter)
                parameter.data = view
                parameter.grad = None
            pieces = state.split([b.tensor.numel() for b in self.buffers]) if self.buffers else []
            for buffer, piece in zip(self.buffers, pieces):
                view = piece.view(buffer.tensor.shape)
                view.copy_(buffer.tensor)
                if buffer.is_counter:
                    buffer.number = view
                else:
                    buffer.put(view)
            dense[self.n_parameters :].copy_(state)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Splits a vector of this layout into shaped views."""
        if not self.shapes:
            return []
        pieces = flat.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes)]

    def spec(self, decays: Callable[[nn.Parameter], bool]) -> list[dict[str, Any]]:
        """Returns the entries of the model's spec."""
        names = [name for name, _ in self.parameters] + [buffer.path for buffer in self.buffers]
        rules: list[Any] = [{"trainable": {"decay": decays(p)}} for _, p in self.trainable]
        rules += ["moving_average"] * (len(names) - len(rules))
        return [
            {"name": name, "shape": list(shape), "init": "given", "rule": rule}
            for name, shape, rule in zip(names, self.shapes, rules)
        ]

    def state_dict(self, module: nn.Module, dense: torch.Tensor) -> dict[str, Any]:
        """Returns the module's state dict with the values of `dense`; tied weights stay tied."""
        kept = [p for _, p in self.parameters] + [buffer.tensor for buffer in self.buffers]
        values = {}
        for tensor, view in zip(kept, self.views(dense)):
            exact = view if tensor.is_floating_point() else view.round()
            values[id(tensor)] = exact.to(tensor.dtype, copy=True)
        state = module.state_dict(keep_vars=True)
        return {name: values.get(id(value), value) for name, value in state.items()}


class Buffer:
    """A buffer, with every location where the module refers to it."""

    def __init__(self, path: str, owner: nn.Module, name: str) -> None:
        self.path = path
        self.tensor: torch.Tensor = owner._buffers[name]
        self.is_persistent = name not in owner._non_persistent_buffers_set
        self.places = [(owner._buffers, name)]
        is_norm = isinstance(owner, nn.modules.batchnorm._NormBase)
        # The number of batches that a layer has seen.
        self.is_counter = is_norm and name == "num_batches_tracked"
        # The counter in the flat vector.
        self.number: torch.Tensor | None = None
        self._first: torch.Tensor | None = None
        self._version = 0

    def is_state(self) -> bool:
        """Whether it is learned from the data and therefore part of the flat vector."""
        return self.is_persistent and (self.tensor.is_floating_point() or self.is_counter)

    def read_number(self) -> None:
        """Sets a counter to its number in the flat vector."""
        if self.number is not None:
            self.tensor.copy_(self.number.round())

    def put(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor in the module."""
        self.tensor = tensor
        for buffers, name in self.places:
            buffers[name] = tensor

    def keep_first(self) -> None:
        """Saves the value that `reset` restores."""
        self._first = self.tensor.clone()
        self._version = self.tensor._version

    def check_unchanged(self) -> None:
        """Rejects a training pass that changed a constant of the state dict."""
        if self.is_persistent and (self._is_replaced() or self.tensor._version != self._version):
            raise ZooError(
                f"`forward` changed the integer buffer `{self.path}`, which workers cannot share; "
                "make it a float buffer, or register it with persistent=False"
            )

    def reset(self) -> None:
        """Restores the initial value if a pass changed it."""
        if self._is_replaced():
            self.put(self.tensor)
        if self.tensor._version != self._version:
            self.tensor.copy_(self._first)
            self._version = self.tensor._version

    def take_back(self) -> None:
        """Copies the value back if a pass replaced the tensor, and counts a counter."""
        if self._is_replaced():
            self._restore()
        if self.number is not None:
            self.number.copy_(self.tensor)

    def _restore(self) -> None:
        buffers, name = self.places[0]
        found = buffers[name]
        if found is None or found.shape != self.tensor.shape:
            shape = "nothing" if found is None else f"shape {list(found.shape)}"
            raise ZooError(
                f"`forward` changed the buffer `{self.path}` from shape "
                f"{list(self.tensor.shape)} to {shape}; keep its shape"
            )
        self.tensor.copy_(found.detach())
        self.put(self.tensor)

    def _is_replaced(self) -> bool:
        buffers, name = self.places[0]
        return buffers[name] is not self.tensor


def _buffers(module: nn.Module) -> list[Buffer]:
    found: dict[int, Buffer] = {}
    for path, owner in module.named_modules():
        for name, tensor in owner._buffers.items():
            if tensor is None:
                continue
            if id(tensor) in found:
                found[id(tensor)].places.append((owner._buffers, name))
            else:
                found[id(tensor)] = Buffer(f"{path}.{name}" if path else name, owner, name)
    return list(found.values())


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    what = f"the parameter `{name}`"
    if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
        raise ZooError(
            f"{what} gets its shape from the first batch; use a layer with explicit sizes instead "
            "of a lazy one"
        )
    _check_numbers(what, parameter)


def _check_numbers(what: str, tensor: torch.Tensor) -> None:
    if tensor.dtype != torch.float32:
        dtype = str(tensor.dtype).replace("torch.", "")
        if tensor.is_complex():
            advice = "store its real and imaginary parts as two parameters"
        elif not tensor.is_floating_point():
            advice = "register it as a buffer"
        else:
            advice = "call `.float()` on the model"
        raise ZooError(f"{what} is {dtype}, but parameters must be float32; {advice}")
    if tensor.device.type != "cpu":
        raise ZooError(f"{what} is on `{tensor.device}`; create the model on the CPU")
    if tensor.layout != torch.strided:
        raise ZooError(f"{what} is a sparse tensor; make it dense")


def _check_batch_norms(module: nn.Module) -> None:
    for path, layer in module.named_modules():
        is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
        if is_norm and layer.track_running_stats and layer.momentum is None:
            raise ZooError(
                f"the batch norm `{path or type(layer).__name__}` has momentum=None, which "
                "averages over all batches of one process; set a momentum, for example 0.1"
            )
