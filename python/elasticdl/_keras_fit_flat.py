# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit` on TensorFlow and JAX: compiled passes over a flat vector of parameters and states.

A pass changes no variable (see `_keras_pass.py`). The variables get the parameters of the job when
a step begins, and Keras' optimizer changes them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from elasticdl import _keras, _keras_variables, _metrics, _records, _state
from elasticdl._keras_pass import JaxPasses, Network, TensorFlowPasses
from elasticdl._zoo import ZooError

_PASSES = {"tensorflow": TensorFlowPasses, "jax": JaxPasses}


class FlatFit:
    """The trained part of a model."""

    def __init__(self, job: Any, model: Any) -> None:
        self._job, self._model = job, model
        _state.hold_arrays()
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self._flat = FlatModel(model)
        self.optimizer = _Optimizer(self._flat)

    def attach(self, progress: Any) -> None:
        """Passes the model to the job."""
        self._trained = [id(one) for one in self._model.trainable_variables]
        self._job.attach_trained(self._flat, self.optimizer, progress=progress)

    def begin_batch(self) -> None:
        pass

    def begin_evaluation(self) -> None:
        pass

    def check(self) -> None:
        """Rejects a change of what is trained."""
        if self._trained != [id(one) for one in self._model.trainable_variables]:
            raise ZooError(
                "`trainable` of a layer was changed during training; set it before `compile`"
            )

    def train(self, batch: Any, scale: float) -> float:
        """Computes the gradients of a lane; `scale` is as in `TorchFit`."""
        return self._flat.train(batch, scale)


class _Network(Network):
    """The loss and the metrics of `fit` as a pure function of parameters and states."""

    def __init__(self, model: Any, variables: list[Any]) -> None:
        super().__init__(model, None, [], variables)

    def loss(self, values: list, seeds: Any, features: Any, labels: Any, rows: list) -> tuple:
        model, (y, weight) = self.model, labels
        mapping = [(slot.variable, value) for slot, value in zip(self.slots, values)]
        mapping += [(variable, seeds[i]) for i, variable in enumerate(self.seeds)]
        training = {"training": True} if model._call_has_training_arg else {}
        scope = keras.StatelessScope(state_mapping=mapping, collect_losses=True)
        with scope:
            predictions = model(features, **training)
            loss = model._compute_loss(
                x=features, y=y, y_pred=predictions, sample_weight=weight, training=True
            )
            first = next(part for part in keras.tree.flatten(features) if part is not None)
            model._loss_tracker.update_state(
                ops.stop_gradient(loss), sample_weight=ops.shape(first)[0]
            )
            model.compute_metrics(features, y, predictions, sample_weight=weight)
        moved = [
            scope.get_current_value(slot.variable) for slot in self.slots if not slot.is_trained
        ]
        return ops.cast(loss, "float32"), moved


