# SPDX-License-Identifier: Apache-2.0
"""`gpu=1` requests a GPU. The nodes only advertise GPUs: nothing computes on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cluster import Cluster
from harness.size import GPU
from jobs import load_command
from trained import Job, counting, is_training


@pytest.fixture(scope="session")
def cluster(own_cluster: Cluster) -> Cluster:
    """Ignores `KUBECONFIG`: only our own nodes are known to have one GPU each."""
    return own_cluster


@pytest.fixture(scope="module")
def image(cluster: Cluster, command: Path) -> str:
    return load_command(cluster, command)


def test_a_worker_waits_for_a_gpu_and_the_job_continues_with_the_others(
    cluster: Cluster, submit: Callable[..., Job]
) -> None:
    n_gpus = len(cluster.nodes)
    job = submit(
        "gpu",
        **counting(
            worker_resource_request="cpu=0.05,memory=256Mi,gpu=1",
            num_workers=n_gpus + 1,
            num_epochs=2,
            model_params={"sleep_ms": "60"},
        ),
    )
    # Other tests may use all of a node, so not every GPU has to get a worker.
    waiting = "the last worker waits, and status shows the reason"
    job.until(waiting, lambda status: is_training(status) and GPU in str(status["instances"]))
    workers = job.running("worker")
    assert 1 <= len(workers) <= n_gpus
    assert len({worker["spec"]["nodeName"] for worker in workers}) == len(workers)
    assert workers[0]["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    job.succeeds().assert_exactly_once(2)
