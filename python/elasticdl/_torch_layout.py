# SPDX-License-Identifier: Apache-2.0
"""The layout of a module's parameters and buffers in one flat vector of float32.

A 16-bit number travels as the float32 of the same value, and a 64-bit one in the places of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from elasticdl._zoo import ZooError

# What a custom training loop can train.
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check(module: nn.Module) -> None:
    """Rejects modules that are not of float32 on the CPU, or that cannot be shared by workers."""
    for what, tensor in _numbers(module):
        _check_kind(what, tensor, (torch.float32,), "call `.float()` on the model")
        if tensor.device.type != "cpu":
            raise ZooError(f"{what} is on `{tensor.device}`; create the model on the CPU")
    _check_batch_norms(module)


def check_loop(module: nn.Module) -> None:
    """Rejects modules that a custom training loop cannot train."""
    for what, tensor in _numbers(module):
        _check_kind(what, tensor, _DTYPES, "convert the model to one of them")
        if tensor.device.type == "meta":
            raise ZooError(
                f"{what} has no values, because it is on the device `meta`; create the model on "
                "another device, or call `model.to_empty(device=…)` and initialize it"
            )
    _check_memory(module)
    _check_batch_norms(module)


class Layout:
    """The flat vector: trainable parameters, then frozen ones, then float buffers.

    It has two such parts if some of them are of float64. These are in the first part, where each
    number takes two places of the vector.

    Tied parameters appear once, under their first name. The batch counters of normalization layers
    are part of the vector, as floats. Other integer buffers and non-persistent buffers are not;
    they are `constants`.

    A parameter that is laid out like its part of the vector becomes a view of it. Others are
    copied: those of 16 bits or on another device and, if `keeps_strides`, those with strides of
    their own.
    """

    def __init__(self, module: nn.Module, keeps_strides: bool = False) -> None:
        self._keeps_strides = keeps_strides
        named = list(module.named_parameters())
        self.trainable = [(name, p) for name, p in named if p.requires_grad]
        self.parameters = self.trainable + [(n, p) for n, p in named if not p.requires_grad]
        self.buffers: list[Buffer] = []
        self.constants: list[Buffer] = []
        for buffer in _buffers(module):
            (self.buffers if buffer.is_state() else self.constants).append(buffer)
        self.n_trainable = sum(p.numel() for _, p in self.trainable)
        tensors = self._tensors()
        self._shapes = [tensor.shape for tensor in tensors]
        self._is_double = [tensor.dtype == torch.float64 for tensor in tensors]
        lengths = [shape.numel() for shape in self._shapes]
        self._n_double = 2 * sum(n for n, is_double in zip(lengths, self._is_double) if is_double)
        # The length of the vector.
        self.n_places = sum(lengths) + self._n_double // 2
        self._places = list(_places(module))

    def _tensors(self) -> list[torch.Tensor]:
        return [p for _, p in self.parameters] + [buffer.tensor for buffer in self.buffers]

    def _parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the numbers of each part of a flat vector."""
        if not any(self._is_double):
            return [flat]
        # Each of them has a storage: torch.save rejects storages that hold numbers of two types.
        doubles, singles = np.split(flat.numpy(), [self._n_double])
        return [torch.from_numpy(doubles.view(np.float64)), torch.from_numpy(singles)]

    def _shaped(self, parts: list[torch.Tensor], first: int = 0) -> list[torch.Tensor]:
        """Splits parts, which begin with the tensor number `first`, into shaped views."""
        starts = [0] * len(parts)
        views = []
        for shape, is_double in zip(self._shapes[first:], self._is_double[first:]):
            part = 0 if is_double else -1
            end = starts[part] + shape.numel()
            views.append(parts[part][starts[part] : end].view(shape))
            starts[part] = end
        return views

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Splits a flat vector into shaped views."""
        return self._shaped(self._parts(flat))

    def state(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the numbers of the buffers in each part of a flat vector."""
        parts = self._parts(flat)
        starts = [0] * len(parts)
        for (_, parameter), is_double in zip(self.parameters, self._is_double):
            starts[0 if is_double else -1] += parameter.numel()
        return [part[start:] for part, start in zip(parts, starts)]

    def device_types(self) -> set[str]:
        """Returns the types of the devices that the module is on."""
        return {tensor.device.type for tensor in self._tensors()}

    def not_float32(self) -> str | None:
        """Returns the name and type of something of which the job cannot take steps, because it is
        not float32. A frozen parameter can have 16 bits.
        """
        named: list[tuple[str, torch.Tensor]] = [*self.trainable]
        named += [(name, p) for name, p in self.parameters if p.dtype == torch.float64]
        named += [(buffer.path, buffer.tensor) for buffer in self.buffers if not buffer.is_counter]
        odd = [(name, tensor) for name, tensor in named if tensor.dtype != torch.float32]
        return f"`{odd[0][0]}` is {_dtype(odd[0][1])}" if odd else None

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether it can be a view of the vector."""
        is_wide = tensor.dtype in (torch.float32, torch.float64)
        is_there = tensor.device.type == "cpu" and is_wide
        return is_there and (not self._keeps_strides or tensor.is_contiguous())

    def move(self, dense: torch.Tensor, state: list[torch.Tensor]) -> None:
        """Copies all values to `dense` and its buffers to `state`, and makes what can be views."""
        with torch.no_grad():
            for (_, parameter), view in zip(self.parameters, self.views(dense)):
                view.copy_(parameter)
                if self.is_view(parameter):
                    parameter.data = view
                parameter.grad = None
            for buffer, view in zip(self.buffers, self._shaped(state, len(self.parameters))):
                view.copy_(buffer.tensor)
                if self.is_view(buffer.tensor):
                    buffer.put(view)
                else:
                    buffer.kept = view
            for part, values in zip(self.state(dense), state):
                part.copy_(values)

    def spec(self, decays: Callable[[nn.Parameter], bool]) -> list[dict[str, Any]]:
        """Returns the entries of the model's spec."""
        names = [name for name, _ in self.parameters] + [buffer.path for buffer in self.buffers]
        rules: list[Any] = [{"trainable": {"decay": decays(p)}} for _, p in self.trainable]
        rules += ["moving_average"] * (len(names) - len(rules))
        entries = [
            {"name": name, "shape": list(shape), "init": "given", "rule": rule}
            for name, shape, rule in zip(names, self._shapes, rules)
        ]
        doubles = [entry for entry, is_double in zip(entries, self._is_double) if is_double]
        for entry in doubles:
            entry["is_double"] = True
        return doubles + [entry for entry in entries if "is_double" not in entry]

    def state_dict(self, module: nn.Module, dense: torch.Tensor) -> dict[str, Any]:
        """Returns the module's state dict with the values of `dense`; tied weights stay tied."""
        values = {}
        kept = [p for _, p in self.parameters] + [buffer.tensor for buffer in self.buffers]
        for tensor, view in zip(kept, self.views(dense)):
            exact = view if tensor.is_floating_point() else view.round()
            values[id(tensor)] = exact.to(tensor.dtype, copy=True)
        state = module.state_dict(keep_vars=True)
        return {name: values.get(id(value), value) for name, value in state.items()}

    def check_kept(self) -> None:
        """Rejects a module whose parameters are not those that it had."""
        for place in self._places:
            place.check()


