# SPDX-License-Identifier: Apache-2.0
"""Two jobs that together request more than the cluster has: elastic jobs, which start with fewer
workers, finish sooner than gangs, which wait until all workers fit (`make soak` runs this)."""

from __future__ import annotations

import time
from pathlib import Path

from harness.cluster import Shape
from harness.kubectl import Kubectl
from harness.size import Size
from jobs import load_command
from runs import Start
from trained import Job, counting, remove

# Nine workers fit, and each job requests five.
NODES, WORKERS_PER_NODE, WANTED = 3, 3, 5
NODE_CPU = "0.38"
WORKER = "cpu=0.11,memory=128Mi"
SMALL = "cpu=0.01,memory=128Mi"
LIMIT = "cpu=1,memory=256Mi"
SHORTER = 0.30


def job(kubectl: Kubectl, command: Path, image: str, folder: Path) -> Job:
    fields = counting(
        master_resource_request=SMALL,
        ps_resource_request=SMALL,
        worker_resource_request=WORKER,
        # No CPU limits, so only waiting times are compared.
        master_resource_limit=LIMIT,
        ps_resource_limit=LIMIT,
        worker_resource_limit=LIMIT,
        model_params={"sleep_ms": "150"},
        num_workers=WANTED,
        num_epochs=6,
    )
    return Job(kubectl, command, image, folder.name, folder, fields)


def test_elastic_jobs_finish_sooner_than_gangs(start: Start, command: Path, tmp_path: Path) -> None:
    cluster = start(Shape(nodes=NODES, size=Size(cpu=NODE_CPU)))
    image = load_command(cluster, command)
    try:
        began = time.monotonic()
        for name in ("gang-a", "gang-b"):
            # The second gang does not fit while the first one runs.
            job(cluster.kubectl, command, image, tmp_path / name).submit().succeeds()
        gang = time.monotonic() - began
        began = time.monotonic()
        names = ("elastic-a", "elastic-b")
        jobs = [job(cluster.kubectl, command, image, tmp_path / name).submit() for name in names]
        for one in jobs:
            one.succeeds().assert_exactly_once(6)
        elastic = time.monotonic() - began
        shorter = 1 - elastic / gang
        print(f"gang {gang:.0f} s, elastic {elastic:.0f} s: {shorter:.0%} shorter")
        assert shorter >= SHORTER
    finally:
        remove(tmp_path)
