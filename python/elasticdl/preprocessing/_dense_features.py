# SPDX-License-Identifier: Apache-2.0
"""A layer that converts a dict of features to one matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np  # noqa: F401 (of the example)

from elasticdl.preprocessing import _columns, _tensorflow_columns
from elasticdl.preprocessing._layer import Preprocessing
from elasticdl.preprocessing.sparse_embedding import SparseEmbedding


@keras.saving.register_keras_serializable("elasticdl")
class DenseFeatures(Preprocessing):
    """Concatenates numbers, counts and embeddings of a dict of features: [batch, width].

    Columns are sorted by name. Each embedding column has its own `SparseEmbedding` in `tables`,
    with the name of the column.

    >>> from elasticdl import feature_column
    >>> age = feature_column.numeric_column("age")
    >>> city = feature_column.categorical_column_with_identity("city", num_buckets=3)
    >>> layer = DenseFeatures([age, feature_column.indicator_column(city)])
    >>> batch = {"age": np.array([42.0, 7.0]), "city": np.array([[1], [2]])}
    >>> keras.ops.convert_to_numpy(layer(batch)).tolist()
    [[42.0, 0.0, 1.0, 0.0], [7.0, 0.0, 0.0, 1.0]]
    """

    takes = (dict,)

    def __init__(self, columns: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(columns, (list, tuple)):
            columns = [columns]
        self.columns = sorted(map(_dense_column, columns), key=lambda column: column.name)
        self.tables = {
            column.name: _table(column)
            for column in self.columns
            if isinstance(column, _columns.EmbeddingColumn)
        }
        self.width = sum(column.width for column in self.columns)
        self.supports_jit = not any(column.on_host for column in self.columns)
        _check_names([column.name for column in self.columns])

    def build(self, input_shape: Any = None) -> None:
        for table in self.tables.values():
            table.build()

    def call(self, features: Mapping[str, Any]) -> Any:
        if not isinstance(features, Mapping):
            raise TypeError("`DenseFeatures` needs a dict from feature names to values")
        parts = [self._values(column, features) for column in self.columns]
        return keras.ops.concatenate(parts, axis=-1)

    def compute_output_spec(self, features: Mapping[str, Any]) -> keras.KerasTensor:
        batch = next(iter(features.values())).shape[0]
        return keras.KerasTensor((batch, self.width), dtype=self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        columns = [keras.saving.serialize_keras_object(column) for column in self.columns]
        return {**super().get_config(), "columns": columns}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DenseFeatures:
        columns = keras.saving.deserialize_keras_object(config["columns"])
        return cls(**{**config, "columns": columns})

    def _values(self, column: Any, features: Mapping[str, Any]) -> Any:
        if column.name in self.tables:
            return self.tables[column.name](column.categorical.ids(features))
        return keras.ops.cast(column.values(features), self.compute_dtype)


def _dense_column(column: Any) -> Any:
    column = _tensorflow_columns.own(column)
    if isinstance(column, _columns.BucketizedColumn):
        return _columns.IndicatorColumn(column)
    if isinstance(column, _columns.Categorical):
        raise TypeError(
            f"column `{column.name}` is categorical: wrap it in `embedding_column` or "
            "`indicator_column`"
        )
    return column


def _table(column: _columns.EmbeddingColumn) -> SparseEmbedding:
    initializer = column.initializer
    if initializer is None:
        initializer = keras.initializers.TruncatedNormal(stddev=column.dimension**-0.5)
    return SparseEmbedding(
        column.categorical.num_buckets,
        column.dimension,
        embeddings_initializer=initializer,
        combiner=column.combiner,
        max_norm=column.max_norm,
        trainable=column.trainable,
        name=column.name,
    )


def _check_names(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two columns are named `{name}`")
