# SPDX-License-Identifier: Apache-2.0
"""Wide & deep model that predicts whether a person earns more than 50,000 dollars a year.

elasticdl data gen census DIR
elasticdl train --model_zoo=model_zoo --model_def=census.wide_deep.custom_model \
    --training_data=DIR/census/train --validation_data=DIR/census/test --num_ps_pods=2

Cheng et al., "Wide & deep learning for recommender systems", 2016. The rows of both embeddings
are stored on the parameter servers.
"""

from __future__ import annotations

import keras
from census import people
from keras import layers, ops

import elasticdl.layers

feed = people.feed
loss = people.loss
optimizer = people.optimizer
eval_metrics_fn = people.eval_metrics_fn


def custom_model(dim=8, hidden=64):
    numbers = keras.Input((people.N_NUMBERS,), name="numbers")
    ids = keras.Input((people.N_IDS,), dtype="int64", name="ids")
    wide_ids = keras.Input((people.N_WIDE_IDS,), dtype="int64", name="wide_ids")
    wide = elasticdl.layers.Embedding(
        1,
        input_dim=people.WIDE_INPUT_DIM,
        embeddings_initializer="zeros",
        combiner="sum",
        name="wide",
    )(wide_ids)
    x = elasticdl.layers.Embedding(dim, input_dim=people.INPUT_DIM, name="embedding")(ids)
    x = ops.concatenate([layers.Flatten()(x), numbers], axis=1)
    x = layers.Dense(hidden, activation="relu")(x)
    x = layers.Dense(hidden // 2, activation="relu")(x)
    probability = ops.sigmoid(wide + layers.Dense(1)(x))
    inputs = {"numbers": numbers, "ids": ids, "wide_ids": wide_ids}
    return keras.Model(inputs, probability, name="wide_deep")
