# SPDX-License-Identifier: Apache-2.0
"""kubectl as a function, for any cluster that has a kubeconfig."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from .waiting import Failure

COMMAND_LIMIT = 120


class Kubectl:
    """`kubectl("get", "pods")` returns the output of the command, or raises with its error."""

    def __init__(self, kubeconfig: Path, program: Path | str, namespace: str = "default") -> None:
        self.kubeconfig = kubeconfig
        self.program = program
        self.namespace = namespace

    def within(self, namespace: str) -> Kubectl:
        return Kubectl(self.kubeconfig, self.program, namespace)

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        command = [self.program, "--namespace", self.namespace, *arguments]
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            check=False,
        )
        if done.returncode != 0:
            raise Failure(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def json(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self(*arguments, "--output", "json"))

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """The object, or none if it does not exist."""
        found = self("get", kind, name, "--ignore-not-found", "--output", "json")
        return json.loads(found) if found.strip() else None

    def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self("apply", "--filename", "-", stdin=json.dumps(listed))
