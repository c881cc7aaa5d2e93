# SPDX-License-Identifier: Apache-2.0
"""PyTorch support: embeddings on parameter servers, and wrappers for custom training loops.

About five lines make an ordinary script elastic:

    job = elasticdl.init()
    model = elasticdl.torch.DistributedDataParallel(model, job)
    optimizer = elasticdl.torch.DistributedOptimizer(optimizer, job)
    sampler = elasticdl.torch.ElasticSampler(job, len(dataset), batch_size=64, epochs=2)
    loader = DataLoader(dataset, batch_sampler=sampler)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from elasticdl import _records

try:
    import torch
    from torch import nn
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "PyTorch is not installed; install it with `pip install elasticdl[torch]`", name="torch"
    ) from None

if TYPE_CHECKING:
    from elasticdl._job import Job

__all__ = ["DistributedDataParallel", "DistributedOptimizer", "ElasticSampler", "Embedding"]

COMBINERS = ("sum", "mean", "sqrtn")

# Named values of `init`; `normal` is the same as in torch.nn.Embedding.
_INITS: dict[str, dict[str, Any]] = {
    "normal": {"normal": {"mean": 0.0, "std": 1.0}},
    "uniform": {"uniform": {"low": -0.05, "high": 0.05}},
    "zeros": {"constant": 0.0},
}


class Source(Protocol):
    """Provides rows to the layers of a model during one pass."""

    def rows(self, table: str, dim: int, ids: torch.Tensor) -> torch.Tensor: ...


class Embedding(nn.Module):
    """An embedding on the parameter servers. Rows are created when an id is first used.

    Without `combiner`, it works like `torch.nn.Embedding`: ids of any shape give one row each. With
    a combiner (`sum`, `mean` or `sqrtn`), it works like `torch.nn.EmbeddingBag`: it reduces the
    rows of the last axis, or those between `offsets`, to one. Negative ids and `padding_idx` are
    ignored: their rows are zeros, and so is a bag without ids.

    To find the ids of a batch, the model's `forward` is run up to the last lookup, with zeros for
    rows. The ids may therefore depend on the batch, but not on parameters, rows or random numbers.
    The number of lookups must be the same in every pass.

    `num_embeddings` limits the ids. With `None`, any id is allowed, and the export contains `ids`
    in addition to `weight`. `init` is `normal` (0, 1), `uniform` (±0.05), `zeros`, or a dict in the
    format of the model's spec, such as `{"normal": {"mean": 0.0, "std": 0.02}}`. Outside a job, the
    layer looks up its rows in the `weight` loaded by `load_state_dict`.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        combiner: str | None = None,
        padding_idx: int | None = None,
        init: str | dict[str, Any] = "normal",
        include_last_offset: bool = False,
    ) -> None:
        super().__init__()
        if combiner is not None and combiner not in COMBINERS:
            known = ", ".join(COMBINERS)
            raise ValueError(f"`combiner` is {combiner!r}; use one of {known}, or None")
        # `given` is for layers of the user's module that were replaced.
        if isinstance(init, str) and init not in (*_INITS, "given"):
            raise ValueError(f"`init` is {init!r}; use one of {', '.join(_INITS)}, or a dict")
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings  # Counts from the end, as in torch.
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.combiner = combiner
        self.padding_idx = padding_idx
        self.include_last_offset = include_last_offset
        self.init = _INITS.get(init, init) if isinstance(init, str) else init
        # Set by the job's adapter; the table's name is the path of the layer in the module.
        self.table = ""
        self.source: Source | None = None
        self.register_parameter("weight", None)
        self.register_buffer("ids", None)

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the rows of `ids`, reduced if the layer has a combiner."""
        ids = torch.as_tensor(ids)
        if ids.is_floating_point() or ids.is_complex():
            raise TypeError(f"embedding ids must be integers, not {ids.dtype}; convert them first")
        flat = ids.reshape(-1).long()
        kept = self._kept(flat)
        rows = self._rows(flat if kept is None else flat[kept])
        if self.combiner is not None:
            return self._combined(rows, kept, ids, offsets, per_sample_weights)
        if kept is not None:
            rows = rows.new_zeros(len(flat), self.embedding_dim).index_copy(0, kept, rows)
        return rows.view(*ids.shape, self.embedding_dim)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name != "weight" or found is not None:
            return found
        if self.table:
            raise RuntimeError(
                f"the embedding `{self.table}` has no `weight`: its rows are on the parameter "
                "servers; to keep an nn.Embedding local, share its weight with another layer, as "
                "in `head.weight = embedding.weight`"
            )
        raise RuntimeError(
            "this embedding has no rows outside a job; load an export into the module with "
            "`load_state_dict(torch.load('model.pt'))` first"
        )

    def extra_repr(self) -> str:
        combiner = f", combiner={self.combiner!r}" if self.combiner else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{combiner}"

    def _kept(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Returns the indices of the ids to look up, or None for all."""
        keeps = flat >= 0
        if self.padding_idx is not None:
            keeps &= flat != self.padding_idx
        return None if bool(keeps.all()) else keeps.nonzero().reshape(-1)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        largest = int(ids.max()) if self.num_embeddings is not None and len(ids) else -1
        if self.num_embeddings is not None and largest >= self.num_embeddings:
            raise IndexError(
                f"embedding id {largest} is too large for {self.num_embeddings} embeddings"
            )
        if self.source is not None:
            return self.source.rows(self.table, self.embedding_dim, ids)
        if self.ids is None:
            return self.weight[ids]
        # Ids that were never trained have no row and give zeros.
        places = torch.searchsorted(self.ids, ids).clamp(max=max(len(self.ids) - 1, 0))
        return self.weight[places] * (self.ids[places] == ids).unsqueeze(1)

    def _combined(
        self,
        rows: torch.Tensor,
        kept: torch.Tensor | None,
        ids: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        if offsets is None and ids.dim() < 2:
            raise ValueError(
                f"a combiner needs two-dimensional ids or `offsets`, but the ids have shape "
                f"{list(ids.shape)}"
            )
        shape = ids.shape[:-1] if offsets is None else (self._n_bags(offsets),)
        if offsets is None and kept is None and weights is None:
            # All bags have the same size: a plain sum is fastest.
            total = rows.view(*ids.shape, self.embedding_dim).sum(-2)
            n_ids = max(ids.shape[-1], 1)
            return total / {"sum": 1, "mean": n_ids, "sqrtn": n_ids**0.5}[self.combiner]
        bags = self._bags(ids, offsets)
        if weights is None:
            weights = rows.new_ones(ids.numel())
        weights = weights.reshape(-1)
        if kept is not None:
            bags, weights = bags[kept], weights[kept]
        n_bags = int(torch.Size(shape).numel())
        total = rows.new_zeros(n_bags, self.embedding_dim)
        total = total.index_add(0, bags, rows * weights.unsqueeze(1))
        if self.combiner != "sum":
            squared = self.combiner == "sqrtn"
            norm = rows.new_zeros(n_bags).index_add(0, bags, weights**2 if squared else weights)
            norm = torch.where(norm == 0, 1.0, norm.sqrt() if squared else norm)
            total = total / norm.unsqueeze(1)
        return total.view(*shape, self.embedding_dim)

    def _n_bags(self, offsets: torch.Tensor) -> int:
        return len(offsets) - self.include_last_offset

    def _bags(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """Returns the bag of each id."""
        if offsets is None:
            n_bags, n_ids = ids.shape[:-1].numel(), ids.shape[-1]
            return torch.arange(n_bags).repeat_interleave(n_ids)
        starts = offsets[: self._n_bags(offsets)].contiguous()
        return torch.searchsorted(starts, torch.arange(ids.numel()), right=True) - 1

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The module has no rows until an export is loaded.
        if prefix + "weight" in state:
            weight = nn.Parameter(state[prefix + "weight"], requires_grad=False)
            self._parameters["weight"] = weight
        if prefix + "ids" in state:
            self.ids = state[prefix + "ids"]
        super()._load_from_state_dict(state, prefix, *rest)


class DistributedDataParallel(nn.Module):
    """Wraps a module whose parameters are managed by a job.

    It computes the same as the module, and its state dict has the same names.
    """

    def __init__(self, module: nn.Module, job: Job) -> None:
        super().__init__()
        self.module = module
        job.attach(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class DistributedOptimizer:
    """Wraps an optimizer: `step()` passes the gradients to the job and ends the iteration.

    All other attributes are those of the optimizer. The job keeps the state of the parameters, so
    it is not in `state_dict()`. `lr_schedule` is an `LRScheduler` of the optimizer, or a function
    of the step; with `schedule_every="epoch"`, it counts epochs. The job applies it, so the loop
    must not call its `step()`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        job: Job,
        lr_schedule: Any = None,
        schedule_every: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._job = job
        job.attach(optimizer=optimizer, lr_schedule=lr_schedule, schedule_every=schedule_every)

    def step(self, closure: Callable[[], Any] | None = None, loss: Any = None) -> Any:
        """Passes the gradients to the job and commits the batch; `loss` is for reports."""
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._job.allreduce(loss=loss)
        self._job.commit()
        return loss

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # Before `__init__`, for example during a copy.
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class ElasticSampler(torch.utils.data.Sampler):
    """A `batch_sampler` for `DataLoader` with the records that the job assigns to this worker.

    The sampler covers all `epochs`; in `for epoch in job.epochs(…)`, each iteration over the loader
    covers one epoch. With `num_workers`, the processes of the loader read batches that probably
    come next; only those that the job assigns reach the loop.
    """

    def __init__(
        self, job: Job, n_records: int, batch_size: int = 64, epochs: int = 1, shuffle: bool = True
    ) -> None:
        self._job = job
        self._plan = (n_records, batch_size, epochs, shuffle)
        job.plan(*self._plan)

    def __len__(self) -> int:
        """The number of steps that an iteration covers, each with one batch per lane."""
        return self._job.steps_per_iteration

    def set_epoch(self, _epoch: int) -> None:
        """Does nothing: the job shuffles each epoch differently."""

    def __iter__(self) -> Iterator[list[int]]:
        # Requests nothing until the first batch is needed, because a loader may start twice.
        for records in self._job.records(*self._plan):
            yield records.tolist()

    def batches(self, loader: torch.utils.data.DataLoader) -> Iterator[Any]:
        """Iterates over the batches of a loader with this `batch_sampler`."""
        fetch = _records.Fetch(loader.dataset, loader.collate_fn, by_item=True)
        options = {name: getattr(loader, name) for name in _records.LOADER_OPTIONS}
        read = self._job._reader(fetch, options)
        for records in self:
            yield read(np.asarray(records))


def _iterate(loader: torch.utils.data.DataLoader) -> Iterator[Any]:
    if isinstance(loader.batch_sampler, ElasticSampler):
        return loader.batch_sampler.batches(loader)
    return _iterate_as_usual(loader)


# A loader takes batches from its sampler long before they are trained, and cannot give them back.
# So where the sampler is ours, our own iterator takes the place of the loader's.
_iterate_as_usual = torch.utils.data.DataLoader.__iter__
torch.utils.data.DataLoader.__iter__ = _iterate
