# SPDX-License-Identifier: Apache-2.0
"""Which cluster the tests of this folder run on, and when they are left out.

`KUBECONFIG` names a cluster to use; otherwise the harness starts one with three real nodes.
`K8S_TESTS=False` leaves the tests out, `True` fails where they cannot run, and without it they are
skipped there, with the reason.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import build, preflight
from harness.cluster import Cluster, Shape, all_names, down
from harness.daemon import Process
from harness.kubectl import Kubectl
from harness.waiting import until

NODES = 3
NAME_PREFIX = "test-"
WANTED = os.environ.get("K8S_TESTS", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if WANTED == "False":
        for item in items:
            item.add_marker(pytest.mark.skip(reason="K8S_TESTS=False leaves this out"))


def require(reason: str | None) -> None:
    """Skips the test for `reason`, or fails where the tests must run."""
    if reason is None:
        return
    if WANTED == "True":
        pytest.fail(f"K8S_TESTS=True, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[[Shape], Cluster]]:
    """Starts clusters that end with the session, even where a test fails."""
    _end_abandoned()
    names: list[str] = []

    def start(shape: Shape) -> Cluster:
        require(preflight.why_no_nodes() if shape.nodes else preflight.why_no_control_plane())
        names.append(f"{NAME_PREFIX}{os.getpid()}-{len(names)}")
        return Cluster.up(names[-1], shape)

    yield start
    for name in names:
        down(name)


@pytest.fixture(scope="session")
def own_cluster(start: Callable[[Shape], Cluster]) -> Cluster:
    """A cluster of real nodes that the test may disturb."""
    return start(Shape(nodes=NODES))


@pytest.fixture(scope="session")
def any_kubectl(request: pytest.FixtureRequest) -> Kubectl:
    """The cluster that `KUBECONFIG` names, or else our own."""
    given = os.environ.get("KUBECONFIG")
    if given:
        return Kubectl(Path(given), shutil.which("kubectl") or build.programs() / "kubectl")
    return request.getfixturevalue("own_cluster").kubectl


@pytest.fixture
def kubectl(any_kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    any_kubectl("create", "namespace", namespace)
    within = any_kubectl.within(namespace)
    # Pods are refused until their account is there.
    until(
        "the default service account",
        lambda: within.find("serviceaccount", "default"),
        seconds=30,
    )
    yield within
    any_kubectl("delete", "namespace", namespace, "--wait=false")


def _end_abandoned() -> None:
    """Takes down clusters of test runs that were killed before they could."""
    for name in all_names():
        owner = name[len(NAME_PREFIX) :].partition("-")[0]
        if name.startswith(NAME_PREFIX) and owner.isdigit() and not Process.see(int(owner)):
            down(name)
