# SPDX-License-Identifier: Apache-2.0
"""Whichever pod dies on a real cluster, the number of pods comes back, the job succeeds, and every
record was trained exactly once. Nodes die in `test_nodes.py`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trained import Job, counting, has_checkpoint, is_training

Submit = Callable[..., Job]


@pytest.mark.parametrize("role", ["worker", "ps", "master"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_deleted_pod_comes_back(submit: Submit, role: str, when: str) -> None:
    """`kubectl delete pod` before and after the first checkpoint."""
    never = {"checkpoint_steps": 10_000, "checkpoint_secs": 1000}
    job = submit("delete", **counting(**(never if when == "before" else {})))
    job.until("it trains", is_training)
    if when == "after":
        job.until("a checkpoint", has_checkpoint)
    victim = job.running(role)[0]["metadata"]
    job.kubectl("delete", "pod", victim["name"], "--wait=false")

    def is_back() -> bool:
        """It runs; or did, where the job ended before anyone looked."""
        others = [pod for pod in job.pods(role) if pod["metadata"]["uid"] != victim["uid"]]
        started = [pod for pod in others if pod["status"].get("phase") in ("Running", "Succeeded")]
        return len(started) == {"worker": 2, "ps": 1, "master": 1}[role]

    seconds = job.until_pods(f"the {role} is back", is_back)
    print(f"{role} deleted {when} the first checkpoint: back after {seconds:.1f} s")
    job.succeeds().assert_exactly_once(3)


def test_a_worker_that_runs_out_of_memory_gets_more_of_it(submit: Submit) -> None:
    job = submit(
        "memory",
        **counting(
            worker_resource_request="cpu=0.05,memory=64Mi",
            model_params={"sleep_ms": "1", "memory_mb": "70"},
            num_workers=1,
        ),
    )
    job.succeeds().assert_exactly_once(3)
    events = (job.folder / "events.jsonl").read_text()
    assert "ran out of memory" in events
    assert "150 % of the memory" in events


def test_a_job_whose_pods_are_all_deleted_stops_and_resumes(submit: Submit) -> None:
    job = submit("all", **counting())
    job.until("a checkpoint", has_checkpoint)
    job.kubectl("delete", "pod", "--selector", f"elasticdl_job_name={job.name}")
    job.until("it is stopped", lambda status: status["state"] == "stopped")
    assert "all pods of the job were deleted" in job.status()["reason"]
    failed = "--for=condition=Failed"
    job.kubectl("wait", f"job/{job.pod_name('master')}", failed, "--timeout=90s")
    [last] = job.pods()
    [container] = last["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 3, "stopped, and resumable"
    job.resume().succeeds().assert_exactly_once(3)


def test_the_bits_are_those_of_an_undisturbed_run(submit: Submit) -> None:
    words = {
        "distribution_strategy": "AllreduceStrategy",
        "model_def": "mnist_mlp",
        "lanes": 4,
        "minibatch_size": 16,
        "num_epochs": 6,
        "num_workers": 2,
        "num_ps_pods": 0,
        "seed": 7,
        "checkpoint_secs": 1,
    }
    calm = submit("calm", **words).succeeds()
    job = submit("bits", **words)
    for instance in ["worker-0", "master", "worker-1"]:
        job.until("it trains", is_training)
        if job.status()["state"] == "running":
            job.delete(instance)
            job.until_pods("two workers", lambda: len(job.running("worker")) == 2)
    assert job.succeeds().weights() == calm.weights()
    job.assert_audit(6)
