# SPDX-License-Identifier: Apache-2.0
"""Whole clusters: without root, two at once, and without leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import wanted
from harness import cgroup, network, place, preflight
from harness.cluster import Cluster, Shape, down
from harness.daemon import Process
from harness.size import Size
from harness.waiting import Failure, until
from pods import POD_LIMIT, await_phase, probe
from runs import Start

FRONT = Path(__file__).with_name("cluster.py")


def test_simulated_nodes_accept_pods_that_fit(start: Start) -> None:
    cluster = start(Shape(fake_nodes=2, size=Size(cpu="4", memory="16Gi", gpus=1)))
    kubectl = cluster.kubectl
    large = {"resources": {"limits": {"cpu": "3", "nvidia.com/gpu": "1"}}}
    kubectl.apply(probe("a", "hold", container=large), probe("b", "hold", container=large))
    placed = set()
    for name in ("a", "b"):
        await_phase(kubectl, name, "Running")
        placed.add(kubectl.json("get", "pod", name)["spec"]["nodeName"])
    assert placed == {"node-1", "node-2"}
    kubectl.apply(probe("c", "hold", container=large))
    until(
        "the third pod does not fit",
        lambda: "Unschedulable" in why_waiting(cluster, "c"),
        POD_LIMIT,
    )
    kubectl("delete", "pod", "a")
    await_phase(kubectl, "c", "Running")
    everything = belongings(cluster)
    cluster.down()
    assert_gone(cluster, everything)


def test_two_clusters_run_concurrently_and_leave_nothing(start: Start) -> None:
    shape = Shape(nodes=1, size=Size(cpu="0.5", memory="1Gi", gpus=2))
    with ThreadPoolExecutor(2) as pool:
        clusters = list(pool.map(start, [shape, shape]))
    for cluster in clusters:
        has = cluster.kubectl.json("get", "node", "node-1")["status"]["allocatable"]
        assert (has["cpu"], has["memory"]) == ("500m", "1Gi")
        requested = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
        cluster.kubectl.apply(probe("same", "hold", container=requested))
    for cluster in clusters:
        await_phase(cluster.kubectl, "same", "Running")
    for cluster in clusters:
        everything = belongings(cluster)
        cluster.down()
        cluster.down()
        assert_gone(cluster, everything)
        others = [each for each in clusters if each.place.folder.exists()]
        for other in others:
            assert other.kubectl.json("get", "pod", "same")["status"]["phase"] == "Running"


def test_a_cluster_that_was_killed_while_starting_can_be_removed() -> None:
    """The harness cannot clean up, and nodes keep booting while it is killed."""
    wanted.require(preflight.why_no_nodes())
    name = f"test-{os.getpid()}-killed"
    starting = subprocess.Popen([sys.executable, FRONT, "--name", name, "up", "--nodes", "2"])
    try:
        containerd = place.folder_of(name) / "processes" / "node-2-containerd"
        until("the second node boots", containerd.exists, POD_LIMIT)
        starting.kill()
        starting.wait()
        cluster = Cluster.find(name)
        everything = belongings(cluster)
    finally:
        starting.kill()
        down(name)
    assert_gone(cluster, everything)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A"])
def test_an_invalid_cluster_name_is_rejected(name: str) -> None:
    with pytest.raises(Failure, match="is not a valid cluster name"):
        down(name)


def why_waiting(cluster: Cluster, pod: str) -> list[str]:
    conditions = cluster.kubectl.json("get", "pod", pod)["status"].get("conditions", [])
    return [each.get("reason", "") for each in conditions]


def belongings(cluster: Cluster) -> set[Process]:
    """All processes of a cluster: those that were started, and all in namespaces of its nodes."""
    started = {cluster.daemons.find(name) for name in cluster.daemons.names()} - {None}
    spaces = {space_of(child.pid) for each in started for child in each.children()} - {None}
    numbers = [int(each.name) for each in Path("/proc").glob("[0-9]*")]
    inside = {Process.see(pid) for pid in numbers if space_of(pid) in spaces}
    assert len(inside) >= cluster.shape.nodes, "every node has at least its first process"
    return (started | inside) - {None, Process.see(os.getpid())}


def space_of(pid: int) -> str | None:
    """The network namespace of a process; none if it is that of the tests."""
    try:
        space = os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
    return None if space == os.readlink("/proc/self/ns/net") else space


def assert_gone(cluster: Cluster, processes: set[Process]) -> None:
    where = cluster.place
    assert [each for each in processes if each.alive()] == []
    assert not where.folder.exists()
    assert str(where.folder) not in Path("/proc/mounts").read_text()
    assert not network.exists(where.bridge)
    assert not any(network.exists(where.link(node.index)) for node in cluster.nodes)
    assert not any((top / where.cgroup).exists() for top in cgroup.hierarchies())
