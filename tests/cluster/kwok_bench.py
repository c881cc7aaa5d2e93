#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the master of a job with many workers: pods on simulated nodes, a real API server and
scheduler, the master as a process of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import preflight
from harness.cluster import Cluster, Shape, down
from harness.kubectl import Kubectl
from harness.size import Size
from outside import outside
from trained import counting

WORKERS = 100
NODES = 10
NAME = f"bench-{os.getpid()}"
TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Counts the watch events for the job's pods. The API server ends watches that fall behind;
    they continue where they were."""

    def __init__(self, kubectl: Kubectl, job: str) -> None:
        pods = f"/api/v1/namespaces/{kubectl.namespace}/pods"
        self.url = f"{pods}?watch=true&labelSelector=elasticdl_job_name%3D{job}"
        self.command = [kubectl.program, "--kubeconfig", kubectl.kubeconfig, "get", "--raw"]
        self.events, self.has_ended = 0, False
        self.process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._count, daemon=True)
        self.thread.start()

    def _count(self) -> None:
        since = ""
        while not self.has_ended:
            self.process = subprocess.Popen(
                [*self.command, self.url + since], stdout=subprocess.PIPE
            )
            for line in self.process.stdout:
                self.events += 1
                version = json.loads(line)["object"]["metadata"]["resourceVersion"]
                since = f"&resourceVersion={version}"

    def end(self) -> None:
        self.has_ended = True
        self.process.terminate()
        self.thread.join()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    command = Path(sys.argv[1])
    if reason := preflight.why_not(0):
        print(f"kwok_bench is skipped: {reason}")
        return
    cluster = Cluster.up(NAME, Shape(fake_nodes=NODES, size=Size(cpu="32", memory="64Gi")))
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(cluster, command, Path(folder) / "many")
    finally:
        down(NAME)


def measure(cluster: Cluster, command: Path, folder: Path) -> None:
    fields = counting(num_workers=WORKERS, worker_resource_request="cpu=1,memory=1024Mi")
    job = outside(cluster.kubectl, command, folder, **fields)
    watch = Watch(cluster.kubectl, "many")
    began = time.monotonic()
    job.submit()
    try:
        pid = job.process.pid
        job.until_pods("all pods are created", lambda: len(job.pods("worker")) == WORKERS)
        made = time.monotonic() - began
        job.until_pods("all run", lambda: len(job.running("worker")) == WORKERS)
        ran = time.monotonic() - began
        report(
            f"{WORKERS} workers: pods created in {made:.1f} s, running in {ran:.1f} s", pid, watch
        )

        old = {pod["metadata"]["uid"] for pod in job.pods("worker")}
        selector = "elasticdl_job_name=many,elasticdl_replica_type=worker"
        began = time.monotonic()
        cluster.kubectl("delete", "pod", "--selector", selector, "--wait=false")

        def are_back() -> bool:
            living = {pod["metadata"]["uid"] for pod in job.running("worker")}
            return len(living - old) == WORKERS

        job.until_pods("all pods are replaced", are_back)
        back = time.monotonic() - began
        report(f"all {WORKERS} deleted at once: as many run again after {back:.1f} s", pid, watch)
    finally:
        watch.end()
        job.kill()


def report(what: str, pid: int, watch: Watch) -> None:
    cpu, memory = cpu_seconds(pid), memory_mb(pid)
    print(f"{what}; master so far: {cpu:.2f} s of CPU, {memory:.0f} MB, {watch.events} events")


if __name__ == "__main__":
    main()
