# SPDX-License-Identifier: Apache-2.0
"""Custom training loops on a cluster whose operator runs in a pod, as installed by
`elasticdl operator manifests`: the example job, a script with `elasticdl run`, and the permissions
that the operator uses."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import machine_python
import runs
from harness.audit import requests
from harness.cluster import Cluster, Shape
from harness.kubectl import Kubectl
from harness.size import Size
from harness.waiting import until
from jobs import ROOT, Client, allowing, load_command, rbac
from machine_python import MachinePython
from managed import LIMIT, Managed
from trained import counting, is_training

EXAMPLE = ROOT / "examples" / "trainingjob"
N_RECORDS = 20_000
# Long enough to inject faults.
EPOCHS = 60
OPERATOR = "training-job-controller"
HOME = "elasticdl"
# The path of service account tokens in pods.
TOKENS = "/var/run/secrets/kubernetes.io"
# Two nodes with half a CPU each, minus operator and master: three workers of the example fit.
NODE_CPU = "0.5"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with runs.starting() as start:
        yield start(Shape(nodes=2, size=Size(cpu=NODE_CPU)))


@pytest.fixture(scope="module")
def image(cluster: Cluster, command: Path) -> str:
    return load_command(cluster, command)


@pytest.fixture(scope="module")
def operated(cluster: Cluster, command: Path, image: str) -> Cluster:
    install(cluster.kubectl, command, image)
    cluster.kubectl.apply(*rbac("default"))
    return cluster


@pytest.fixture(scope="module")
def place(
    operated: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Cluster, MachinePython]:
    folder = tmp_path_factory.mktemp("python")
    return operated, machine_python.load(operated, folder, "elasticdl:loop")


def install(kubectl: Kubectl, command: Path, image: str) -> None:
    """Installs the operator as users do, but the images are already on the nodes."""
    done = subprocess.run(
        [command, "operator", "manifests", f"--image={image}"],
        capture_output=True,
        text=True,
        check=True,
    )
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    # Objects that are applied need their namespace, no matter where the file states it.
    objects.sort(key=lambda each: each["kind"] != "Namespace")
    # The nodes share the folders of this machine.
    kubectl.within(HOME).apply(*objects, allowing("/"))
    ready = f"deployment/{OPERATOR}"
    kubectl.within(HOME)("rollout", "status", ready, f"--timeout={LIMIT}s")


def storage(python: MachinePython, folder: Path) -> str:
    """The job's folder, and the image's content, which comes from this machine."""
    own = (f"host_path={folder},mount_path={folder}", f"host_path={EXAMPLE},mount_path=/workspace")
    return ";".join((*own, *python.volumes))


def example(cluster: Cluster, python: MachinePython, command: Path, folder: Path) -> Managed:
    """The example, with images and storage that this cluster has, for more epochs."""
    fields: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())["spec"]
    fields |= {
        "image_pull_policy": "Never",
        "job_command": f"{fields['job_command']} --epochs {EPOCHS}",
        "volume": storage(python, folder),
        "envs": python.envs,
        # The script has no data files; it only sets the number of records.
        "training_data": "",
    }
    fields["image_name"] = python.image
    return Managed(cluster.kubectl, command, python.image, "example", folder, fields)


def test_the_example_succeeds_when_pods_are_deleted(
    place: tuple[Cluster, MachinePython], command: Path, tmp_path: Path
) -> None:
    cluster, python = place
    folder = tmp_path / "example"
    job = example(cluster, python, command, folder).submit()
    job.until("it trains", is_training)
    print(f"three workers after {job.until_workers(3):.1f} s more")
    first = {pod["metadata"]["name"] for pod in job.running("worker")}
    # The user's code runs in this pod.
    look = f"import os; print(os.path.exists('{TOKENS}'))"
    assert job.kubectl("exec", min(first), "--", "python", "-c", look).strip() == "False"

    job.delete("worker-0")
    operators = cluster.kubectl.within(HOME)
    gone = operators.json("get", "pods")["items"][0]["metadata"]["name"]
    operators("delete", "pod", gone, "--wait=false")

    def is_replaced() -> bool:
        return any(pod["metadata"]["name"] not in first for pod in job.running("worker"))

    seconds = job.until_pods("the worker is replaced", is_replaced, LIMIT)
    print(f"the worker was replaced in {seconds:.1f} s")
    job.succeeds().assert_audit(EPOCHS, N_RECORDS)

    # The replacement of the operator sets the condition.
    until("the operator reports success", lambda: "Succeeded" in job.conditions(), LIMIT)
    assert gone not in operators("get", "pods", "--output", "name")


WITHIN_PATCH = "the API server checks it itself when a patch creates an object"
# Permissions that the operator does not use in this test, and why.
UNUSED = {
    ("delete", "pods"): "only a preempted job loses its pods",
    ("delete", "jobs"): "only a preempted job loses its master",
    ("create", "configmaps"): WITHIN_PATCH,
    ("create", "services"): WITHIN_PATCH,
    ("create", "networkpolicies"): WITHIN_PATCH,
    ("create", "poddisruptionbudgets"): WITHIN_PATCH,
}


def test_the_operator_uses_exactly_its_permissions(
    operated: Cluster, command: Path, image: str, tmp_path: Path
) -> None:
    # Makes the operator do everything that it does for a job.
    small = counting(min_workers=1, max_workers=1, num_epochs=1)
    del small["num_workers"]
    job = Managed(operated.kubectl, command, image, "rights", tmp_path / "rights", small)
    job.submit().succeeds()
    until("the operator reports success", lambda: "Succeeded" in job.conditions(), LIMIT)
    sent = requests(operated.audit_log, f"system:serviceaccount:{HOME}:{OPERATOR}")
    refused = {request for request in sent if not request.allowed}
    assert not refused
    used = {(request.verb, request.resource) for request in sent if request.resource}
    documents = yaml.safe_load_all((ROOT / "manifests" / "operator" / "rbac.yaml").read_text())
    rules = [rule for each in documents if "rules" in each for rule in each["rules"]]
    granted = {
        (verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]
    }
    assert granted - used <= set(UNUSED)
    assert set(UNUSED) <= granted


@pytest.fixture
def client(place: tuple[Cluster, MachinePython], command: Path, tmp_path: Path) -> Client:
    cluster, python = place
    tmp_path.chmod(0o755)
    return Client(command, python.image, cluster.kubectl, tmp_path)


def run(
    client: Client, python: MachinePython, job: str, *script: str, workers: str = "2"
) -> Managed:
    """Runs `elasticdl run` on the cluster, detached."""
    folder = client.work / job
    folder.mkdir()
    folder.chmod(0o777)
    done = client.raw(
        "run",
        f"--workers={workers}",
        f"--job_name={job}",
        f"--namespace={client.kubectl.namespace}",
        f"--image_name={client.image}",
        "--image_pull_policy=Never",
        f"--volume={storage(python, folder)}",
        f"--job_dir={folder}",
        f"--envs={python.envs}",
        "--master_resource_request=cpu=0.1,memory=256Mi",
        "--master_resource_limit=cpu=1,memory=1Gi",
        "--worker_resource_request=cpu=0.1,memory=256Mi",
        "--worker_resource_limit=cpu=1,memory=1Gi",
        "--detach",
        *script,
    )
    assert done.code == 0, done.err
    return Managed(client.kubectl, client.command, client.image, job, folder)


def test_a_script_continues_when_its_master_is_deleted(
    place: tuple[Cluster, MachinePython], client: Client
) -> None:
    _, python = place
    job = run(client, python, "script", "/workspace/train.py", f"--epochs={EPOCHS}")
    job.until("it trains", is_training)
    job.delete("master")
    job.until("a second master", lambda status: status.get("term", 0) >= 2)
    watched = client("attach", "script")
    assert watched.code == 0, watched.err
    job.assert_audit(EPOCHS, N_RECORDS)


def test_a_script_that_fails_reports_its_own_error(
    place: tuple[Cluster, MachinePython], client: Client
) -> None:
    _, python = place
    run(client, python, "bad", "/workspace/train.py", "--no-such-flag")
    watched = client("attach", "bad")
    assert watched.code == 1 and "--no-such-flag" in watched.out + watched.err, watched
    assert "--no-such-flag" in client("status", "bad").out
    explained = client("explain", "bad")
    assert explained.code == 0 and "--no-such-flag" in explained.out, explained
    assert client("clean", "bad").code == 0
