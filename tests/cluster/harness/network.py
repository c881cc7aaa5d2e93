# SPDX-License-Identifier: Apache-2.0
"""The bridge of a cluster, and the links from it to its nodes.

Nodes have no default route and the machine forwards nothing for them, so no packet of a cluster
leaves its bridge.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from .place import Place
from .waiting import Failure

# Also works if the programs that create links are not installed.
LINKS = Path("/sys/class/net")


def make_bridge(place: Place) -> None:
    run("ip", "link", "add", place.bridge, "type", "bridge")
    run("ip", "address", "add", f"{place.host}/24", "dev", place.bridge)
    run("ip", "link", "set", place.bridge, "up")


def remove_all(place: Place) -> None:
    """Removes the existing bridge and links, with their routes."""
    links = [each.name for each in LINKS.glob(place.link("*"))]
    for link in [*links, place.bridge]:
        _delete(link)


def connect(place: Place, index: int, others: int, pid: int) -> None:
    """Creates a link to the node whose first process is `pid`, one of `others` nodes."""
    link, address = place.link(index), place.node_address(index)
    disconnect(place, index)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", link, "master", place.bridge, "up")
    run("ip", "route", "replace", place.node_pods(index), "via", address)
    inside = ["link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up"]
    # Packets to a Service need a route before kube-proxy redirects them to a pod.
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
    """Removes a node's link, if it has one. A dead node's link may remain: sockets outlive it."""
    _delete(place.link(index))


def partition(place: Place, index: int) -> None:
    """Disconnects a node without notice; it keeps running."""
    run("ip", "link", "set", place.link(index), "down")


def heal(place: Place, index: int) -> None:
    run("ip", "link", "set", place.link(index), "up")


def exists(link: str) -> bool:
    return (LINKS / link).exists()


def _delete(link: str) -> None:
    """Deletes a link if it exists; the kernel may delete it first, together with the node."""
    try:
        if exists(link):
            run("ip", "link", "delete", link)
    except Failure:
        if exists(link):
            raise


def run(*command: str, stdin: str | None = None) -> None:
    """Runs a short command; raises with its error output."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"{' '.join(command)}: {done.stderr.strip()}")
