# SPDX-License-Identifier: Apache-2.0
"""Elastic scheduling as in the tutorial: a high-priority job preempts a worker, which is replaced
when that job is done. On real nodes, all resources are a tenth of the tutorial's; simulated nodes
have the same as in the tutorial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.cluster import Shape
from harness.kubectl import Kubectl
from harness.size import Size
from jobs import load_command
from outside import outside
from pods import priority
from runs import Start
from trained import Job, counting, is_training, remove

HIGH, LOW = "high-priority", "low-priority"
# Three nodes with 4 CPUs each, some used by the system: one worker with 3 CPUs fits on each.
NODE_CPU = "0.38"
WORKER = "cpu=0.3,memory=256Mi"
SMALL = "cpu=0.02,memory=256Mi"
# Half a minute for two workers: long enough to be observed even on a slow machine.
HIGH_EPOCHS = 5


def job(kubectl: Kubectl, command: Path, image: str, folder: Path, **fields) -> Job:
    same = {
        "master_resource_request": SMALL,
        "ps_resource_request": SMALL,
        "worker_resource_request": WORKER,
        "master_pod_priority": HIGH,
        "model_params": {"sleep_ms": "60"},
    }
    made = counting(**{**same, **fields})
    return Job(kubectl, command, image, folder.name, folder, made)


def test_a_high_priority_job_preempts_a_worker_that_is_replaced_afterwards(
    start: Start, command: Path, tmp_path: Path
) -> None:
    cluster = start(Shape(nodes=3, size=Size(cpu=NODE_CPU)))
    image = load_command(cluster, command)
    kubectl = cluster.kubectl
    kubectl.apply(priority(HIGH, 1_000_000), priority(LOW, 1000))
    try:
        low = job(
            kubectl,
            command,
            image,
            tmp_path / "low",
            worker_pod_priority=LOW,
            num_workers=2,
            num_epochs=10,
        ).submit()
        seconds = low.until_pods("two workers", lambda: len(low.running("worker")) == 2)
        print(f"low job: two workers after {seconds:.1f} s")
        low.until("it trains", is_training)

        high = job(
            kubectl,
            command,
            image,
            tmp_path / "high",
            worker_pod_priority=HIGH,
            num_workers=2,
            num_epochs=HIGH_EPOCHS,
        )
        high.submit()
        # The status first: it is cheap to poll, and this state ends with the high-priority job.
        low.until("status shows why one worker waits", shows_reason)
        seconds = high.until_pods("its workers", lambda: len(high.running("worker")) == 2)
        print(f"high job: both workers run {seconds:.1f} s after the low job's worker is pending")
        assert len(low.running("worker")) == 1
        assert waiting(low) == 1
        high.until("it trains", is_training)
        records = low.status()["records_done"]
        low.until("both train", lambda status: status["records_done"] > records)
        assert high.status()["state"] == "running"

        high.succeeds().assert_exactly_once(HIGH_EPOCHS)
        seconds = low.until_pods("two workers again", lambda: len(low.running("worker")) == 2)
        print(f"low job: two workers again {seconds:.1f} s after the end of the high job")
        low.succeeds().assert_exactly_once(10)
        events = (low.folder / "events.jsonl").read_text()
        assert "was preempted" in events
    finally:
        remove(tmp_path)


def test_the_tutorials_resources_on_simulated_nodes(
    start: Start, command: Path, tmp_path: Path
) -> None:
    # Three nodes with 4 CPUs each, minus what the system uses.
    cluster = start(Shape(fake_nodes=3, size=Size(cpu="3.9", memory="12Gi")))
    kubectl = cluster.kubectl
    kubectl.apply(priority(HIGH, 1_000_000), priority(LOW, 1000))
    same = {
        "worker_resource_request": "cpu=3,memory=4096Mi",
        "ps_resource_request": "cpu=0.2,memory=1024Mi",
        "ps_pod_priority": HIGH,
    }
    low, high = (
        outside(kubectl, command, tmp_path / name, **counting(worker_pod_priority=of, **same))
        for name, of in (("low", LOW), ("high", HIGH))
    )
    try:
        low.submit()
        low.until_pods("two workers", lambda: len(low.running("worker")) == 2)
        high.submit()
        high.until_pods("two workers", lambda: len(high.running("worker")) == 2)
        low.until_pods(
            "one worker waits", lambda: waiting(low) == 1 and len(low.running("worker")) == 1
        )
        high.kill()
        low.until_pods("two workers again", lambda: len(low.running("worker")) == 2)
    finally:
        low.kill()
        high.kill()


def shows_reason(status: dict[str, Any]) -> bool:
    """Whether one worker waits, and the status shows the reason."""
    waiting = [it for it in status["instances"] if it["state"] == "waiting"]
    return len(waiting) == 1 and "no node can run it" in waiting[0]["why"]


def waiting(job: Job) -> int:
    return sum(pod["status"].get("phase") == "Pending" for pod in job.pods("worker"))
