# SPDX-License-Identifier: Apache-2.0
"""The bridge of a cluster, and the cables from it to its nodes.

Nodes have no default route and the machine forwards nothing for them, so no packet of a cluster
gets further than its bridge.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .place import Place
from .waiting import Failure

# Also where the programs that make links are not installed.
LINKS = Path("/sys/class/net")


def make_bridge(place: Place) -> None:
    run("ip", "link", "add", place.bridge, "type", "bridge")
    run("ip", "address", "add", f"{place.host}/24", "dev", place.bridge)
    run("ip", "link", "set", place.bridge, "up")


def remove_all(place: Place) -> None:
    """Removes the bridge and its cables, whichever are there, with the routes over them."""
    links = [each.name for each in LINKS.glob(place.cable("*"))]
    for link in [*links, place.bridge]:
        _delete(link)


def connect(place: Place, index: int, others: int, pid: int) -> None:
    """Lays a cable to the node whose first process is `pid`, one of `others` nodes."""
    cable, address = place.cable(index), place.node_address(index)
    disconnect(place, index)
    run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", cable, "master", place.bridge, "up")
    run("ip", "route", "replace", place.node_pods(index), "via", address)
    inside = ["link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up"]
    # Packets to a Service need a route before kube-proxy turns them to a pod.
    inside += [f"route add {place.services} dev eth0"]
    inside += [
        f"route add {place.node_pods(other)} via {place.node_address(other)}"
        for other in range(1, others + 1)
        if other != index
    ]
    run("nsenter", "--target", str(pid), "--net", "ip", "-batch", "-", stdin="\n".join(inside))
    forward = "echo 1 >/proc/sys/net/ipv4/ip_forward"
    run("nsenter", "--target", str(pid), "--net", "--mount", "sh", "-c", forward)


def disconnect(place: Place, index: int) -> None:
    """Takes a node's cable away, if it has one. A dead node's may stay: sockets outlive it."""
    _delete(place.cable(index))


def cut(place: Place, index: int) -> None:
    """Cuts a node off; it runs on, and nobody is told."""
    run("ip", "link", "set", place.cable(index), "down")


def mend(place: Place, index: int) -> None:
    run("ip", "link", "set", place.cable(index), "up")


def exists(link: str) -> bool:
    return (LINKS / link).exists()


def _delete(link: str) -> None:
    """Deletes a link if it is there; the kernel may delete it first, with the node at its end."""
    try:
        if exists(link):
            run("ip", "link", "delete", link)
    except Failure:
        if exists(link):
            raise


def run(*command: str, stdin: str | None = None) -> None:
    """Runs a short command; its complaint is in the error."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"{' '.join(command)}: {done.stderr.strip()}")
