# SPDX-License-Identifier: Apache-2.0
"""Nodes that crash or are cut off, on a cluster of their own: the cluster notices, and jobs lose
nothing but time."""

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

# A lost node is noticed after the control plane's grace, and later where the machine is busy.
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
    """A node with workers, and not with the master if that can be."""
    master = node_of(job.running("master")[0])
    nodes = [node_of(pod) for pod in job.running("worker")]
    return next((node for node in nodes if node != master), nodes[0])


def test_a_crashed_and_a_cut_off_node_are_noticed_and_come_back(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    _, crashed, cut = (node.name for node in cluster.nodes)
    api = cluster.api()
    kubectl.apply(probe("there", "hold", nodeName=crashed, restartPolicy="Always"))
    await_phase(kubectl, "there", "Running")
    cluster.crash(crashed)
    cluster.partition(cut)
    for node in (crashed, cut):
        until(f"{node} is lost", lambda node=node: api.lost(node), NODE_LIMIT)
    cluster.heal(cut)
    cluster.reboot(crashed)
    until(f"{cut} is back", lambda: api.ready(cut), NODE_LIMIT)
    until("the pod runs again", lambda: restarts(kubectl, "there") > 0, POD_LIMIT)
    await_phase(kubectl, "there", "Running")


def restarts(kubectl: Kubectl, pod: str) -> int:
    statuses = kubectl.json("get", "pod", pod)["status"].get("containerStatuses", [])
    return sum(status["restartCount"] for status in statuses)


def preferring(node: str) -> dict[str, Any]:
    """Puts all pods of a job on one node, as long as that is there."""
    names = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    preferred = {"weight": 100, "preference": {"matchExpressions": [names]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}
    return {"cluster_spec_json": json.dumps({"pod": {"spec": {"affinity": affinity}}})}


def test_the_loss_of_a_node_with_the_whole_job_costs_only_time(
    submit: Submit, cluster: Cluster
) -> None:
    """It is no deletion of all pods by a user, which would stop the job."""
    victim = cluster.nodes[1].name
    words = counting(num_workers=3, num_epochs=2, model_params={"sleep_ms": "120"})
    job = submit("crash", **words, **preferring(victim))
    job.until("a checkpoint", has_checkpoint)
    assert {node_of(pod) for pod in job.pods()} == {victim}
    cluster.crash(victim)
    try:

        def is_back() -> bool:
            living = [pod for pod in job.running("worker") if node_of(pod) != victim]
            return len(living) == 3

        seconds = job.until_pods("three workers on other nodes", is_back)
        print(f"kill -9 of a node: three workers again after {seconds:.1f} s")
        job.succeeds().assert_exactly_once(2)
        assert job.status()["term"] == 2
    finally:
        cluster.reboot(victim)


def test_a_partition_costs_only_time(submit: Submit, cluster: Cluster) -> None:
    job = submit("cut", **counting(num_workers=3, num_epochs=6))
    job.until("a checkpoint", has_checkpoint)
    victim = node_without_master(job)
    cluster.partition(victim)
    try:
        # Master and cluster both give the node's workers up.
        until(f"{victim} is lost", lambda: cluster.api().lost(victim), NODE_LIMIT)
    finally:
        cluster.heal(victim)
    job.succeeds().assert_exactly_once(6)
