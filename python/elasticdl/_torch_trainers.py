# SPDX-License-Identifier: Apache-2.0
"""What the adapters for trainers on PyTorch share: the trained part of a model, and its loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elasticdl import _records
from elasticdl._zoo import ZooError


class Trained(nn.Module):
    """What a job trains of a model: its trainable parameters, and its buffers.

    Frozen parameters stay out of the job: every worker has the same ones from its script. `extra`
    are buffers of the adapter; like those of the model, the job takes their mean over all lanes.
    """

    def __init__(self, model: nn.Module, **extra: torch.Tensor) -> None:
        super().__init__()
        # Not a child: its names are to have no prefix.
        object.__setattr__(self, "_model", model)
        self._names: set[str] = set()
        self.settle()
        if not self._names:
            raise ZooError("the model has no trainable parameter; set `requires_grad` of some")
        for name, tensor in extra.items():
            self.register_buffer(name, tensor)

    @classmethod
    def of(cls, model: nn.Module, **extra: torch.Tensor) -> Trained:
        """Returns a view of the model that has the name of its class."""
        return type(type(model).__name__, (cls,), {})(model, **extra)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        named = self._model.named_parameters()
        return ((name, parameter) for name, parameter in named if parameter.requires_grad)

    def named_modules(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        yield "", self
        yield from self._model.named_modules()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.state_dict(*args, **kwargs)

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> Any:
        return self._model.register_forward_pre_hook(hook, **options)

    def settle(self) -> None:
        """What is trainable now is trained: the job has frozen what is in no optimizer."""
        self._names = {name for name, _ in self.named_parameters()}

    def check(self) -> None:
        """Rejects a change of what is trained: other workers would not see it."""
        changed = self._names ^ {name for name, _ in self.named_parameters()}
        if changed:
            raise ZooError(
                f"`requires_grad` of the parameter `{min(changed)}` was changed during training; "
                "freeze parameters before it"
            )


def check_loader(what: str, loader: Any) -> bool:
    """Rejects loaders that a job cannot stand in for; returns whether the records are shuffled."""
    wrong = None
    if not isinstance(loader, DataLoader):
        wrong = f"is a {type(loader).__name__}; use a DataLoader"
    elif isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        wrong = (
            "has an iterable dataset; a job needs one with `__len__` and `__getitem__`, such as "
            "`elasticdl.data.shards(sources, open=…)`"
        )
    elif loader.batch_size is None or not isinstance(
        loader.sampler, (RandomSampler, SequentialSampler)
    ):
        wrong = "has a custom sampler, but the job assigns the records; use `shuffle`"
    elif getattr(loader.sampler, "replacement", False):
        wrong = "has a RandomSampler with replacement=True, but a job trains every record once"
    elif len(loader.sampler) != len(loader.dataset):
        wrong = (
            f"has a {type(loader.sampler).__name__} with num_samples={len(loader.sampler)}, but "
            f"the dataset has {len(loader.dataset)} records, and a job trains each once per epoch"
        )
    elif loader.drop_last:
        wrong = "has drop_last=True, but a job trains every record once per epoch"
    if wrong:
        raise ZooError(f"{what} {wrong}")
    return isinstance(loader.sampler, RandomSampler)


def loader_options(loader: DataLoader) -> dict[str, Any]:
    """Returns how a loader reads batches, if not simply in this process."""
    options = {name: getattr(loader, name) for name in _records.LOADER_OPTIONS}
    return options if loader.num_workers or loader.pin_memory else {}
