# SPDX-License-Identifier: Apache-2.0
"""Combines the embeddings of several ids per record."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np  # noqa: F401 (of the example)

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Preprocessing

COMBINERS = ("mean", "sqrtn", "sum")


@keras.saving.register_keras_serializable("elasticdl")
class SparseEmbedding(Preprocessing):
    """Looks up the rows of a record's ids and combines them to one vector: [batch, `output_dim`].

    `combiner` is "sum", "mean", or "sqrtn" (the sum divided by the square root of the count).
    Input is sparse, ragged, or dense [batch, n]. Negative ids are ignored; no ids give zeros.
    With `max_norm`, longer rows (l2) are scaled down when they are used; the table is unchanged.

    >>> layer = SparseEmbedding(4, 2, embeddings_initializer="ones", combiner="sum")
    >>> keras.ops.convert_to_numpy(layer(np.array([[1, 3], [2, -1], [-1, -1]]))).tolist()
    [[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        combiner: str = "mean",
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if input_dim < 1 or output_dim < 1:
            raise ValueError(f"table sizes must be at least 1, not {input_dim} × {output_dim}")
        check_combiner(combiner)
        check_max_norm(max_norm)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.combiner = combiner
        self.max_norm = max_norm

    def build(self, input_shape: Any = None) -> None:
        self.embeddings = self.add_weight(
            shape=(self.input_dim, self.output_dim),
            initializer=self.embeddings_initializer,
            name="embeddings",
        )

    def call(self, inputs: Any) -> Any:
        ids = _kinds.as_value(inputs)
        if _kinds.is_ragged_or_sparse(ids):
            total, count = self._total_of_rows(ids)
        else:
            total, count = self._total_of_dense(_kinds.to_tensor(ids))
        if self.combiner == "sum":
            return total
        count = keras.ops.maximum(count, 1.0)
        return total / (count if self.combiner == "mean" else keras.ops.sqrt(count))

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        shape = inputs.shape if len(inputs.shape) == 1 else inputs.shape[:-1]
        return keras.KerasTensor((*shape, self.output_dim), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "combiner": self.combiner,
            "max_norm": self.max_norm,
        }

    def _total_of_dense(self, ids: Any) -> tuple[Any, Any]:
        ops = keras.ops
        if len(ids.shape) == 1:
            ids = ops.expand_dims(ids, -1)
        is_present = ops.expand_dims(ops.cast(ids >= 0, self.compute_dtype), -1)
        rows = self._rows(ops.maximum(ids, 0)) * is_present
        return ops.sum(rows, axis=-2), ops.sum(is_present, axis=-2)

    def _total_of_rows(self, ids: Any) -> tuple[Any, Any]:
        """Sums by record without padding, so a long record costs no more than its ids."""
        tf = _kinds.tensorflow()
        if ids.shape.rank != 2:
            raise ValueError(f"ragged or sparse ids must have rank 2, not {ids.shape.rank}")
        if _kinds.is_sparse(ids):
            values, records, n_records = ids.values, ids.indices[:, 0], ids.dense_shape[0]
        else:
            values, records, n_records = ids.flat_values, ids.value_rowids(), ids.nrows()
        is_present = values >= 0
        values, records = tf.boolean_mask(values, is_present), tf.boolean_mask(records, is_present)
        rows = self._rows(values)
        total = tf.math.unsorted_segment_sum(rows, records, n_records)
        count = tf.math.unsorted_segment_sum(tf.ones_like(rows[:, :1]), records, n_records)
        return total, count

    def _rows(self, ids: Any) -> Any:
        if not _kinds.is_integer(ids):
            ids = keras.ops.cast(ids, "int32")
        rows = keras.ops.take(self.embeddings, ids, axis=0)
        return rows if self.max_norm is None else _clip(rows, self.max_norm)


def check_combiner(combiner: str) -> None:
    """Rejects an unknown combiner."""
    if combiner not in COMBINERS:
        raise ValueError(f"`combiner` must be one of {', '.join(COMBINERS)}, not `{combiner}`")


def check_max_norm(max_norm: float | None) -> None:
    """Rejects an invalid maximum length."""
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"`max_norm` must be greater than 0, not {max_norm}")


def _clip(rows: Any, max_norm: float) -> Any:
    """Scales down rows longer than `max_norm`."""
    ops = keras.ops
    square = ops.sum(ops.square(rows), axis=-1, keepdims=True)
    is_long = square > max_norm * max_norm
    # Take the root only for long rows: its gradient at 0 is infinite.
    length = ops.sqrt(ops.where(is_long, square, max_norm * max_norm))
    return rows * (max_norm / length)
