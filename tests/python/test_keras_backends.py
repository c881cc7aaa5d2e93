# SPDX-License-Identifier: Apache-2.0
"""Whole jobs with a Keras model on JAX and on torch; `test_train.py` has those on TensorFlow."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from conftest import DATA, Cluster

BACKENDS = ["jax", "torch"]

# A small model, because JAX compiles it in every process; with moving averages and randomness.
TINY = """
import sys

import keras
from keras import layers, ops

def custom_model():
    inputs = keras.Input((784,), name="image")
    x = layers.Dropout(0.25)(layers.BatchNormalization()(layers.Dense(8)(inputs)))
    return keras.Model(inputs, layers.Dense(10)(x))

def loss(labels, predictions):
    losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return ops.mean(losses)

def optimizer():
    return keras.optimizers.Adam()

def feed(columns, mode, metadata):
    assert "tensorflow" not in sys.modules, "importing it takes seconds"
    return columns["image"].reshape(-1, 784).astype("float32") / 255, columns["label"]
"""


def job_flags(folder: Path, name: str, **more: object) -> list[str]:
    (folder / "tiny.py").write_text(TINY)
    flags = {
        "model_def": folder / "tiny.py",
        "training_data": DATA / "test",
        "job_name": name,
        "minibatch_size": 8,
        "checkpoint_secs": 0,
        "evaluation_epochs": "false",
        **more,
    }
    return ["train", *(f"--{flag}={value}" for flag, value in flags.items())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_bit_identical_for_any_number_of_workers(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    found = set()
    for n_workers in (1, 2):
        name = f"bits-{n_workers}"
        more = {"num_workers": n_workers, "lanes": 2, "max_step": 4}
        strategy = {"distribution_strategy": "AllreduceStrategy"}
        cluster.run(*job_flags(tmp_path, name, **more, **strategy), KERAS_BACKEND=backend)
        model = (cluster.job(name) / "output" / "model.safetensors").read_bytes()
        found.add(hashlib.sha256(model).hexdigest())
    assert len(found) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameter_servers_train_it_and_the_model_is_exported(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    more = {"num_workers": 1, "num_ps_pods": 1, "max_step": 4}
    cluster.run(*job_flags(tmp_path, "servers", **more), KERAS_BACKEND=backend)
    cluster.run("audit", "servers")
    assert (cluster.job("servers") / "output" / "model.keras").is_file()
