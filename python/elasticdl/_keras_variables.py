# SPDX-License-Identifier: Apache-2.0
"""The variables of a Keras model that `fit` changes."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.random.seed_generator import global_seed_generator

from elasticdl._zoo import ZooError

_SEED_NAME = "seed_generator_state"
# Layers whose state `fit` does not change.
_CONSTANT = (keras.layers.Normalization,)


def states(model: Any) -> list[Any]:
    """Returns what training changes besides the parameters: batch norms and metrics."""
    # Not `non_trainable_variables`, which has the weights of frozen layers, too.
    layers = [one for one in model._flatten_layers() if not isinstance(one, _CONSTANT)]
    found = [one for layer in layers for one in layer._non_trainable_variables]
    unique = list({id(one): one for one in [*found, *metrics(model)]}.values())
    for one in unique:
        if keras.backend.standardize_dtype(one.dtype) != "float32":
            raise ZooError(
                f"`{one.path}` is {one.dtype}, but a job can only average float32; remove the "
                "layer or metric that it belongs to"
            )
    return unique


def metrics(model: Any) -> list[Any]:
    """Returns the state of the metrics."""
    found = [one for metric in model.metrics for one in metric.variables]
    return list({id(one): one for one in found}.values())


def seeds(model: Any) -> list[Any]:
    """Returns the states of the random number generators."""
    own = [one for one in model.non_trainable_variables if one.name == _SEED_NAME]
    return [*own, global_seed_generator().state]


class Optimizer:
    """Takes the steps of a Keras optimizer, whose variables are part of the job's state."""

    def __init__(self, optimizer: Any) -> None:
        self._keras = optimizer
        self._rate: list[Any] = []

    def copy(self, variable: Any) -> Any:
        """Returns the value of a variable, as the job keeps it."""
        raise NotImplementedError

    def keep_rate(self) -> None:
        """Callbacks can change it before a step, and do so again in a worker that joins."""
        self._rate = [self.copy(one) for one in self._rate_variables()]

    def restore_rate(self) -> None:
        for variable, kept in zip(self._rate_variables(), self._rate):
            variable.assign(kept)

    def state_dict(self) -> dict[str, Any]:
        rates = dict(zip(map(id, self._rate_variables()), self._rate))
        values = [rates.get(id(one)) for one in self._keras.variables]
        return {
            "state": {},
            "variables": [
                self.copy(one) if value is None else value
                for one, value in zip(self._keras.variables, values)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for variable, value in zip(self._keras.variables, state["variables"]):
            variable.assign(value)
        self.keep_rate()

    def _rate_variables(self) -> list[Any]:
        rate = getattr(self._keras, "_learning_rate", None)
        return [rate] if isinstance(rate, keras.Variable) else []
