# SPDX-License-Identifier: Apache-2.0
"""Combines the ids of several features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _host, _kinds
from elasticdl.preprocessing._layer import Preprocessing


@keras.saving.register_keras_serializable("elasticdl")
class ConcatenateWithOffset(Preprocessing):
    """Adds an offset to the ids of each input and concatenates them, to share one table.

    Negative ids ("no id") are unchanged. Inputs of different kinds give a ragged tensor.

    >>> left, right = np.array([[1], [1]]), np.array([[2], [-1]])
    >>> np.asarray(ConcatenateWithOffset(offsets=[0, 10])([left, right])).tolist()
    [[1, 12], [1, -1]]
    """

    takes = (list, tuple)

    def __init__(self, offsets: Sequence[int], axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.offsets = [int(offset) for offset in offsets]
        self.axis = axis

    def call(self, inputs: Sequence[Any]) -> Any:
        self._check(inputs)
        return join(inputs, self.offsets, self.axis)

    def compute_output_spec(self, inputs: Sequence[Any]) -> keras.KerasTensor:
        self._check(inputs)
        shape = list(inputs[0].shape)
        sizes = [one.shape[self.axis] for one in inputs]
        shape[self.axis] = None if None in sizes else sum(sizes)
        is_sparse = all(one.sparse for one in inputs)
        is_ragged = not is_sparse and any(one.sparse or one.ragged for one in inputs)
        return keras.KerasTensor(
            shape, dtype=_kinds.held(keras.ops, "int64"), sparse=is_sparse, ragged=is_ragged
        )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "offsets": self.offsets, "axis": self.axis}

    def _check(self, inputs: Any) -> None:
        if not isinstance(inputs, (list, tuple)) or len(inputs) != len(self.offsets):
            n = len(inputs) if isinstance(inputs, (list, tuple)) else "no list"
            raise ValueError(
                f"`ConcatenateWithOffset` with {len(self.offsets)} offsets needs a list of "
                f"{len(self.offsets)} inputs, got {n}"
            )


def join(inputs: Sequence[Any], offsets: Sequence[int], axis: int = -1) -> Any:
    """Concatenates the ids of several features, each shifted by its offset."""
    moved = [
        _kinds.elementwise(lambda ops, ids, by=offsets[place]: _move(ops, ids, by), one)
        for place, one in enumerate(inputs)
    ]
    tf = _kinds.tensorflow()
    if tf is None:
        are_arrays = all(isinstance(one, np.ndarray) for one in moved)
        return (_host if are_arrays else keras.ops).concatenate(moved, axis=axis)
    if all(_kinds.is_sparse(one) for one in moved):
        return tf.sparse.concat(axis, moved, expand_nonconcat_dims=True)
    if any(_kinds.is_ragged_or_sparse(one) for one in moved):
        return tf.concat([_kinds.to_ragged(one) for one in moved], axis)
    return tf.concat(moved, axis)


def _move(ops: Any, ids: Any, by: int) -> Any:
    ids = _kinds.to_ids(ops, ids)
    return ops.where(ids < 0, ids, ids + by)
