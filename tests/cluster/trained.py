# SPDX-License-Identifier: Apache-2.0
"""A small training job on a cluster: submit it, inject faults, wait for it, check its result."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.kubectl import Kubectl
from harness.waiting import Failure, until
from jobs import rbac

ROOT = Path(__file__).parents[2]
DATA = ROOT / "data" / "fashion_mnist" / "test"
N_RECORDS = 2000
# Far longer than any job takes, even on a busy machine.
JOB_LIMIT = 400
PODS_LIMIT = 240
SUBMIT_LIMIT = 120
LABEL = "elasticdl_job_name"

Wanted = Callable[[dict[str, Any]], object]


@dataclass
class Job:
    """A job whose folder is a folder of this machine, the same on all nodes."""

    kubectl: Kubectl
    command: Path
    image: str
    name: str
    folder: Path
    fields: dict[str, Any] = field(default_factory=dict)

    def submit(self) -> Job:
        """Submits the job as a user does, detached."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Pods run as a different user.
        self.folder.chmod(0o777)
        self.kubectl.apply(*rbac(self.kubectl.namespace))
        description = self.folder / "submitted.yaml"
        description.write_text(json.dumps(self._spec()))
        self._run("train", "--config", str(description), "--detach")
        return self

    def resume(self) -> Job:
        self._run("train", "--resume", self.name, "--detach")
        return self

    def pods(self, role: str | None = None) -> list[dict[str, Any]]:
        """The job's pods that have not been deleted."""
        selector = f"{LABEL}={self.name}" + (f",elasticdl_replica_type={role}" if role else "")
        items = self.kubectl.json("get", "pods", "--selector", selector)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def running(self, role: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods(role) if pod["status"].get("phase") == "Running"]

    def pod_name(self, instance: str) -> str:
        return f"elasticdl-{self.name}-{instance}"

    def status(self) -> dict[str, Any]:
        """The last status that the master wrote; empty before the first one."""
        try:
            return json.loads((self.folder / "status.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def until(self, what: str, holds: Wanted, seconds: float = JOB_LIMIT) -> float:
        """Waits until the status fulfils the condition, and returns how long it took."""
        began = time.monotonic()

        def condition() -> object:
            status = self.status()
            if status.get("state") == "failed":
                raise Failure(f"the job failed: {status['reason']}\n{self.logs()}")
            return status and holds(status)

        until(f"{self.name}: {what}", condition, seconds, lambda: "\n" + self.logs())
        return time.monotonic() - began

    def until_pods(
        self, what: str, holds: Callable[[], object], seconds: float = PODS_LIMIT
    ) -> float:
        began = time.monotonic()
        until(f"{self.name}: {what}", holds, seconds, lambda: "\n" + self.logs())
        return time.monotonic() - began

    def logs(self) -> str:
        """The last log lines of every pod, and the states of the pods."""
        text = self.kubectl("get", "pods", "--output", "wide")
        for pod in self.pods():
            name = pod["metadata"]["name"]
            try:
                text += f"\n--- {name}\n" + self.kubectl("logs", name, "--tail=40")
            except Failure as failure:
                text += f"\n--- {name}: {failure}"
        return text

    def delete(self, instance: str) -> None:
        """Deletes the pod of a worker, a server or the master."""
        is_master = instance == "master"
        names = [pod["metadata"]["name"] for pod in self.running("master")] if is_master else []
        self.kubectl("delete", "pod", *(names or [self.pod_name(instance)]), "--wait=false")

    def succeeds(self) -> Job:
        """Waits until the job and its master's pod have succeeded."""
        self.until("it succeeds", lambda status: status["state"] == "succeeded")
        self.kubectl(
            "wait", f"job/{self.pod_name('master')}", "--for=condition=Complete", "--timeout=90s"
        )
        return self

    def assert_exactly_once(self, epochs: int) -> None:
        """Every record was trained once per epoch, according to the `count` model and the audit."""
        rows, totals = _counts(self.folder / "output" / "model.safetensors")
        assert len(rows) == N_RECORDS
        wrong = {row for row in rows if row != epochs}
        assert not wrong, f"records were trained {wrong} times, not {epochs}"
        assert set(totals) == {float(epochs * N_RECORDS)}
        self.assert_audit(epochs)

    def assert_audit(self, epochs: int, n_records: int = N_RECORDS) -> None:
        done = subprocess.run(
            [self.command, "audit", self.folder, "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        audited = json.loads(done.stdout)["epochs"]
        assert len(audited) == epochs
        for epoch in audited:
            found = (epoch["records"], epoch["missing"], epoch["duplicated"])
            assert found == (n_records, 0, 0), audited

    def weights(self) -> str:
        """The bytes of the result."""
        return hashlib.sha256((self.folder / "output/model.safetensors").read_bytes()).hexdigest()

    def _spec(self) -> dict[str, Any]:
        resources = "cpu=0.05,memory=256Mi"
        return {
            "job_name": self.name,
            "image_name": self.image,
            "image_pull_policy": "Never",
            "volume": f"host_path={ROOT}/data,mount_path={ROOT}/data;"
            f"host_path={self.folder},mount_path={self.folder}",
            "job_dir": str(self.folder),
            "training_data": str(DATA),
            "master_resource_request": resources,
            "ps_resource_request": resources,
            "worker_resource_request": resources,
            "heartbeat_timeout_secs": 5.0,
            **self.fields,
        }

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(
            [self.command, *arguments, f"--namespace={self.kubectl.namespace}"],
            env={**os.environ, "KUBECONFIG": str(self.kubectl.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=SUBMIT_LIMIT,
            check=False,
        )
        if done.returncode != 0:
            raise Failure(f"elasticdl {' '.join(arguments)}: {done.stderr}\n{self.logs()}")


def counting(**fields: Any) -> dict[str, Any]:
    """A job whose model counts applied records, and that runs long enough to inject faults."""
    return {
        "model_def": "count",
        "model_params": {"sleep_ms": "20"},
        "minibatch_size": 10,
        "num_minibatches_per_task": 4,
        "num_epochs": 3,
        "num_workers": 2,
        "num_ps_pods": 1,
        "checkpoint_steps": 100,
        "checkpoint_secs": 3,
        **fields,
    }


def has_checkpoint(status: dict[str, Any]) -> bool:
    return bool(status.get("last_checkpoint"))


def is_training(status: dict[str, Any]) -> bool:
    return status["state"] == "running" and status["records_done"] > 0


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _counts(path: Path) -> tuple[list[float], list[float]]:
    """How often each record was applied, and each dense total."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])

    def floats(name: str) -> list[float]:
        begin, end = header[name]["data_offsets"]
        part = data[8 + length + begin : 8 + length + end]
        return list(struct.unpack(f"<{len(part) // 4}f", part))

    return floats("count.rows"), floats("total")
