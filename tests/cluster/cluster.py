#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts and stops Kubernetes clusters on this machine, and injects faults."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from harness import build, place, preflight
from harness.cluster import Cluster, Shape, down
from harness.image import make_image
from harness.size import Size
from harness.waiting import Failure


def main() -> int:
    arguments = parser().parse_args()
    try:
        arguments.run(arguments)
    except Failure as failure:
        print(f"cluster: {failure}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__)
    top.add_argument(
        "--name", default="elasticdl", help="name of the cluster (default: %(default)s)"
    )
    verbs = top.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    verb("build", lambda _: print(build.programs()), "Build the components, and print their folder")
    upward = verb("up", up, "Start a cluster, and print the path of its kubeconfig")
    tier = upward.add_mutually_exclusive_group(required=True)
    tier.add_argument("--nodes", type=int, default=0, help="number of real nodes (needs root)")
    tier.add_argument("--kwok", type=int, default=0, help="number of simulated nodes")
    upward.add_argument("--node-cpu", help="CPUs of each node for pods, for example 0.9")
    upward.add_argument("--node-memory", help="memory of each node for pods, for example 2Gi")
    upward.add_argument(
        "--node-gpus", type=int, default=0, help="advertised GPUs of each node, which do not exist"
    )
    verb(
        "down",
        lambda given: down(given.name),
        "Stop a cluster and remove everything that belongs to it",
    )
    verb("list", lambda _: print("\n".join(place.names())), "List the running clusters")
    verb("env", environment, "Print shell commands that select a cluster, for eval")
    verb(
        "kubeconfig",
        lambda given: print(find(given).kubeconfig),
        "Print the path of the kubeconfig",
    )
    verb("audit-log", lambda given: print(find(given).audit_log), "Print the path of the audit log")

    image = verb("make-image", image_from, "Write the image elasticdl:test from a built command")
    image.add_argument("binary", type=Path)
    image.add_argument("out", type=Path)
    load = verb(
        "load-image",
        lambda given: find(given).load_image(given.tar),
        "Load the images of a tar file on every node",
    )
    load.add_argument("tar", type=Path)
    for name, text in {
        "crash": "Kill every process of a node at once",
        "reboot": "Start a node again, and wait until it is ready",
        "partition": "Disconnect a node from the others",
        "heal": "Reconnect a node",
    }.items():
        added = verb(name, lambda given, name=name: getattr(find(given), name)(given.node), text)
        added.add_argument("node", help="for example node-1")
    return top


def find(arguments: argparse.Namespace) -> Cluster:
    return Cluster.find(arguments.name)


def up(arguments: argparse.Namespace) -> None:
    if reason := preflight.why_not(arguments.nodes):
        raise Failure(reason)
    build.programs()
    size = Size(arguments.node_cpu, arguments.node_memory, arguments.node_gpus)
    started = time.monotonic()
    cluster = Cluster.up(arguments.name, Shape(arguments.nodes, arguments.kwok, size))
    print(f"cluster `{arguments.name}` is up after {time.monotonic() - started:.1f} s")
    print(f"kubeconfig: {cluster.kubeconfig}")


def environment(arguments: argparse.Namespace) -> None:
    cluster = find(arguments)
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"export PATH={cluster.programs}:$PATH")


def image_from(arguments: argparse.Namespace) -> None:
    print(make_image(arguments.binary, arguments.out))


if __name__ == "__main__":
    sys.exit(main())
