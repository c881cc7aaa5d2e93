# SPDX-License-Identifier: Apache-2.0
"""Converts the columns of a batch to the inputs of a Keras model, with the user's `feed` if any.

On TensorFlow, `feed` gets a `tf.data.Dataset` of the batch's records and is traced once per mode.
On JAX and torch, it gets the columns as numpy arrays. This module keeps only traced functions, so
the same batch always gives the same features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from elasticdl._mode import Mode
from elasticdl._zoo import ZooError

LABEL = "label"
RECORD = "record"

# numpy types of the columns; text and raw bytes are objects.
DTYPES = {"f32": "float32", "i64": "int64", "u8": "uint8", "bytes": "S"}

# Number of records in a dummy batch: more than one, to keep the batch axis.
N_MADE_UP = 2


@dataclass
class Metadata:
    """Metadata passed to `feed`: column names in order, and the numpy type of each."""

    column_names: list[str]
    column_dtypes: dict[str, np.dtype]


class Feed:
    """Base class; without a user-defined `feed`, the columns are used directly."""

    def __init__(self, feed: Any, columns: list[dict]) -> None:
        self._feed = feed
        self._columns = columns
        dtypes = {column["name"]: np.dtype(DTYPES[column["dtype"]]) for column in columns}
        self._metadata = Metadata(list(dtypes), dtypes)

    def __call__(self, batch: Any, mode: str) -> tuple[Any, Any]:
        """Returns features and labels of the batch; labels may be None in prediction."""
        made = self._make(batch.columns, mode)
        if not isinstance(made, tuple) or len(made) != 2:
            if mode != Mode.PREDICTION:
                raise ZooError(
                    f"`feed` returned {_shown(made)} in {mode}; it must return (features, labels)"
                )
            made = (made, None)
        if made[1] is None and mode != Mode.PREDICTION:
            raise ZooError(
                f"the batch has no labels in {mode}: the data has no column `{LABEL}`; define "
                "`feed` and return (features, labels)"
            )
        self._check(made, len(batch), batch.columns, mode)
        return made

    def made_up(self) -> Any:
        """Returns dummy features with the shapes used in training, to build the model."""
        raise NotImplementedError

    def _make(self, columns: dict, mode: str) -> Any:
        raise NotImplementedError

    def _check(self, made: tuple[Any, Any], n: int, columns: dict, mode: str) -> None:
        for leaf in keras.tree.flatten([part for part in made if part is not None]):
            n_out = leaf.shape[0] if len(leaf.shape) else None
            if n_out != n:
                raise ZooError(self._wrong_number(n_out, n))

    def _wrong_number(self, n_out: int | None, n: int) -> str:
        came = "a scalar" if n_out is None else "1 record" if n_out == 1 else f"{n_out} records"
        return (
            f"`feed` returned {came} for a batch of {n} records; it must return each record "
            "exactly once, so do not use `repeat`, `filter` or `batch`"
        )

    def _without_feed(self, columns: dict) -> tuple[Any, Any]:
        named = {column["name"]: column for column in self._columns}
        is_label = {name: c.get("is_label") or name == LABEL for name, c in named.items()}
        labels = [columns[name] for name in columns if is_label.get(name)]
        features = {name: columns[name] for name in columns if not is_label.get(name)}
        if len(features) == 1:
            (features,) = features.values()
        return features, (labels[0] if labels else None)


class NumpyFeed(Feed):
    """For JAX and torch: columns are arrays; text is an array of `bytes` objects."""

    def made_up(self) -> Any:
        columns = {}
        for column in self._columns:
            shape = (N_MADE_UP, *column["shape"])
            is_text = column["dtype"] == "bytes"
            zeros = None if is_text else np.zeros(shape, DTYPES[column["dtype"]])
            columns[column["name"]] = [b""] * N_MADE_UP if is_text else zeros
        try:
            return self._make(columns, Mode.TRAINING)[0]
        except ZooError:
            raise
        except Exception as error:
            raise ZooError(
                "`feed` failed on a dummy batch of zeros and empty strings, which is used to find "
                "the shapes of the model's inputs; make it accept such records, or define the "
                f"shapes with keras.Input: {type(error).__name__}: {error}"
            ) from error

    def _make(self, columns: dict, mode: str) -> Any:
        if self._feed is not None:
            arrays = {name: _array(values) for name, values in columns.items()}
            return self._feed(arrays, mode, self._metadata)
        for name, values in columns.items():
            if isinstance(values, list):
                raise ZooError(
                    f"the column `{name}` is text, which a model cannot use directly; define "
                    "`feed` and convert it to numbers"
                )
        return self._without_feed(columns)


class TensorFlowFeed(Feed):
    """For TensorFlow: `feed` gets a `tf.data.Dataset` (of serialized records if `raw`)."""

    def __init__(self, feed: Any, columns: list[dict], raw: bool) -> None:
        super().__init__(feed, columns)
        self._raw = raw
        # By mode and columns: in prediction, the labels may be missing.
        self._traced: dict[tuple, Any] = {}

    def made_up(self) -> Any:
        import tensorflow as tf

        names = [RECORD] if self._raw else [column["name"] for column in self._columns]
        if self._feed is None:
            made = self._without_feed(self._inputs(names))
        else:
            # Use the shapes found by tracing: a dummy record could not be parsed.
            made = self._trace(names, Mode.TRAINING).structured_outputs
        features = made[0] if isinstance(made, tuple) and len(made) == 2 else made

        def zeros(value: Any) -> Any:
            is_spec = isinstance(value, tf.TypeSpec)
            spec = value if is_spec else tf.type_spec_from_value(value)
            first, *rest = spec.shape.as_list()
            dense = tf.zeros([first or N_MADE_UP, *(axis or 1 for axis in rest)], spec.dtype)
            if isinstance(spec, tf.RaggedTensorSpec):
                return tf.RaggedTensor.from_tensor(dense)
            return tf.sparse.from_dense(dense) if isinstance(spec, tf.SparseTensorSpec) else dense

        return tf.nest.map_structure(zeros, features)

    def _make(self, columns: dict, mode: str) -> Any:
        import tensorflow as tf

        inputs = {name: tf.convert_to_tensor(values) for name, values in columns.items()}
        if self._feed is None:
            return self._without_feed(inputs)
        run = self._trace(list(columns), mode)
        try:
            return run(inputs)
        except (tf.errors.InvalidArgumentError, tf.errors.OutOfRangeError) as error:
            # `get_single_element` got no batch, or more than one.
            n = int(next(iter(inputs.values())).shape[0])
            n_out = self._count(inputs, mode, n)
            if n_out == n:
                raise
            raise ZooError(self._wrong_number(n_out, n)) from error

    def _inputs(self, names: list[str]) -> dict:
        import tensorflow as tf

        if self._raw:
            return {RECORD: tf.TensorSpec([None], tf.string, name=RECORD)}
        by_name = {column["name"]: column for column in self._columns}
        specs = {}
        for name in names:
            column = by_name[name]
            dtype = (
                tf.as_dtype(DTYPES[column["dtype"]]) if column["dtype"] != "bytes" else tf.string
            )
            shape = [None, *column["shape"]] if dtype != tf.string else [None]
            specs[name] = tf.TensorSpec(shape, dtype, name=name)
        return specs

    def _trace(self, names: list[str], mode: str) -> Any:
        import tensorflow as tf

        key = (mode, *names)
        if key not in self._traced:

            def run(inputs: dict) -> Any:
                made = self._dataset(inputs, mode)
                if not isinstance(made, tf.data.Dataset):
                    return made
                n = tf.shape(next(iter(inputs.values())), out_type=tf.int64)[0]
                return made.batch(n).get_single_element()

            self._traced[key] = tf.function(run).get_concrete_function(self._inputs(names))
        return self._traced[key]

    def _dataset(self, inputs: dict, mode: str) -> Any:
        import tensorflow as tf

        records = tf.data.Dataset.from_tensor_slices(inputs[RECORD] if self._raw else inputs)
        with _plain_datasets():
            return self._feed(records, mode, self._metadata)

    def _count(self, inputs: dict, mode: str, n: int) -> int:
        """Counts the records that `feed` returns, up to a limit in case of an endless `repeat`."""
        made = self._dataset(inputs, mode).take(100 * n)
        return sum(1 for _ in made)


@contextlib.contextmanager
def _plain_datasets() -> Iterator[None]:
    """Disables dataset methods that would change the order of records or cache them.

    The records are already shuffled with the job's seed, and a cache would return old records.
    """
    import tensorflow as tf

    names = ("shuffle", "cache", "prefetch")
    originals = {name: getattr(tf.data.Dataset, name) for name in names}
    try:
        for name in names:
            setattr(tf.data.Dataset, name, lambda dataset, *_args, **_kwargs: dataset)
        yield
    finally:
        for name, original in originals.items():
            setattr(tf.data.Dataset, name, original)


def _array(values: Any) -> np.ndarray:
    if not isinstance(values, list):
        return values
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _shown(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {len(made)}"
    return f"a {type(made).__name__}"
