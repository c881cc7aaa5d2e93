# SPDX-License-Identifier: Apache-2.0
"""A second torch device, `box`, written in Python. Importing this module registers it.

The host cannot read the memory of its tensors: their numbers are in CPU tensors that only this
module knows. So an operation that mixes them with tensors on the CPU fails, as on a GPU, and so
does an access to their numbers without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree, backend_registration

NAME = "box"

# By the address of a tensor's storage, which the tensors that autograd makes of it share.
_numbers: dict[int, torch.Tensor] = {}


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _wrap(numbers: torch.Tensor) -> torch.Tensor:
    made = torch._C._acc.create_empty_tensor(tuple(numbers.shape), numbers.dtype)
    _numbers[made.untyped_storage()._cdata] = numbers
    return made


def _unwrap(value: Any) -> Any:
    if _is_here(value):
        return _numbers[value.untyped_storage()._cdata]
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        raise RuntimeError(f"an operation on `{NAME}` got a tensor on `{value.device}`")
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs any operation, on the numbers of its tensors."""
    if op is torch.ops.aten._copy_from.default:  # Between devices.
        source, target, *_ = args
        pair = [_unwrap(tensor) if _is_here(tensor) else tensor for tensor in (target, source)]
        pair[0].copy_(pair[1])
        return target
    given = filter(_is_here, _pytree.tree_leaves((args, kwargs)))
    known = {id(_unwrap(tensor)): tensor for tensor in given}
    args, kwargs = _pytree.tree_map(_unwrap, (args, kwargs))

    def result(numbers: torch.Tensor) -> torch.Tensor:
        # Operations in place return their argument.
        return known[id(numbers)] if id(numbers) in known else _wrap(numbers)

    return _pytree.tree_map_only(torch.Tensor, result, op(*args, **kwargs))


backend_registration._setup_privateuseone_for_python_backend(NAME)
_library = torch.library.Library("_", "IMPL")
_library.fallback(_compute, "PrivateUse1")
