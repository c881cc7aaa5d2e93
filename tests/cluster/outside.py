# SPDX-License-Identifier: Apache-2.0
"""A master outside of the cluster, with pods on simulated nodes: it knows only their phases."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from pathlib import Path
from typing import Any

from harness.kubectl import Kubectl
from jobs import rbac
from trained import Job

STOP_LIMIT = 20


class Outside(Job):
    """A job whose master is a process of this machine."""

    process: subprocess.Popen[bytes] | None = None

    def submit(self) -> Outside:
        self.run_master(json.dumps(self._spec()), secrets.token_hex(32))
        return self

    def run_master(self, described: str, key: str) -> None:
        # The API server rejects pods without their accounts.
        self.kubectl.apply(*rbac(self.kubectl.namespace))
        mounts = {"job": self.folder / "etc" / "job", "key": self.folder / "etc" / "key"}
        for mount in mounts.values():
            mount.mkdir(parents=True)
        (mounts["job"] / "job.yaml").write_text(described)
        (mounts["key"] / "job.key").write_text(key)
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubectl.kubeconfig),
            "POD_NAME": f"elasticdl-{self.name}-master",
            "POD_NAMESPACE": self.kubectl.namespace,
            "POD_IP": "127.0.0.1",
            "ELASTICDL_JOB_DIR": str(self.folder),
            "ELASTICDL_MASTER_ADDR": "127.0.0.1:0",
        }
        flags = [f"--{name}_mount={path}" for name, path in mounts.items()]
        with (self.folder / "master.log").open("wb") as log:
            self.process = subprocess.Popen(
                [self.command, "pod", "master", *flags, "--master_port=0", "--http_port=0"],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def end(self) -> None:
        """Kills the master."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(STOP_LIMIT)

    def kill(self) -> None:
        """Kills the master, and deletes its pods."""
        self.end()
        selector = f"elasticdl_job_name={self.name}"
        self.kubectl("delete", "pod", "--selector", selector, "--grace-period=0", "--force")

    def logs(self) -> str:
        log = (self.folder / "master.log").read_text()
        return f"{log[-4000:]}\n{self.kubectl('get', 'pods', '--output', 'wide')}"


def outside(kubectl: Kubectl, command: Path, folder: Path, **fields: Any) -> Outside:
    return Outside(kubectl, command, "elasticdl:none", folder.name, folder, fields)
