# SPDX-License-Identifier: Apache-2.0
"""The operator with `kubectl apply -k`: the same objects as with `-f`, and overlays.

`kubectl kustomize` only reads files, so no cluster is needed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import wanted
from harness import build, preflight
from jobs import ROOT

LIMIT = 60
OPERATOR = "training-job-controller"


@pytest.fixture(scope="module")
def kubectl() -> Path:
    wanted.require(preflight.why_no_control_plane())
    return build.programs() / "kubectl"


def kustomized(kubectl: Path, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    command = [kubectl, "kustomize", str(ROOT / folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return by_name(done.stdout)


def by_name(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    objects = list(yaml.safe_load_all(text))
    named = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(named) == len(objects), "two objects have the same name"
    return named


def test_the_base_has_the_objects_of_the_folder(kubectl: Path) -> None:
    files = sorted((ROOT / "manifests" / "operator").glob("*.yaml"))
    applied = by_name("---\n".join(file.read_text() for file in files))
    assert kustomized(kubectl, "manifests") == applied


def test_an_overlay_moves_the_operator_and_changes_its_settings(kubectl: Path) -> None:
    base = kustomized(kubectl, "manifests")
    overlay = kustomized(kubectl, "examples/kustomize")
    assert {kind for kind, _ in overlay} == {kind for kind, _ in base}
    assert ("Namespace", "training") in overlay
    for each in overlay.values():
        assert each["metadata"].get("namespace", "training") == "training", each
        for subject in each.get("subjects", []):
            assert subject["namespace"] == "training", each
    spec = overlay["Deployment", OPERATOR]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert spec["replicas"] == 2
    assert container["image"] == "registry.example.com/elasticdl:native"
    assert "--max_load_desired=0.9" in container["args"]
    # It reads its queues in its own namespace.
    assert "--namespace=$(POD_NAMESPACE)" in container["args"]
    [namespace] = [each for each in container["env"] if each["name"] == "POD_NAMESPACE"]
    assert namespace["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
