# SPDX-License-Identifier: Apache-2.0
"""Tests of the harness: its clusters behave like other clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.audit import Request, requests
from harness.cluster import Cluster
from harness.given import LOAD_IMAGE, Given, Impossible
from harness.kubectl import Kubectl
from harness.size import millicpus
from harness.waiting import Failure, until
from pods import POD_LIMIT, await_phase, phase, priority, probe, service

PORT = 8080
HIGH = priority("harness-high", 1000)
LOW = priority("harness-low", 10)


@pytest.fixture(scope="session")
def cluster(own_cluster: Cluster) -> Cluster:
    """Ignores `KUBECONFIG`: the harness is tested on its own cluster."""
    return own_cluster


def test_a_pod_runs_and_logs(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(probe("talker", "serve", f":{PORT}"))
    await_phase(kubectl, "talker", "Running")
    assert fetch(kubectl, "talker", f"http://localhost:{PORT}") == "talker\n"
    assert kubectl("logs", "talker") == "serving as talker\n"


def test_every_node_finds_a_service_by_its_name(cluster: Cluster, kubectl: Kubectl) -> None:
    clients = [node.name for node in cluster.nodes]
    kubectl.apply(service("server", PORT), probe("server", "serve", f":{PORT}"))
    kubectl.apply(*(probe(node, "hold", nodeName=node) for node in clients))
    url = f"http://server.{kubectl.namespace}.svc.cluster.local:{PORT}"
    for client in clients:
        await_phase(kubectl, client, "Running")
        # Names and routes are updated shortly after the pods of a Service.
        until(
            f"`{client}` is answered by the Service",
            lambda client=client: fetch(kubectl, client, url) == "server\n",
            POD_LIMIT,
        )


def test_an_external_name_is_not_found(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(probe("client", "lookup", "example.org"))
    await_phase(kubectl, "client", "Failed")


def test_a_higher_priority_preempts_a_lower_one(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(HIGH, LOW)
    # More than half of a node, so two pods do not fit.
    node = cluster.nodes[0].name
    whole = kubectl.json("get", "node", node)["status"]["allocatable"]["cpu"]
    most = {"resources": {"requests": {"cpu": f"{millicpus(whole) * 6 // 10}m"}}}
    where = {"nodeSelector": {"kubernetes.io/hostname": node}, "container": most}
    kubectl.apply(
        probe("low", "serve", f":{PORT}", priorityClassName="harness-low", **where),
    )
    await_phase(kubectl, "low", "Running")
    kubectl.apply(probe("high", "hold", priorityClassName="harness-high", **where))
    await_phase(kubectl, "high", "Running")
    # Its resources are free when it has exited, which is before the pod is removed.
    until("the low-priority pod is removed", lambda: phase(kubectl, "low") == "Gone", POD_LIMIT)
    assert "Preempted" in kubectl("get", "events", "--output", "jsonpath={.items[*].reason}")


def test_a_container_above_its_memory_limit_is_killed(cluster: Cluster, kubectl: Kubectl) -> None:
    limited = {"resources": {"limits": {"memory": "32Mi"}}}
    kubectl.apply(probe("greedy", "allocate", "256", container=limited))
    await_phase(kubectl, "greedy", "Failed")
    ended = kubectl.json("get", "pod", "greedy")["status"]["containerStatuses"][0]["state"]
    assert ended["terminated"]["reason"] == "OOMKilled"


def test_the_audit_log_lists_the_requests_of_an_account(cluster: Cluster, kubectl: Kubectl) -> None:
    account = f"system:serviceaccount:{kubectl.namespace}:default"
    with pytest.raises(Failure, match="pods is forbidden"):
        kubectl("get", "pods", "--as", account)
    expected = {Request("list", "", "pods", allowed=False)}
    until(
        "the request is in the log",
        lambda: requests(cluster.audit_log, account) == expected,
        POD_LIMIT,
    )


def test_an_external_cluster_needs_a_command_to_load_images(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = Given(cluster.kubeconfig, cluster.kubectl.program)
    assert "node-1" in given.kubectl("get", "nodes")
    monkeypatch.delenv(LOAD_IMAGE, raising=False)
    with pytest.raises(Impossible, match="is not set; it must be the command that loads images"):
        given.load_image(tmp_path)


def fetch(kubectl: Kubectl, pod: str, url: str) -> str:
    """The response that a pod gets; empty if there is none."""
    try:
        return kubectl("exec", pod, "--", "/probe", "get", url)
    except Failure:
        return ""
