# SPDX-License-Identifier: Apache-2.0
"""The command as it is built here runs in a container, with as few rights as our pods have."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import wanted
from harness.cluster import Cluster
from harness.given import Given
from harness.image import make_image
from harness.kubectl import Kubectl
from pods import await_phase, pod

ROOT = Path(__file__).parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
CONFINED = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command without what only debuggers read."""
    built = TARGET / "release" / "elasticdl"
    wanted.require(None if built.exists() else f"`{built}` is not built")
    stripped = tmp_path_factory.mktemp("image") / "elasticdl"
    subprocess.run(["strip", "--strip-all", "-o", stripped, built], check=True)
    return stripped


def test_the_built_command_runs_in_a_confined_container(
    cluster: Cluster | Given, kubectl: Kubectl, binary: Path, tmp_path: Path
) -> None:
    licence = {"/licence/LICENSE": ROOT / "LICENSE"}
    image = make_image(binary, tmp_path / "image.tar", licence, name="elasticdl:harness")
    cluster.load_image(image)
    confined = {"securityContext": CONFINED}
    kubectl.apply(pod("version", "elasticdl:harness", "--version", container=confined))
    await_phase(kubectl, "version", "Succeeded")
    expected = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    assert kubectl("logs", "version") == expected.stdout


def test_the_same_content_gives_the_same_image(tmp_path: Path) -> None:
    program = Path("/bin/sh")
    first, second = (make_image(program, tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
