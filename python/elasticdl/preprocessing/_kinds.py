# SPDX-License-Identifier: Apache-2.0
"""Handles the kinds of input of a layer: numpy array, backend tensor, ragged or sparse tensor.

TensorFlow is imported only if it is the Keras backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _host


def tensorflow() -> Any:
    """Returns the `tensorflow` module if it is the Keras backend, otherwise None."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow

    return tensorflow


def as_value(values: Any) -> Any:
    """Converts `values` to a tensor of the backend (of any kind) or to a numpy array."""
    tf = tensorflow()
    if tf is not None:
        return values if is_ragged_or_sparse(values) else tf.convert_to_tensor(values)
    if keras.ops.is_tensor(values):
        return values
    foreign = sys.modules.get("tensorflow")
    if foreign is not None and foreign.is_tensor(values):
        raise TypeError(
            f"got a TensorFlow tensor, but Keras runs on `{keras.backend.backend()}`: use numpy "
            "arrays, or set KERAS_BACKEND=tensorflow"
        )
    return np.asarray(values)


def is_ragged_or_sparse(values: Any) -> bool:
    """Whether `values` is a ragged or sparse TensorFlow tensor."""
    return is_ragged(values) or is_sparse(values)


def is_ragged(values: Any) -> bool:
    """Whether `values` is a `tf.RaggedTensor`."""
    tf = tensorflow()
    return tf is not None and isinstance(values, tf.RaggedTensor)


def is_sparse(values: Any) -> bool:
    """Whether `values` is a `tf.SparseTensor`."""
    tf = tensorflow()
    return tf is not None and isinstance(values, tf.SparseTensor)


def elementwise(function: Callable[[Any, Any], Any], values: Any) -> Any:
    """Calls `function(ops, flat_values)`, and restores the shape and kind of `values`.

    `ops` is `keras.ops`, or its equivalent for numpy arrays.
    """
    values = as_value(values)
    if is_ragged(values):
        return values.with_flat_values(function(keras.ops, values.flat_values))
    if is_sparse(values):
        return values.with_values(function(keras.ops, values.values))
    return function(_host if isinstance(values, np.ndarray) else keras.ops, values)


def held(ops: Any, dtype: str) -> str:
    """Returns `dtype`, or its 32-bit version if JAX has 64-bit types disabled."""
    if ops is _host or keras.backend.backend() != "jax":
        return dtype
    import jax

    return dtype if jax.config.jax_enable_x64 else dtype.replace("64", "32")


def to_ids(ops: Any, values: Any) -> Any:
    """Converts `values` to ids: int64, or int32 if JAX has 64-bit types disabled."""
    return ops.cast(values, held(ops, "int64"))


def to_tensor(values: Any) -> Any:
    """Converts a dense value to a tensor of the backend."""
    if not isinstance(values, np.ndarray):
        return values
    return keras.ops.convert_to_tensor(values, dtype=held(keras.ops, str(values.dtype)))


def is_integer(values: Any) -> bool:
    """Whether `values` contains integers."""
    return keras.backend.is_int_dtype(values.dtype) if not is_text(values) else False


def is_float(values: Any) -> bool:
    """Whether `values` contains floating-point numbers."""
    return keras.backend.is_float_dtype(values.dtype) if not is_text(values) else False


def is_text(values: Any) -> bool:
    """Whether `values` contains strings."""
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "SUTO"
    return keras.backend.standardize_dtype(values.dtype) == "string"


def to_bytes(values: np.ndarray) -> list[bytes]:
    """Returns the strings of an array in row-major order, in UTF-8."""
    texts = values.ravel().tolist()
    for text in texts:
        if not isinstance(text, (str, bytes)):
            raise TypeError(f"an array of strings must contain `str` or `bytes`, not `{text!r}`")
    return [text.encode() if isinstance(text, str) else text for text in texts]


def to_numpy(layer: str, values: Any) -> np.ndarray:
    """Converts a backend tensor to numpy, for layers that cannot be part of a compiled model."""
    try:
        return keras.ops.convert_to_numpy(values)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"`{layer}` runs on the host and cannot be part of a compiled model on "
            f"`{keras.backend.backend()}`: call it in `feed`"
        ) from error


def needs_tensorflow(layer: str) -> Any:
    """Returns the `tensorflow` module, for a layer whose output only TensorFlow supports."""
    tf = tensorflow()
    if tf is None:
        raise RuntimeError(
            f"`{layer}` returns tensors that only TensorFlow has, but Keras runs on "
            f"`{keras.backend.backend()}`: set KERAS_BACKEND=tensorflow, or use dense ids padded "
            "with -1, which `SparseEmbedding` ignores"
        )
    return tf


def to_ragged(values: Any) -> Any:
    """Converts any TensorFlow tensor to a `tf.RaggedTensor` of rank 2."""
    tf = tensorflow()
    if values.shape.rank == 1 and not is_ragged_or_sparse(values):
        values = tf.expand_dims(values, 1)
    if values.shape.rank != 2:
        raise ValueError(f"ragged rows need input of rank 1 or 2, not {values.shape.rank}")
    if is_sparse(values):
        # Not `from_sparse`, which rejects rows with gaps.
        cells = tf.sparse.reorder(values)
        return tf.RaggedTensor.from_value_rowids(
            cells.values, cells.indices[:, 0], nrows=cells.dense_shape[0]
        )
    return values if is_ragged(values) else tf.RaggedTensor.from_tensor(values)
