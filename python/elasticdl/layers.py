# SPDX-License-Identifier: Apache-2.0
"""`Embedding`: a Keras layer whose rows are stored on the parameter servers.

The layer has no weights. For each batch, a first pass records the ids that it looks up
(`Recording`). A second pass provides the rows of these ids (`Lent`) as ordinary inputs of the
compiled function, which returns their gradients. The only state of this module is the current
pass.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
from keras import ops

from elasticdl._zoo import ZooError

COMBINERS = ("sum", "mean", "sqrtn")

# The current pass; passes never overlap in a worker.
_pass: Recording | Lent | None = None


@keras.saving.register_keras_serializable(package="elasticdl")
class Embedding(keras.layers.Layer):
    """Maps ids to vectors of size `output_dim`, which are stored on parameter servers.

    Ids are 64-bit integers (32-bit on the JAX backend) without an upper bound. `input_dim` is
    optional and only used for export: with it, the layer becomes a plain `keras.layers.Embedding`.
    Without it, the exported layer contains the rows seen in training, and returns zeros for other
    ids.

    `combiner` (`sum`, `mean` or `sqrtn`) reduces the vectors along the last axis of the ids; a
    record without ids gives zeros. Negative ids are ignored, and so is id 0 if `mask_zero` is set.
    Without a combiner, negative ids give zeros, and `mask_zero` works as in Keras. On TensorFlow,
    ids can be ragged or, with a combiner, sparse.
    """

    def __init__(
        self,
        output_dim: int,
        input_dim: int | None = None,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        input_length: int | None = None,
        combiner: str | None = None,
        **kwargs: Any,
    ) -> None:
        if combiner is not None and combiner not in COMBINERS:
            raise ZooError(
                f"an Embedding's combiner is `{combiner}`; choose one of {', '.join(COMBINERS)}"
            )
        super().__init__(**kwargs)
        self.output_dim = output_dim
        self.input_dim = input_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.mask_zero = mask_zero
        self.input_length = input_length
        self.combiner = combiner
        self.supports_masking = mask_zero
        self.autocast = False
        self.built = True
        # Rows of an exported model; plain arrays, so Keras does not treat them as weights.
        self._local: Local | None = None

    def call(self, inputs: Any) -> Any:
        if _is_uneven(inputs):
            return self._of_uneven(inputs)
        ids = whole(inputs)
        vectors = self._vectors(ids)
        present = ops.expand_dims(ops.cast(ids >= self.least_id, vectors.dtype), -1)
        vectors = vectors * present
        if self.combiner is None:
            return vectors
        total = ops.sum(vectors, axis=-2)
        return total / _divisor(ops.sum(present, axis=-2), self.combiner)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        if not self.mask_zero or self.combiner is not None or _is_uneven(inputs):
            return None
        return ops.not_equal(inputs, 0)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        kept = input_shape if self.combiner is None else input_shape[:-1]
        return (*kept, self.output_dim)

    def compute_output_spec(self, inputs: Any, **_kwargs: Any) -> Any:
        shape = self.compute_output_shape(inputs.shape)
        ragged = getattr(inputs, "ragged", False) and self.combiner is None
        extra = {"ragged": True} if ragged else {}
        return keras.KerasTensor(shape, dtype=self.compute_dtype, **extra)

    def get_config(self) -> dict[str, Any]:
        own = {
            "output_dim": self.output_dim,
            "input_dim": self.input_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "mask_zero": self.mask_zero,
            "input_length": self.input_length,
            "combiner": self.combiner,
        }
        return {**super().get_config(), **own}

    def save_own_variables(self, store: Any) -> None:
        if self._local is not None:
            store["ids"], store["rows"] = self._local.ids, self._local.rows

    def load_own_variables(self, store: Any) -> None:
        if "ids" in store:
            self._local = Local(np.asarray(store["ids"]), np.asarray(store["rows"]))

    @property
    def least_id(self) -> int:
        """The lowest id that has a row; without a combiner, id 0 has a row and is only masked."""
        return 1 if self.mask_zero and self.combiner is not None else 0

    def _vectors(self, ids: Any) -> Any:
        """Returns a vector for each id; `ids` can have any shape."""
        if _pass is not None:
            vectors = _pass.vectors(self, ids)
        elif self._local is not None:
            vectors = self._local.vectors(ids)
        else:
            vectors = no_vectors(ids, self.output_dim)
        return ops.cast(vectors, self.compute_dtype)

    def _of_uneven(self, inputs: Any) -> Any:
        """Handles ragged or sparse ids (TensorFlow): sums rows by record."""
        import tensorflow as tf

        if isinstance(inputs, tf.RaggedTensor):
            ids = tf.cast(inputs.flat_values, tf.int64)
            records, n = inputs.value_rowids(), inputs.nrows()
        elif self.combiner is None:
            raise ZooError(
                f"the Embedding `{self.name}` gets sparse ids but has no combiner; choose one of "
                f"{', '.join(COMBINERS)}"
            )
        else:
            ids, records = tf.cast(inputs.values, tf.int64), inputs.indices[:, 0]
            n = inputs.dense_shape[0]
        vectors = self._vectors(ids)
        present = tf.cast(ids >= self.least_id, vectors.dtype)[:, None]
        vectors = vectors * present
        if self.combiner is None:
            return inputs.with_flat_values(vectors)
        total = tf.math.unsorted_segment_sum(vectors, records, n)
        count = tf.math.unsorted_segment_sum(present, records, n)
        return total / _divisor(count, self.combiner)


class Recording:
    """A pass that records the ids of each call of each layer."""

    def __init__(self) -> None:
        self._calls: dict[int, list[Any]] = {}

    def vectors(self, layer: Any, ids: Any) -> Any:
        self._calls.setdefault(id(layer), []).append(ops.reshape(ids, (-1,)))
        return no_vectors(ids, layer.output_dim)

    def calls(self, layer: Any) -> list[Any]:
        """Returns the flat ids of each call of `layer`."""
        return self._calls.get(id(layer), [])


class Lent:
    """A pass that provides the rows for the ids of each call of each layer."""

    def __init__(self, layers: list[Any], rows: list[list[Any]]) -> None:
        self._left = {id(layer): list(calls) for layer, calls in zip(layers, rows)}

    def vectors(self, layer: Any, ids: Any) -> Any:
        rows = self._left[id(layer)].pop(0)
        return ops.reshape(rows, (*ops.shape(ids), layer.output_dim))


class Local:
    """Rows of an exported model, sorted by id."""

    def __init__(self, ids: np.ndarray, rows: np.ndarray) -> None:
        order = np.argsort(ids, kind="stable")
        self.ids = np.asarray(ids)[order].astype("int64")
        self.rows = np.asarray(rows, dtype="float32")[order]

    def vectors(self, ids: Any) -> Any:
        if len(self.ids) == 0:
            return no_vectors(ids, self.rows.shape[-1])
        known = ops.convert_to_tensor(self.ids)
        flat = ops.cast(ops.reshape(ids, (-1,)), known.dtype)
        places = ops.minimum(ops.searchsorted(known, flat), len(self.ids) - 1)
        found = ops.cast(ops.equal(ops.take(known, places), flat), "float32")
        rows = ops.take(ops.convert_to_tensor(self.rows), places, axis=0) * found[:, None]
        return ops.reshape(rows, (*ops.shape(ids), self.rows.shape[-1]))


@contextlib.contextmanager
def during(the_pass: Recording | Lent) -> Any:
    """Makes `the_pass` the current pass."""
    global _pass
    before, _pass = _pass, the_pass
    try:
        yield the_pass
    finally:
        _pass = before


def current() -> Recording | Lent | None:
    return _pass


def no_vectors(ids: Any, dim: int) -> Any:
    return ops.zeros((*ops.shape(ids), dim), "float32")


def whole(ids: Any) -> Any:
    """Converts ids to 64-bit integers, or to 32-bit ones on JAX."""
    dtype = keras.backend.standardize_dtype(ids.dtype)
    if dtype in ("int32", "int64"):
        return ids
    return ops.cast(ids, "int32" if keras.backend.backend() == "jax" else "int64")


def _divisor(count: Any, combiner: str) -> Any:
    """Returns the divisor for the sum of `count` vectors; 1 if there are none, to keep zeros."""
    if combiner == "sum":
        return 1.0
    count = ops.maximum(count, 1.0)
    return count if combiner == "mean" else ops.sqrt(count)


def _is_uneven(inputs: Any) -> bool:
    """Whether ids are ragged or sparse (TensorFlow only)."""
    return hasattr(inputs, "flat_values") or hasattr(inputs, "dense_shape")
