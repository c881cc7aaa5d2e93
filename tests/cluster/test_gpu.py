# SPDX-License-Identifier: Apache-2.0
"""`gpu=1` asks for a GPU. The nodes only promise theirs: nothing here computes on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.cluster import Cluster, Shape
from harness.size import GPU, Size
from jobs import load_command
from trained import Job, counting, remove


def test_a_worker_waits_for_a_gpu_and_the_job_goes_on_with_the_other(
    start: Callable[[Shape], Cluster], command: Path, tmp_path: Path
) -> None:
    cluster = start(Shape(nodes=1, size=Size(gpus=1)))
    image = load_command(cluster, command)
    folder = tmp_path / "gpu"
    words = counting(worker_resource_request="cpu=0.05,memory=256Mi,gpu=1", num_epochs=2)
    job = Job(cluster.kubectl, command, image, folder.name, folder, words)
    try:
        job.submit()
        job.until_pods("one worker has the GPU", lambda: len(job.running("worker")) == 1)
        container = job.running("worker")[0]["spec"]["containers"][0]
        assert container["resources"]["limits"][GPU] == "1"
        waiting = "the other waits for one, and status says so"
        job.until(waiting, lambda status: GPU in str(status["instances"]))
        job.succeeds().assert_exactly_once(2)
    finally:
        remove(folder)
