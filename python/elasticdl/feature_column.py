# SPDX-License-Identifier: Apache-2.0
"""Feature columns, which define how to convert features, and the layer `DenseFeatures`.

Columns of `tf.feature_column` that have an equivalent here are accepted, too.
In dense features, "" and -1 mean "no value", as in TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from elasticdl.preprocessing import _columns
from elasticdl.preprocessing._dense_features import DenseFeatures
from elasticdl.preprocessing._tensorflow_columns import own
from elasticdl.preprocessing.index_lookup import read_vocabulary
from elasticdl.preprocessing.sparse_embedding import check_combiner, check_max_norm

__all__ = [
    "DenseFeatures",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_list",
    "concatenated_categorical_column",
    "embedding_column",
    "indicator_column",
    "numeric_column",
]


def numeric_column(key: str, shape: int | Sequence[int] = (1,)) -> _columns.NumericColumn:
    """Unmodified numbers; `shape` is the shape of one record.

    >>> numeric_column("pixels", shape=(28, 28)).width
    784
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    return _columns.NumericColumn(key, sizes)


def bucketized_column(source: Any, boundaries: Sequence[float]) -> _columns.BucketizedColumn:
    """Buckets of a numeric column; a bucket includes its left boundary.

    >>> bucketized_column(numeric_column("age"), [18, 65]).num_buckets
    3
    """
    source = own(source)
    if not isinstance(source, _columns.NumericColumn):
        raise TypeError(f"only a numeric column can have buckets; `{source.name}` is not one")
    bounds = tuple(float(bound) for bound in boundaries)
    if not bounds or list(bounds) != sorted(set(bounds)):
        raise ValueError(f"`boundaries` must be in increasing order, not {list(bounds)}")
    return _columns.BucketizedColumn(source, bounds)


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> _columns.IdentityColumn:
    """Integers as ids; values outside [0, `num_buckets`) become `default_value`, or an error.

    >>> categorical_column_with_identity("user", num_buckets=1000).name
    'user'
    """
    _check_count("num_buckets", num_buckets)
    if default_value is not None and not 0 <= default_value < num_buckets:
        raise ValueError(f"`default_value` must be in [0, {num_buckets}), not {default_value}")
    return _columns.IdentityColumn(key, num_buckets, default_value)


def categorical_column_with_hash_bucket(key: str, hash_bucket_size: int) -> _columns.HashColumn:
    """Hashed strings or integers, as in `preprocessing.Hashing`.

    >>> categorical_column_with_hash_bucket("city", hash_bucket_size=100).num_buckets
    100
    """
    _check_count("hash_bucket_size", hash_bucket_size)
    return _columns.HashColumn(key, hash_bucket_size)


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: str | os.PathLike | Sequence[Any],
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> _columns.VocabularyColumn:
    """Words mapped to their index in a list, or in a file with one word per line.

    Other words are hashed to `num_oov_buckets` ids after the list. Without such ids, they get
    `default_value`; with -1, they are ignored.

    >>> categorical_column_with_vocabulary_list("city", ["Oslo", "Lima"]).num_buckets
    2
    """
    words = tuple(read_vocabulary(vocabulary_list))
    if num_oov_buckets < 0:
        raise ValueError(f"`num_oov_buckets` must not be negative, not {num_oov_buckets}")
    if num_oov_buckets and default_value != -1:
        raise ValueError("give `num_oov_buckets` or `default_value`, not both")
    if not -1 <= default_value < len(words):
        raise ValueError(f"`default_value` must be in [-1, {len(words)}), not {default_value}")
    return _columns.VocabularyColumn(key, words, default_value, num_oov_buckets)


def concatenated_categorical_column(columns: Sequence[Any]) -> _columns.ConcatenatedColumn:
    """Combines categorical columns into one with consecutive id ranges, to share a table.

    >>> user = categorical_column_with_identity("user", num_buckets=32)
    >>> item = categorical_column_with_identity("item", num_buckets=128)
    >>> both = concatenated_categorical_column([user, item])
    >>> both.name, both.num_buckets
    ('user_C_item', 160)
    """
    if not isinstance(columns, (list, tuple)) or not columns:
        raise ValueError("`concatenated_categorical_column` needs a list of one or more columns")
    return _columns.ConcatenatedColumn(tuple(_categorical(column) for column in columns))


def indicator_column(categorical_column: Any) -> _columns.IndicatorColumn:
    """Counts of each id of a categorical column in a record.

    >>> indicator_column(categorical_column_with_identity("day", num_buckets=7)).width
    7
    """
    return _columns.IndicatorColumn(_categorical(categorical_column))


def embedding_column(
    categorical_column: Any,
    dimension: int,
    combiner: str = "mean",
    initializer: Any = None,
    max_norm: float | None = None,
    trainable: bool = True,
) -> _columns.EmbeddingColumn:
    """A trainable embedding of the ids of a categorical column.

    `initializer` is a Keras initializer (default: truncated normal with deviation 1/√dimension).
    With `max_norm`, longer rows are scaled down to that length when they are used.

    >>> city = categorical_column_with_hash_bucket("city", hash_bucket_size=100)
    >>> embedding_column(city, dimension=8).name
    'city_embedding'
    """
    _check_count("dimension", dimension)
    check_combiner(combiner)
    check_max_norm(max_norm)
    return _columns.EmbeddingColumn(
        _categorical(categorical_column), dimension, combiner, initializer, max_norm, trainable
    )


def _categorical(column: Any) -> _columns.Categorical:
    column = own(column)
    if not isinstance(column, _columns.Categorical):
        raise TypeError(f"column `{column.name}` is not categorical: it has no ids")
    return column


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, not {count}")
