# SPDX-License-Identifier: Apache-2.0
"""DeepFM model that predicts whether a person earns more than 50,000 dollars a year.

elasticdl data gen census DIR
elasticdl train --model_zoo=model_zoo --model_def=deepfm.deepfm_functional_api.custom_model \
    --training_data=DIR/census/train --validation_data=DIR/census/test --num_ps_pods=2

Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction", 2017. The
factorization machine and the deep network share one embedding, whose rows are stored on the
parameter servers.
"""

from __future__ import annotations

import keras
from census import people
from keras import layers, ops

import elasticdl.layers

loss = people.loss
optimizer = people.optimizer
eval_metrics_fn = people.eval_metrics_fn


def custom_model(dim=8, hidden=64):
    numbers = keras.Input((people.N_NUMBERS,), name="numbers")
    ids = keras.Input((people.N_IDS,), dtype="int64", name="ids")
    linear = elasticdl.layers.Embedding(
        1,
        input_dim=people.INPUT_DIM,
        embeddings_initializer="zeros",
        combiner="sum",
        name="linear",
    )(ids)
    vectors = elasticdl.layers.Embedding(dim, input_dim=people.INPUT_DIM, name="embedding")(ids)
    x = ops.concatenate([layers.Flatten()(vectors), numbers], axis=1)
    x = layers.Dense(hidden, activation="relu")(x)
    x = layers.Dense(hidden, activation="relu")(x)
    probability = ops.sigmoid(linear + pairs(vectors) + layers.Dense(1)(x))
    return keras.Model({"numbers": numbers, "ids": ids}, probability, name="deepfm")


def pairs(vectors):
    """Sums the inner products of all pairs of a record's vectors."""
    square_of_sum = ops.sum(vectors, axis=1) ** 2
    sum_of_squares = ops.sum(vectors**2, axis=1)
    return 0.5 * ops.sum(square_of_sum - sum_of_squares, axis=1, keepdims=True)


def feed(dataset, mode, metadata):
    made = people.feed(dataset, mode, metadata)
    if keras.backend.backend() == "tensorflow":
        if mode == "prediction":
            return made.map(without_crosses)
        return made.map(lambda features, label: (without_crosses(features), label))
    if mode == "prediction":
        return without_crosses(made)
    features, labels = made
    return without_crosses(features), labels


def without_crosses(features):
    return {name: features[name] for name in ("numbers", "ids")}
