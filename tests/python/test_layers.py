# SPDX-License-Identifier: Apache-2.0
"""Embeddings on parameter servers must compute what `keras.layers.Embedding` computes.

Runs on the backend in KERAS_BACKEND.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import elasticdl.layers
from elasticdl import _keras_swap
from elasticdl._zoo import ZooError
from keras_fixture import (
    LABEL,
    Batch,
    adapter,
    by_name,
    column,
    fresh,
    mean_squares,
    plain_gradient,
)

RNG = np.random.default_rng(11)
N_IDS, DIM = 50, 4
TABLE = RNG.normal(size=(N_IDS, DIM)).astype("float32")
IDS = column("ids", "i64", 3)
WORDS = Batch(ids=RNG.integers(0, N_IDS, (12, 3)), label=RNG.integers(0, 2, 12))
# Only TensorFlow has ragged tensors.
on_tensorflow = pytest.mark.backends("tensorflow")


def small(make_embedding):
    """A functional model with one embedding."""

    def custom_model():
        inputs = keras.Input((3,), dtype="int64", name="ids")
        x = make_embedding()(inputs)
        x = keras.layers.Flatten()(x)
        return keras.Model(inputs, keras.layers.Dense(1, name="out")(x))

    return custom_model


def plain_embedding():
    return keras.layers.Embedding(N_IDS, DIM, name="table")


def ours():
    return elasticdl.layers.Embedding(DIM, input_dim=N_IDS, name="table")


def rows_of(mine, batch, table=TABLE):
    """The rows that parameter servers would return."""
    return [table[ids] for ids in mine.lookups(batch)]


def summed(ids, gradient, n_ids=N_IDS):
    """The gradient by id, as the parameter servers sum it."""
    total = np.zeros((n_ids, gradient.shape[1]), "float32")
    np.add.at(total, ids, gradient)
    return total


def check_like_keras(mine, model, batch, features):
    """Loss, dense gradient and summed row gradients equal those of `model`, which has `TABLE`."""
    ids = mine.lookups(batch)
    loss, gradients = mine.train(batch, rows_of(mine, batch), seed=1)
    expected, plain, _ = plain_gradient(model, mean_squares, features, batch.columns["label"])
    assert loss == pytest.approx(expected, rel=1e-5)
    name = next(name for name in plain if name.endswith("embeddings"))
    total = sum(summed(i, g) for i, g in zip(ids, gradients))
    np.testing.assert_allclose(total, plain[name], rtol=1e-4, atol=1e-6)
    mine_dense = by_name(mine, mine.gradient)
    for other in set(plain) - {name}:
        np.testing.assert_allclose(mine_dense[other], plain[other], rtol=1e-4, atol=1e-6)


def with_table(model):
    for layer in _keras_swap.flat_layers(model):
        if isinstance(layer, keras.layers.Embedding):
            layer._embeddings.assign(TABLE)
    return model


def test_an_embedding_equals_that_of_keras():
    mine = adapter(small(ours), [IDS, LABEL])
    assert mine.spec["tables"] == [
        {"name": "table", "dim": DIM, "init": {"uniform": {"low": -0.05, "high": 0.05}}}
    ]
    (ids,) = mine.lookups(WORDS)
    np.testing.assert_array_equal(ids, WORDS.columns["ids"].ravel())
    model = with_table(fresh(small(plain_embedding)))
    model.get_layer("out").kernel.assign(by_name(mine, mine.dense)["out/kernel"])
    check_like_keras(mine, model, WORDS, WORDS.columns["ids"])
    rows = rows_of(mine, WORDS)
    expected = ops.convert_to_numpy(model(WORDS.columns["ids"]))
    np.testing.assert_allclose(mine.predict(WORDS, rows), expected, rtol=1e-5, atol=1e-6)
    half = WORDS.part(0, 5)
    found = mine.predict(half, rows_of(mine, half))
    np.testing.assert_allclose(found, expected[:5], rtol=1e-5, atol=1e-6)


class Twice(keras.Model):
    """One layer, called twice, in a list."""

    def __init__(self, make_embedding=ours):
        super().__init__()
        self.parts = [make_embedding()]
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        left = self.parts[0](inputs[:, :2])
        right = self.parts[0](inputs[:, 2:] // 2)
        return self.out(ops.mean(ops.concatenate([left, right], axis=1), axis=1))


def test_a_layer_that_is_called_twice_has_the_rows_of_both_calls():
    mine = adapter(Twice, [IDS, LABEL])
    (ids,) = mine.lookups(WORDS)
    raw = WORDS.columns["ids"]
    np.testing.assert_array_equal(ids, np.concatenate([raw[:, :2].ravel(), raw[:, 2] // 2]))
    model = fresh(lambda: Twice(plain_embedding))
    model(raw)
    with_table(model).out.kernel.assign(
        next(v for n, v in by_name(mine, mine.dense).items() if n.endswith("kernel"))
    )
    check_like_keras(mine, model, WORDS, raw)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("mask_zero", [False, True])
def test_combiners_skip_negative_ids_and_padding(combiner, mask_zero, tmp_path):
    def custom_model():
        inputs = keras.Input((4,), dtype="int64", name="ids")
        layer = elasticdl.layers.Embedding(
            DIM, input_dim=N_IDS, combiner=combiner, mask_zero=mask_zero, name="table"
        )
        return keras.Model(inputs, layer(inputs))

    def loss(labels, predictions):
        return ops.sum(predictions)

    ids = np.array([[3, -1, 7, 3], [-1, -1, -5, -1], [0, 2, -1, -1]])
    batch = Batch(ids=ids, label=np.zeros(3, "int64"))
    mine = adapter(custom_model, [column("ids", "i64", 4), LABEL], loss=loss)
    (requested,) = mine.lookups(batch)
    kept = [[i for i in row if i >= (1 if mask_zero else 0)] for row in ids.tolist()]
    np.testing.assert_array_equal(requested, sum(kept, []))
    power = {"sum": 0.0, "mean": 1.0, "sqrtn": 0.5}[combiner]
    expected = [TABLE[row].sum(0) / max(len(row), 1) ** power for row in kept]
    found = mine.predict(batch, [TABLE[requested]])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    _, (gradient,) = mine.train(batch, [TABLE[requested]], 0)
    weights = np.concatenate([np.full(len(row), len(row) ** -power) for row in kept if row])
    np.testing.assert_allclose(gradient, np.repeat(weights[:, None], DIM, 1), rtol=1e-5)
    # Plain Keras has no combiner, so the export has a small model instead.
    mine.export(str(tmp_path), mine.dense, {"table": (np.arange(N_IDS), TABLE)})
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_allclose(ops.convert_to_numpy(loaded(ids)), expected, rtol=1e-5, atol=1e-6)


def test_padding_is_masked_as_in_keras():
    def custom_model(make=lambda: elasticdl.layers.Embedding(DIM, mask_zero=True, name="table")):
        inputs = keras.Input((3,), dtype="int64", name="ids")
        x = keras.layers.GlobalAveragePooling1D()(make()(inputs))
        return keras.Model(inputs, keras.layers.Dense(1, name="out")(x))

    mine = adapter(custom_model, [IDS, LABEL])
    plain = keras.layers.Embedding(N_IDS, DIM, mask_zero=True)
    model = with_table(fresh(lambda: custom_model(lambda: plain)))
    model.get_layer("out").kernel.assign(by_name(mine, mine.dense)["out/kernel"])
    ids = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    batch = Batch(ids=ids, label=np.array([0, 1, 0]))
    check_like_keras(mine, model, batch, ids)


class Deep(keras.Model):
    """A large embedding in a layer in a list, and a small one."""

    def __init__(self, n_large=40_000, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [Block(n_large), keras.layers.Embedding(N_IDS, DIM)]
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(ops.mean(self.blocks[0](inputs), 1) + ops.sum(self.blocks[1](inputs)))


class Block(keras.layers.Layer):
    def __init__(self, n_large, **kwargs):
        super().__init__(**kwargs)
        self.large = keras.layers.Embedding(n_large, 16, name="large")

    def call(self, inputs):
        return self.large(inputs)


def large_functional():
    inputs = keras.Input((3,), dtype="int64", name="ids")
    x = keras.layers.Embedding(40_000, 16, name="large", embeddings_initializer="normal")(inputs)
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


@pytest.mark.parametrize("custom_model", [large_functional, Deep])
def test_a_large_embedding_is_replaced_and_restored_with_its_rows(custom_model, tmp_path):
    mine = adapter(custom_model, [IDS, LABEL])
    (table,) = mine.spec["tables"]
    assert table["name"].endswith("large/embeddings") and table["dim"] == 16
    assert not any("large" in param["name"] for param in mine.spec["params"])
    rows = RNG.normal(size=(len(WORDS) * 3, 16)).astype("float32")
    (ids,) = mine.lookups(WORDS)
    known = {int(i): rows[n] for n, i in enumerate(ids)}
    given = np.stack([known[int(i)] for i in ids])
    expected = mine.predict(WORDS, [given])
    mine.train(WORDS, [given], 1)

    seen = np.array(sorted(known))
    tables = {table["name"]: (seen, np.stack([known[int(i)] for i in seen]))}
    mine.export(str(tmp_path), mine.dense, tables)
    custom = {"Deep": Deep, "Block": Block}
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False, custom_objects=custom)
    found = ops.convert_to_numpy(loaded(WORDS.columns["ids"]))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # Rows that no record used equal those of plain Keras.
    fresh_model = fresh(custom_model)
    fresh_model(WORDS.columns["ids"])
    values = [
        next(layer for layer in _keras_swap.flat_layers(model) if layer.name == "large")
        for model in (loaded, fresh_model)
    ]
    last = [ops.convert_to_numpy(layer.embeddings)[N_IDS:] for layer in values]
    np.testing.assert_array_equal(*last)
    # The rows stay on the servers while training continues.
    np.testing.assert_array_equal(mine.predict(WORDS, [given]), expected)


def test_only_large_embeddings_with_parameter_servers_are_replaced():
    everywhere = {"distribution_strategy": "AllreduceStrategy"}
    mine = adapter(large_functional, [IDS, LABEL], job=everywhere)
    assert mine.spec["tables"] == []
    assert mine.spec["params"][0]["shape"] == [40_000, 16]
    assert mine.lookups(WORDS) == []
    assert adapter(small(plain_embedding), [IDS, LABEL]).spec["tables"] == []


def test_rows_set_by_the_user_are_kept():
    def custom_model():
        model = large_functional()
        model.get_layer("large").set_weights([np.ones((40_000, 16), "float32")])
        return model

    assert adapter(custom_model, [IDS, LABEL]).spec["tables"] == []


class Open(keras.Model):
    """Ids without a bound, so no plain layer can replace it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = elasticdl.layers.Embedding(DIM, name="table")
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        return self.out(ops.mean(self.table(inputs), axis=1))


