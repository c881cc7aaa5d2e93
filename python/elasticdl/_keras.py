# SPDX-License-Identifier: Apache-2.0
"""Runs a Keras model for the training loop in Rust, which owns the parameters and the optimizer.

The adapter computes ids to look up, loss and gradient, metrics, and predictions for a batch. It
never updates a parameter, and no result depends on earlier calls.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from elasticdl import (
    _keras_callbacks,
    _keras_swap,
    _keras_tensorflow,
    _metrics,
    _optimizers,
    _trial,
)
from elasticdl._keras_feed import RECORD, Feed, NumpyFeed, TensorFlowFeed
from elasticdl._keras_pass import ALIGNMENT, JaxPasses, Network, TensorFlowPasses, TorchPasses
from elasticdl._mode import Mode
from elasticdl._zoo import Zoo, ZooError

_keras_tensorflow.leave_unimported()

MODEL_FILE = "model.keras"

WITH_SERVERS = ("ParameterServerStrategy", "HybridStrategy")

# Mode for looking up ids, by job type; evaluation during training uses the training mode.
_MODES = {"train": Mode.TRAINING, "evaluate": Mode.EVALUATION, "predict": Mode.PREDICTION}

_PASSES = {"tensorflow": TensorFlowPasses, "jax": JaxPasses, "torch": TorchPasses}


class KerasAdapter:
    """A Keras model on the backend that Keras was imported with.

    The optimizer uses a `LearningRateScheduler` from `callbacks()`. For other callbacks,
    `on_train_begin` is called before the first batch of this worker, and `on_train_end` at export,
    with the trained weights in the model. A callback with other methods is rejected.
    """

    def __init__(self, zoo: Zoo, job: dict[str, Any], columns: list[dict[str, Any]]) -> None:
        self._backend = keras.backend.backend()
        if self._backend not in _PASSES:
            raise ZooError(
                f"the Keras backend `{self._backend}` cannot train; set KERAS_BACKEND to "
                "tensorflow, jax or torch"
            )
        prepare(job)
        self._job = job
        self._metrics = zoo.eval_metrics_fn() if zoo.eval_metrics_fn else None
        is_training = job.get("job_type", "train") == "train"
        made = list(zoo.callbacks() or []) if zoo.callbacks and is_training else []
        self._scheduler, self._callbacks = _keras_callbacks.split(made)
        self._has_begun = False
        raw = bool(self._backend == "tensorflow" and zoo.feed and job.get("_raw"))
        self._feed = self._new_feed(zoo, columns, raw)
        self._model = self._new_model(zoo)
        if is_training:
            _keras_callbacks.check_model(self._model)
        if job.get("distribution_strategy") in WITH_SERVERS:
            _keras_swap.swap(self._model)
        self._tables = _keras_swap.distributed(self._model)
        self._network = Network(self._model, zoo.loss, self._tables)
        self.dense = aligned(self._network.n_numbers)
        self.gradient = aligned(self._network.n_numbers)
        for slot in self._network.slots:
            if getattr(slot.variable, "constraint", None) is not None:
                raise ZooError(
                    f"`{slot.variable.path}` has a constraint, which is not supported; remove it, "
                    "or use a regularizer"
                )
            first = keras.ops.convert_to_numpy(slot.variable.value)
            self.dense[slot.start : slot.stop] = np.asarray(first, "float32").ravel()
        self._passes = _PASSES[self._backend](self._network, self.dense, self.gradient)
        optimizer = zoo.optimizer()
        self.spec = self._new_spec(zoo, columns, raw, optimizer)
        # The last batch that was fed: a batch is first looked up and then trained.
        self._fed: tuple[Any, str, tuple[Any, Any]] | None = None
        self._looked_up: tuple[Any, list[list[np.ndarray]]] | None = None

    def begin_trial(self, watch: _trial.Watch) -> None:
        """Passes what `feed` returns to `watch` from now on; no callback is called."""
        self._has_begun = True
        self._feed = _trial.watched(self._feed, watch)

    def lookups(self, batch: Any) -> list[np.ndarray]:
        if not self._tables:
            return []
        calls = self._ids(batch)
        found = []
        for table, ids in zip(self._tables, calls):
            kept = [one[one >= table.least_id] for one in ids]
            found.append(np.concatenate(kept) if kept else np.zeros(0, "int64"))
        return found

    def train(self, batch: Any, rows: list[np.ndarray], seed: int) -> tuple[float, list]:
        self._begin()
        random.seed(seed)
        np.random.seed(seed & 0xFFFF_FFFF)
        if self._backend == "torch":
            import torch

            torch.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
        features, labels = self._features(batch, Mode.TRAINING)
        seeds = self._network.seed_states(seed)
        call_rows = self._split_rows(batch, rows)
        loss, row_gradients = self._passes.train(features, labels, call_rows, seeds)
        return loss, self._join_gradients(batch, row_gradients)

    def evaluate(self, batch: Any, rows: list[np.ndarray]) -> tuple[float, dict[str, list[float]]]:
        features, labels = self._features(batch, Mode.EVALUATION)
        loss, predictions = self._passes.infer(features, labels, self._split_rows(batch, rows))
        named = self._named(predictions)
        return loss, _metrics.sums(self._metrics, labels, named, len(batch), loss=loss)

    def predict(self, batch: Any, rows: list[np.ndarray]) -> np.ndarray:
        features, _ = self._features(batch, Mode.PREDICTION)
        _, predictions = self._passes.infer(features, None, self._split_rows(batch, rows))
        n = len(batch)
        outputs = [_metrics.to_numpy(one) for one in keras.tree.flatten(predictions)]
        for output in outputs:
            if output.ndim == 0 or len(output) != n:
                raise ZooError(
                    f"the model's output has the shape {list(output.shape)} for {n} records; its "
                    "first axis must be the record"
                )
        return np.concatenate([o.reshape(n, -1).astype("float32") for o in outputs], axis=1)

    def export(
        self, folder: str, dense: np.ndarray, tables: dict[str, tuple[np.ndarray, np.ndarray]]
    ) -> list[str]:
        for slot in self._network.slots:
            value = np.asarray(dense[slot.start : slot.stop]).reshape(slot.shape)
            slot.variable.assign(value.astype(slot.dtype))
        with _keras_swap.restored(self._model, tables) as model:
            for callback in self._callbacks:
                callback.set_model(model)
                callback.on_train_end()
            model.save(os.path.join(folder, MODEL_FILE))
        return [MODEL_FILE]

    def _new_feed(self, zoo: Zoo, columns: list[dict[str, Any]], raw: bool) -> Feed:
        if self._backend == "tensorflow":
            return TensorFlowFeed(zoo.feed, columns, raw)
        return NumpyFeed(zoo.feed, columns)

    def _new_model(self, zoo: Zoo) -> Any:
        """Builds the user's model with reproducible names and initial values of all weights."""
        keras.utils.clear_session()
        keras.utils.set_random_seed(self._job["seed"] & 0xFFFF_FFFF)
        model = zoo.custom_model()
        if not isinstance(model, keras.Model):
            raise ZooError(
                f"`{zoo.name}` returned a {type(model).__name__}; it must return a keras.Model"
            )
        if not _is_built(model):
            model(_tensors(self._feed.made_up()))
        return model

    def _new_spec(self, zoo: Zoo, columns: list[dict], raw: bool, optimizer: Any) -> dict[str, Any]:
        record = {"name": RECORD, "dtype": "record", "shape": [], "is_label": False}
        tables = [_keras_swap.table_spec(table) for table in self._tables]
        _refuse_repeated([table["name"] for table in tables])
        names = unique([slot.variable.path for slot in self._network.slots])
        params = [
            {
                "name": name,
                "shape": list(slot.shape),
                "init": "given",
                "rule": _rule(slot, optimizer),
            }
            for name, slot in zip(names, self._network.slots)
        ]
        return {
            "name": zoo.name,
            "params": params,
            "tables": tables,
            "inputs": [record] if raw else columns,
            "metrics": _metrics.describe(self._metrics),
            "optimizer": self._optimizer_spec(optimizer),
        }

    def _optimizer_spec(self, optimizer: Any) -> dict[str, Any]:
        # Upper bound on the number of steps of the job, if known.
        n_steps = self._job.get("_n_steps") or self._job.get("max_step") or None
        if self._scheduler is None:
            return _optimizers.from_keras(optimizer, n_steps)
        epoch_steps = self._job.get("epoch_steps")
        if not n_steps or not epoch_steps:
            raise ZooError("LearningRateScheduler needs the number of epochs; set --num_epochs")
        first = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        rates = _keras_callbacks.rates(self._scheduler, first, n_steps, epoch_steps)
        return _optimizers.from_keras(optimizer, n_steps, lambda step: rates[step])

    def _features(self, batch: Any, mode: str) -> tuple[Any, Any]:
        if self._fed is None or self._fed[0] is not batch or self._fed[1] != mode:
            self._fed = (batch, mode, self._feed(batch, mode))
        return self._fed[2]

    def _ids(self, batch: Any) -> list[list[np.ndarray]]:
        """Returns the ids of each call of each table's layer; they do not depend on the mode."""
        if self._looked_up is None or self._looked_up[0] is not batch:
            features, _ = self._features(batch, _MODES[self._job.get("job_type", "train")])
            if self._backend == "jax":
                _refuse_wide_ids(features)
            calls = [[one.astype("int64") for one in ids] for ids in self._passes.ids(features)]
            for table, ids in zip(self._tables, calls):
                _check_ids(table, ids)
            self._looked_up = (batch, calls)
        return self._looked_up[1]

    def _split_rows(self, batch: Any, rows: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Splits the rows of each table by call, with zeros for ids that have no row."""
        if not self._tables:
            return []
        split = []
        for table, ids, whole in zip(self._tables, self._ids(batch), rows):
            calls, start = [], 0
            for one in ids:
                kept = one >= table.least_id
                n = int(np.count_nonzero(kept))
                call = whole[start : start + n]
                start += n
                if n < len(one):
                    call = np.zeros((len(one), table.output_dim), "float32")
                    call[kept] = whole[start - n : start]
                calls.append(call)
            split.append(calls)
        return split

    def _join_gradients(self, batch: Any, gradients: list[list[np.ndarray]]) -> list[np.ndarray]:
        """Inverse of `_split_rows`, for gradients."""
        if not self._tables:
            return []
        given = []
        for table, ids, calls in zip(self._tables, self._ids(batch), gradients):
            kept = [
                gradient if (one >= table.least_id).all() else gradient[one >= table.least_id]
                for one, gradient in zip(ids, calls)
            ]
            empty = np.zeros((0, table.output_dim), "float32")
            given.append(kept[0] if len(kept) == 1 else np.concatenate([empty, *kept]))
        return given

    def _named(self, predictions: Any) -> Any:
        """Names the outputs if there are several and a metric refers to one of them."""
        names = getattr(self._model, "output_names", None)
        is_by_output = any(isinstance(m, Mapping) for m in (self._metrics or {}).values())
        if is_by_output and names and isinstance(predictions, (list, tuple)):
            return dict(zip(names, predictions))
        return predictions

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        for callback in self._callbacks:
            callback.set_model(self._model)
            callback.on_train_begin()


def prepare(job: dict[str, Any]) -> None:
    """Fixes the number of threads and the order of arithmetic.

    Call it before the framework's first operation. A thread pool that is already running cannot be
    changed; the sums of this process then depend on it.
    """
    n_threads = int(job.get("threads_per_worker") or 1)
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(n_threads)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.experimental.enable_op_determinism()
    elif backend == "jax":
        # JAX reads this when it creates its first array.
        os.environ.setdefault("NPROC", str(n_threads))
        flags, single = os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false"
        if n_threads == 1 and single not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {single}".strip()
    elif backend == "torch":
        import torch

        torch.set_num_threads(n_threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Filling would write all new memory twice; Keras never reads uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False


def aligned(n: int) -> np.ndarray:
    raw = np.zeros(4 * n + ALIGNMENT, "uint8")
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + 4 * n].view("float32")


def _is_built(model: Any) -> bool:
    return model.built and all(layer.built for layer in model._flatten_layers())


def _tensors(features: Any) -> Any:
    return keras.tree.map_structure(keras.ops.convert_to_tensor, features)


def _rule(slot: Any, optimizer: Any) -> Any:
    if not slot.is_trained:
        return "moving_average"
    return {"trainable": {"decay": _optimizers.decayed(optimizer, slot.variable)}}


def unique(names: list[str]) -> list[str]:
    """Appends a number to repeated names."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return unique


def _refuse_repeated(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ZooError(f"two Embedding layers are named `{name}`; use unique names")


def _check_ids(table: Any, calls: list[np.ndarray]) -> None:
    for ids in calls:
        if table.input_dim is not None and len(ids) and int(ids.max()) >= table.input_dim:
            raise ZooError(
                f"the Embedding `{table.name}` got the id {int(ids.max())}, but its input_dim is "
                f"{table.input_dim}; increase input_dim or use smaller ids"
            )


def _refuse_wide_ids(features: Any) -> None:
    """Rejects 64-bit ids, which JAX would silently truncate to 32 bits."""
    for leaf in keras.tree.flatten(features):
        is_wide = getattr(leaf, "dtype", None) in (np.int64, np.uint64) and leaf.size
        if is_wide and not (int(leaf.min()) >= -(2**31) and int(leaf.max()) < 2**31):
            raise ZooError(
                "a feature has ids beyond 32 bits, which the JAX backend cannot look up; map them "
                "to less than 2147483648 in `feed`, or set KERAS_BACKEND to tensorflow or torch"
            )
