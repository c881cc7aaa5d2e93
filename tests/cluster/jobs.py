# SPDX-License-Identifier: Apache-2.0
"""Runs the command against a cluster: submits and queries jobs, as users do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.cluster import Cluster
from harness.given import Given
from harness.image import make_image
from harness.kubectl import Kubectl

ROOT = Path(__file__).parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
COMMAND_LIMIT = 600
SMALL = "cpu=0.05,memory=256Mi"
MOST = "cpu=1,memory=1024Mi"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Client:
    """`client("status", "x")` runs the command in the namespace of the test."""

    def __init__(self, command: Path, image: str, kubectl: Kubectl, home: Path) -> None:
        self.command, self.image, self.kubectl, self.home = command, image, kubectl, home
        self.work = home / "work"
        self.work.mkdir()
        # Pods run as a different user.
        self.work.chmod(0o777)

    def __call__(self, *arguments: str, kubeconfig: Path | None = None) -> Result:
        namespace = f"--namespace={self.kubectl.namespace}"
        return self.raw(*arguments, namespace, kubeconfig=kubeconfig)

    def raw(self, *arguments: str, kubeconfig: Path | None = None) -> Result:
        """Runs the command without a namespace."""
        kubeconfig = kubeconfig or self.kubectl.kubeconfig
        environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "ELASTICDL_HOME": str(self.home / "elasticdl"),
        }
        done = subprocess.run(
            [self.command, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def train(self, job: str, *arguments: str, kubeconfig: Path | None = None) -> Result:
        return self("train", *self.flags(job), *arguments, kubeconfig=kubeconfig)

    def flags(self, job: str) -> list[str]:
        data = ROOT / "data" / "fashion_mnist"
        resources = [
            f"--{role}_resource_{kind}={amount}"
            for role in ("master", "ps", "worker")
            for kind, amount in (("request", SMALL), ("limit", MOST))
        ]
        return [
            f"--job_name={job}",
            f"--image_name={self.image}",
            "--image_pull_policy=Never",
            f"--volume=host_path={self.work},mount_path=/work;host_path={data},mount_path=/data",
            "--model_def=mnist_mlp",
            "--training_data=/data/train",
            "--validation_data=/data/test",
            "--minibatch_size=64",
            "--num_minibatches_per_task=2",
            "--num_workers=1",
            "--num_ps_pods=1",
            *resources,
        ]

    def put_mnist(self) -> None:
        """Copies the shipped data to the volume of the job."""
        for part in ("train", "test"):
            shutil.copytree(ROOT / "data" / "fashion_mnist" / part, self.work / "mnist" / part)

    def allow(self) -> None:
        """Grants the pods of this namespace the permissions in the project's manifest."""
        for document in rbac(self.kubectl.namespace):
            self.kubectl.apply(document)

    def left(self, job: str) -> list[str]:
        """The names of all remaining objects of the job."""
        kinds = "configmap,secret,service,job,pod,networkpolicy,poddisruptionbudget"
        found = self.kubectl("get", kinds, "-l", f"elasticdl_job_name={job}", "-o", "name")
        return found.split()


def load_command(cluster: Cluster | Given, command: Path) -> str:
    """Loads an image with the command on every node, and returns its name."""
    name = "elasticdl:test"
    image = command.with_suffix(".tar")
    if not image.exists():
        make_image(command, image, name=name)
    cluster.load_image(image)
    return name


def training_job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A job for the operator."""
    described = {"apiVersion": "elasticdl.org/v1", "kind": "TrainingJob"}
    return {**described, "metadata": {"name": name}, "spec": spec}


def allowing(*host_paths: Path | str) -> dict[str, Any]:
    """Operator settings that allow jobs to mount these folders of their nodes."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "elasticdl-queues"},
        "data": {
            "permissions.yaml": yaml.safe_dump({"host_paths": [str(it) for it in host_paths]})
        },
    }


def pods_of(kubectl: Kubectl, job: str) -> list[dict[str, Any]]:
    return kubectl.json("get", "pod", "--selector", f"elasticdl_job_name={job}")["items"]


def phases(kubectl: Kubectl, job: str) -> dict[str, str]:
    """The phase of every pod of the job; the master's pod has the name of its Job."""
    found = {}
    for pod in pods_of(kubectl, job):
        is_master = pod["metadata"]["labels"].get("elasticdl_replica_type") == "master"
        name = f"elasticdl-{job}-master" if is_master else pod["metadata"]["name"]
        found[name] = pod["status"]["phase"]
    return found


def account(namespace: str, role: str) -> str:
    """The API server's user name for pods of a role."""
    return f"system:serviceaccount:{namespace}:elasticdl-{role}"


def has_token(pod: dict[str, Any]) -> bool:
    """Whether the API server has mounted a token of its service account in the pod."""
    volumes = pod["spec"].get("volumes", [])
    sources = [
        source for each in volumes for source in each.get("projected", {}).get("sources", [])
    ]
    return any("serviceAccountToken" in source for source in sources)


def rbac(namespace: str) -> list[dict]:
    text = (ROOT / "manifests" / "elasticdl-rbac.yaml").read_text()
    return list(yaml.safe_load_all(text.replace("namespace: default", f"namespace: {namespace}")))


def accuracies(log: str) -> list[float]:
    """The accuracies in all `Evaluation metrics[v=N]: {...}` lines."""
    return [float(found) for found in re.findall(r"Evaluation.*'accuracy': ([0-9.]+)", log)]