def test_an_export_without_a_bound_has_the_trained_rows(tmp_path):
    mine = adapter(Open, [IDS, LABEL])
    expected = mine.predict(WORDS, rows_of(mine, WORDS))
    order = RNG.permutation(N_IDS)
    mine.export(str(tmp_path), mine.dense, {"table": (order, TABLE[order])})
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Open": Open})
    found = ops.convert_to_numpy(loaded(WORDS.columns["ids"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    unseen = ops.convert_to_numpy(loaded(np.array([[N_IDS, N_IDS + 1, 99]])))
    np.testing.assert_allclose(unseen, ops.convert_to_numpy(loaded.out.bias)[None], atol=1e-7)


class Uneven(keras.Model):
    """A different number of ids in each record, taken from dense ids."""

    def __init__(self, combiner, is_sparse):
        super().__init__()
        self.table = elasticdl.layers.Embedding(DIM, combiner=combiner, name="table")
        self.is_sparse = is_sparse

    def call(self, inputs):
        import tensorflow as tf

        ids = tf.RaggedTensor.from_tensor(inputs["ids"], lengths=inputs["n"])
        vectors = self.table(ids.to_sparse() if self.is_sparse else ids)
        return vectors if self.table.combiner else tf.reduce_sum(vectors, axis=1)


@on_tensorflow
@pytest.mark.parametrize(
    ("combiner", "is_sparse"), [(None, False), ("mean", False), ("mean", True), ("sum", True)]
)
def test_ragged_and_sparse_ids_are_looked_up(combiner, is_sparse):
    mine = adapter(lambda: Uneven(combiner, is_sparse), [IDS, column("n", "i64"), LABEL])
    lengths = np.array([0, 1, 2, 3] * 3)
    batch = Batch(**WORDS.columns, n=lengths)
    (ids,) = mine.lookups(batch)
    rows = WORDS.columns["ids"]
    np.testing.assert_array_equal(ids, np.concatenate([r[:n] for r, n in zip(rows, lengths)]))
    sums = np.stack([TABLE[r[:n]].sum(0) for r, n in zip(rows, lengths)])
    expected = sums / np.maximum(lengths, 1)[:, None] if combiner == "mean" else sums
    np.testing.assert_allclose(mine.predict(batch, [TABLE[ids]]), expected, rtol=1e-5, atol=1e-6)


def test_an_initializer_is_passed_to_the_servers_or_refused():
    def init(initializer, input_dim=None):
        layer = elasticdl.layers.Embedding(
            DIM, input_dim=input_dim, embeddings_initializer=initializer, name="table"
        )
        return _keras_swap.table_spec(layer)["init"]

    kinds = keras.initializers
    assert init("zeros") == {"constant": 0.0} and init("ones") == {"constant": 1.0}
    assert init(kinds.Constant(0.5)) == {"constant": 0.5}
    assert init(kinds.RandomUniform(-1, 2)) == {"uniform": {"low": -1, "high": 2}}
    assert init("normal") == {"normal": {"mean": 0.0, "std": 0.05}}
    assert init(kinds.TruncatedNormal(1, 2)) == {"truncated_normal": {"mean": 1, "std": 2}}
    limit = (6 / (96 + DIM)) ** 0.5
    glorot = init("glorot_uniform", input_dim=96)["uniform"]
    assert glorot == pytest.approx({"low": -limit, "high": limit})
    with pytest.raises(ZooError, match="`table` has the initializer GlorotUniform, which"):
        init("glorot_uniform")
    with pytest.raises(ZooError, match="combiner is `max`; choose one of sum, mean, sqrtn"):
        elasticdl.layers.Embedding(DIM, combiner="max")


def test_ids_out_of_range_are_refused():
    mine = adapter(small(ours), [IDS, LABEL])
    batch = Batch(ids=np.array([[1, 2, N_IDS]]), label=np.array([0]))
    with pytest.raises(ZooError, match="`table` got the id 50, but its input_dim is 50; increase"):
        mine.lookups(batch)


@pytest.mark.backends("jax")  # Only JAX is limited to 32 bits.
def test_64_bit_ids_are_refused_on_jax():
    mine = adapter(Open, [IDS, LABEL])
    batch = Batch(ids=np.array([[1, 2, 2**40]]), label=np.array([0]))
    with pytest.raises(ZooError, match="beyond 32 bits, which the JAX backend cannot look up"):
        mine.lookups(batch)


@pytest.mark.backends("tensorflow", "torch")
def test_64_bit_ids_are_looked_up():
    mine = adapter(Open, [IDS, LABEL])
    batch = Batch(ids=np.array([[1, 2**40, 2**63 - 1]]), label=np.array([0]))
    (ids,) = mine.lookups(batch)
    assert ids.tolist() == [1, 2**40, 2**63 - 1]
