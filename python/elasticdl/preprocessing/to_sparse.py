# SPDX-License-Identifier: Apache-2.0
"""Converts dense rows to sparse tensors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np  # noqa: F401 (of the example)

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Preprocessing


@keras.saving.register_keras_serializable("elasticdl")
class ToSparse(Preprocessing):
    """Returns a `tf.SparseTensor` without missing values (TensorFlow backend only).

    `ignore_value` is the value to drop; None means "" for strings, -1 for integers and 0.0 for
    other numbers. Sparse input is returned unchanged.

    >>> ToSparse()(np.array([[12, -1], [45, 78]])).values.numpy().tolist()
    [12, 45, 78]
    """

    def __init__(self, ignore_value: str | int | float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_value = ignore_value
        self.supports_jit = False

    def call(self, inputs: Any) -> Any:
        tf = _kinds.needs_tensorflow("ToSparse")
        values = _kinds.as_value(inputs)
        if _kinds.is_sparse(values):
            return values
        ignored = tf.constant(self._ignored(tf, values.dtype), values.dtype)
        if _kinds.is_ragged(values):
            cells = values.to_sparse()
            return tf.sparse.retain(cells, tf.not_equal(cells.values, ignored))
        places = tf.where(tf.not_equal(values, ignored))
        shape = tf.shape(values, out_type=tf.int64)
        sparse = tf.SparseTensor(places, tf.gather_nd(values, places), shape)
        sparse.set_shape(values.shape)
        return sparse

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        _kinds.needs_tensorflow("ToSparse")
        return keras.KerasTensor(inputs.shape, dtype=inputs.dtype, sparse=True)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ignore_value": self.ignore_value}

    def _ignored(self, tf: Any, dtype: Any) -> Any:
        if self.ignore_value is not None:
            return self.ignore_value
        if dtype == tf.string:
            return ""
        return -1 if dtype.is_integer else 0.0
