# SPDX-License-Identifier: Apache-2.0
"""The harness itself: what happens on its clusters is what happens on clusters."""

from __future__ import annotations

from harness.cluster import Cluster
from harness.kubectl import Kubectl
from harness.size import millicpus
from harness.waiting import Failure, until
from pods import POD_LIMIT, await_phase, phase, priority, probe, service

# A lost node is noticed after the control plane's grace, and later where the machine is busy.
NODE_LIMIT = 90
PORT = 8080
HIGH = priority("harness-high", 1000)
LOW = priority("harness-low", 10)


def test_a_pod_runs_and_tells_what_it_does(own_cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(probe("talker", "serve", f":{PORT}"))
    await_phase(kubectl, "talker", "Running")
    assert fetch(kubectl, "talker", f"http://localhost:{PORT}") == "talker\n"
    assert kubectl("logs", "talker") == "serving as talker\n"


def test_every_node_finds_a_service_by_its_name(own_cluster: Cluster, kubectl: Kubectl) -> None:
    askers = [node.name for node in own_cluster.nodes]
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


def test_a_name_of_the_outside_is_not_found(own_cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply(probe("asker", "lookup", "example.org"))
    await_phase(kubectl, "asker", "Failed")


def test_a_higher_priority_takes_the_place_of_a_lower(
    own_cluster: Cluster, kubectl: Kubectl
) -> None:
    kubectl.apply(HIGH, LOW)
    # More than half of a node, so that two of them do not fit.
    node = own_cluster.nodes[0].name
    whole = kubectl.json("get", "node", node)["status"]["allocatable"]["cpu"]
    most = {"resources": {"requests": {"cpu": f"{millicpus(whole) * 6 // 10}m"}}}
    where = {"nodeSelector": {"kubernetes.io/hostname": node}, "container": most}
    kubectl.apply(
        probe("low", "serve", f":{PORT}", priorityClassName="harness-low", **where),
    )
    await_phase(kubectl, "low", "Running")
    kubectl.apply(probe("high", "hold", priorityClassName="harness-high", **where))
    await_phase(kubectl, "high", "Running")
    assert phase(kubectl, "low") == "Gone"
    assert "Preempted" in kubectl("get", "events", "--output", "jsonpath={.items[*].reason}")


def test_a_container_over_its_memory_is_killed(own_cluster: Cluster, kubectl: Kubectl) -> None:
    limited = {"resources": {"limits": {"memory": "32Mi"}}}
    kubectl.apply(probe("greedy", "allocate", "256", container=limited))
    await_phase(kubectl, "greedy", "Failed")
    ended = kubectl.json("get", "pod", "greedy")["status"]["containerStatuses"][0]["state"]
    assert ended["terminated"]["reason"] == "OOMKilled"


def test_a_crashed_and_a_cut_off_node_are_noticed_and_come_back(
    own_cluster: Cluster, kubectl: Kubectl
) -> None:
    _, crashed, cut = (node.name for node in own_cluster.nodes)
    api = own_cluster.api()
    kubectl.apply(probe("there", "hold", nodeName=crashed, restartPolicy="Always"))
    await_phase(kubectl, "there", "Running")
    own_cluster.crash(crashed)
    own_cluster.partition(cut)
    for node in (crashed, cut):
        until(f"{node} is lost", lambda node=node: not api.ready(node), NODE_LIMIT)
    own_cluster.heal(cut)
    own_cluster.reboot(crashed)
    until(f"{cut} is back", lambda: api.ready(cut), NODE_LIMIT)
    until("the pod runs again", lambda: restarts(kubectl, "there") > 0, POD_LIMIT)
    await_phase(kubectl, "there", "Running")


def test_what_an_account_asks_is_in_the_audit_log(own_cluster: Cluster, kubectl: Kubectl) -> None:
    account = f"system:serviceaccount:{kubectl.namespace}:default"
    try:
        kubectl("get", "pods", "--as", account)
    except Failure as refused:
        assert account in str(refused)
    until(
        "the request is in the audit log",
        lambda: kubectl.namespace in own_cluster.audit_log.read_text(),
        POD_LIMIT,
    )


def fetch(kubectl: Kubectl, pod: str, url: str) -> str:
    """What a pod is answered; nothing where it is not."""
    try:
        return kubectl("exec", pod, "--", "/probe", "get", url)
    except Failure:
        return ""


def restarts(kubectl: Kubectl, pod: str) -> int:
    statuses = kubectl.json("get", "pod", pod)["status"].get("containerStatuses", [])
    return sum(status["restartCount"] for status in statuses)
