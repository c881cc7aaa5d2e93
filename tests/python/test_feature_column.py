# SPDX-License-Identifier: Apache-2.0
"""Feature columns, and `DenseFeatures` compared with TensorFlow's own input layer."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests compare with TensorFlow", allow_module_level=True)

import numpy as np  # noqa: E402

import preprocessing_dense as dense  # noqa: E402
from elasticdl import feature_column as fc  # noqa: E402

# TensorFlow's columns print a deprecation warning on every call.
tf.get_logger().setLevel("ERROR")

BATCH = {
    "age": np.array([[17.0], [18.0], [70.0]], "float32"),
    "user": np.array([[1, -1], [3, 2], [-1, -1]]),
    "city": np.array([["Oslo", "Lima"], ["", "Rome"], ["Oslo", "Oslo"]]),
    "word": np.array([["a"], ["b"], ["z"]]),
}


def their_columns():
    user = tf.feature_column.categorical_column_with_identity("user", 5)
    city = tf.feature_column.categorical_column_with_hash_bucket("city", 7)
    word = tf.feature_column.categorical_column_with_vocabulary_list("word", ["a", "b"])
    oov = tf.feature_column.categorical_column_with_vocabulary_list(
        "word", ["b"], num_oov_buckets=4
    )
    age = tf.feature_column.numeric_column("age")
    return [
        tf.feature_column.embedding_column(user, 3, combiner="sum", max_norm=0.4),
        tf.feature_column.embedding_column(city, 2, combiner="sqrtn"),
        tf.feature_column.embedding_column(word, 2),
        tf.feature_column.indicator_column(oov),
        tf.feature_column.indicator_column(city),
        tf.feature_column.bucketized_column(age, [18, 65]),
        age,
    ]


def our_columns():
    user = fc.categorical_column_with_identity("user", 5)
    city = fc.categorical_column_with_hash_bucket("city", 7)
    word = fc.categorical_column_with_vocabulary_list("word", ["a", "b"])
    oov = fc.categorical_column_with_vocabulary_list("word", ["b"], num_oov_buckets=4)
    age = fc.numeric_column("age")
    return [
        fc.embedding_column(user, 3, combiner="sum", max_norm=0.4),
        fc.embedding_column(city, 2, combiner="sqrtn"),
        fc.embedding_column(word, 2),
        fc.indicator_column(oov),
        fc.indicator_column(city),
        fc.bucketized_column(age, [18, 65]),
        age,
    ]


@pytest.fixture(scope="module")
def their_answer():
    """The output of TensorFlow's input layer for the batch, and its tables by column."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        features = {name: tf.constant(values) for name, values in BATCH.items()}
        output = tf.compat.v1.feature_column.input_layer(features, their_columns())
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.tables_initializer())
        variables = tf.compat.v1.global_variables()
        tables = {one.name.split("/")[1]: session.run(one) for one in variables}
        return session.run(output), tables


@pytest.mark.parametrize("columns", [our_columns, their_columns])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_dense_features_equals_tensorflows_input_layer(their_answer, columns, kind):
    wanted, tables = their_answer
    layer = fc.DenseFeatures(columns())
    layer.build()
    assert set(layer.tables) == set(tables)
    for name, table in tables.items():
        layer.tables[name].embeddings.assign(table)
    batch = dict(BATCH)
    if kind != "dense":
        batch["user"] = tf.ragged.constant([[1], [3, 2], []], dtype=tf.int64)
        batch["city"] = tf.ragged.constant([["Oslo", "Lima"], ["Rome"], ["Oslo", "Oslo"]])
    if kind == "sparse":
        batch["user"] = batch["user"].to_sparse()
        batch["city"] = batch["city"].to_sparse()
    np.testing.assert_allclose(layer(batch), wanted, rtol=1e-6)
    assert layer.width == wanted.shape[1]


def test_concatenated_columns_share_one_table_of_ids():
    user = fc.categorical_column_with_identity("user", 32)
    item = tf.feature_column.categorical_column_with_identity("item", 128)
    age = fc.bucketized_column(fc.numeric_column("age"), [1, 2, 3, 4, 5])
    column = fc.concatenated_categorical_column([user, item, age])
    assert column.name == "user_C_item_C_age_bucketized"
    assert column.num_buckets == 166
    batch = {"user": [10, -1], "item": [1, 120], "age": [[0.5], [9.0]]}
    counts = fc.DenseFeatures([fc.indicator_column(column)])(batch).numpy()
    assert [np.flatnonzero(row).tolist() for row in counts] == [[10, 33, 160], [152, 165]]
    batch["item"] = tf.ragged.constant([[1, 2], []], dtype=tf.int64)
    counts = fc.DenseFeatures([fc.indicator_column(column)])(batch).numpy()
    assert [np.flatnonzero(row).tolist() for row in counts] == [[10, 33, 34, 160], [165]]


