# SPDX-License-Identifier: Apache-2.0
"""Rounds the logarithm of numbers."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np  # noqa: F401 (of the example)

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Numeric
from elasticdl.preprocessing.round_identity import within


@keras.saving.register_keras_serializable("elasticdl")
class LogRound(Numeric):
    """Computes round(log x) if that is in [0, `num_bins`), otherwise `default_value`.

    `base` is the base of the logarithm; None means e.

    >>> np.asarray(LogRound(num_bins=16, base=2)(np.array([[0.0], [3.1], [1024.0]]))).tolist()
    [[0], [2], [10]]
    """

    def __init__(
        self, num_bins: int, default_value: int = 0, base: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_bins < 1:
            raise ValueError(f"`num_bins` must be at least 1, not {num_bins}")
        if base is not None and not base > 1:
            raise ValueError(f"`base` must be greater than 1, not {base}")
        self.num_bins = num_bins
        self.default_value = default_value
        self.base = base

    def transform(self, ops: Any, values: Any) -> Any:
        if not _kinds.is_float(values):
            values = ops.cast(values, "float32")
        is_positive = values > 0
        scale = 1.0 if self.base is None else math.log(self.base)
        rounded = ops.round(ops.log(ops.where(is_positive, values, 1.0)) / scale)
        return within(ops, ops.where(is_positive, rounded, -1.0), self.num_bins, self.default_value)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_bins": self.num_bins,
            "default_value": self.default_value,
            "base": self.base,
        }
