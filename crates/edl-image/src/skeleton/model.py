# SPDX-License-Identifier: Apache-2.0
"""An example model in Keras that classifies 28x28 images; edit as needed.

elasticdl train --model_zoo=/model_zoo --model_def=my_model.custom_model --training_data=DIR
"""

import keras
import numpy as np

SIDE = 28
N_CLASSES = 10


def custom_model():
    return keras.Sequential(
        [
            keras.Input((SIDE * SIDE,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(N_CLASSES),
        ]
    )


def loss(labels, predictions):
    return keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)


def optimizer(lr=0.001):
    return keras.optimizers.Adam(learning_rate=lr)


def feed(dataset, mode, metadata):
    """Converts records to features and, except for prediction, labels."""
    if keras.backend.backend() == "tensorflow":
        return dataset.map(lambda record: parse(record, mode))
    pixels = dataset["image"]
    if pixels.dtype == object:
        pixels = np.frombuffer(b"".join(pixels), dtype="uint8")
    pixels = pixels.reshape(-1, SIDE * SIDE).astype("float32") / 255
    return pixels if mode == "prediction" else (pixels, dataset["label"])


def parse(record, mode):
    import tensorflow as tf

    kinds = {"image": tf.io.FixedLenFeature([], tf.string)}
    if mode != "prediction":
        kinds["label"] = tf.io.FixedLenFeature([], tf.int64)
    row = record if isinstance(record, dict) else tf.io.parse_single_example(record, kinds)
    pixels = row["image"]
    if pixels.dtype == tf.string:
        pixels = tf.io.decode_raw(pixels, tf.uint8)
    pixels = tf.cast(tf.reshape(pixels, [SIDE * SIDE]), tf.float32) / 255
    return pixels if mode == "prediction" else (pixels, row["label"])


def eval_metrics_fn():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