@dataclass(frozen=True)
class _Place:
    """Where a module refers to a parameter."""

    name: str
    owner: dict[str, Any]
    key: str
    parameter: nn.Parameter
    dtype: torch.dtype
    device: torch.device
    is_trainable: bool

    def check(self) -> None:
        parameter = self.parameter
        if self.owner.get(self.key) is not parameter:
            raise ZooError(
                f"the parameter `{self.name}` was replaced by another object after it was passed "
                "to the job; change its values in place, for example by `load_state_dict` without "
                "assign=True, or replace it before `elasticdl.init`"
            )
        if parameter.dtype != self.dtype or parameter.device != self.device:
            raise ZooError(
                f"the parameter `{self.name}` was converted from {_kind(self.dtype, self.device)} "
                f"to {_kind(parameter.dtype, parameter.device)} after it was passed to the job; "
                "convert the model before `elasticdl.init`"
            )
        if parameter.requires_grad and not self.is_trainable:
            raise ZooError(
                f"the parameter `{self.name}` was frozen or in no optimizer when it was passed to "
                "the job, but it requires gradients now; set `requires_grad` and create the "
                "optimizer before `elasticdl.init`"
            )


def _places(module: nn.Module) -> Iterator[_Place]:
    for path, layer in module.named_modules():
        for key, p in layer._parameters.items():
            if p is not None:
                name = f"{path}.{key}" if path else key
                kind = (p.dtype, p.device, p.requires_grad)
                yield _Place(name, layer._parameters, key, p, *kind)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on `{device}`"


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
        # Its value in the flat vector, if the tensor is no view of that.
        self.kept: torch.Tensor | None = None
        self._first: torch.Tensor | None = None
        self._version = 0

    def is_state(self) -> bool:
        """Whether it is learned from the data and therefore part of the flat vector."""
        is_lazy = isinstance(self.tensor, nn.parameter.UninitializedTensorMixin)
        is_float = is_lazy or self.tensor.is_floating_point()
        return self.is_persistent and (is_float or self.is_counter)

    def read(self) -> None:
        """Gets the value from the flat vector, if the tensor is no view of that."""
        if self.kept is not None:
            is_exact = self.tensor.is_floating_point()
            self.tensor.copy_(self.kept if is_exact else self.kept.round())

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
        """Copies the value back if a pass replaced the tensor, or if it is no view."""
        if self._is_replaced():
            self._restore()
        if self.kept is not None:
            self.kept.copy_(self.tensor)

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


