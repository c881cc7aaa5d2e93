# SPDX-License-Identifier: Apache-2.0
"""The embedding tables of a module: the ids that a batch needs, and their rows.

Lookups take rows in the order in which `lookups` returned the ids, so no search is needed: the
first call of a layer gets the first rows. The training loop merges duplicate ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from elasticdl._zoo import ZooError
from elasticdl.torch import Embedding

# Smaller embeddings are cheaper as dense parameters; the original ElasticDL has the same limit.
MIN_SWAPPED_BYTES = 2 << 20

# Strategies that keep tables on parameter servers.
WITH_SERVERS = ("ParameterServerStrategy", "HybridStrategy")

# Number of batches whose ids are kept for comparison; a worker has two in flight.
N_REMEMBERED = 16


class Tables:
    """All distributed embeddings of one module."""

    def __init__(self, module: nn.Module, strategy: str) -> None:
        self._first = swap(module) if strategy in WITH_SERVERS else {}
        found = [(path, m) for path, m in module.named_modules() if isinstance(m, Embedding)]
        self._layers = {path or "embedding": layer for path, layer in found}
        for path, layer in self._layers.items():
            layer.table = path
        self._prefixes = {path or "embedding": f"{path}." if path else "" for path, _ in found}
        # Number of lookups per pass; known after the first pass.
        self._n_lookups: int | None = None
        self._named: deque[tuple[bytes, dict[str, np.ndarray]]] = deque(maxlen=N_REMEMBERED)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def spec(self) -> list[dict[str, Any]]:
        """Returns the entries of the model's spec."""
        layers = self._layers.items()
        return [{"name": n, "dim": layer.embedding_dim, "init": layer.init} for n, layer in layers]

    def first_rows(self, table: int) -> np.ndarray:
        """Returns the initial rows of a swapped table."""
        layer = list(self._layers.values())[table]
        return self._first[id(layer)].numpy()

    def record(self, batch: Any, forward: Callable[[], Any]) -> list[np.ndarray]:
        """Returns the ids of each table, from a forward pass that stops after its last lookup."""
        recording = _Recording(self._n_lookups)
        with self._from(recording), suppress(_LastLookup):
            forward()
        self._n_lookups = recording.n_lookups
        named = {table: _joined(recording.ids.get(table, [])) for table in self._layers}
        self._named.append((batch.records.tobytes(), named))
        return list(named.values())

    def serve(
        self, batch: Any, rows: list[np.ndarray], wants_gradient: bool
    ) -> AbstractContextManager[_Served]:
        """Provides `rows` to the layers during one pass."""
        return self._serve(batch, rows, wants_gradient) if self._layers else _NOTHING

    @contextmanager
    def _serve(self, batch: Any, rows: list[np.ndarray], wants_gradient: bool) -> Iterator[_Served]:
        self._first = {}  # The job has them, or those of another worker.
        # Records of different data sets can have the same indices, so there can be several.
        records = batch.records.tobytes()
        named = [ids for numbers, ids in self._named if numbers == records]
        served = _Served(dict(zip(self._layers, rows)), named, wants_gradient)
        with self._from(served):
            yield served
        served.check_all_taken()

    def state_dict(
        self, tables: Mapping[str, tuple[np.ndarray, np.ndarray]]
    ) -> dict[str, torch.Tensor]:
        """Returns the rows as plain layers store them; rows that were never trained are zeros."""
        state = {}
        for table, layer in self._layers.items():
            ids, rows = tables.get(table, (np.empty(0), np.empty((0, layer.embedding_dim))))
            ids = torch.from_numpy(np.asarray(ids).astype(np.int64))
            rows = torch.from_numpy(np.array(rows, np.float32).reshape(-1, layer.embedding_dim))
            prefix = self._prefixes[table]
            if layer.num_embeddings is None:
                order = ids.argsort()
                state[prefix + "ids"], state[prefix + "weight"] = ids[order], rows[order]
            else:
                weight = torch.zeros(layer.num_embeddings, layer.embedding_dim)
                weight[ids] = rows
                state[prefix + "weight"] = weight
        return state

    @contextmanager
    def _from(self, source: _Recording | _Served) -> Iterator[None]:
        for layer in self._layers.values():
            layer.source = source
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.source = None


class _LastLookup(BaseException):
    """Stops a recording pass; not an `Exception`, so user code does not catch it."""


