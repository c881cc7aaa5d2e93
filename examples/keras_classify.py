# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit` as a job: `elasticdl run --workers 2 examples/keras_classify.py`.

Two lines differ from an ordinary script, those with `elasticdl`; `python` runs it as one. The data
is synthetic. The backend must be torch.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import elasticdl.keras


def points(n_points: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in a square; the label tells whether they are in a circle."""
    x = np.random.default_rng(seed).uniform(-1, 1, (n_points, 2)).astype("float32")
    return x, (np.linalg.norm(x, axis=1) < 0.8).astype("int64")


def main() -> None:
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    model = elasticdl.keras.elastic(model)
    history = model.fit(
        *points(2000, seed=1),
        epochs=3,
        verbose=2,
        validation_data=points(500, seed=2),
        callbacks=[keras.callbacks.EarlyStopping(patience=2)],
    )
    print(f"accuracy {history.history['val_accuracy'][-1]:.3f}")
    model.save("classifier.keras")


if __name__ == "__main__":
    main()
