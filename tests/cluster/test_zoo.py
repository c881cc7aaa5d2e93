# SPDX-License-Identifier: Apache-2.0
"""Images that `elasticdl zoo` builds without a daemon run on a real cluster, with the restrictions
of our pods.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import wanted
from harness.cluster import Cluster
from harness.given import Given
from harness.kubectl import Kubectl
from jobs import TARGET
from pods import await_phase, phase, pod, probe, service
from test_image import CONFINED

PORT = 8000
# Every node pulls the image before its first pod starts, so it must be small.
MAX_BYTES = 60_000_000
PROGRAMS = {"dynamic": TARGET / "release" / "elasticdl", "static": TARGET / "static" / "elasticdl"}
# A build inside the image: the registry of its base image is a Service, which DNS must resolve.
INNER = "ARG BASE_IMAGE=scratch\nFROM ${BASE_IMAGE}\n"


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Path:
    path = PROGRAMS[request.param]
    wanted.require(None if path.exists() else f"`{path}` is not built")
    return path


def zoo(program: Path, folder: Path, *args: str) -> str:
    """Runs `elasticdl zoo` in a folder, and returns its output."""
    environment = {**os.environ, "ELASTICDL_HOME": str(folder / "home")}
    command = [program, "zoo", *args]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def built(program: Path, folder: Path, name: str) -> tuple[Path, str]:
    """A native image with a folder of models, as a file, and its name with digest."""
    folder.mkdir()
    zoo(program, folder, "init", "--language=rust", "--model_zoo=model_zoo")
    inner = folder / "model_zoo" / "inner"
    inner.mkdir()
    (inner / "Dockerfile").write_text(INNER)
    args = ("build", f"--image={name}", "--builder=own", "--output=image.tar")
    return folder / "image.tar", zoo(program, folder, *args)


def test_a_zoo_image_runs_confined_and_finds_services(
    cluster: Cluster | Given, kubectl: Kubectl, program: Path, tmp_path: Path
) -> None:
    name = f"elasticdl:zoo-{program.parent.name}"
    image, _ = built(program, tmp_path / "first", name)
    assert image.stat().st_size <= MAX_BYTES
    cluster.load_image(image)

    kubectl.apply(pod("version", name, "--version", container={"securityContext": CONFINED}))
    await_phase(kubectl, "version", "Succeeded")
    expected = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert kubectl("logs", "version") == expected.stdout

    # The server does not use TLS, so both builds fail; their errors show how far they got.
    kubectl.apply(service("server", PORT), probe("server", "serve", f":{PORT}"))
    await_phase(kubectl, "server", "Running")
    known = failure(kubectl, name, "known", f"server.{kubectl.namespace}.svc:{PORT}/base:1")
    unknown = failure(kubectl, name, "unknown", f"unknown.{kubectl.namespace}.svc:{PORT}/base:1")
    assert "cannot reach registry" in known and "resolve" not in known and "lookup" not in known
    assert "resolve" in unknown or "lookup" in unknown, unknown


def failure(kubectl: Kubectl, image: str, name: str, base: str) -> str:
    """The error of a build in a pod that cannot get its base image."""
    args = ("zoo", "build", "--image=a:b", f"--base_image={base}", "/model_zoo/inner")
    container = {
        "securityContext": CONFINED,
        "env": [{"name": "ELASTICDL_HOME", "value": "/tmp"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    volumes = [{"name": "tmp", "emptyDir": {}}]
    kubectl.apply(pod(name, image, *args, container=container, volumes=volumes))
    await_phase(kubectl, name, "Failed")
    assert phase(kubectl, name) == "Failed"
    return kubectl("logs", name)


def test_the_same_zoo_gives_the_same_image(program: Path, tmp_path: Path) -> None:
    first, first_name = built(program, tmp_path / "first", "elasticdl:same")
    second, second_name = built(program, tmp_path / "second", "elasticdl:same")
    assert first_name == second_name
    assert first.read_bytes() == second.read_bytes()
