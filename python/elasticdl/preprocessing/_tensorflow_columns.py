# SPDX-License-Identifier: Apache-2.0
"""Converts columns of `tf.feature_column`, which Keras 3 does not support, to columns of elasticdl.

They are recognized by class name, so TensorFlow is not imported.
"""

from __future__ import annotations

from typing import Any

import keras

from elasticdl.preprocessing import _columns
from elasticdl.preprocessing.index_lookup import read_vocabulary


def own(column: Any) -> _columns.Column:
    """Returns the column, converted if it comes from TensorFlow."""
    if isinstance(column, _columns.Column):
        return column
    name = type(column).__name__
    if name not in _READERS or not type(column).__module__.startswith("tensorflow."):
        known = ", ".join(_READERS)
        raise TypeError(f"cannot use a column of type `{name}`; TensorFlow columns can be {known}")
    return _READERS[name](column)


def _numeric(column: Any) -> _columns.Column:
    if column.normalizer_fn is not None or column.default_value is not None:
        raise TypeError(
            f"column `{column.name}` has a `normalizer_fn` or `default_value`, which are not "
            "supported: use `elasticdl.preprocessing.Normalizer` or `ToNumber` on the feature"
        )
    return _columns.NumericColumn(column.key, tuple(column.shape))


def _bucketized(column: Any) -> _columns.Column:
    return _columns.BucketizedColumn(own(column.source_column), tuple(column.boundaries))


def _identity(column: Any) -> _columns.Column:
    return _columns.IdentityColumn(column.key, column.number_buckets, column.default_value)


def _hash(column: Any) -> _columns.Column:
    return _columns.HashColumn(column.key, column.hash_bucket_size)


def _list(column: Any) -> _columns.Column:
    words = tuple(read_vocabulary(column.vocabulary_list))
    return _columns.VocabularyColumn(
        column.key, words, column.default_value, column.num_oov_buckets
    )


def _file(column: Any) -> _columns.Column:
    words = tuple(read_vocabulary(column.vocabulary_file)[: column.vocabulary_size])
    return _columns.VocabularyColumn(
        column.key, words, column.default_value, column.num_oov_buckets
    )


def _indicator(column: Any) -> _columns.Column:
    return _columns.IndicatorColumn(own(column.categorical_column))


def _embedding(column: Any) -> _columns.Column:
    return _columns.EmbeddingColumn(
        own(column.categorical_column),
        column.dimension,
        column.combiner,
        _initializer(column.initializer),
        column.max_norm,
        column.trainable,
    )


def _initializer(initializer: Any) -> Any:
    if type(initializer).__name__ != "TruncatedNormal":
        raise TypeError(
            "this TensorFlow initializer is not supported: create the column with "
            "`elasticdl.feature_column.embedding_column` and a Keras initializer"
        )
    return keras.initializers.TruncatedNormal(initializer.mean, initializer.stddev)


_READERS = {
    "NumericColumn": _numeric,
    "BucketizedColumn": _bucketized,
    "IdentityCategoricalColumn": _identity,
    "HashedCategoricalColumn": _hash,
    "VocabularyListCategoricalColumn": _list,
    "VocabularyFileCategoricalColumn": _file,
    "IndicatorColumn": _indicator,
    "EmbeddingColumn": _embedding,
}
