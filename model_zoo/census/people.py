# SPDX-License-Identifier: Apache-2.0
"""Code shared by the census models: feature conversion, loss and metrics.

`elasticdl data gen census DIR` generates the records: eight strings and six numbers about a person,
and whether the person earns more than 50,000 dollars a year. Every feature, including bucketized
numbers, has its own range of ids. The ids are the same on every Keras backend.
"""

from __future__ import annotations

import keras
import numpy as np

WORDS = (
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "gender",
    "native_country",
)

# Name, mean and standard deviation in the training data, and bucket boundaries.
NUMBERS = (
    ("age", 38.6, 13.7, (18, 25, 30, 35, 40, 45, 50, 55, 60, 65)),
    ("fnlwgt", 189_700.0, 105_600.0, (1e5, 1.5e5, 2e5, 2.5e5, 3e5)),
    ("education_num", 10.1, 2.6, (5, 9, 10, 11, 12, 13, 14, 15)),
    ("capital_gain", 1_080.0, 7_450.0, (1, 3_000, 5_000, 7_000, 15_000)),
    ("capital_loss", 87.5, 403.0, (1, 1_500, 1_800, 2_000)),
    ("hours_per_week", 40.4, 12.4, (20, 35, 40, 41, 45, 50, 60)),
)

# Crossed features, which have their own weights; given by index into the ids.
CROSSES = ((1, 3), (7, 3), (8, 1, 3))

N_NUMBERS = len(NUMBERS)
N_IDS = len(WORDS) + N_NUMBERS
N_WIDE_IDS = N_IDS + len(CROSSES)

# Ids per feature: many more than there are strings, so collisions are rare.
FEATURE_SIZE = 10_000
CROSS_SIZE = 1_000_000
INPUT_DIM = N_IDS * FEATURE_SIZE
WIDE_INPUT_DIM = INPUT_DIM + len(CROSSES) * CROSS_SIZE

# A string's hash is the sum of its bytes, each multiplied by the weight of its position.
_N_BYTES = 32
_WEIGHTS = np.array([pow(31, place + 1, 1_000_003) for place in range(_N_BYTES)], "int64")


def loss(labels, predictions):
    ops = keras.ops
    return ops.mean(keras.losses.binary_crossentropy(ops.reshape(labels, (-1, 1)), predictions))


def optimizer(lr=0.001):
    return keras.optimizers.Adam(learning_rate=lr)


def eval_metrics_fn():
    return {"auc": keras.metrics.AUC(), "accuracy": accuracy}


def accuracy(labels, predictions):
    return keras.ops.equal(predictions[:, 0] >= 0.5, keras.ops.reshape(labels, (-1,)) == 1)


def feed(dataset, mode, metadata):
    """Features: `numbers` [6], `ids` [14] and `wide_ids` [17]; labels: 0 or 1."""
    if keras.backend.backend() == "tensorflow":
        return _feed_tensorflow(dataset, mode)
    words = [_word_bytes(dataset[name]) for name in WORDS]
    numbers = [np.asarray(dataset[name]).reshape(-1) for name, *_ in NUMBERS]
    features = _features(np, words, numbers)
    return features if mode == "prediction" else (features, dataset["label"])


def _feed_tensorflow(dataset, mode):
    import tensorflow as tf

    kinds = {name: tf.io.FixedLenFeature([], tf.string) for name in WORDS}
    kinds.update({name: tf.io.FixedLenFeature([], tf.int64) for name, *_ in NUMBERS})
    if mode != "prediction":
        kinds["label"] = tf.io.FixedLenFeature([], tf.int64)

    def parse(record):
        row = record if isinstance(record, dict) else tf.io.parse_single_example(record, kinds)
        words = [tf.strings.strip(row[name]) for name in WORDS]
        words = [tf.io.decode_raw(word, tf.uint8, fixed_length=_N_BYTES) for word in words]
        features = _features(tf.experimental.numpy, words, [row[name] for name, *_ in NUMBERS])
        return features if mode == "prediction" else (features, row["label"])

    return dataset.map(parse)


def _word_bytes(words):
    """The first bytes of each string, padded with zeros."""
    cut = [word.strip()[:_N_BYTES].ljust(_N_BYTES, b"\0") for word in words]
    return np.frombuffer(b"".join(cut), "uint8").reshape(-1, _N_BYTES)


def _features(xp, words, numbers):
    """Features of one or more records; `xp` is numpy or TensorFlow's numpy API."""
    ids = [xp.sum(xp.asarray(word, "int64") * _WEIGHTS, axis=-1) % FEATURE_SIZE for word in words]
    scaled = []
    for value, (_, centre, spread, borders) in zip(numbers, NUMBERS):
        value = xp.asarray(value, "float32")
        is_past = value[..., None] >= np.array(borders, "float32")
        ids.append(xp.sum(xp.asarray(is_past, "int64"), axis=-1))
        scaled.append((value - np.float32(centre)) / np.float32(spread))
    ids = [code + np.int64(place * FEATURE_SIZE) for place, code in enumerate(ids)]
    crosses = []
    for place, cross in enumerate(CROSSES):
        code = sum(ids[feature] * np.int64(31**n) for n, feature in enumerate(cross))
        crosses.append(code % CROSS_SIZE + np.int64(INPUT_DIM + place * CROSS_SIZE))
    return {
        "numbers": xp.stack(scaled, axis=-1),
        "ids": xp.stack(ids, axis=-1),
        "wide_ids": xp.stack(ids + crosses, axis=-1),
    }
