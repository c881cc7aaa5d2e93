# SPDX-License-Identifier: Apache-2.0
"""The tutorial for minikube, command by command: an image, a job with a parameter server, and one
with AllReduce; with a built-in model and with a Keras model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import machine_python
from harness.cluster import Cluster
from harness.given import Given
from harness.kubectl import Kubectl
from harness.waiting import until
from jobs import ROOT, Client, phases, pods_of

JOB = "test-mnist"
ACCURACY, BY_VERSION = 0.77, 250
START_LIMIT = 300
RESOURCES = [
    "--master_resource_request=cpu=0.2,memory=1024Mi",
    "--master_resource_limit=cpu=1,memory=2048Mi",
    "--worker_resource_request=cpu=0.4,memory=1024Mi",
    "--worker_resource_limit=cpu=1,memory=2048Mi",
    "--ps_resource_request=cpu=0.2,memory=1024Mi",
    "--ps_resource_limit=cpu=1,memory=2048Mi",
]


@dataclass(frozen=True)
class Model:
    """An image, and what a job needs to train its model."""

    image: str
    flags: tuple[str, ...]
    # In addition to the data.
    volumes: tuple[str, ...] = ()


@pytest.fixture
def client(command: Path, kubectl: Kubectl, tmp_path: Path) -> Client:
    client = Client(command, "", kubectl, tmp_path)
    client.allow()
    client.put_mnist()
    return client


@pytest.fixture
def native(cluster: Cluster | Given, client: Client, tmp_path: Path) -> Model:
    """The image that `zoo init` and `zoo build` create."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    name = "elasticdl:mnist_ps"
    for args in (
        ["init", "--language=rust"],
        ["build", f"--image={name}", "--builder=own", "--output=image.tar"],
    ):
        environment = {**os.environ, "ELASTICDL_HOME": str(tmp_path / "home")}
        subprocess.run([client.command, "zoo", *args], cwd=folder, env=environment, check=True)
    cluster.load_image(folder / "image.tar")
    return Model(name, ("--model_def=mnist_cnn",))


@pytest.fixture
def keras(cluster: Cluster | Given, tmp_path: Path) -> Model:
    """An empty image: Python, the wheel and Keras come from this machine."""
    python = machine_python.load(cluster, tmp_path, "elasticdl:mnist_keras")
    volumes = [*python.volumes, f"host_path={ROOT}/model_zoo,mount_path=/model_zoo"]
    return Model(
        python.image,
        (
            "--model_zoo=model_zoo",
            "--model_def=mnist.mnist_functional_api.custom_model",
            f"--envs={python.envs}",
        ),
        tuple(volumes),
    )


def train(client: Client, model: Model, *arguments: str) -> None:
    """The tutorial's command."""
    volumes = ";".join((f"host_path={client.work},mount_path=/data", *model.volumes))
    done = client(
        "train",
        f"--image_name={model.image}",
        *model.flags,
        "--training_data=/data/mnist/train",
        "--validation_data=/data/mnist/test",
        "--num_epochs=2",
        *RESOURCES,
        "--minibatch_size=64",
        "--num_minibatches_per_task=2",
        "--evaluation_steps=50",
        f"--job_name={JOB}",
        "--image_pull_policy=Never",
        f"--volume={volumes}",
        *arguments,
        "--detach",
    )
    assert done.code == 0, done.err


def run_to_completion(client: Client, kubectl: Kubectl, processes: list[str]) -> None:
    """All pods run at the same time, and all of them complete."""
    names = [f"elasticdl-test-mnist-{process}" for process in processes]
    running = dict.fromkeys(names, "Running")

    def run() -> bool:
        seen = phases(kubectl, JOB)
        assert "Failed" not in seen.values(), log_of(kubectl)
        return seen == running

    until("all pods run", run, START_LIMIT, lambda: log_of(kubectl))
    watched = client("attach", "test-mnist")
    assert watched.code == 0, watched.err + log_of(kubectl)
    completed = dict.fromkeys(names, "Succeeded")
    until(
        "all pods complete", lambda: phases(kubectl, JOB) == completed, 60, lambda: log_of(kubectl)
    )


def log_of(kubectl: Kubectl) -> str:
    names = [pod["metadata"]["name"] for pod in pods_of(kubectl, JOB)]
    logs = [kubectl("logs", name, "--tail=30") for name in names]
    return "\n".join([kubectl("get", "pods"), *logs])


def reached(kubectl: Kubectl) -> float:
    """The best accuracy up to the version in the tutorial."""
    log = kubectl("logs", "job/elasticdl-test-mnist-master")
    print("\n".join(line for line in log.splitlines() if "Evaluation" in line), file=sys.stderr)
    found = re.findall(r"Evaluation metrics\[v=(\d+)\].*'accuracy': ([0-9.]+)", log)
    return max(float(accuracy) for version, accuracy in found if int(version) <= BY_VERSION)


@pytest.mark.parametrize("kind", ["native", "keras"])
def test_with_a_parameter_server(
    kind: str, request: pytest.FixtureRequest, client: Client, kubectl: Kubectl
) -> None:
    model = request.getfixturevalue(kind)
    strategy = "--distribution_strategy=ParameterServerStrategy"
    train(client, model, "--num_ps_pods=1", "--num_workers=1", strategy)
    run_to_completion(client, kubectl, ["master", "ps-0", "worker-0"])
    assert reached(kubectl) >= ACCURACY


@pytest.mark.parametrize("kind", ["native", "keras"])
def test_with_allreduce(
    kind: str, request: pytest.FixtureRequest, client: Client, kubectl: Kubectl
) -> None:
    model = request.getfixturevalue(kind)
    strategy = "--distribution_strategy=AllreduceStrategy"
    train(client, model, "--num_ps_pods=0", "--num_workers=2", strategy)
    run_to_completion(client, kubectl, ["master", "worker-0", "worker-1"])
    assert "Loss" in kubectl("logs", "elasticdl-test-mnist-worker-0")
    assert reached(kubectl) >= ACCURACY
