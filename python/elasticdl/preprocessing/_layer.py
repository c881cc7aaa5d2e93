# SPDX-License-Identifier: Apache-2.0
"""Base classes of the layers: input handling and output specs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _kinds


class Preprocessing(keras.layers.Layer):
    """A layer that gets its input unchanged: Keras neither casts it nor requires a tensor."""

    takes: tuple[type, ...] = ()  # Accepted containers of several inputs: list and tuple, or dict.

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        # Keras rejects a mix of tensors and arrays in a list or dict, so convert them first.
        return super().__call__(_accept(inputs, self.takes), **kwargs)


class Numeric(Preprocessing):
    """A layer that maps each number independently; also works inside compiled models."""

    output_dtype = "int64"

    def call(self, inputs: Any) -> Any:
        return _kinds.elementwise(self._checked, inputs)

    def transform(self, ops: Any, values: Any) -> Any:
        """Maps flat or dense `values` with the functions of `ops` (see `_kinds.elementwise`)."""
        raise NotImplementedError

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        return _like(inputs, self.output_dtype)

    def _checked(self, ops: Any, values: Any) -> Any:
        if _kinds.is_text(values):
            name = type(self).__name__
            raise TypeError(f"`{name}` needs numbers, not strings: use `ToNumber` first")
        return self.transform(ops, values)


class Textual(Preprocessing):
    """A layer that maps each string (or integer) independently, on the host."""

    output_dtype = "int64"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_jit = False

    def call(self, inputs: Any) -> Any:
        return _kinds.elementwise(self.transform, inputs)

    def transform(self, ops: Any, values: Any) -> Any:
        """Maps flat or dense `values` with TensorFlow if it is the backend, else with numpy."""
        tf = _kinds.tensorflow()
        if tf is not None:
            return self.on_tensorflow(tf, values)
        if isinstance(values, np.ndarray):
            return self.on_numpy(values)
        values = _kinds.to_numpy(type(self).__name__, values)
        output = self.on_numpy(values)
        return ops.convert_to_tensor(output, dtype=_kinds.held(ops, str(output.dtype)))

    def on_tensorflow(self, tf: Any, values: Any) -> Any:
        """Maps a dense TensorFlow tensor."""
        raise NotImplementedError

    def on_numpy(self, values: np.ndarray) -> np.ndarray:
        """Maps a numpy array; strings are `str` or `bytes`."""
        raise NotImplementedError

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        return _like(inputs, self.output_dtype)


def _accept(inputs: Any, nests: tuple[type, ...]) -> Any:
    if isinstance(inputs, nests):
        if isinstance(inputs, Mapping):
            return {name: _accept(one, ()) for name, one in inputs.items()}
        return [_accept(one, ()) for one in inputs]
    return inputs if isinstance(inputs, keras.KerasTensor) else _kinds.as_value(inputs)


def _like(inputs: Any, dtype: str) -> keras.KerasTensor:
    dtype = _kinds.held(keras.ops, dtype)
    return keras.KerasTensor(
        inputs.shape, dtype=dtype, sparse=inputs.sparse, ragged=getattr(inputs, "ragged", False)
    )
