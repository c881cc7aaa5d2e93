# SPDX-License-Identifier: Apache-2.0
"""Checks which parts of a Keras training loop a job can honour.

Batches are trained on many workers at once, so no worker sees all batches or the end of an epoch.
A callback that waits for either, or a model with its own training step, is rejected before the
job starts.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from elasticdl._zoo import ZooError

# What to use instead of some callbacks of Keras.
_INSTEAD = {
    "BackupAndRestore": "the job saves checkpoints; set --checkpoint_steps",
    "CSVLogger": "read metrics.jsonl in the job folder",
    "EarlyStopping": "set --early_stop_patience",
    "ModelCheckpoint": "the job saves checkpoints; set --checkpoint_steps",
    "ProgbarLogger": "the command shows the progress",
    "ReduceLROnPlateau": "use a learning-rate schedule",
    "TensorBoard": "set --tensorboard_dir",
    "TerminateOnNaN": "the job stops by itself; see --on_nonfinite",
}
# Methods that no worker could call at the right time.
_UNCALLED = [
    f"on_{what}_{when}"
    for what in ("epoch", "batch", "train_batch", "test", "test_batch")
    for when in ("begin", "end")
]
# Methods of a model that replace what the job does.
_STEPS = ("train_step", "test_step", "compute_loss", "make_train_function")


def split(callbacks: list[Any]) -> tuple[Any, list[Any]]:
    """Returns the `LearningRateScheduler`, if there is one, and the other callbacks."""
    scheduler, others = None, []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.LearningRateScheduler):
            scheduler = callback
        elif isinstance(callback, keras.callbacks.Callback):
            _check(callback)
            others.append(callback)
        else:
            name = type(callback).__name__
            raise ZooError(f"`callbacks` returned a {name}; return keras.callbacks.Callback")
    return scheduler, others


def _check(callback: Any) -> None:
    name = type(callback).__name__
    for method in _UNCALLED:
        plain = getattr(keras.callbacks.Callback, method)
        if method in vars(callback) or getattr(type(callback), method) is not plain:
            advice = _INSTEAD.get(name, "only `on_train_begin` and `on_train_end` are called")
            raise ZooError(
                f"the callback `{name}` needs `{method}`, but no worker sees all batches; remove "
                f"it: {advice}"
            )


def check_model(model: Any) -> None:
    """Rejects a model with its own training step, which the job would not call."""
    for method in _STEPS:
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ZooError(
                f"the model `{type(model).__name__}` overrides `{method}`, which the job does not "
                "call; use `loss` and `add_loss`, or a custom training loop in PyTorch"
            )


def rates(scheduler: Any, first: float, n_steps: int, epoch_steps: int) -> np.ndarray:
    """Returns the learning rate of each step; a `LearningRateScheduler` counts epochs."""
    values, rate = [], first
    for epoch in range(-(-n_steps // epoch_steps)):
        try:
            rate = scheduler.schedule(epoch, rate)
        except TypeError:  # As in Keras: older schedules do not take the rate.
            rate = scheduler.schedule(epoch)
        values.append(float(rate))
    return np.repeat(values, epoch_steps)[:n_steps]
