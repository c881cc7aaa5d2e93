# SPDX-License-Identifier: Apache-2.0
"""The expected output of every preprocessing layer for dense input; `python preprocessing_dense.py`
checks it on the backend in KERAS_BACKEND. Tests run it on JAX and torch, and its cases on
TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

if __name__ == "__main__":
    # Simulates a machine without TensorFlow: importing it is an error.
    sys.modules["tensorflow"] = None

import keras
import numpy as np

from elasticdl import feature_column as fc
from elasticdl import preprocessing as prep

NAN, INF = float("nan"), float("inf")
TEXT = np.array([["A", "B"], ["D", "é"]])

# (name, layer, input, output)
NUMBERS = [
    ("bins", prep.Discretization([0.1, 0.7, 2]), [[-1, 0.1], [0.7, 9]], [[0, 1], [2, 3]]),
    ("bins_of_ints", prep.Discretization([0, 5]), [[-1, 0], [4, 5]], [[0, 1], [1, 2]]),
    (
        "log",
        prep.LogRound(20, base=2),
        [[0.0, 2.6, 0.2], [3.1, 1024, NAN]],
        [[0, 1, 0], [2, 10, 0]],
    ),
    (
        "log_default",
        prep.LogRound(3, default_value=7),
        [[-1, 1, 8], [INF, 2, 99]],
        [[7, 0, 2], [7, 1, 7]],
    ),
    ("round", prep.RoundIdentity(10), [[1.2, 1.6], [2.5, 4.9]], [[1, 2], [2, 5]]),
    (
        "round_default",
        prep.RoundIdentity(3, default_value=-1),
        [[INF, NAN, -1.0, 2.0]],
        [[-1, -1, -1, 2]],
    ),
    ("round_ints", prep.RoundIdentity(9), [[1, 8], [9, -1]], [[1, 8], [0, 0]]),
    ("normalize", prep.Normalizer(1, 2), [[3, 5], [0, -1]], [[1.0, 2.0], [-0.5, -1.0]]),
]
STRINGS = [
    ("hash", prep.Hashing(1000), TEXT, [[564, 528], [295, 25]]),
    ("hash_bytes", prep.Hashing(1000), np.char.encode(TEXT, "utf-8"), [[564, 528], [295, 25]]),
    ("hash_objects", prep.Hashing(1000), TEXT.astype(object), [[564, 528], [295, 25]]),
    ("lookup", prep.IndexLookup(["A", "é"]), TEXT, [[0, 2], [2, 1]]),
    ("lookup_oov", prep.IndexLookup(["A"], num_oov_tokens=1000), TEXT, [[0, 529], [296, 26]]),
    (
        "int32",
        prep.ToNumber("int32", -1),
        np.array([["12", ""], [" 3 ", "-4"]]),
        [[12, -1], [3, -4]],
    ),
    ("float32", prep.ToNumber("float32"), np.array([["1.5", ""]]), [[1.5, 0.0]]),
]
INTEGERS = [
    ("hash_ints", prep.Hashing(1000), [[1, -5], [0, 123456789]], [[849, 816], [735, 306]]),
    ("lookup_ints", prep.IndexLookup([7, -3]), [[7, 5], [-3, 0]], [[0, 2], [1, 2]]),
]


def as_input(values: object) -> np.ndarray:
    """An array with the type that Keras would use."""
    array = np.asarray(values)
    return array.astype("float32") if array.dtype.kind == "f" else array


def check(layer: keras.layers.Layer, values: object, expected: object) -> None:
    """Checks numpy input, and the same layer after saving and loading."""
    for one in (layer, reload(layer)):
        output = keras.ops.convert_to_numpy(one(as_input(values)))
        np.testing.assert_array_equal(output, np.array(expected))
        assert output.dtype == layer.output_dtype


def reload(layer: keras.layers.Layer) -> keras.layers.Layer:
    """The layer after saving and loading."""
    return keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))


def check_in_model(layer: keras.layers.Layer, values: object, expected: object) -> None:
    """Checks backend tensors, and the layer in a functional model."""
    array = as_input(values)
    is_on_jax = keras.backend.backend() == "jax"  # JAX has no 64-bit numbers by default.
    if is_on_jax and array.dtype == "int64":
        array = array.astype("int32")
    output = layer(keras.ops.convert_to_tensor(array))
    assert keras.ops.is_tensor(output)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(output), np.array(expected))
    inputs = keras.Input(array.shape[1:], dtype=str(array.dtype))
    model = keras.Model(inputs, layer(inputs))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(array)), np.array(expected))
    if is_on_jax:
        import jax

        np.testing.assert_array_equal(jax.jit(layer)(array), np.array(expected))


def check_embedding() -> None:
    """Checks combiners, missing ids and `max_norm` against explicit sums."""
    ids = np.array([[0, 2], [1, -1], [-1, -1]])
    table = np.arange(12, dtype="float32").reshape(4, 3)
    for combiner, divisor in (("sum", 1), ("mean", 2), ("sqrtn", 2**0.5)):
        layer = prep.SparseEmbedding(4, 3, combiner=combiner)
        layer.build()
        layer.embeddings.assign(table)
        expected = np.stack([(table[0] + table[2]) / divisor, table[1], 0 * table[1]])
        np.testing.assert_allclose(keras.ops.convert_to_numpy(layer(ids)), expected, rtol=1e-6)
    layer = prep.SparseEmbedding(4, 3, combiner="sum", max_norm=2.0)
    layer.build()
    layer.embeddings.assign(table)
    clipped = table * np.minimum(1, 2 / np.linalg.norm(table + 1e-20, axis=1, keepdims=True))
    expected = np.stack([clipped[0] + clipped[2], clipped[1], 0 * table[1]])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer(ids)), expected, rtol=1e-5)


def check_join() -> None:
    """Checks `ConcatenateWithOffset`, alone and in a model."""
    left, right = np.array([[1], [-1]]), np.array([[2], [3]])
    layer = reload(prep.ConcatenateWithOffset([0, 10]))
    expected = np.array([[1, 12], [-1, 13]])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer([left, right])), expected)
    inputs = [keras.Input((1,), dtype="int64"), keras.Input((1,), dtype="int64")]
    model = keras.Model(inputs, layer(inputs))
    np.testing.assert_array_equal(model.predict_on_batch([left, right]), expected)


def check_columns() -> None:
    """A model over numeric columns trains, and string columns work outside of models."""
    user = fc.categorical_column_with_identity("user", 8)
    both = fc.concatenated_categorical_column(
        [user, fc.bucketized_column(fc.numeric_column("age"), [18, 65])]
    )
    layer = fc.DenseFeatures([fc.embedding_column(both, 4, max_norm=1.0), fc.numeric_column("age")])
    inputs = {
        "age": keras.Input((1,), name="age"),
        "user": keras.Input((2,), dtype="int64", name="user"),
    }
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    batch = {"age": np.array([[3.0], [40.0]]), "user": np.array([[1, 2], [7, -1]])}
    table = layer.tables["user_C_age_bucketized_embedding"]
    before = keras.ops.convert_to_numpy(table.embeddings)
    model.compile("sgd", "mse")
    model.train_on_batch(batch, np.ones((2, 1)))
    changed = np.any(keras.ops.convert_to_numpy(table.embeddings) != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [1, 2, 7, 8, 9], changed

    words = fc.categorical_column_with_vocabulary_list("word", ["A", "B"])
    city = fc.categorical_column_with_hash_bucket("city", 3)
    layer = fc.DenseFeatures([fc.indicator_column(words), fc.indicator_column(city)])
    batch = {"word": np.array(["B", "Z"]), "city": np.array([["A", "B"], ["", "A"]])}
    expected = [[1, 1, 0, 0, 1], [0, 1, 0, 0, 0]]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer(batch)), expected)


def main() -> None:
    """Runs every case on a backend without ragged tensors."""
    for _, layer, values, expected in NUMBERS + STRINGS + INTEGERS:
        check(layer, values, expected)
        assert isinstance(layer(as_input(values)), np.ndarray), "numpy in, numpy out"
    for _, layer, values, expected in NUMBERS:
        check_in_model(layer, values, expected)
    check_join()
    check_embedding()
    check_columns()
    for layer in (prep.ToRagged(), prep.ToSparse()):
        check_refusal(layer, np.array([[1, -1]]), "only TensorFlow has")
    if keras.backend.backend() == "jax":
        import jax

        check_refusal(jax.jit(prep.Hashing(3)), np.array([1], "int32"), "call it in `feed`")


def check_refusal(call: Callable[[np.ndarray], object], values: np.ndarray, text: str) -> None:
    """The error names what is missing and the solution."""
    try:
        call(values)
    except (RuntimeError, TypeError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"the error must contain `{text}`")


if __name__ == "__main__":
    main()
