# SPDX-License-Identifier: Apache-2.0
"""A Keras script with `fit`, as jobs and the test run it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import keras
import numpy as np

import elasticdl.keras
from elasticdl import _state, _trainers
from faults import Faults

BATCH, EPOCHS = 8, 3
# The last step of an epoch has fewer records.
N_RECORDS = int(os.environ.get("RECORDS", "125"))
X = np.random.default_rng(1).standard_normal((N_RECORDS, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int64")


class Seen(keras.callbacks.Callback):
    """A callback with state: what it has seen. It also kills workers."""

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.n_steps = 0
        self._faults = faults

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(f"begin {epoch}")

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(f"batch {batch}")
        self.n_steps += 1
        if self._faults is not None:
            # The worker that shows the progress is lost.
            self._faults.between(self.n_steps, may_kill=_trainers.job().is_leader)

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(f"end {epoch} {' '.join(sorted(logs))}")


class Labels(keras.metrics.Metric):
    """The sum of the labels, which does not depend on the weights."""

    def __init__(self) -> None:
        super().__init__(name="labels")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y, predictions, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.cast(y, "float32")))

    def result(self):
        # Not the variable itself, which Keras resets before it reads the logs.
        return self.total + 0.0


def model(is_plain: bool = False) -> keras.Model:
    """A model; one that is plain has no state, no random numbers and no frozen weights."""
    keras.utils.set_random_seed(1)
    odd = [keras.layers.BatchNormalization(momentum=0.9), keras.layers.Dropout(0.3)]
    constant = [keras.layers.Normalization(), keras.layers.Dense(6, trainable=False)]
    constant[0].adapt(X)
    first, last = ([], []) if is_plain else (constant, odd)
    layers = [*first, keras.layers.Dense(5, "relu"), *last, keras.layers.Dense(2)]
    made = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy", Labels()])
    return made


def fit(model: keras.Model, callbacks: list, is_plain: bool = False) -> dict[str, list[float]]:
    schedule = keras.callbacks.LearningRateScheduler(lambda _, rate: rate * 0.9)
    history = model.fit(
        X,
        Y,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=2,
        shuffle=not is_plain,
        validation_data=(X[:50], Y[:50]),
        callbacks=[schedule, *callbacks],
    )
    return history.history


def tensor(array: np.ndarray) -> object:
    """Returns what the state of a script holds on this backend."""
    if keras.backend.backend() != "torch":
        return array
    import torch

    return torch.from_numpy(array)


def main(folder: Path, n_workers: int, kills: list[int]) -> None:
    is_plain = "PLAIN" in os.environ
    trained = elasticdl.keras.elastic(model(is_plain))
    seen = Seen(Faults(folder, n_workers, kills))
    stop = keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    best = keras.callbacks.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True)
    history = fit(trained, [seen, stop, plateau, best], is_plain)
    end = {
        "weights": [tensor(np.array(one)) for one in trained.get_weights()],
        "history": {name: [float(one) for one in values] for name, values in history.items()},
        "seen": seen.seen,
        "best": [stop.best_epoch, float(stop.best), float(best.best)],
    }
    try:
        fit(trained, [], is_plain)
    except elasticdl.ZooError as error:
        end["again"] = str(error)
    others = {"tensorflow", "torch"} - {keras.backend.backend()}
    assert not others & sys.modules.keys(), "Keras has not imported them"
    (folder / f"end-{os.getpid()}").write_bytes(_state.dump(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(kill) for kill in sys.argv[3:]])
