# SPDX-License-Identifier: Apache-2.0
"""The harness itself: what happens on its clusters is what happens on clusters."""

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
    """Whatever `KUBECONFIG` names, the harness is tested on its own."""
    return own_cluster


def test_a_pod_runs_and_tells_what_it_does(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(probe("talker", "serve", f":{PORT}"))
    await_phase(kubectl, "talker", "Running")
    assert fetch(kubectl, "talker", f"http://localhost:{PORT}") == "talker\n"
    assert kubectl("logs", "talker") == "serving as talker\n"


def test_every_node_finds_a_service_by_its_name(cluster: Cluster, kubectl: Kubectl) -> None:
    askers = [node.name for node in cluster.nodes]
    kubectl.apply(service("server", PORT), probe("server", "serve", f":{PORT}"))
    kubectl.apply(*(probe(node, "hold", nodeName=node) for node in askers))
    url = f"http://server.{kubectl.namespace}.svc.cluster.local:{PORT}"
    for asker in askers:
        await_phase(kubectl, asker, "Running")
        # Names and routes follow the pods of a Service a moment later.
        until(
            f"`{asker}` is answered by the Service",
            lambda asker=asker: fetch(kubectl, asker, url) == "server\n",
            POD_LIMIT,
        )


def test_a_name_of_the_outside_is_not_found(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(probe("asker", "lookup", "example.org"))
    await_phase(kubectl, "asker", "Failed")


def test_a_higher_priority_takes_the_place_of_a_lower(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(HIGH, LOW)
    # More than half of a node, so that two of them do not fit.
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
    # Its place is free as soon as it has ended, which is before it is gone.
    until("the lower one is gone", lambda: phase(kubectl, "low") == "Gone", POD_LIMIT)
    assert "Preempted" in kubectl("get", "events", "--output", "jsonpath={.items[*].reason}")


def test_a_container_over_its_memory_is_killed(cluster: Cluster, kubectl: Kubectl) -> None:
    limited = {"resources": {"limits": {"memory": "32Mi"}}}
    kubectl.apply(probe("greedy", "allocate", "256", container=limited))
    await_phase(kubectl, "greedy", "Failed")
    ended = kubectl.json("get", "pod", "greedy")["status"]["containerStatuses"][0]["state"]
    assert ended["terminated"]["reason"] == "OOMKilled"


def test_the_audit_log_tells_what_an_account_asked_for(cluster: Cluster, kubectl: Kubectl) -> None:
    account = f"system:serviceaccount:{kubectl.namespace}:default"
    with pytest.raises(Failure, match="pods is forbidden"):
        kubectl("get", "pods", "--as", account)
    asked = {Request("list", "", "pods", allowed=False)}
    until("it is in the log", lambda: requests(cluster.audit_log, account) == asked, POD_LIMIT)


def test_a_cluster_of_others_can_be_used_but_takes_images_only_by_a_command(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = Given(cluster.kubeconfig, cluster.kubectl.program)
    assert "node-1" in given.kubectl("get", "nodes")
    monkeypatch.delenv(LOAD_IMAGE, raising=False)
    with pytest.raises(Impossible, match="does not say how images get into this cluster"):
        given.load_image(tmp_path)


def fetch(kubectl: Kubectl, pod: str, url: str) -> str:
    """What a pod is answered; nothing where it is not."""
    try:
        return kubectl("exec", pod, "--", "/probe", "get", url)
    except Failure:
        return ""
