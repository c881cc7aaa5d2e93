# SPDX-License-Identifier: Apache-2.0
"""Which cluster the tests of this folder run on, and when they are left out.

`KUBECONFIG` names a cluster to use; otherwise the harness starts one with three real nodes.
`K8S_TESTS=False` leaves the tests out, `True` (or `CI=true`) fails where they cannot run, and
without either they are skipped there, with the reason.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import wanted
from harness import build, place, preflight
from harness.cluster import Cluster, Shape, down
from harness.daemon import Process
from harness.given import Given, Impossible
from harness.kubectl import Kubectl
from harness.waiting import until
from jobs import TARGET, load_command

# Minutes long, and about speed: `make soak` names it. Leaving it out is no skip.
collect_ignore = ["test_makespan.py"]
NODES = 3
NAME_PREFIX = "test-"
# Of the clusters of this process.
NUMBERS = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if wanted.LEFT_OUT:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="K8S_TESTS=False leaves this out"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says once, and not for every test, why tests were left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"left out ({count} tests): {reason}")


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Shape], Cluster]]:
    """Starts clusters that end with their file of tests, even where one fails."""
    with _starting() as start:
        yield start


@pytest.fixture(scope="session")
def own_cluster() -> Iterator[Cluster]:
    """A cluster of real nodes that the test may disturb."""
    _end_abandoned()
    with _starting() as start:
        yield start(Shape(nodes=NODES))


@contextmanager
def _starting() -> Iterator[Callable[[Shape], Cluster]]:
    names: list[str] = []

    def start(shape: Shape) -> Cluster:
        wanted.require(preflight.why_not(shape.nodes))
        names.append(f"{NAME_PREFIX}{os.getpid()}-{next(NUMBERS)}")
        return Cluster.up(names[-1], shape)

    try:
        yield start
    finally:
        for name in names:
            down(name)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster | Given:
    """The cluster that `KUBECONFIG` names, or else our own.

    What only our own can do raises `Impossible`, and the test is skipped.
    """
    given = os.environ.get("KUBECONFIG")
    if given:
        return Given(Path(given), shutil.which("kubectl") or build.programs() / "kubectl")
    return request.getfixturevalue("own_cluster")


@pytest.fixture
def kubectl(cluster: Cluster | Given) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", namespace)
    within = cluster.kubectl.within(namespace)
    # Pods are refused until their account is there.
    until(
        "the default service account",
        lambda: within.find("serviceaccount", "default"),
        seconds=30,
    )
    yield within
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command as it was built here, without what only debuggers read."""
    built = TARGET / "release" / "elasticdl"
    wanted.require(None if built.exists() else f"`{built}` is not built")
    stripped = tmp_path_factory.mktemp("command") / "elasticdl"
    subprocess.run(["strip", "--strip-all", "-o", stripped, built], check=True)
    return stripped


@pytest.fixture(scope="session")
def image(cluster: Cluster | Given, command: Path) -> str:
    """The name of an image with that command, which every node has."""
    return load_command(cluster, command)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    return (yield from _skip_impossible())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    return (yield from _skip_impossible())


def _skip_impossible() -> Iterator[None]:
    try:
        return (yield)
    except Impossible as reason:
        return wanted.require(str(reason))


def _end_abandoned() -> None:
    """Takes down clusters of test runs that were killed before they could."""
    for name in place.names():
        owner = name[len(NAME_PREFIX) :].partition("-")[0]
        if name.startswith(NAME_PREFIX) and owner.isdigit() and not Process.see(int(owner)):
            down(name)
