# SPDX-License-Identifier: Apache-2.0
"""Scales numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np  # noqa: F401 (of the example)

from elasticdl.preprocessing._layer import Numeric


@keras.saving.register_keras_serializable("elasticdl")
class Normalizer(Numeric):
    """Computes (x - `subtractor`) / `divisor` as float32.

    >>> np.asarray(Normalizer(subtractor=1.0, divisor=2.0)(np.array([[3.0], [5.0]]))).tolist()
    [[1.0], [2.0]]
    """

    output_dtype = "float32"

    def __init__(self, subtractor: float, divisor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if divisor == 0:
            raise ValueError("`divisor` must not be 0: do not normalize a constant feature")
        self.subtractor = float(subtractor)
        self.divisor = float(divisor)

    def transform(self, ops: Any, values: Any) -> Any:
        return (ops.cast(values, "float32") - self.subtractor) / self.divisor

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "subtractor": self.subtractor,
            "divisor": self.divisor,
        }
