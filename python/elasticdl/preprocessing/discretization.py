# SPDX-License-Identifier: Apache-2.0
"""Maps numbers to buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Numeric


@keras.saving.register_keras_serializable("elasticdl")
class Discretization(Numeric):
    """Maps each number to its bucket; a bucket includes its left boundary.

    >>> np.asarray(Discretization(bins=[0, 1, 2])(np.array([-0.5, 0.0, 1.5, 2.0]))).tolist()
    [0, 1, 2, 3]
    """

    def __init__(self, bins: Sequence[float], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.bins = [float(bound) for bound in bins]
        if not self.bins or self.bins != sorted(self.bins):
            raise ValueError(f"`bins` must be non-empty and in ascending order, not {self.bins}")

    def transform(self, ops: Any, values: Any) -> Any:
        if not _kinds.is_float(values):
            values = _kinds.to_ids(ops, values)
        # Boundaries get the type of the values: 0.7 as float32 is less than 0.7 as float64.
        bounds = _bounds(self.bins, keras.backend.standardize_dtype(values.dtype))
        if ops is keras.ops:
            bounds = ops.convert_to_tensor(bounds)
        flat = ops.searchsorted(bounds, ops.reshape(values, (-1,)), side="right")
        return _kinds.to_ids(ops, ops.reshape(flat, ops.shape(values)))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "bins": self.bins}


def _bounds(bins: list[float], dtype: str) -> np.ndarray:
    """Converts the boundaries to `dtype`; integer boundaries are rounded up."""
    if not dtype.startswith("int"):
        return np.asarray(bins, dtype)
    limits = np.iinfo(dtype)
    whole = [math.ceil(max(min(bound, 2.0**63), -(2.0**63))) for bound in bins]
    return np.array([max(min(bound, limits.max), limits.min) for bound in whole], dtype)
