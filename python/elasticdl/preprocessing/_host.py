# SPDX-License-Identifier: Apache-2.0
"""The functions of `keras.ops` that numeric layers use, for numpy arrays."""

from __future__ import annotations

import numpy as np
from numpy import concatenate, log, logical_and, reshape, round, searchsorted, shape, where

__all__ = [
    "cast",
    "concatenate",
    "log",
    "logical_and",
    "reshape",
    "round",
    "searchsorted",
    "shape",
    "where",
]


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts `values` to another type."""
    return values.astype(dtype)