def test_the_indicator_equals_keras_category_encoding():
    ids = np.array([[0, 2, 2], [1, 0, 1]])
    wanted = keras.layers.CategoryEncoding(3, output_mode="count")(ids)
    column = fc.indicator_column(fc.categorical_column_with_identity("ids", 3))
    np.testing.assert_array_equal(fc.DenseFeatures(column)({"ids": ids}), wanted)


def test_every_number_of_a_record_has_separate_buckets():
    column = fc.bucketized_column(fc.numeric_column("pair", shape=2), [0.0])
    output = fc.DenseFeatures([column])({"pair": np.array([[-1.0, -1.0], [1.0, 1.0]])})
    assert output.numpy().tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_numeric_columns_train_in_a_model_and_strings_work():
    dense.check_columns()


def test_a_model_can_be_saved_and_loaded(tmp_path):
    inputs = {
        "age": keras.Input((1,), name="age"),
        "user": keras.Input((2,), dtype="int64", name="user"),
        "city": keras.Input((2,), dtype="string", name="city"),
        "word": keras.Input((1,), dtype="string", name="word"),
    }
    model = keras.Model(inputs, keras.layers.Dense(1)(fc.DenseFeatures(our_columns())(inputs)))
    batch = {name: tf.constant(values) for name, values in BATCH.items()}
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    losses = [model.train_on_batch(batch, np.ones((3, 1))) for _ in range(3)]
    assert losses[-1] < losses[0]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(batch), model(batch))


def test_a_frozen_embedding_has_no_trainable_weights():
    user = fc.categorical_column_with_identity("user", 5)
    layer = fc.DenseFeatures([fc.embedding_column(user, 2, trainable=False)])
    layer.build()
    assert len(layer.weights) == 1
    assert not layer.trainable_weights


def test_the_default_initial_rows_equal_tensorflows():
    user = fc.categorical_column_with_identity("user", 5000)
    layer = fc.DenseFeatures([fc.embedding_column(user, 4)])
    layer.build()
    table = layer.tables["user_embedding"].embeddings.numpy()
    # Truncating a normal distribution at two deviations reduces its deviation to 0.88.
    assert abs(table.std() - 0.88 / 2) < 0.01
    assert abs(table).max() <= 1.0


def test_values_out_of_range_give_the_default_or_an_error():
    batch = {"user": np.array([[4], [9]])}
    column = fc.categorical_column_with_identity("user", 5, default_value=2)
    counts = fc.DenseFeatures([fc.indicator_column(column)])(batch).numpy()
    assert counts.argmax(axis=1).tolist() == [4, 2]
    column = fc.categorical_column_with_identity("user", 5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`user` has ids outside \[0, 5\)"):
        fc.DenseFeatures([fc.indicator_column(column)])(batch)


USER = fc.categorical_column_with_identity("user", 5)
AGE = fc.numeric_column("age")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: fc.DenseFeatures([USER]), TypeError, "`user` is categorical: wrap it in"),
        (lambda: fc.DenseFeatures([AGE, AGE]), ValueError, "two columns are named `age`"),
        (lambda: fc.DenseFeatures(["age"]), TypeError, "cannot use a column of type `str`"),
        (lambda: fc.DenseFeatures([AGE])({"x": [1]}), KeyError, "`age` is missing: the features"),
        (lambda: fc.DenseFeatures([AGE])({"age": ["x"]}), TypeError, "`age` contains strings"),
        (lambda: fc.embedding_column(AGE, 3), TypeError, "`age` is not categorical"),
        (lambda: fc.embedding_column(USER, 0), ValueError, "`dimension` must be at least 1"),
        (lambda: fc.embedding_column(USER, 3, "max"), ValueError, "`combiner` must be one of"),
        (
            lambda: fc.embedding_column(USER, 3, max_norm=-1),
            ValueError,
            "`max_norm` must be greater than 0, not -1",
        ),
        (lambda: fc.concatenated_categorical_column([]), ValueError, "one or more columns"),
        (
            lambda: fc.bucketized_column(USER, [1]),
            TypeError,
            "only a numeric column can have buckets",
        ),
        (lambda: fc.bucketized_column(AGE, [1, 1]), ValueError, "increasing order"),
        (
            lambda: fc.indicator_column(tf.feature_column.crossed_column(["a", "b"], 9)),
            TypeError,
            "cannot use a column of type `CrossedColumn`",
        ),
    ],
)
def test_a_bad_column_is_refused_in_one_line(make, error, text):
    with pytest.raises(error, match=text):
        make()
