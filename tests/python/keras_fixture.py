# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of Keras models: jobs, batches, and plain Keras for comparison."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from elasticdl._keras import KerasAdapter
from elasticdl._zoo import Zoo

BACKEND = keras.backend.backend()
LABEL = {"name": "label", "dtype": "i64", "shape": [], "is_label": True}


class Batch:
    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self.records = np.arange(len(next(iter(columns.values()))), dtype="uint64")

    def __len__(self) -> int:
        return len(self.records)

    def part(self, start: int, stop: int) -> Batch:
        return Batch(**{name: values[start:stop] for name, values in self.columns.items()})


def column(name: str, dtype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), "is_label": False}


def mean_squares(labels, predictions):
    return ops.mean((ops.cast(labels, "float32")[:, None] - predictions) ** 2)


def adapter(custom_model, columns, *, raw=False, job=(), loss=mean_squares, **parts):
    """The adapter of a module that has only these parts."""
    parts.setdefault("optimizer", lambda: keras.optimizers.SGD(0.1))
    zoo = Zoo(module=None, name="test.custom_model", custom_model=custom_model, loss=loss, **parts)
    words = {
        "seed": 7,
        "threads_per_worker": 1,
        "job_type": "train",
        "distribution_strategy": "ParameterServerStrategy",
        "_raw": raw,
        **dict(job),
    }
    return KerasAdapter(zoo, words, columns)


def by_name(adapter, flat) -> dict[str, np.ndarray]:
    """The flat vector, split by the spec as in Rust."""
    found, start = {}, 0
    for param in adapter.spec["params"]:
        stop = start + int(np.prod(param["shape"]))
        found[param["name"]] = np.array(flat[start:stop]).reshape(param["shape"])
        start = stop
    assert start == len(flat)
    return found


def fresh(custom_model, seed=7):
    """The same model, created with plain Keras."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    return custom_model()


def plain_gradient(model, loss, features, labels) -> tuple[float, dict, dict]:
    """Plain Keras: loss, gradients by name, and changes of non-trainable variables by name."""
    before = {v.path: np.array(ops.convert_to_numpy(v)) for v in model.non_trainable_variables}
    run = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[BACKEND]
    value, gradients = run(model, loss, features, labels)
    names = [variable.path for variable in model.trainable_variables]
    changes = {
        v.path: ops.convert_to_numpy(v) - before[v.path] for v in model.non_trainable_variables
    }
    return float(value), dict(zip(names, map(np.asarray, gradients))), changes


def _tensorflow(model, loss, features, labels):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss(tf.constant(labels), model(features, training=True)) + sum(model.losses)
    variables = [variable.value for variable in model.trainable_variables]
    gradients = tape.gradient(value, variables, unconnected_gradients="zero")
    return value, [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def _jax(model, loss, features, labels):
    import jax

    # On other backends, `model(…, training=True)` does this.
    mode = {"training": True} if model._call_has_training_arg else {}

    def run(trained, fixed):
        out, fixed, extra = model.stateless_call(
            trained, fixed, features, return_losses=True, **mode
        )
        return loss(labels, out) + sum(extra), fixed

    trained = [variable.value for variable in model.trainable_variables]
    fixed = [variable.value for variable in model.non_trainable_variables]
    (value, moved), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(trained, fixed)
    for variable, new in zip(model.non_trainable_variables, moved):
        variable.assign(new)
    return value, gradients


def _torch(model, loss, features, labels):
    value = loss(ops.convert_to_tensor(labels), model(features, training=True))
    value = value + sum(model.losses)
    value.backward()
    tensors = [variable.value for variable in model.trainable_variables]
    zeros = np.zeros_like
    return value.detach(), [
        zeros(t.detach().numpy()) if t.grad is None else t.grad.numpy() for t in tensors
    ]