class FlatModel:
    """The model with its flat vectors, as the job's loop sees it."""

    # A schedule that the job follows would count steps; Keras' optimizer has its own.
    is_per_epoch = False

    def __init__(self, model: Any) -> None:
        self.module = model
        trained = model.trainable_variables
        for one in trained:
            if keras.backend.standardize_dtype(one.dtype) != "float32":
                raise ZooError(f"`{one.path}` is {one.dtype}, but a job trains float32")
        self._n_trained = len(trained)
        self._network = _Network(model, [*trained, *_keras_variables.states(model)])
        self.slots = self._network.slots
        metrics = {id(one) for one in _keras_variables.metrics(model)}
        self._metrics = [slot for slot in self.slots if id(slot.variable) in metrics]
        self.dense, self.gradient = (_keras.aligned(self._network.n_numbers) for _ in range(2))
        self.incoming = np.zeros_like(self.dense)
        make = _PASSES[keras.backend.backend()]
        self._passes = make(self._network, self.dense, self.gradient)
        self._seed = 0
        self.keep()

    @staticmethod
    def depends_on(_value: Any) -> bool:
        return False

    def train(self, batch: Any, scale: float) -> float:
        """Fills `gradient` with the gradients and the changes of states of a lane."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        seeds = self._network.seed_states(self._seed)
        loss, _ = self._passes.train(x, (y, weight), [], seeds)
        for slot in self._metrics if scale != 1 else ():
            self.gradient[slot.start : slot.stop] *= np.float32(scale)
        return loss

    def plan(self, n_steps: int, epoch_steps: int) -> None:
        pass

    def spec(self) -> dict[str, Any]:
        raise ZooError("`fit` takes the steps with the optimizer of Keras; use --step=auto")

    def check_schedule(self, error: ZooError | None = None) -> None:
        pass

    def script_spec(self, follows_schedule: bool) -> dict[str, Any]:
        """Returns the model's spec for a job whose script takes the steps."""
        rate = float(ops.convert_to_numpy(self.module.optimizer.learning_rate))
        rules: list[Any] = [{"trainable": {"decay": False}}] * self._n_trained
        rules += ["moving_average"] * (len(self.slots) - len(rules))
        return {
            "name": type(self.module).__name__,
            "params": [
                {"name": name, "shape": shape, "init": "given", "rule": rule}
                for (name, shape), rule in zip(self.shapes().items(), rules)
            ],
            "tables": [],
            "inputs": [],
            "metrics": _metrics.describe(None),
            "optimizer": {"kind": {"script": {"nonfinite": False}}, "learning_rate": rate},
        }

    def shapes(self) -> dict[str, list[int]]:
        """Returns the shapes of all parameters and states."""
        paths = [slot.variable.path for slot in self.slots[: self._n_trained]]
        paths += [f"keras_{number}" for number in range(len(self.slots) - self._n_trained)]
        names = _keras.unique(paths)
        return {name: list(slot.shape) for name, slot in zip(names, self.slots)}

    def doubles(self) -> set[str]:
        """Returns the names of those of float64: none can be."""
        return set()

    def keep(self) -> None:
        """Makes the current values of the variables those of the vector."""
        for slot in self.slots:
            value = ops.convert_to_numpy(slot.variable.value)
            self.dense[slot.start : slot.stop] = np.asarray(value).ravel()
        np.copyto(self.incoming, self.dense)

    def begin(self, seed: int, _step: int) -> None:
        """Prepares for a lane."""
        self._seed = seed
        _records.reseed(seed)
        if not _is_same(self.dense, self.incoming):
            self.receive()

    def receive(self) -> None:
        """Gives the job's parameters to the variables."""
        np.copyto(self.dense, self.incoming)
        self._assign()

    def begin_step(self, seed: int) -> None:
        """Prepares a step by the mean gradient of all lanes, in `gradient`."""
        np.copyto(self.dense, self.incoming)
        first = self.slots[self._n_trained].start if len(self.slots) > self._n_trained else None
        if first is not None:
            self.dense[first:] += self.gradient[first:]
        self._assign()
        _records.reseed(seed)

    def apply(self) -> None:
        """Takes the step."""
        slots = self.slots[: self._n_trained]
        gradients = [
            ops.convert_to_tensor(self.gradient[slot.start : slot.stop].reshape(slot.shape).copy())
            for slot in slots
        ]
        self.module.optimizer.apply(gradients, [slot.variable for slot in slots])

    def end_step(self) -> None:
        """Passes the parameters and states after a step to the job."""
        self.keep()

    def take(self) -> None:
        """`train` has filled `gradient`; a step that is passed over has none."""

    def allow_steps(self) -> None:
        pass

    def refuse_steps(self) -> None:
        pass

    def check_options(self) -> None:
        pass

    def end(self) -> None:
        """Gives the job's final parameters to the variables."""
        self.receive()

    def save(self, folder: Path) -> None:
        """Writes `model.keras`."""
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".model-{os.getpid()}.keras"
        type(self.module).save(self.module, unfinished)
        unfinished.replace(folder / "model.keras")

    def _assign(self) -> None:
        for slot in self.slots:
            slot.variable.assign(self.dense[slot.start : slot.stop].reshape(slot.shape))


class _Optimizer(_keras_variables.Optimizer):
    """The optimizer of the model, for the job."""

    def __init__(self, model: FlatModel) -> None:
        super().__init__(model.module.optimizer)
        self._flat = model
        self.keep_rate()

    def copy(self, variable: Any) -> np.ndarray:
        return np.array(ops.convert_to_numpy(variable.value))

    def step(self) -> None:
        self._flat.apply()


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))
