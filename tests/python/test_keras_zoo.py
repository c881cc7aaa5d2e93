# SPDX-License-Identifier: Apache-2.0
"""The shipped Keras models must learn, on the backend in KERAS_BACKEND."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_fixture import BACKEND, LABEL, Batch, adapter, by_name, column

ZOO = Path(__file__).parents[2] / "model_zoo"
RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def zoo_on_the_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ZOO), *sys.path])


def open_zoo(name, columns, model="custom_model"):
    module = importlib.import_module(name)
    parts = {part: getattr(module, part) for part in ("loss", "optimizer", "feed")}
    parts["eval_metrics_fn"] = module.eval_metrics_fn
    return adapter(getattr(module, model), columns, raw=BACKEND == "tensorflow", **parts)


def batch_of(columns) -> Batch:
    """Serialized examples on TensorFlow, as from RecordIO; columns on other backends."""
    if BACKEND != "tensorflow":
        return Batch(**columns)
    import tensorflow as tf

    def feature(value):
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value)]))

    def example(row):
        features = tf.train.Features(feature={n: feature(v) for n, v in zip(columns, row)})
        return tf.train.Example(features=features).SerializeToString()

    return Batch(record=[example(row) for row in zip(*columns.values())])


def descend(mine, batch, rate, n_steps):
    """Plain gradient descent, also on rows; returns the first and the last loss."""
    is_moving = [param["rule"] == "moving_average" for param in mine.spec["params"]]
    sizes = [int(np.prod(param["shape"])) for param in mine.spec["params"]]
    factor = np.repeat(np.where(is_moving, 1.0, -rate), sizes).astype("float32")
    tables = [{} for _ in mine.spec["tables"]]
    losses = []
    for step in range(n_steps):
        requested = mine.lookups(batch)
        dims = [table["dim"] for table in mine.spec["tables"]]
        rows = [
            np.stack([table.setdefault(int(i), np.zeros(dim, "float32")) for i in ids])
            for ids, table, dim in zip(requested, tables, dims)
        ]
        loss, gradients = mine.train(batch, rows, step)
        losses.append(loss)
        mine.dense += factor * mine.gradient
        for ids, table, gradient in zip(requested, tables, gradients):
            for i, one in zip(ids, gradient):
                table[int(i)] = table[int(i)] - rate * one
    found = [
        np.stack([table[int(i)] for i in ids]) for ids, table in zip(mine.lookups(batch), tables)
    ]
    return losses[0], losses[-1], found


@pytest.mark.parametrize(
    ("name", "model"),
    [("mnist.mnist_functional_api", "custom_model"), ("mnist.mnist_subclass", "CustomModel")],
)
def test_image_models_learn(name, model):
    labels = np.arange(8) % 4
    images = [bytes([30 + 60 * int(label)]) * 784 for label in labels]
    columns = [column("image", "bytes"), LABEL]
    if BACKEND != "tensorflow":
        # Rust passes pixels as numbers if it knows their shape.
        columns[0] = column("image", "u8", 784)
        images = np.stack([np.frombuffer(image, "uint8") for image in images])
    mine = open_zoo(name, columns, model)
    assert sum(param["rule"] == "moving_average" for param in mine.spec["params"]) == 2
    first, last, _ = descend(mine, batch_of({"image": images, "label": labels}), 0.02, 8)
    assert last < 0.8 * first
    assert mine.predict(batch_of({"image": images, "label": labels}), []).shape == (8, 10)


def people(n):
    from census import people as names

    words = {name: [bytes([65 + i]) * 3 for i in RNG.integers(0, 5, n)] for name in names.WORDS}
    numbers = {name: RNG.integers(0, 60, n) for name, *_ in names.NUMBERS}
    label = np.array([int(word < b"C") for word in words["occupation"]])
    return {**words, **numbers, "label": label}


@pytest.mark.parametrize("name", ["census.wide_deep", "deepfm.deepfm_functional_api"])
def test_census_models_learn(name, tmp_path):
    rows = people(48)
    columns = [column(n, "bytes" if isinstance(v, list) else "i64") for n, v in rows.items()]
    mine = open_zoo(name, [*columns[:-1], LABEL])
    batch = batch_of(rows)
    first, last, table_rows = descend(mine, batch, 0.5, 25)
    assert last < 0.6 * first
    _, sums = mine.evaluate(batch, table_rows)
    assert sums["accuracy"][0] / sums["accuracy"][1] > 0.9
    assert len(sums["auc"]) == 8192 and sum(sums["auc"]) == 48


def test_ids_are_the_same_on_every_backend():
    from census import people as names

    columns = {name: [b" Private", b"x"] for name in names.WORDS}
    columns |= {name: np.array([18, 5_000]) for name, *_ in names.NUMBERS}
    words = [names._word_bytes(columns[name]) for name in names.WORDS]
    numbers = [columns[name] for name, *_ in names.NUMBERS]
    made = names._features(np, words, numbers)
    assert made["ids"][0, 0] == 2_461 and made["ids"][0, 8] == 80_001
    assert made["wide_ids"].shape == (2, names.N_WIDE_IDS)
    assert made["wide_ids"].max() < names.WIDE_INPUT_DIM
    if BACKEND == "tensorflow":
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices(columns)
        found = names.feed(rows, "prediction", None).batch(2).get_single_element()
        for name, values in made.items():
            np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-6)


def test_the_export_of_a_census_model_is_a_plain_keras_model(tmp_path):
    rows = people(6)
    columns = [column(n, "bytes" if isinstance(v, list) else "i64") for n, v in rows.items()]
    mine = open_zoo("deepfm.deepfm_functional_api", [*columns[:-1], LABEL])
    batch = batch_of(rows)
    requested = mine.lookups(batch)
    unique = [np.unique(ids) for ids in requested]
    values = [
        RNG.normal(size=(len(ids), table["dim"])).astype("float32")
        for ids, table in zip(unique, mine.spec["tables"])
    ]
    table_rows = [v[np.searchsorted(u, ids)] for ids, u, v in zip(requested, unique, values)]
    expected = mine.predict(batch, table_rows)
    names = [table["name"] for table in mine.spec["tables"]]
    mine.export(str(tmp_path), mine.dense, dict(zip(names, zip(unique, values))))
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    features, _ = mine._feed(batch, "training")
    found = keras.ops.convert_to_numpy(loaded(features))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert not any(type(x).__module__.startswith("elasticdl") for x in loaded._flatten_layers())
    assert by_name(mine, mine.dense)
