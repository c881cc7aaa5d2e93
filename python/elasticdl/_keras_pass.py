# SPDX-License-Identifier: Apache-2.0
"""Compiled passes for each backend: from the flat parameter vector to loss and gradient.

A pass changes no variable: parameters, seeds and rows are its inputs, and new values of moving
averages are outputs. Its result therefore does not depend on earlier passes.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from keras.src.random.seed_generator import global_seed_generator

from elasticdl import layers

# In bytes: the alignment that TensorFlow requires of shared memory.
ALIGNMENT = 64

# Parameters with at least this many numbers get their own tensor, which saves two copies.
LARGE = 4096

# The variable of a `keras.random.SeedGenerator`.
_SEED_NAME = "seed_generator_state"


class Slot(NamedTuple):
    """The position of a variable in the flat vector."""

    variable: Any
    start: int
    stop: int
    is_trained: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.variable.shape)

    @property
    def dtype(self) -> str:
        return keras.backend.standardize_dtype(self.variable.dtype)


class Run(NamedTuple):
    """Adjacent slots that are passed to and from TensorFlow as one tensor."""

    slots: list[Slot]
    dense: np.ndarray
    gradient: np.ndarray

    @property
    def is_aligned(self) -> bool:
        """Whether TensorFlow can share the memory; it aborts if the memory is not aligned."""
        return self.dense.ctypes.data % ALIGNMENT == 0 and self.dense.size > 0


class Network:
    """A model as a pure function of its parameters."""

    def __init__(
        self, model: Any, loss: Any, tables: list[Any], variables: list[Any] | None = None
    ) -> None:
        self.model = model
        self.tables = tables
        self._loss = loss
        trained = {id(variable) for variable in model.trainable_weights}
        self.slots: list[Slot] = []
        start = 0
        for variable in model.weights if variables is None else variables:
            stop = start + int(np.prod(variable.shape))
            self.slots.append(Slot(variable, start, stop, id(variable) in trained))
            start = stop
        self.n_numbers = start
        self.seeds = [v for v in model.non_trainable_variables if v.name == _SEED_NAME]
        if keras.backend.backend() != "jax":
            # The global generator of `keras.random`; Keras rejects its use in compiled JAX code.
            self.seeds.append(global_seed_generator().state)

    def seed_states(self, seed: int) -> np.ndarray:
        """Returns the state of each seed generator, which depends only on `seed` and its index."""
        states = np.empty((len(self.seeds), 2), dtype="int64")
        for place in range(len(self.seeds)):
            key = _mix(_mix(seed) ^ place)
            # 31 and 30 bits: torch stores states as int32, and the second one is incremented.
            states[place] = key >> 33, key & 0x3FFF_FFFF
        return states

    def loss(self, values: list, seeds: Any, features: Any, labels: Any, rows: list) -> tuple:
        """Returns the mean training loss and the new values of non-trainable variables."""
        predictions, extra, scope = self._forward(values, seeds, features, rows, True)
        loss = self._mean_loss(labels, predictions, extra)
        moved = [scope.get_current_value(slot.variable) for slot in self.slots]
        return loss, [new for slot, new in zip(self.slots, moved) if not slot.is_trained]

    def infer(self, values: list, features: Any, labels: Any, rows: list) -> tuple:
        """Returns the mean loss (None without labels) and the predictions."""
        predictions, extra, _ = self._forward(values, None, features, rows, False)
        loss = None if labels is None else self._mean_loss(labels, predictions, extra)
        return loss, predictions

    def ids(self, values: list, features: Any) -> list[list]:
        """Returns the ids of each call of each table's layer."""
        recording = layers.Recording()
        self._run(values, None, features, recording, False)
        return [recording.calls(table) for table in self.tables]

    def _forward(self, values: list, seeds: Any, features: Any, rows: list, training: bool):
        return self._run(values, seeds, features, layers.Lent(self.tables, rows), training)

    def _run(self, values: list, seeds: Any, features: Any, the_pass: Any, training: bool):
        mapping = [(slot.variable, value) for slot, value in zip(self.slots, values)]
        if seeds is not None:
            mapping += [(variable, seeds[i]) for i, variable in enumerate(self.seeds)]
        scope = keras.StatelessScope(state_mapping=mapping, collect_losses=True)
        with scope, layers.during(the_pass):
            if self.model._call_has_training_arg:
                predictions = self.model(features, training=training)
            else:
                predictions = self.model(features)
            extra = list(self.model.losses)
        return predictions, extra, scope

    def _mean_loss(self, labels: Any, predictions: Any, extra: list) -> Any:
        loss = ops.cast(ops.mean(self._loss(labels, predictions)), "float32")
        for one in extra:
            loss = loss + ops.cast(ops.sum(one), "float32")
        return loss