def _numbers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns what belongs into the vector, with names for error messages."""
    for name, parameter in module.named_parameters():
        yield f"the parameter `{name}`", parameter
    for buffer in _buffers(module):
        if buffer.is_state() and not buffer.is_counter:
            yield f"the buffer `{buffer.path}`", buffer.tensor


def _check_kind(
    what: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], advice: str
) -> None:
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise ZooError(
            f"{what} gets its shape from the first batch; use a layer with explicit sizes instead "
            "of a lazy one, or run a batch through the model first"
        )
    if tensor.dtype not in dtypes:
        if tensor.is_complex():
            advice = "store its real and imaginary parts as two parameters"
        elif not tensor.is_floating_point():
            advice = "register it as a buffer"
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        raise ZooError(f"{what} is {_dtype(tensor)}, but parameters must be {listed}; {advice}")
    if tensor.layout != torch.strided:
        raise ZooError(f"{what} is a sparse tensor; make it dense")


def _check_memory(module: nn.Module) -> None:
    """Rejects parameters that share memory without being the same object."""
    spans = []
    for name, p in module.named_parameters():
        if p.numel() and p.device.type in ("cpu", "cuda"):  # Others may have no addresses.
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride()))
            end = p.data_ptr() + (last + 1) * p.itemsize
            spans.append((str(p.device), p.data_ptr(), end, name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in zip(spans, spans[1:]):
        if device == other_device and start < end:
            raise ZooError(
                f"the parameters `{name}` and `{other}` share memory, but are different objects; "
                "tie them by assigning the parameter itself: `head.weight = embedding.weight`"
            )


def _check_batch_norms(module: nn.Module) -> None:
    for path, layer in module.named_modules():
        is_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
        if is_norm and layer.track_running_stats and layer.momentum is None:
            raise ZooError(
                f"the batch norm `{path or type(layer).__name__}` has momentum=None, which "
                "averages over all batches of one process; set a momentum, for example 0.1"
            )
