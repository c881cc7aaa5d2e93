#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The first case of the published EDL experiment in real time: 133 nodes, twenty jobs of 2 to 60
workers and ten servers, with the real operator, API server and scheduler. The nodes are simulated;
masters are processes of this machine. Prints waiting time, utilization and fairness next to those
of the simulator (`make soak` runs it; it takes ten minutes).
"""

from __future__ import annotations

import base64
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import fake_nodes, preflight
from harness.cluster import Cluster, Shape, down
from harness.kubectl import Kubectl
from harness.size import Size, millicpus
from jobs import ROOT, allowing, training_job
from outside import Outside

N_JOBS, GAP, HOLD = 20, 13.5, 339.0
MIN_WORKERS, N_SERVERS = 2, 10
LOOK_EVERY = 2.0
NAME = f"edl-{os.getpid()}"
# The published nodes without the system's pods: 86 with 12 CPUs and 47 with 28. Of these, 23 run
# more system pods than the network agent.
NODES = [(86, "11.75"), (24, "27.75"), (23, "27")]
TOTAL_MILLI = 2_348_000
SYSTEM_MILLI = 50_500


class Managed(Outside):
    """A job that the operator describes to its master."""

    def submit(self) -> Managed:
        spec = {
            "image_name": "elasticdl:none",
            "model_def": "count",
            "training_data": str(ROOT / "data" / "fashion_mnist" / "test"),
            "volume": f"host_path={self.folder},mount_path={self.folder}",
            "job_dir": str(self.folder),
            "num_ps_pods": N_SERVERS,
            "min_workers": MIN_WORKERS,
            "max_workers": 60,
            "ps_resource_request": "cpu=4,memory=5120Mi",
            "worker_resource_request": "cpu=5,memory=8192Mi",
            # No worker ever connects: only the phases of pods are known.
            "heartbeat_timeout_secs": 100_000.0,
        }
        self.kubectl.apply(training_job(self.name, spec))
        return self

    def start(self) -> bool:
        """Starts the master as soon as the operator has described the job."""
        found = self.kubectl.find("configmap", f"elasticdl-{self.name}")
        secret = self.kubectl.find("secret", f"elasticdl-{self.name}-key")
        notes = (found or {}).get("metadata", {}).get("annotations", {})
        if not found or not secret or "elasticdl.org/workers" not in notes:
            return False
        key = base64.b64decode(secret["data"]["job.key"]).decode()
        self.run_master(found["data"]["job.yaml"], key)
        return True


@dataclass
class Course:
    """The observations over time."""

    waits: dict[str, float] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)

    def look(self, kubectl: Kubectl, submitted: dict[str, float], now: float) -> None:
        used = 0
        running: dict[tuple[str, str], int] = {}
        for pod in kubectl.json("get", "pods")["items"]:
            if pod["status"].get("phase") != "Running":
                continue
            labels = pod["metadata"]["labels"]
            of = labels["elasticdl_job_name"], labels["elasticdl_replica_type"]
            running[of] = running.get(of, 0) + 1
            requests = pod["spec"]["containers"][0]["resources"]["requests"]
            used += millicpus(requests["cpu"])
        self.loads.append((used + SYSTEM_MILLI) / TOTAL_MILLI)
        self.workers = {job: running.get((job, "worker"), 0) for job in submitted}
        for job, at in submitted.items():
            has_all = self.workers[job] >= MIN_WORKERS and running.get((job, "ps"), 0) == N_SERVERS
            if has_all and job not in self.waits:
                self.waits[job] = now - at

    def report(self) -> None:
        waits = sorted(self.waits.values())
        shares = list(self.workers.values())
        jain = sum(shares) ** 2 / (len(shares) * sum(n * n for n in shares))
        steady = self.loads[len(self.loads) // 2 :]
        print(
            f"operator, real API server: {len(waits)} of {N_JOBS} jobs started, mean wait "
            f"{statistics.mean(waits):.1f} s, longest {waits[-1]:.1f} s, utilization "
            f"{statistics.mean(self.loads):.1%} (second half {statistics.mean(steady):.1%}), "
            f"Jain {jain:.3f} at the end, workers {sorted(shares)}"
        )


def main() -> None:
    command = Path(sys.argv[1])
    if reason := preflight.why_not(0):
        print(f"edl_case is skipped: {reason}")
        return
    count, cpu = NODES[0]
    cluster = Cluster.up(NAME, Shape(fake_nodes=count, size=Size(cpu=cpu, memory="95Gi")))
    try:
        for kind, (count, cpu) in enumerate(NODES[1:]):
            size = Size(cpu=cpu, memory="95Gi")
            names = [f"large-{kind}-{index}" for index in range(count)]
            cluster.kubectl.apply(*(fake_nodes.describe(name, size) for name in names))
        with tempfile.TemporaryDirectory() as folder:
            play(cluster.kubectl, command, Path(folder))
    finally:
        down(NAME)
    print("simulator:", flush=True)
    subprocess.run([command, "simulate", "edl-case-1", "--policy=elastic-fair"], check=True)


def play(kubectl: Kubectl, command: Path, folder: Path) -> None:
    kubectl("apply", "--filename", str(ROOT / "manifests" / "operator" / "crd.yaml"))
    kubectl("create", "namespace", "elasticdl")
    kubectl.within("elasticdl").apply(allowing(folder))
    flags = [f"--kubeconfig={kubectl.kubeconfig}", "--http_port=0", "--masters_outside"]
    with (folder / "operator.log").open("wb") as log:
        operator = subprocess.Popen([command, "operator", *flags], stdout=log, stderr=log)
    course = Course()
    waiting: list[Managed] = []
    jobs: list[Managed] = []
    submitted: dict[str, float] = {}
    began = time.monotonic()
    try:
        while (now := time.monotonic() - began) < N_JOBS * GAP + HOLD:
            if len(jobs) < N_JOBS and now >= len(jobs) * GAP:
                job = new(kubectl, command, folder / f"mnist-{len(jobs)}").submit()
                submitted[job.name] = now
                jobs.append(job)
                waiting.append(job)
            waiting = [job for job in waiting if not job.start()]
            course.look(kubectl, submitted, time.monotonic() - began)
            time.sleep(LOOK_EVERY)
        course.report()
    finally:
        operator.kill()
        operator.wait()
        for job in jobs:
            job.end()


def new(kubectl: Kubectl, command: Path, folder: Path) -> Managed:
    folder.mkdir()
    fields: dict[str, Any] = {}
    return Managed(kubectl, command, "elasticdl:none", folder.name, folder, fields)


if __name__ == "__main__":
    main()
