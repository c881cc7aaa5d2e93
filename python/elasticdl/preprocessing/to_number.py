# SPDX-License-Identifier: Apache-2.0
"""Parses strings as numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Textual

_TYPES = ("int32", "int64", "float32", "float64")


@keras.saving.register_keras_serializable("elasticdl")
class ToNumber(Textual):
    """Parses each string as a number; the empty string gives `default_value`.

    `out_type` is the name of a type or a dtype object: int32, int64, float32 or float64.

    >>> np.asarray(ToNumber("int32", default_value=-1)(np.array([["12", ""]]))).tolist()
    [[12, -1]]
    """

    def __init__(self, out_type: Any, default_value: float = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.out_type = keras.backend.standardize_dtype(out_type)
        if self.out_type not in _TYPES:
            raise ValueError(f"`out_type` must be one of {', '.join(_TYPES)}, not {self.out_type}")
        self.default_value = np.dtype(self.out_type).type(default_value).item()
        if self.out_type.startswith("int") and self.default_value != default_value:
            raise ValueError(f"`default_value` {default_value} is not of type {self.out_type}")
        self._limits = _limits(self.out_type)

    @property
    def output_dtype(self) -> str:
        """The data type of the output."""
        return self.out_type

    def on_tensorflow(self, tf: Any, values: Any) -> Any:
        _check_text(values)
        is_empty = tf.equal(values, "")
        numbers = tf.strings.to_number(tf.where(is_empty, "0", values), tf.as_dtype(self.out_type))
        return tf.where(is_empty, tf.constant(self.default_value, numbers.dtype), numbers)

    def on_numpy(self, values: np.ndarray) -> np.ndarray:
        _check_text(values)
        texts = _kinds.to_bytes(values)
        numbers = [self._read(text) if text else self.default_value for text in texts]
        return np.array(numbers, self.out_type).reshape(values.shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "out_type": self.out_type,
            "default_value": self.default_value,
        }

    def _read(self, text: bytes) -> float:
        try:
            if b"_" in text:  # Python parses 1_000 as a number, TensorFlow does not.
                raise ValueError
            if self._limits is None:
                return float(text)
            number = int(text)
            if number not in self._limits:
                raise ValueError
            return number
        except ValueError:
            word = text.decode(errors="replace")
            raise ValueError(f"cannot parse `{word}` as {self.out_type}") from None


def _limits(dtype: str) -> range | None:
    """Returns the range of an integer type."""
    if not dtype.startswith("int"):
        return None
    return range(np.iinfo(dtype).min, np.iinfo(dtype).max + 1)


def _check_text(values: Any) -> None:
    if not _kinds.is_text(values):
        dtype = keras.backend.standardize_dtype(values.dtype)
        raise TypeError(f"`ToNumber` needs strings, not `{dtype}`")
