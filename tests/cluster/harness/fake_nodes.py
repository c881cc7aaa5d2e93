# SPDX-License-Identifier: Apache-2.0
"""Simulated nodes, which are only API objects; kwok acts as their kubelets.

Their pods are scheduled, preempted and deleted as usual, and are reported as running, but no
process runs.
"""

from __future__ import annotations

from pathlib import Path

from . import keys
from .daemon import Daemons
from .kubectl import Kubectl
from .place import Place
from .size import GPU, Size

LABEL = "elasticdl-node"
STAGES = Path(__file__).with_name("kwok.yaml")
PODS = "110"
MACHINE = Size(cpu="4", memory="16Gi")


def start(place: Place, programs: Path, daemons: Daemons, names: list[str], size: Size) -> None:
    """Starts kwok, and creates the nodes."""
    daemons.start(
        "kwok",
        programs / "kwok",
        f"--kubeconfig={keys.kubeconfig(place)}",
        f"--config={STAGES}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-label-selector={LABEL}=fake",
        f"--cidr=10.{place.number}.0.1/17",
        f"--node-ip={place.loopback}",
        f"--server-address={place.loopback}:10247",
        "--node-lease-duration-seconds=40",
    )
    Kubectl(keys.kubeconfig(place), programs / "kubectl").apply(
        *(describe(name, size) for name in names)
    )


def describe(name: str, size: Size) -> dict[str, object]:
    """The object of a node that kwok manages."""
    has = {"cpu": size.cpu or MACHINE.cpu, "memory": size.memory or MACHINE.memory, "pods": PODS}
    if size.gpus:
        has[GPU] = str(size.gpus)
    labels = {LABEL: "fake", "kubernetes.io/hostname": name}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {"capacity": has, "allocatable": has},
    }
