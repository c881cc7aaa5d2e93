# SPDX-License-Identifier: Apache-2.0
"""The operator on real nodes: elastic jobs and a service share a full cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runs
from harness.cluster import Cluster, Shape
from harness.kubectl import Kubectl
from harness.node import PROBE_IMAGE
from harness.size import Size
from harness.waiting import until
from jobs import ROOT, allowing, load_command, rbac, training_job
from managed import LIMIT, Managed
from trained import counting, remove

IMAGE = "elasticdl:test"
SMALL = "cpu=0.02,memory=128Mi"
# Two nodes with 0.7 CPUs each, minus masters and servers: four workers with 0.25 fit.
NODE_CPU = "0.7"
WORKER = "cpu=0.25,memory=128Mi"


class Operator:
    """The operator as a process of this machine, which can be killed."""

    def __init__(self, command: Path, kubectl: Kubectl, log: Path) -> None:
        self.command, self.kubectl, self.log = command, kubectl, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        kubeconfig = str(self.kubectl.kubeconfig)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.command, "operator", f"--kubeconfig={kubeconfig}", "--http_port=0"],
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with runs.starting() as start:
        yield start(Shape(nodes=2, size=Size(cpu=NODE_CPU)))


@pytest.fixture(scope="module")
def place(
    cluster: Cluster, command: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Operator]]:
    tmp_path = tmp_path_factory.mktemp("operator")
    load_command(cluster, command)
    cluster.kubectl("apply", "--filename", str(ROOT / "manifests" / "operator" / "crd.yaml"))
    cluster.kubectl("create", "namespace", "elasticdl")
    folders = (ROOT, tmp_path_factory.getbasetemp())
    cluster.kubectl.within("elasticdl").apply(allowing(*folders))
    cluster.kubectl.apply(*rbac("default"))
    operator = Operator(command, cluster.kubectl, tmp_path / "operator.log")
    operator.start()
    try:
        yield cluster, operator
    finally:
        operator.kill()
        cluster.kubectl("delete", "trainingjob", "--all", "--wait=false")


def managed(cluster: Cluster, command: Path, folder: Path, **fields: Any) -> Managed:
    made = counting(
        min_workers=1,
        max_workers=4,
        master_resource_request=SMALL,
        ps_resource_request=SMALL,
        worker_resource_request=WORKER,
        **fields,
    )
    del made["num_workers"]
    return Managed(cluster.kubectl, command, IMAGE, folder.name, folder, made)


def web(replicas: int) -> dict[str, Any]:
    """A service that is not a training job."""
    container = {"name": "main", "image": PROBE_IMAGE, "imagePullPolicy": "Never"}
    container |= {"args": ["serve", ":8000"], "resources": {"requests": {"cpu": "250m"}}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [container]},
            },
        },
    }


def test_two_jobs_share_a_full_cluster_and_a_service_gets_its_capacity_back(
    place: tuple[Cluster, Operator], command: Path, tmp_path: Path
) -> None:
    cluster, operator = place
    slow = {"sleep_ms": "100"}
    first = managed(cluster, command, tmp_path / "one", num_epochs=12, model_params=slow).submit()
    second = managed(cluster, command, tmp_path / "two", num_epochs=3, model_params=slow)
    try:
        print(f"the first job has four workers after {first.until_workers(4):.1f} s")
        second.submit()
        second.until_pods("it trains", lambda: second.running("worker"), LIMIT)
        print("the second job runs with the capacity that the first gave up")
        # During a resize.
        operator.kill()
        operator.start()
        first.until_workers(2)
        second.until_workers(2)
        second.succeeds().assert_exactly_once(3)
        seconds = first.until_workers(4)
        print(f"four workers again {seconds:.1f} s after the end of the second")

        cluster.kubectl.apply(web(2))

        def serves() -> bool:
            found = cluster.kubectl.json("get", "deployment", "web")
            return found["status"].get("readyReplicas", 0) == 2

        until("the service has its capacity", serves, LIMIT)
        assert len(first.running("worker")) <= 3
        cluster.kubectl("delete", "deployment", "web", "--wait=false")
        first.succeeds().assert_exactly_once(12)
        until("the operator reports success", lambda: "Succeeded" in first.conditions(), LIMIT)
        events = cluster.kubectl("get", "events", "--output", "custom-columns=M:.message")
        assert "freeing capacity for job" in events, events
    finally:
        print(operator.log.read_text()[-3000:] if "SHOW" in os.environ else "")
        remove(tmp_path)


BAD = {
    "min_over_max": ({"min_workers": 5, "max_workers": 2}, "min_workers"),
    "negative": ({"min_workers": -1}, "min_workers"),
    "absurd": ({"max_workers": 4_294_967_295}, "max_workers"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_api_server_rejects_what_the_schema_forbids(
    place: tuple[Cluster, Operator], case: str
) -> None:
    fields, expected = BAD[case]
    cluster, _ = place
    bad = {"image_name": IMAGE, "model_def": "count", "training_data": "/data", **fields}
    with pytest.raises(Exception, match=expected):
        cluster.kubectl.apply(training_job("bad", bad))


def test_a_job_can_mount_only_allowed_folders_of_its_node(
    place: tuple[Cluster, Operator], command: Path, tmp_path: Path
) -> None:
    cluster, _ = place
    fields = {"volume": "host_path=/etc,mount_path=/work", "job_dir": "/work/greedy"}
    job = managed(cluster, command, tmp_path / "greedy", **fields).submit()

    def refused() -> bool:
        found = cluster.kubectl.json("get", "trainingjob", job.name)
        shown = found.get("status", {}).get("conditions", [])
        return any(each["reason"] == "NotAllowed" for each in shown)

    try:
        until("the operator refuses it", refused, LIMIT)
        assert not job.pods("master")
    finally:
        cluster.kubectl("delete", "trainingjob", job.name)
