# SPDX-License-Identifier: Apache-2.0
"""Rounds numbers to integers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np  # noqa: F401 (of the example)

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Numeric


@keras.saving.register_keras_serializable("elasticdl")
class RoundIdentity(Numeric):
    """Rounds to the nearest integer if that is in [0, `num_buckets`), otherwise `default_value`.

    Ties round to the even integer. Integers are not converted to floating point.

    >>> np.asarray(RoundIdentity(num_buckets=5)(np.array([[1.2], [1.6], [9.0]]))).tolist()
    [[1], [2], [0]]
    """

    def __init__(self, num_buckets: int, default_value: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_buckets < 1:
            raise ValueError(f"`num_buckets` must be at least 1, not {num_buckets}")
        self.num_buckets = num_buckets
        self.default_value = default_value

    def transform(self, ops: Any, values: Any) -> Any:
        rounded = ops.round(values) if _kinds.is_float(values) else _kinds.to_ids(ops, values)
        return within(ops, rounded, self.num_buckets, self.default_value)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_buckets": self.num_buckets,
            "default_value": self.default_value,
        }


def within(ops: Any, values: Any, n: int, default: int) -> Any:
    """Converts `values` to ids, with `default` for values outside [0, `n`)."""
    is_inside = ops.logical_and(values >= 0, values < n)
    # Values outside may not fit an integer (such as infinity), so replace them before the cast.
    ids = _kinds.to_ids(ops, ops.where(is_inside, values, 0))
    return ops.where(is_inside, ids, default)