class TensorFlowPasses:
    """`tf.function`s with a dynamic batch size, so they are not retraced for each size."""

    def __init__(self, network: Network, dense: np.ndarray, gradient: np.ndarray) -> None:
        import tensorflow as tf

        self._tf = tf
        self._network = network
        self._runs = []
        for slots in _cut(network.slots):
            span = slice(slots[0].start, slots[-1].stop)
            self._runs.append(Run(slots, dense[span], gradient[span]))
        # Shares the memory of `dense`: the next pass reads what is written there.
        self._shared = [
            tf.experimental.dlpack.from_dlpack(run.dense.__dlpack__()) if run.is_aligned else None
            for run in self._runs
        ]
        self._functions: dict[tuple, tuple[Any, Any]] = {}

    def train(
        self, features: Any, labels: Any, rows: list, seeds: np.ndarray
    ) -> tuple[float, list]:
        arguments = (self._flat(), self._tf.constant(seeds), features, labels, rows)
        loss, pieces, row_gradients = self._call(self._train, arguments)
        for run, piece in zip(self._runs, pieces):
            np.copyto(run.gradient, _view(piece))
        return float(loss), [[_view(one) for one in calls] for calls in row_gradients]

    def infer(self, features: Any, labels: Any, rows: list) -> tuple[float | None, Any]:
        loss, predictions = self._call(self._infer, (self._flat(), features, labels, rows))
        return (None if loss is None else float(loss)), predictions

    def ids(self, features: Any) -> list[list[np.ndarray]]:
        calls = self._call(self._ids, (self._flat(), features))
        return [[one.numpy() for one in ids] for ids in calls]

    def _flat(self) -> list:
        """Returns the parameters of each run; copies memory that TensorFlow cannot share."""
        return [
            self._tf.convert_to_tensor(run.dense) if shared is None else shared
            for run, shared in zip(self._runs, self._shared)
        ]

    def _call(self, body: Any, arguments: tuple) -> Any:
        key = (body.__name__, *(argument is None for argument in arguments))
        if key not in self._functions:
            self._functions[key] = self._compile(body, arguments)
        function, traced = self._functions[key]
        if traced is not None:
            # Much cheaper than letting `function` look up its trace.
            with contextlib.suppress(TypeError, ValueError):
                return traced(*arguments)
        return function(*arguments)

    def _compile(self, body: Any, arguments: tuple) -> tuple[Any, Any]:
        """Traces `body` before its first call, so every batch size runs the same graph.

        By default, TensorFlow would compile a separate graph for the first batch size, and results
        would differ bitwise between processes that saw different sizes first. The trace fits all
        batches except those whose features have other inner shapes; they use the `tf.function`.
        """
        function = self._tf.function(body, autograph=False)
        flat, *others = arguments
        specs = [self._tf.type_spec_from_value(run) for run in flat]
        try:
            opened = self._tf.nest.map_structure(self._open_spec, others)
            return function, function.get_concrete_function(specs, *opened)
        except Exception:
            # Some models need a static batch size: they have one trace per size. An error with
            # another cause is raised again here.
            function.get_concrete_function(*arguments)
            return function, None

    def _open_spec(self, value: Any) -> Any:
        """Returns the type of `value` with a dynamic batch size."""
        tf = self._tf
        if value is None:
            return None
        spec = tf.type_spec_from_value(value)
        if spec.shape.rank in (None, 0):
            return spec
        shape = [None, *spec.shape[1:]]
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensorSpec([None] * len(shape), spec.dtype)
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                [None, None, *shape[2:]], spec.dtype, spec.ragged_rank, spec.row_splits_dtype
            )
        return tf.TensorSpec(shape, spec.dtype)

    def _values(self, flat: list) -> list:
        tf = self._tf
        values = []
        for run, numbers in zip(self._runs, flat):
            sizes = [slot.stop - slot.start for slot in run.slots]
            pieces = tf.split(numbers, sizes) if len(sizes) > 1 else [numbers]
            shaped = [tf.reshape(p, slot.shape) for p, slot in zip(pieces, run.slots)]
            values += [tf.cast(v, slot.dtype) for v, slot in zip(shaped, run.slots)]
        return values

    def _train(self, flat: list, seeds: Any, features: Any, labels: Any, rows: list) -> tuple:
        tf = self._tf
        slots = self._network.slots
        values = self._values(flat)
        trained = [value for slot, value in zip(slots, values) if slot.is_trained]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([trained, rows])
            loss, moved = self._network.loss(values, seeds, features, labels, rows)
        gradients, row_gradients = tape.gradient(
            loss, [trained, rows], unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        changes = iter(_merge(slots, values, gradients, moved))

        def joined(run: Run) -> Any:
            pieces = [tf.convert_to_tensor(next(changes)) for _ in run.slots]
            pieces = [tf.reshape(tf.cast(piece, tf.float32), [-1]) for piece in pieces]
            return pieces[0] if len(pieces) == 1 else tf.concat(pieces, 0)

        return loss, [joined(run) for run in self._runs], row_gradients

    def _infer(self, flat: Any, features: Any, labels: Any, rows: list) -> tuple:
        return self._network.infer(self._values(flat), features, labels, rows)

    def _ids(self, flat: Any, features: Any) -> list:
        # TensorFlow prunes everything that the ids do not depend on, which is most of the model.
        return self._network.ids(self._values(flat), features)


class JaxPasses:
    """One `jit` per kind of pass; JAX compiles once per batch size."""

    def __init__(self, network: Network, dense: np.ndarray, gradient: np.ndarray) -> None:
        import jax

        self._network = network
        self._dense = dense
        self._gradient = gradient
        self._train = jax.jit(self._train_body)
        self._infer = jax.jit(self._infer_body)
        self._ids = jax.jit(self._ids_body)

    def train(
        self, features: Any, labels: Any, rows: list, seeds: np.ndarray
    ) -> tuple[float, list]:
        seeds = seeds.astype("uint32")
        loss, pieces, row_gradients = self._train(self._dense, seeds, features, labels, rows)
        for slot, piece in zip(self._network.slots, pieces):
            self._gradient[slot.start : slot.stop] = np.asarray(piece).ravel()
        return float(loss), [[np.asarray(one) for one in calls] for calls in row_gradients]

    def infer(self, features: Any, labels: Any, rows: list) -> tuple[float | None, Any]:
        loss, predictions = self._infer(self._dense, features, labels, rows)
        return (None if loss is None else float(loss)), predictions

    def ids(self, features: Any) -> list[list[np.ndarray]]:
        calls = self._ids(self._dense, features)
        return [[np.asarray(one) for one in ids] for ids in calls]

    def _values(self, flat: Any) -> list:
        slots = self._network.slots
        return [flat[s.start : s.stop].reshape(s.shape).astype(s.dtype) for s in slots]

    def _train_body(self, flat: Any, seeds: Any, features: Any, labels: Any, rows: list) -> tuple:
        import jax

        slots = self._network.slots
        values = self._values(flat)

        def loss(trained: list, rows: list) -> tuple:
            given = iter(trained)
            merged = [next(given) if s.is_trained else v for s, v in zip(slots, values)]
            return self._network.loss(merged, seeds, features, labels, rows)

        trained = [value for slot, value in zip(slots, values) if slot.is_trained]
        run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (mean, moved), (gradients, row_gradients) = run(trained, rows)
        changes = _merge(slots, values, gradients, moved)
        return mean, [ops.cast(change, "float32") for change in changes], row_gradients

    def _infer_body(self, flat: Any, features: Any, labels: Any, rows: list) -> tuple:
        return self._network.infer(self._values(flat), features, labels, rows)

    def _ids_body(self, flat: Any, features: Any) -> list:
        return self._network.ids(self._values(flat), features)


class TorchPasses:
    """Eager passes over views of the flat vectors; torch writes gradients directly into them."""

    def __init__(self, network: Network, dense: np.ndarray, gradient: np.ndarray) -> None:
        import torch

        self._torch = torch
        self._network = network
        self._gradient = gradient
        self._leaves = []
        for slot in network.slots:
            span = slice(slot.start, slot.stop)
            leaf = torch.from_numpy(dense[span]).view(slot.shape)
            if slot.is_trained:
                leaf.requires_grad_()
                leaf.grad = torch.from_numpy(gradient[span]).view(slot.shape)
            self._leaves.append(leaf)

    def train(
        self, features: Any, labels: Any, rows: list, seeds: np.ndarray
    ) -> tuple[float, list]:
        torch = self._torch
        self._gradient.fill(0.0)
        rows = [[torch.tensor(one).requires_grad_() for one in calls] for calls in rows]
        values = self._values()
        features, labels = _tensors(features), _tensors(labels)
        loss, moved = self._network.loss(values, torch.from_numpy(seeds), features, labels, rows)
        loss.backward()
        fixed = [pair for pair in zip(self._network.slots, values) if not pair[0].is_trained]
        for (slot, value), new in zip(fixed, moved):
            piece = _difference(new, value).detach().float().cpu().numpy()
            self._gradient[slot.start : slot.stop] = piece.ravel()
        return float(loss.detach()), [[_row_gradient(one) for one in calls] for calls in rows]

    def infer(self, features: Any, labels: Any, rows: list) -> tuple[float | None, Any]:
        torch = self._torch
        with torch.no_grad():
            rows = [[torch.tensor(one) for one in calls] for calls in rows]
            features, labels = _tensors(features), _tensors(labels)
            loss, predictions = self._network.infer(self._values(), features, labels, rows)
        return (None if loss is None else float(loss)), predictions

    def ids(self, features: Any) -> list[list[np.ndarray]]:
        with self._torch.no_grad():
            calls = self._network.ids(self._values(), _tensors(features))
        return [[one.cpu().numpy() for one in ids] for ids in calls]

    def _values(self) -> list:
        return [
            leaf if slot.dtype == "float32" else ops.cast(leaf, slot.dtype)
            for leaf, slot in zip(self._leaves, self._network.slots)
        ]


def _merge(slots: list[Slot], values: list, gradients: list, moved: list) -> list:
    """Returns, per slot, the gradient if it is trained, and otherwise the change of its value."""
    gradients, moved = iter(gradients), iter(moved)
    return [
        next(gradients) if slot.is_trained else _difference(next(moved), value)
        for slot, value in zip(slots, values)
    ]


def _cut(slots: list[Slot]) -> list[list[Slot]]:
    """Groups small adjacent slots, and keeps large ones separate, in order."""
    runs: list[list[Slot]] = []
    was_large = True
    for slot in slots:
        is_large = slot.stop - slot.start >= LARGE
        if is_large or was_large:
            runs.append([])
        runs[-1].append(slot)
        was_large = is_large
    return runs


def _difference(new: Any, old: Any) -> Any:
    return ops.cast(new, "float32") - ops.cast(old, "float32")


def _row_gradient(rows: Any) -> np.ndarray:
    return np.zeros(rows.shape, "float32") if rows.grad is None else rows.grad.numpy()


def _tensors(values: Any) -> Any:
    if values is None:
        return None
    return keras.tree.map_structure(ops.convert_to_tensor, values)


def _view(tensor: Any) -> np.ndarray:
    """Views a TensorFlow tensor as an array, without a copy."""
    return np.asarray(memoryview(tensor))


def _mix(key: int) -> int:
    """SplitMix64: mixes a 64-bit number."""
    mask = (1 << 64) - 1
    key = (key + 0x9E37_79B9_7F4A_7C15) & mask
    key = ((key ^ (key >> 30)) * 0xBF58_476D_1CE4_E5B9) & mask
    key = ((key ^ (key >> 27)) * 0x94D0_49BB_1331_11EB) & mask
    return key ^ (key >> 31)
