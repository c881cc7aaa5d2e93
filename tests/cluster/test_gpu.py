# SPDX-License-Identifier: Apache-2.0
"""`gpu=1` asks for a GPU. The nodes only promise theirs: nothing here computes on one."""

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
    """Whatever `KUBECONFIG` names, only nodes of our own are known to have one GPU each."""
    return own_cluster


@pytest.fixture(scope="module")
def image(cluster: Cluster, command: Path) -> str:
    return load_command(cluster, command)


def test_a_worker_waits_for_a_gpu_and_the_job_goes_on_with_the_others(
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
    # Other tests may fill a node meanwhile, so not every GPU has to get a worker.
    waiting = "the last one waits, and status says for what"
    job.until(waiting, lambda status: is_training(status) and GPU in str(status["instances"]))
    workers = job.running("worker")
    assert 1 <= len(workers) <= n_gpus
    assert len({worker["spec"]["nodeName"] for worker in workers}) == len(workers)
    assert workers[0]["spec"]["containers"][0]["resources"]["limits"][GPU] == "1"
    job.succeeds().assert_exactly_once(2)
