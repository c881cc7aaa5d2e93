# SPDX-License-Identifier: Apache-2.0
"""Creates pods for tests, and waits for their phases."""

from __future__ import annotations

from typing import Any

from harness.kubectl import Kubectl
from harness.node import PROBE_IMAGE
from harness.waiting import Failure

# Far longer than any pod takes, even on a busy machine.
POD_LIMIT = 90


def probe(name: str, *command: str, **spec: Any) -> dict[str, Any]:
    """A pod that runs the harness's own probe."""
    return pod(name, PROBE_IMAGE, *command, **spec)


def pod(
    name: str,
    image: str,
    *command: str,
    container: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod with one container, whose image must already be on its node."""
    first = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "args": list(command),
        **(container or {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name, **(labels or {})}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "containers": [first],
            **spec,
        },
    }


def service(name: str, port: int) -> dict[str, Any]:
    """A Service for the pods with its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": port}]},
    }


def priority(name: str, value: int) -> dict[str, Any]:
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }


def phase(kubectl: Kubectl, name: str) -> str:
    """The phase of a pod; `Gone` if there is no such pod."""
    found = kubectl.find("pod", name)
    return found["status"].get("phase", "Pending") if found else "Gone"


def await_phase(kubectl: Kubectl, name: str, wanted: str) -> None:
    """Waits until an existing pod is in phase `wanted`; on failure, describes the pod."""
    holds = f"--for=jsonpath={{.status.phase}}={wanted}"
    try:
        kubectl("wait", f"pod/{name}", holds, f"--timeout={POD_LIMIT}s")
    except Failure as failure:
        raise Failure(f"{failure}\n{kubectl('describe', 'pod', name)}") from None
