# SPDX-License-Identifier: Apache-2.0
"""Selects the cluster for the tests of this folder, and decides when they are skipped.

`KUBECONFIG` selects a cluster; otherwise, the harness starts one with three real nodes, which all
processes of a test run share.
With `K8S_TESTS=False`, the tests do not run. With `True` (or `CI=true`), tests that cannot run
fail. Otherwise, they are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import runs
import wanted
from harness import build
from harness.cluster import Cluster
from harness.given import Given, Impossible
from harness.kubectl import Kubectl
from harness.waiting import until
from jobs import TARGET, load_command
from runs import Start
from trained import Job, remove

# The tests of each of these files share a separate cluster, so one process runs them all.
OWN_CLUSTERS = {"test_nodes.py", "test_operator.py", "test_custom_loop.py"}
# Long tests start early, so none of them runs last.
FIRST = [*sorted(OWN_CLUSTERS), "test_tutorial.py", "test_walkthrough.py", "test_preemption.py"]
# Measures speed, which takes minutes: `make soak` runs it, so it does not count as skipped.
collect_ignore = ["test_makespan.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reverse", action="store_true", help="run the tests in reverse order")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*FIRST, item.path.name).index(item.path.name))
    if config.getoption("--reverse"):
        items.reverse()
    if wanted.DISABLED:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="disabled by K8S_TESTS=False"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Every process takes the next test, or all tests of a file that has its own cluster."""
    from xdist.scheduler import LoadScopeScheduling

    class ByCluster(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if Path(file).name in OWN_CLUSTERS else nodeid

    return ByCluster(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Passes the ID of the test run to a process of pytest-xdist."""
    node.workerinput["run"] = run_of(node.config)


def run_of(config: pytest.Config) -> int:
    """The process that runs all tests, or distributes them to others."""
    return config.workerinput["run"] if hasattr(config, "workerinput") else os.getpid()


def pytest_sessionstart(session: pytest.Session) -> None:
    if run_of(session.config) == os.getpid():
        runs.end_abandoned()


def pytest_unconfigure(config: pytest.Config) -> None:
    if run_of(config) == os.getpid():
        runs.end_shared(os.getpid())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints once, and not for every test, why tests were skipped."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"skipped ({count} tests): {reason}")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts clusters that are stopped with the test, even if it fails."""
    with runs.starting() as start:
        yield start


@pytest.fixture(scope="session")
def own_cluster(request: pytest.FixtureRequest) -> Cluster:
    """A cluster of real nodes, which other tests use at the same time."""
    return runs.shared(run_of(request.config))


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster | Given:
    """The cluster that `KUBECONFIG` selects, or else our own."""
    given = os.environ.get("KUBECONFIG")
    if given:
        return Given(Path(given), shutil.which("kubectl") or build.programs() / "kubectl")
    return request.getfixturevalue("own_cluster")


@pytest.fixture
def kubectl(cluster: Cluster | Given) -> Iterator[Kubectl]:
    """kubectl in the test's own namespace."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", namespace)
    within = cluster.kubectl.within(namespace)
    # Pods are rejected until their account exists.
    until(
        "the default service account",
        lambda: within.find("serviceaccount", "default"),
        seconds=30,
    )
    yield within
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built command, without debug information."""
    built = TARGET / "release" / "elasticdl"
    wanted.require(None if built.exists() else f"`{built}` is not built")
    stripped = tmp_path_factory.mktemp("command") / "elasticdl"
    subprocess.run(["strip", "--strip-all", "-o", stripped, built], check=True)
    return stripped


@pytest.fixture(scope="session")
def image(cluster: Cluster | Given, command: Path) -> str:
    """The name of an image with the command, which is loaded on every node."""
    return load_command(cluster, command)


@pytest.fixture
def submit(
    kubectl: Kubectl, command: Path, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Job]]:
    """Submits jobs whose folders are removed afterwards."""
    folders: list[Path] = []

    def submit(name: str, **fields: Any) -> Job:
        folder = tmp_path_factory.mktemp("jobs") / name
        folders.append(folder)
        return Job(kubectl, command, image, name, folder, fields).submit()

    yield submit
    for folder in folders:
        remove(folder)


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
