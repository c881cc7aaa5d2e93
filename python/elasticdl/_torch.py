# SPDX-License-Identifier: Apache-2.0
"""Adapts a `torch.nn.Module` of the model zoo to the training loop.

A result may depend only on `dense`, the batch, the rows and the seed; `Flat` ensures this.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from elasticdl import _metrics, _optimizers, _schedules, _torch_flat, _torch_layout, _trial
from elasticdl._mode import Mode
from elasticdl._torch_flat import Flat
from elasticdl._torch_tables import Tables
from elasticdl._zoo import Zoo, ZooError

LABEL = "label"

_MODES = {"train": Mode.TRAINING, "evaluate": Mode.EVALUATION, "predict": Mode.PREDICTION}

# Names of a loss function's first parameter if the predictions come first, as in torch.
_PREDICTIONS = ("input", "output", "pred", "logit", "y_pred", "y_hat")


class TorchAdapter:
    """A module with its flat parameters and its tables."""

    def __init__(self, zoo: Zoo, job: Mapping[str, Any], columns: list[dict[str, Any]]) -> None:
        _torch_flat.make_repeatable(job["threads_per_worker"])
        _torch_flat.reseed(job["seed"])
        self.module = zoo.custom_model()
        if not isinstance(self.module, nn.Module):
            raise ZooError(
                f"`{zoo.name}` returned a {type(self.module).__name__}; return a torch.nn.Module"
            )
        _torch_layout.check(self.module)
        self._loss = _with_labels_first(zoo.loss)
        self._feed = _Feed(zoo.feed, columns)
        self._metrics = zoo.eval_metrics_fn() if zoo.eval_metrics_fn is not None else None
        self._mode = _MODES[job["job_type"]]
        self._tables = Tables(self.module, job["distribution_strategy"])

        optimizer, schedule, every = _optimizer(zoo, self.module)

        self._flat = Flat(self.module)
        self.dense, self.gradient = self._flat.dense, self._flat.gradient
        self.spec = {
            "name": zoo.name,
            "params": self._flat.spec(optimizer),
            "tables": self._tables.spec(),
            "inputs": columns,
            "metrics": _metrics.describe(self._metrics),
            "optimizer": _optimizers.from_torch(
                optimizer,
                schedule,
                job["max_step"] or None,
                _epoch_steps(job) if every == "epoch" else None,
            ),
        }

    def begin_trial(self, watch: _trial.Watch) -> None:
        """Passes what `feed` returns to `watch` from now on."""
        self._feed = _trial.watched(self._feed, watch)

    def memory(self) -> np.ndarray | None:
        """Returns an array for all parameters, or None if the module changes them in its passes."""
        return self._flat.memory()

    def bind(self, dense: np.ndarray) -> None:
        """Makes the parameters views into `dense`."""
        self._flat.bind(dense)

    def first_rows(self, table: int) -> np.ndarray:
        """Returns the initial rows of a table that was an `nn.Embedding`."""
        return self._tables.first_rows(table)

    def lookups(self, batch: Any) -> list[np.ndarray]:
        """Returns the ids that `batch` needs, per table."""
        if not self._tables:
            return []
        self._begin(self._mode == Mode.TRAINING)
        self._flat.reseed(0)
        features, _ = self._feed(batch, self._mode)
        with torch.no_grad():
            return self._tables.record(batch, lambda: self.module(features))

    def train(
        self, batch: Any, rows: list[np.ndarray], seed: int
    ) -> tuple[float, list[np.ndarray]]:
        """Runs forward and backward, and fills `gradient`."""
        loss, row_gradients = self._pass(batch, rows, seed)
        self._flat.fill_gradient()
        return loss, row_gradients

    def train_in_pieces(
        self, batch: Any, rows: list[np.ndarray], seed: int
    ) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
        """Like `train`, but leaves the gradient in autograd's tensors.

        The pieces are flat; concatenated, they equal what `train` writes into `gradient`. This
        saves a copy if the caller copies them anyway.
        """
        loss, row_gradients = self._pass(batch, rows, seed)
        pieces = [gradient.reshape(-1).numpy() for gradient in self._flat.take_gradients()]
        return loss, [*pieces, self._flat.changes], row_gradients

    def evaluate(self, batch: Any, rows: list[np.ndarray]) -> tuple[float, dict[str, list[float]]]:
        """Returns the mean loss and the sums of the metrics."""
        labels, predictions = self._forward(batch, rows, Mode.EVALUATION)
        with torch.no_grad():
            loss = self._mean_loss(labels, predictions, len(batch)).item()
            return loss, _metrics.sums(self._metrics, labels, predictions, len(batch), loss)

    def predict(self, batch: Any, rows: list[np.ndarray]) -> np.ndarray:
        """Returns one row of numbers per record; several outputs are concatenated."""
        _, predictions = self._forward(batch, rows, Mode.PREDICTION)
        outputs = [output.reshape(len(output), -1).float() for output in _leaves(predictions)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)).numpy()

    def export(
        self, folder: str, dense: np.ndarray, tables: Mapping[str, tuple[np.ndarray, np.ndarray]]
    ) -> list[str]:
        """Writes `model.pt`, a `state_dict` that the plain module can load."""
        self._begin(False)
        state = self._flat.layout.state_dict(self.module, torch.from_numpy(np.array(dense)))
        state.update(self._tables.state_dict(tables))
        torch.save(state, os.path.join(folder, "model.pt"))
        return ["model.pt"]

    def _begin(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)
        self._flat.reset()

    def _forward(self, batch: Any, rows: list[np.ndarray], mode: str) -> tuple[Any, Any]:
        self._begin(False)
        self._flat.reseed(0)
        features, labels = self._feed(batch, mode)
        with torch.no_grad(), self._tables.serve(batch, rows, wants_gradient=False):
            predictions = self.module(features)
        self._flat.check_unchanged()
        return labels, predictions

    def _mean_loss(self, labels: Any, predictions: Any, n_records: int) -> torch.Tensor:
        loss = self._loss(labels, predictions)
        if not isinstance(loss, torch.Tensor):
            raise ZooError(f"`loss` returned a {type(loss).__name__}; return a tensor")
        if loss.dim() == 0:
            return loss
        if loss.shape[0] == n_records or loss.numel() == 1:
            return loss.mean()
        raise ZooError(
            f"`loss` returned values of shape {list(loss.shape)} for {n_records} records; return "
            "one number per record or their mean"
        )

    def _pass(
        self, batch: Any, rows: list[np.ndarray], seed: int
    ) -> tuple[float, list[np.ndarray]]:
        """Leaves gradients in the parameters, and changes of other state in `gradient`."""
        self._begin(True)
        self._flat.forget_gradients()
        self._flat.reseed(seed)
        features, labels = self._feed(batch, Mode.TRAINING)
        with self._tables.serve(batch, rows, wants_gradient=True) as served:
            loss = self._mean_loss(labels, self.module(features), len(batch))
        if loss.requires_grad:
            loss.backward()
        self._flat.check_unchanged()
        self._flat.take_changes()
        return loss.item(), served.gradients()


class _Feed:
    """Converts a batch to the inputs of the module and the labels for the loss."""

    def __init__(self, feed: Callable[..., Any] | None, columns: list[dict[str, Any]]) -> None:
        self._feed = feed
        self._labels = [c["name"] for c in columns if c["is_label"] or c["name"] == LABEL]
        self._metadata = SimpleNamespace(
            columns=columns,
            column_names=[column["name"] for column in columns],
            column_dtypes={column["name"]: column["dtype"] for column in columns},
        )

    def __call__(self, batch: Any, mode: str) -> tuple[Any, Any]:
        if self._feed is None:
            fed = self._split(batch.columns)
        else:
            fed = self._feed(batch.columns, mode, self._metadata)
        if not (isinstance(fed, tuple) and len(fed) == 2):
            if mode != Mode.PREDICTION:
                raise ZooError(
                    f"`feed` returned a {type(fed).__name__}; return a tuple (features, labels)"
                )
            fed = fed, None
        features, labels = (_tensors(part) for part in fed)
        for part, values in ("features", features), ("labels", labels):
            for leaf in _leaves(values):
                _check_records(part, leaf, len(batch))
        return features, labels

    def _split(self, columns: dict[str, Any]) -> tuple[Any, Any]:
        features = {name: column for name, column in columns.items() if name not in self._labels}
        labels = {name: columns[name] for name in self._labels if name in columns}
        return _alone(features), _alone(labels) if labels else None


def _alone(columns: dict[str, Any]) -> Any:
    return next(iter(columns.values())) if len(columns) == 1 else columns


def _tensors(values: Any) -> Any:
    """Converts arrays to tensors without a copy; leaves other values unchanged."""
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values) if values.dtype.kind in "fiub" else values
    if isinstance(values, Mapping):
        return {name: _tensors(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_tensors(value) for value in values)
    return values


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, Mapping):
        for value in values.values():
            yield from _leaves(value)
    elif isinstance(values, tuple):
        for value in values:
            yield from _leaves(value)
    elif values is not None:
        yield values


def _check_records(part: str, leaf: Any, n_records: int) -> None:
    is_one = not hasattr(leaf, "__len__") or getattr(leaf, "ndim", 1) == 0
    n_found = 1 if is_one else len(leaf)
    if n_found != n_records:
        raise ZooError(
            f"`feed` returned {part} of {n_found} records for a batch of {n_records}; it must not "
            "change the number of records"
        )


def _with_labels_first(loss: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns the loss as `loss(labels, predictions)`; torch's losses take predictions first."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        first = next(iter(inspect.signature(function).parameters), "")
    except ValueError:  # A built-in function without a signature.
        first = ""
    if first.lower().startswith(_PREDICTIONS):
        return lambda labels, predictions: loss(predictions, labels)
    return loss


def _epoch_steps(job: dict[str, Any]) -> int:
    if not job.get("epoch_steps"):
        raise ZooError("a schedule that counts epochs needs the number of epochs; set --num_epochs")
    return job["epoch_steps"]


def _optimizer(zoo: Zoo, module: nn.Module) -> tuple[torch.optim.Optimizer, Any, str]:
    """Returns the user's optimizer and schedule, and whether it counts steps or epochs.

    Freezes parameters that are not in the optimizer.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # A model that has only tables has no parameters for the optimizer.
    made = _made(zoo.optimizer, parameters or [nn.Parameter(torch.zeros(1))])
    made = made if isinstance(made, tuple) else (made, zoo.lr_schedule)
    optimizer, schedule, every = made if len(made) == 3 else (*made, None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ZooError(
            f"`optimizer` returned a {type(optimizer).__name__}; return a torch.optim.Optimizer"
        )
    _torch_flat.freeze_unheld(module, optimizer)
    return optimizer, schedule, _schedules.interval(schedule, every)


def _made(optimizer: Callable[..., Any], parameters: list[nn.Parameter]) -> Any:
    """Creates the optimizer without importing torch's compiler, which would take seconds."""
    guarded = torch.optim.Optimizer.add_param_group
    torch.optim.Optimizer.add_param_group = getattr(guarded, "__wrapped__", guarded)
    try:
        return optimizer(parameters)
    finally:
        torch.optim.Optimizer.add_param_group = guarded
