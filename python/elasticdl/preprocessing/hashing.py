# SPDX-License-Identifier: Apache-2.0
"""Hashes strings to bins."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._fingerprint import fingerprint64
from elasticdl.preprocessing._layer import Textual


@keras.saving.register_keras_serializable("elasticdl")
class Hashing(Textual):
    """Maps each string to FarmHash Fingerprint64 modulo `num_bins`, the same on every backend.

    An integer is hashed as its decimal digits.

    >>> np.asarray(Hashing(num_bins=3)(np.array([["A"], ["B"], ["C"]]))).tolist()
    [[1], [0], [1]]
    """

    def __init__(self, num_bins: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_bins < 1:
            raise ValueError(f"`num_bins` must be at least 1, not {num_bins}")
        self.num_bins = num_bins

    def on_tensorflow(self, tf: Any, values: Any) -> Any:
        _check_hashable(values)
        text = values if values.dtype == tf.string else tf.strings.as_string(values)
        return tf.strings.to_hash_bucket_fast(text, self.num_bins)

    def on_numpy(self, values: np.ndarray) -> np.ndarray:
        _check_hashable(values)
        return hash_bins(values, self.num_bins)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_bins": self.num_bins}


def hash_bins(values: np.ndarray, num_bins: int) -> np.ndarray:
    """Returns the bins of an array of strings or integers."""
    text = values if _kinds.is_text(values) else values.astype(str)
    bins = fingerprint64(_kinds.to_bytes(text)) % np.uint64(num_bins)
    return bins.astype(np.int64).reshape(values.shape)


def _check_hashable(values: Any) -> None:
    if not (_kinds.is_text(values) or _kinds.is_integer(values)):
        dtype = keras.backend.standardize_dtype(values.dtype)
        raise TypeError(
            f"`Hashing` needs strings or integers, not `{dtype}`: "
            "round the numbers, or use `Discretization` first"
        )
