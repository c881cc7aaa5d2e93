# SPDX-License-Identifier: Apache-2.0
"""The built command runs in a container, with the restrictions of our pods."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from harness.cluster import Cluster
from harness.given import Given
from harness.image import make_host_image, make_image
from harness.kubectl import Kubectl
from pods import await_phase, pod

GZIP = b"\x1f\x8b"
CONFINED = {
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def test_the_built_command_runs_in_a_confined_container(
    kubectl: Kubectl, image: str, command: Path
) -> None:
    confined = {"securityContext": CONFINED}
    kubectl.apply(pod("version", image, "--version", container=confined))
    await_phase(kubectl, "version", "Succeeded")
    expected = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert kubectl("logs", "version") == expected.stdout


def test_a_container_can_run_the_programs_of_the_machine(
    cluster: Cluster | Given, kubectl: Kubectl, tmp_path: Path
) -> None:
    cluster.load_image(make_host_image(tmp_path / "host.tar"))
    usr = {"name": "usr", "hostPath": {"path": "/usr"}}
    container = {
        "command": ["/bin/sh", "-c", "test -x /usr/bin/env && echo $((6 * 7))"],
        "volumeMounts": [{"name": "usr", "mountPath": "/usr", "readOnly": True}],
        "securityContext": CONFINED,
    }
    kubectl.apply(pod("host", "elasticdl-host:test", container=container, volumes=[usr]))
    await_phase(kubectl, "host", "Succeeded")
    assert kubectl("logs", "host") == "42\n"


def test_extra_files_and_folders_are_included(tmp_path: Path) -> None:
    zoo = tmp_path / "zoo"
    (zoo / "mnist").mkdir(parents=True)
    (zoo / "mnist" / "model.py").write_text("model = 1")
    made = make_image(Path("/bin/sh"), tmp_path / "image.tar", {"/zoo": zoo})
    with tarfile.open(made) as image:
        blobs = [image.extractfile(each) for each in image if each.name.startswith("blobs/")]
        layer = next(data for blob in blobs if (data := blob.read())[:2] == GZIP)
    with tarfile.open(fileobj=io.BytesIO(layer)) as files:
        names = {each.name for each in files}
    assert {"usr/local/bin/elasticdl", "zoo/mnist/model.py", "tmp"} <= names


def test_the_same_content_gives_the_same_image(tmp_path: Path) -> None:
    program = Path("/bin/sh")
    first, second = (make_image(program, tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
