# SPDX-License-Identifier: Apache-2.0
"""Pods are deleted on a real cluster: they are replaced, the job succeeds, and every record is
trained exactly once. `test_nodes.py` crashes nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trained import Job, counting, has_checkpoint, is_training

Submit = Callable[..., Job]


@pytest.mark.parametrize("role", ["worker", "ps", "master"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_deleted_pod_is_replaced(submit: Submit, role: str, when: str) -> None:
    """`kubectl delete pod` before and after the first checkpoint."""
    never = {"checkpoint_steps": 10_000, "checkpoint_secs": 1000}
    job = submit("delete", **counting(**(never if when == "before" else {})))
    job.until("it trains", is_training)
    if when == "after":
        job.until("a checkpoint", has_checkpoint)
    deleted = job.running(role)[0]["metadata"]
    job.kubectl("delete", "pod", deleted["name"], "--wait=false")

    def is_back() -> bool:
        """It is running, or the job ended before the check."""
        others = [pod for pod in job.pods(role) if pod["metadata"]["uid"] != deleted["uid"]]
        started = [pod for pod in others if pod["status"].get("phase") in ("Running", "Succeeded")]
        return len(started) == {"worker": 2, "ps": 1, "master": 1}[role]

    seconds = job.until_pods(f"the {role} is replaced", is_back)
    print(f"{role} deleted {when} the first checkpoint: replaced after {seconds:.1f} s")
    job.succeeds().assert_exactly_once(3)


def test_a_worker_that_runs_out_of_memory_gets_more_memory(submit: Submit) -> None:
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
    assert "150 % of the requested memory" in events


STEPS = {
    "distribution_strategy": "AllreduceStrategy",
    "model_def": "mnist_cnn",
    "model_params": {},
    "lanes": 4,
    "num_ps_pods": 0,
}


@pytest.mark.parametrize("strategy", [{}, STEPS], ids=["servers", "allreduce"])
def test_a_job_whose_pods_are_all_deleted_is_saved_and_resumes(
    submit: Submit, strategy: dict[str, object]
) -> None:
    """The only checkpoint is that of the deletion, so the job must resume at exactly that step."""
    job = submit("all", **counting(checkpoint_steps=10_000, checkpoint_secs=1000, **strategy))
    job.until("some training", lambda status: status["step"] > 50)
    job.kubectl("delete", "pod", "--selector", f"elasticdl_job_name={job.name}")
    job.until("the job is stopped", lambda status: status["state"] == "stopped")
    stopped = job.status()
    assert stopped["reason"] == "all pods of the job were deleted"
    # A worker that loses its master in its last second reports less than it has computed.
    assert 0 < stopped["goodput"]["records"] <= stopped["records_done"], "nothing was wasted"
    failed = "--for=condition=Failed"
    job.kubectl("wait", f"job/{job.pod_name('master')}", failed, "--timeout=90s")
    [last] = job.pods()
    [container] = last["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 3, "stopped, and resumable"
    job.resume().succeeds()
    # Work is not counted from here on: if a worker is silent for a moment, which it can be on a
    # busy machine, others compute its batches again.
    assert f"resumed at step {stopped['step']}" in (job.folder / "events.jsonl").read_text()
    job.assert_audit(3)
    if not strategy:
        job.assert_exactly_once(3)


def test_the_result_is_bit_identical_to_an_undisturbed_run(submit: Submit) -> None:
    fields = {
        "distribution_strategy": "AllreduceStrategy",
        "model_def": "mnist_mlp",
        "lanes": 4,
        "minibatch_size": 16,
        # On a fast machine, too, the job must last until its third process is deleted.
        "num_epochs": 24,
        "num_workers": 2,
        "num_ps_pods": 0,
        "seed": 7,
        "checkpoint_secs": 1,
    }
    calm = submit("calm", **fields).succeeds()
    job = submit("bits", **fields)
    for instance in ["worker-0", "master", "worker-1"]:
        job.until("it trains", is_training)
        job.delete(instance)
        job.until_pods("two workers", lambda: len(job.running("worker")) == 2)
    assert job.succeeds().weights() == calm.weights()
    job.assert_audit(24)
