# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit` on the torch backend: the job trains the tensors of the model's variables."""

from __future__ import annotations

from typing import Any

import keras
import torch

from elasticdl import _keras_variables
from elasticdl._torch_trainers import Trained


class TorchFit:
    """The trained part of a model."""

    def __init__(self, job: Any, model: Any) -> None:
        self._job, self._model = job, model
        self.optimizer = _Optimizer(model)

    def attach(self, progress: Any) -> None:
        """Passes the model to the job."""
        job, model = self._job, self._model
        self._metrics = _keras_variables.metrics(model)
        states = {
            f"keras_{number}": one for number, one in enumerate(_keras_variables.states(model))
        }
        tensors = {name: one.value.detach().clone() for name, one in states.items()}
        self._trained = Trained.of(model, **tensors)
        job.attach(self._trained, self.optimizer, progress=progress)
        self._trained.settle()
        for name, variable in states.items():
            # What Keras changes is what the job averages.
            variable.value.data = self._trained._buffers[name]
        self._seeds = _keras_variables.seeds(model)

    def begin_batch(self) -> None:
        self._model.train()

    def begin_evaluation(self) -> None:
        self._model.eval()

    def check(self) -> None:
        """Rejects a change of what is trained."""
        self._trained.check()

    def train(self, batch: Any, scale: float) -> float:
        """Computes the gradients of a lane, as `train_step` of Keras does before its step.

        `scale` is the share of the lane in the records of the step: the job takes the mean change
        of all lanes, each by its records, but metrics are sums.
        """
        model = self._model
        before = [one.value.detach().clone() for one in self._metrics]
        for seed in self._seeds:
            seed.assign(torch.randint(0, 1 << 30, (2,)))
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        training = {"training": True} if model._call_has_training_arg else {}
        predictions = model(x, **training)
        loss = model._compute_loss(
            x=x, y=y, y_pred=predictions, sample_weight=weight, training=True
        )
        n_rows = len(next(part for part in keras.tree.flatten(x) if part is not None))
        model._loss_tracker.update_state(loss.detach(), sample_weight=n_rows)
        loss.backward()
        model.compute_metrics(x, y, predictions, sample_weight=weight)
        if scale != 1:
            for variable, value in zip(self._metrics, before):
                variable.assign(value + (variable.value.detach() - value) * scale)
        return loss.detach()


class _Optimizer(_keras_variables.Optimizer, torch.optim.Optimizer):
    """The optimizer of the model, for the job."""

    def __init__(self, model: Any) -> None:
        _keras_variables.Optimizer.__init__(self, model.optimizer)
        self._model = model
        if not self._keras.built:
            self._keras.build(model.trainable_variables)
        rate = float(keras.ops.convert_to_numpy(self._keras.learning_rate))
        parameters = [one.value for one in model.trainable_variables]
        torch.optim.Optimizer.__init__(self, parameters, {"lr": rate})
        self.keep_rate()

    def copy(self, variable: Any) -> torch.Tensor:
        return variable.value.detach().clone()

    def step(self) -> None:  # type: ignore[override]
        variables = self._model.trainable_variables
        with torch.no_grad():
            self._keras.apply([one.value.grad for one in variables], variables)
