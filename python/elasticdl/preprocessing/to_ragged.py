# SPDX-License-Identifier: Apache-2.0
"""Converts dense rows to ragged rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np  # noqa: F401 (of the example)

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing._layer import Preprocessing


@keras.saving.register_keras_serializable("elasticdl")
class ToRagged(Preprocessing):
    """Returns a `tf.RaggedTensor` without missing values (TensorFlow backend only).

    Strings are split at `sep` first, unless `sep` is None.
    `ignore_value` is the value to drop; None means "" for strings and -1 for numbers.

    >>> ToRagged()(np.array([["1,2,3"], [""], ["4"]])).to_list()
    [[b'1', b'2', b'3'], [], [b'4']]
    """

    def __init__(
        self,
        sep: str | None = ",",
        ignore_value: str | int | float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if sep == "":
            raise ValueError('`sep` must not be "": use a separator, or None to disable splitting')
        self.sep = sep
        self.ignore_value = ignore_value
        self.supports_jit = False

    def call(self, inputs: Any) -> Any:
        tf = _kinds.needs_tensorflow("ToRagged")
        rows = _kinds.to_ragged(_kinds.as_value(inputs))
        is_text = rows.dtype == tf.string
        if is_text and self.sep is not None:
            rows = tf.strings.split(rows, self.sep).merge_dims(1, 2)
        ignored = self.ignore_value
        if ignored is None:
            ignored = "" if is_text else -1
        return tf.ragged.boolean_mask(rows, tf.not_equal(rows, tf.constant(ignored, rows.dtype)))

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        _kinds.needs_tensorflow("ToRagged")
        return keras.KerasTensor((inputs.shape[0], None), dtype=inputs.dtype, ragged=True)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "sep": self.sep, "ignore_value": self.ignore_value}