class _Recording:
    """Records ids and returns zeros."""

    def __init__(self, n_expected: int | None) -> None:
        self.ids: dict[str, list[np.ndarray]] = {}
        self.n_lookups = 0
        self._n_expected = n_expected

    def rows(self, table: str, dim: int, ids: torch.Tensor) -> torch.Tensor:
        # Copy, because the batch's memory is reused.
        self.ids.setdefault(table, []).append(ids.numpy().copy())
        self.n_lookups += 1
        if self.n_lookups == self._n_expected:
            raise _LastLookup
        return torch.zeros(len(ids), dim)


class _Served:
    """Returns the received rows, and keeps them to collect their gradients."""

    def __init__(
        self,
        rows: dict[str, np.ndarray],
        named: list[dict[str, np.ndarray]],
        wants_gradient: bool,
    ) -> None:
        self._rows = rows
        self._named = named
        self._wants_gradient = wants_gradient
        self._taken = dict.fromkeys(rows, 0)
        self._leaves: dict[str, list[torch.Tensor]] = {table: [] for table in rows}

    def rows(self, table: str, dim: int, ids: torch.Tensor) -> torch.Tensor:
        start = self._taken[table]
        end = start + len(ids)
        found = ids.numpy()
        is_known = not self._named
        self._named = [n for n in self._named if np.array_equal(n[table][start:end], found)]
        if end > len(self._rows[table]) or not (is_known or self._named):
            raise _changed(table)
        self._taken[table] = end
        leaf = torch.from_numpy(self._rows[table][start:end])
        leaf.requires_grad_(self._wants_gradient)
        self._leaves[table].append(leaf)
        # A model may modify the looked-up rows in place, but not the received ones.
        return leaf.clone()

    def check_all_taken(self) -> None:
        for table, rows in self._rows.items():
            if self._taken[table] != len(rows):
                raise _changed(table)

    def gradients(self) -> list[np.ndarray]:
        """Returns one array per table, shaped like its rows."""
        gradients = []
        for table, leaves in self._leaves.items():
            whole = _joined([_gradient(leaf) for leaf in leaves])
            gradients.append(whole.astype(np.float32, copy=False).reshape(self._rows[table].shape))
        return gradients


# For modules without tables.
_NOTHING = nullcontext(_Served({}, [], wants_gradient=False))


def swap(module: nn.Module) -> dict[int, torch.Tensor]:
    """Replaces large `nn.Embedding` and `nn.EmbeddingBag` layers by distributed embeddings.

    Returns their values by the ids of the new layers. Weights that another layer shares stay dense.
    So do frozen weights and those with `max_norm`, `scale_grad_by_freq` or the mode `max`, which
    need the whole table.
    """
    n_uses: dict[int, int] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            n_uses[id(parameter)] = n_uses.get(id(parameter), 0) + 1
    swapped: dict[int, Embedding] = {}
    values = {}
    for owner in list(module.modules()):
        for name, layer in owner._modules.items():
            if layer is not None and _is_swapped(layer) and n_uses[id(layer.weight)] == 1:
                # A layer that is used twice stays one layer.
                distributed = swapped.setdefault(id(layer), _distributed(layer))
                owner._modules[name] = distributed
                values[id(distributed)] = layer.weight.detach().float().contiguous()
    return values


def _is_swapped(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Embedding, nn.EmbeddingBag):
        return False
    needs_whole = layer.max_norm is not None or layer.scale_grad_by_freq
    is_large = layer.weight.numel() * layer.weight.element_size() > MIN_SWAPPED_BYTES
    is_max = getattr(layer, "mode", None) == "max"
    return is_large and layer.weight.requires_grad and not needs_whole and not is_max


def _distributed(layer: nn.Embedding | nn.EmbeddingBag) -> Embedding:
    return Embedding(
        layer.num_embeddings,
        layer.embedding_dim,
        combiner=getattr(layer, "mode", None),
        padding_idx=layer.padding_idx,
        init="given",
        include_last_offset=getattr(layer, "include_last_offset", False),
    )


def _changed(table: str) -> ZooError:
    return ZooError(
        f"the ids that `forward` looks up in the embedding `{table}` changed between two passes "
        "over one batch; they must depend only on the batch, not on parameters, rows, random "
        "numbers or the training mode"
    )


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    if len(pieces) == 1:
        return np.ascontiguousarray(pieces[0])
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def _gradient(leaf: torch.Tensor) -> np.ndarray:
    return (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).detach().numpy()
