# SPDX-License-Identifier: Apache-2.0
"""Whole jobs with a Keras model on JAX and on torch; those on TensorFlow are in `test_train.py`."""

from __future__ import annotations

import hashlib

import pytest

from conftest import DATA, ZOO, Cluster

BACKENDS = ["jax", "torch"]


def words(name: str, **more: object) -> list[str]:
    flags = {
        "model_zoo": ZOO,
        "model_def": "mnist.mnist_functional_api.custom_model",
        "training_data": DATA / "train",
        "job_name": name,
        "minibatch_size": 8,
        "checkpoint_secs": 0,
        "evaluation_epochs": "false",
        **more,
    }
    return ["train", *(f"--{flag}={value}" for flag, value in flags.items())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_for_any_number_of_workers(cluster: Cluster, backend: str) -> None:
    found = set()
    for n_workers in (1, 2):
        name = f"bits-{n_workers}"
        more = {"num_workers": n_workers, "lanes": 2, "max_step": 4}
        strategy = {"distribution_strategy": "AllreduceStrategy"}
        cluster.run(*words(name, **more, **strategy), KERAS_BACKEND=backend)
        model = (cluster.job(name) / "output" / "model.safetensors").read_bytes()
        found.add(hashlib.sha256(model).hexdigest())
    assert len(found) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameter_servers_train_it_and_the_model_is_exported(
    cluster: Cluster, backend: str
) -> None:
    more = {"num_workers": 1, "num_ps_pods": 1, "max_step": 4}
    cluster.run(*words("servers", **more), KERAS_BACKEND=backend)
    cluster.run("audit", "servers")
    assert (cluster.job("servers") / "output" / "model.keras").is_file()
