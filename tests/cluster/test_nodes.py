# SPDX-License-Identifier: Apache-2.0
"""Nodes that crash or are disconnected, on a separate cluster: the cluster detects it, and jobs
lose only time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runs
from harness.cluster import Cluster, Shape
from harness.kubectl import Kubectl
from harness.waiting import until
from jobs import load_command
from pods import POD_LIMIT, await_phase, probe
from trained import Job, counting, has_checkpoint

# A lost node is detected after the control plane's grace period, and later on a busy machine.
NODE_LIMIT = 90

Submit = Callable[..., Job]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with runs.starting() as start:
        yield start(Shape(nodes=3))


@pytest.fixture(scope="module")
def image(cluster: Cluster, command: Path) -> str:
    return load_command(cluster, command)


def node_of(pod: dict[str, Any]) -> str:
    return pod["spec"]["nodeName"]


def node_without_master(job: Job) -> str:
    """A node with workers and, if possible, without the master."""
    master = node_of(job.running("master")[0])
    nodes = [node_of(pod) for pod in job.running("worker")]
    return next((node for node in nodes if node != master), nodes[0])


def test_a_crashed_and_a_disconnected_node_are_detected_and_recover(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    _, crashed, disconnected = (node.name for node in cluster.nodes)
    api = cluster.api()
    kubectl.apply(probe("there", "hold", nodeName=crashed, restartPolicy="Always"))
    await_phase(kubectl, "there", "Running")
    cluster.crash(crashed)
    cluster.partition(disconnected)
    for node in (crashed, disconnected):
        until(f"{node} is lost", lambda node=node: api.lost(node), NODE_LIMIT)
    cluster.heal(disconnected)
    cluster.reboot(crashed)
    until(f"{disconnected} is ready again", lambda: api.ready(disconnected), NODE_LIMIT)
    until("the pod runs again", lambda: restarts(kubectl, "there") > 0, POD_LIMIT)
    await_phase(kubectl, "there", "Running")


def restarts(kubectl: Kubectl, pod: str) -> int:
    statuses = kubectl.json("get", "pod", pod)["status"].get("containerStatuses", [])
    return sum(status["restartCount"] for status in statuses)


def preferring(node: str) -> dict[str, Any]:
    """Puts all pods of a job on one node, as long as the node exists."""
    names = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    preferred = {"weight": 100, "preference": {"matchExpressions": [names]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}
    return {"cluster_spec_json": json.dumps({"pod": {"spec": {"affinity": affinity}}})}


def test_the_loss_of_a_node_with_the_whole_job_costs_only_time(
    submit: Submit, cluster: Cluster
) -> None:
    """Unlike the deletion of all pods by a user, this does not stop the job."""
    lost_node = cluster.nodes[1].name
    fields = counting(num_workers=3, num_epochs=2, model_params={"sleep_ms": "120"})
    job = submit("crash", **fields, **preferring(lost_node))
    job.until("a checkpoint", has_checkpoint)
    assert {node_of(pod) for pod in job.pods()} == {lost_node}
    cluster.crash(lost_node)
    try:

        def is_back() -> bool:
            running = [pod for pod in job.running("worker") if node_of(pod) != lost_node]
            return len(running) == 3

        seconds = job.until_pods("three workers on other nodes", is_back)
        print(f"kill -9 of a node: three workers again after {seconds:.1f} s")
        job.succeeds().assert_exactly_once(2)
        assert job.status()["term"] == 2
    finally:
        cluster.reboot(lost_node)


def test_a_partition_costs_only_time(submit: Submit, cluster: Cluster) -> None:
    job = submit("partitioned", **counting(num_workers=3, num_epochs=6))
    job.until("a checkpoint", has_checkpoint)
    lost_node = node_without_master(job)
    cluster.partition(lost_node)
    try:
        # Both the master and the cluster declare the node's workers lost.
        until(f"{lost_node} is lost", lambda: cluster.api().lost(lost_node), NODE_LIMIT)
    finally:
        cluster.heal(lost_node)
    job.succeeds().assert_exactly_once(6)
