# SPDX-License-Identifier: Apache-2.0
"""Columns, which read numbers or ids from a batch of features. They have no weights.

Ids have the shape [batch, n] and the same kind as the feature; a negative id means "no id".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import keras
import numpy as np

from elasticdl.preprocessing import _kinds
from elasticdl.preprocessing.concatenate_with_offset import join
from elasticdl.preprocessing.discretization import Discretization
from elasticdl.preprocessing.hashing import Hashing
from elasticdl.preprocessing.index_lookup import IndexLookup
from elasticdl.preprocessing.round_identity import within


class Column:
    """Base class of columns, which are serialized as the values of their fields."""

    on_host = False  # Whether its values cannot be computed inside a compiled model.

    def get_config(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Column:
        load = keras.saving.deserialize_keras_object
        return cls(**{name: load(value) for name, value in config.items()})


class Categorical(Column):
    """A column of ids: it has a `name`, and ids from 0 to `num_buckets` - 1."""

    def ids(self, features: Mapping[str, Any]) -> Any:
        """Returns the ids of a batch, [batch, n]."""
        raise NotImplementedError


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class NumericColumn(Column):
    """Unmodified numbers; `shape` is the shape of one record."""

    key: str
    shape: tuple[int, ...] = (1,)

    @property
    def name(self) -> str:
        return self.key

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def values(self, features: Mapping[str, Any]) -> Any:
        """Returns the numbers of a batch, [batch, width]."""
        values = _dense(feature(features, self.key), 0)
        if _kinds.is_text(values):
            raise TypeError(f"feature `{self.key}` contains strings, but its column is numeric")
        values = keras.ops.cast(_kinds.to_tensor(values), "float32")
        return keras.ops.reshape(values, (-1, self.width))


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class BucketizedColumn(Categorical):
    """Buckets of numbers; if a record has several numbers, each has its own buckets."""

    source: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.source.name}_bucketized"

    @property
    def num_buckets(self) -> int:
        return self.source.width * (len(self.boundaries) + 1)

    def ids(self, features: Mapping[str, Any]) -> Any:
        buckets = self._layer(self.source.values(features))
        n_each = len(self.boundaries) + 1
        return buckets + keras.ops.cast(np.arange(self.source.width) * n_each, buckets.dtype)

    @cached_property
    def _layer(self) -> Discretization:
        return Discretization(self.boundaries)


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class IdentityColumn(Categorical):
    """Integers as ids; values outside [0, `num_buckets`) are `default_value` or an error."""

    key: str
    num_buckets: int
    default_value: int | None = None

    @property
    def name(self) -> str:
        return self.key

    def ids(self, features: Mapping[str, Any]) -> Any:
        return _kinds.elementwise(self._ids, _matrix(feature(features, self.key)))

    def _ids(self, ops: Any, values: Any) -> Any:
        if not _kinds.is_integer(values):
            raise TypeError(f"feature `{self.key}` must be integers: its values are the ids")
        values = _kinds.to_ids(ops, values)
        default = -1 if self.default_value is None else self.default_value
        ids = ops.where(values == -1, -1, within(ops, values, self.num_buckets, default))
        if self.default_value is None:
            self._check(ids, values)
        return ids

    def _check(self, ids: Any, values: Any) -> None:
        """Rejects values out of range, except inside a model compiled by JAX or torch."""
        message = f"feature `{self.key}` has ids outside [0, {self.num_buckets})"
        tf = _kinds.tensorflow()
        if tf is not None:
            tf.debugging.assert_equal(ids, values, message=message)
        elif isinstance(values, np.ndarray) and not np.array_equal(ids, values):
            raise ValueError(message)


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class HashColumn(Categorical):
    """Hashed strings or integers."""

    on_host = True

    key: str
    num_buckets: int

    @property
    def name(self) -> str:
        return self.key

    def ids(self, features: Mapping[str, Any]) -> Any:
        return _kinds.elementwise(self._ids, _matrix(feature(features, self.key)))

    def _ids(self, ops: Any, values: Any) -> Any:
        return ops.where(_is_missing(values), -1, self._layer.transform(ops, values))

    @cached_property
    def _layer(self) -> Hashing:
        return Hashing(self.num_buckets)


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class VocabularyColumn(Categorical):
    """Words mapped to their index in a list; others get an id after it, or `default_value`."""

    on_host = True

    key: str
    vocabulary: tuple[Any, ...]
    default_value: int = -1
    num_oov_buckets: int = 0

    @property
    def name(self) -> str:
        return self.key

    @property
    def num_buckets(self) -> int:
        return len(self.vocabulary) + self.num_oov_buckets

    def ids(self, features: Mapping[str, Any]) -> Any:
        return _kinds.elementwise(self._ids, _matrix(feature(features, self.key)))

    def _ids(self, ops: Any, values: Any) -> Any:
        ids = self._layer.transform(ops, values)
        if self.num_oov_buckets == 0:
            ids = ops.where(ids < len(self.vocabulary), ids, self.default_value)
        return ops.where(_is_missing(values), -1, ids)

    @cached_property
    def _layer(self) -> IndexLookup:
        return IndexLookup(self.vocabulary, num_oov_tokens=max(self.num_oov_buckets, 1))


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class ConcatenatedColumn(Categorical):
    """The ids of several columns, concatenated with consecutive id ranges."""

    columns: tuple[Categorical, ...]

    @property
    def on_host(self) -> bool:
        return any(column.on_host for column in self.columns)

    @property
    def name(self) -> str:
        return "_C_".join(column.name for column in self.columns)

    @property
    def num_buckets(self) -> int:
        return sum(column.num_buckets for column in self.columns)

    def ids(self, features: Mapping[str, Any]) -> Any:
        sizes = [column.num_buckets for column in self.columns]
        offsets = [sum(sizes[:place]) for place in range(len(sizes))]
        return join([column.ids(features) for column in self.columns], offsets, axis=1)


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class IndicatorColumn(Column):
    """Counts of each id of a column in a record."""

    categorical: Categorical

    @property
    def on_host(self) -> bool:
        return self.categorical.on_host

    @property
    def name(self) -> str:
        return f"{self.categorical.name}_indicator"

    @property
    def width(self) -> int:
        return self.categorical.num_buckets

    def values(self, features: Mapping[str, Any]) -> Any:
        """Returns the counts of a batch, [batch, width]."""
        ops = keras.ops
        ids = _kinds.to_tensor(_dense(self.categorical.ids(features), -1))
        is_present = ops.expand_dims(ops.cast(ids >= 0, "float32"), -1)
        hot = ops.one_hot(ops.maximum(ids, 0), self.width, dtype="float32")
        return ops.sum(hot * is_present, axis=1)


@keras.saving.register_keras_serializable("elasticdl")
@dataclass(frozen=True)
class EmbeddingColumn(Column):
    """A trainable embedding of the ids of a column; `DenseFeatures` owns the table."""

    categorical: Categorical
    dimension: int
    combiner: str = "mean"
    initializer: Any = None
    max_norm: float | None = None
    trainable: bool = True

    @property
    def on_host(self) -> bool:
        return self.categorical.on_host

    @property
    def name(self) -> str:
        return f"{self.categorical.name}_embedding"

    @property
    def width(self) -> int:
        return self.dimension


def feature(features: Mapping[str, Any], key: str) -> Any:
    """Returns the feature with that name."""
    if key not in features:
        known = ", ".join(f"`{name}`" for name in sorted(features))
        raise KeyError(f"feature `{key}` is missing: the features are {known}")
    return _kinds.as_value(features[key])


def _matrix(values: Any) -> Any:
    """Expands values of rank 1 to one value per record."""
    if len(values.shape) == 1 and not _kinds.is_ragged_or_sparse(values):
        ops = np if isinstance(values, np.ndarray) else keras.ops
        return ops.expand_dims(values, 1)
    if len(values.shape) != 2:
        raise ValueError(f"ids must be [batch] or [batch, n], not of rank {len(values.shape)}")
    return values


def _dense(values: Any, padding: Any) -> Any:
    if _kinds.is_ragged(values):
        return values.to_tensor(padding)
    if _kinds.is_sparse(values):
        tf = _kinds.tensorflow()
        return tf.sparse.to_dense(tf.sparse.reorder(values), padding)
    return values


def _is_missing(values: Any) -> Any:
    """Returns where values are missing: the empty string, or -1."""
    if not _kinds.is_text(values):
        return values == -1
    if isinstance(values, np.ndarray):
        is_empty = [not text for text in _kinds.to_bytes(values)]
        return np.array(is_empty, bool).reshape(values.shape)
    return _kinds.tensorflow().equal(values, "")
