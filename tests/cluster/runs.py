# SPDX-License-Identifier: Apache-2.0
"""The clusters of one test run: those of single tests or files, and the shared one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import wanted
from harness import build, place, preflight
from harness.cluster import Cluster, Shape, down
from harness.daemon import Process
from harness.lock import alone
from harness.size import Size

PREFIX = "test-"
# Each node advertises one GPU, which does not exist.
SHARED = Shape(nodes=3, size=Size(gpus=1))
# Twice the time of a start on a busy machine, without the build of the components.
START_LIMIT = 240
# The number of clusters of this process.
NUMBERS = itertools.count()

Start = Callable[[Shape], Cluster]


@contextmanager
def starting() -> Iterator[Start]:
    """Starts clusters, and stops them at the end, even if a test fails."""
    names: list[str] = []

    def start(shape: Shape) -> Cluster:
        wanted.require(preflight.why_not(shape.nodes))
        names.append(f"{PREFIX}{os.getpid()}-{next(NUMBERS)}")
        return Cluster.up(names[-1], shape)

    try:
        yield start
    finally:
        for name in names:
            down(name)


def shared(run: int) -> Cluster:
    """The cluster of the test run `run`: the first process that needs it starts it."""
    wanted.require(preflight.why_not(SHARED.nodes))
    # This takes longer than others would wait for the lock.
    build.programs()
    with alone(_lock(run), "starting the shared cluster", START_LIMIT):
        if _name(run) not in place.names():
            return Cluster.up(_name(run), SHARED)
    return Cluster.find(_name(run))


def end_shared(run: int) -> None:
    down(_name(run))
    _lock(run).unlink(missing_ok=True)


def end_abandoned() -> None:
    """Stops clusters of test runs that were killed."""
    for name in place.names():
        owner = name[len(PREFIX) :].partition("-")[0]
        if name.startswith(PREFIX) and owner.isdigit() and not Process.see(int(owner)):
            down(name)
            _lock(int(owner)).unlink(missing_ok=True)


def _name(run: int) -> str:
    return f"{PREFIX}{run}-shared"


def _lock(run: int) -> Path:
    return place.root() / f".{_name(run)}.lock"
