# SPDX-License-Identifier: Apache-2.0
"""Image classifier for 28×28 images in ten classes: a small CNN as a functional Keras model.

elasticdl train --model_zoo=model_zoo --model_def=mnist.mnist_functional_api.custom_model \
    --training_data=data/fashion_mnist/train --validation_data=data/fashion_mnist/test

Runs on every Keras backend: set KERAS_BACKEND to tensorflow, jax or torch.
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

SIDE = 28
N_CLASSES = 10


def custom_model():
    inputs = keras.Input((SIDE, SIDE, 1), name="image")
    x = layers.Conv2D(32, 3, activation="relu")(inputs)
    x = layers.Conv2D(64, 3, activation="relu")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.25)(x)
    x = layers.Flatten()(x)
    outputs = layers.Dense(N_CLASSES)(x)
    return keras.Model(inputs, outputs, name="mnist")


def loss(labels, predictions):
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return ops.mean(losses)


def optimizer(lr=0.0003):
    return keras.optimizers.Adam(learning_rate=lr)


def feed(dataset, mode, metadata):
    """Returns images scaled to [0, 1], and class labels."""
    if keras.backend.backend() == "tensorflow":
        return feed_tensorflow(dataset, mode)
    images = dataset["image"]
    if images.dtype == object:  # raw bytes from the record
        images = np.frombuffer(b"".join(images), dtype="uint8")
    images = images.reshape(-1, SIDE, SIDE, 1).astype("float32") / 255
    return images if mode == "prediction" else (images, dataset["label"])


def feed_tensorflow(dataset, mode):
    """Like `feed`, for serialized examples or rows that are already parsed."""
    import tensorflow as tf

    kinds = {"image": tf.io.FixedLenFeature([], tf.string)}
    if mode != "prediction":
        kinds["label"] = tf.io.FixedLenFeature([], tf.int64)

    def parse(record):
        row = record if isinstance(record, dict) else tf.io.parse_single_example(record, kinds)
        image = row["image"]
        pixels = tf.io.decode_raw(image, tf.uint8) if image.dtype == tf.string else image
        image = tf.cast(tf.reshape(pixels, [SIDE, SIDE, 1]), tf.float32) / 255
        return image if mode == "prediction" else (image, row["label"])

    return dataset.map(parse)


def eval_metrics_fn():
    return {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
