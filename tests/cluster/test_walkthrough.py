# SPDX-License-Identifier: Apache-2.0
"""docs/minikube.md, command by command, on a cluster that is not minikube."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.cluster import Cluster
from harness.given import Given
from harness.kubectl import Kubectl
from harness.waiting import until
from jobs import ROOT, Client

sys.path.insert(0, str(ROOT / "tests" / "docs"))
from pages import SHELL, Block, blocks  # noqa: E402

PAGE = ROOT / "docs" / "minikube.md"
# Sections whose commands are run. The others start minikube, download an image, or need docker.
SECTIONS = ("An image", "Train", "Break it")
COMMAND_LIMIT = 400
# A reader repeats a command until it shows something.
LOOK_LIMIT = 240


class Reader:
    """Types the commands of the page, in a separate folder and namespace."""

    def __init__(self, client: Client, folder: Path, cluster: Cluster | Given) -> None:
        self.client, self.folder, self.cluster = client, folder, cluster
        for name in ("manifests", "model_zoo"):
            (folder / name).symlink_to(ROOT / name)
        tools = folder / "bin"
        tools.mkdir()
        (tools / "elasticdl").symlink_to(client.command)
        (tools / "kubectl").symlink_to(Path(client.kubectl.program).absolute())
        self.env = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "KUBECONFIG": str(self._kubeconfig()),
            "ELASTICDL_HOME": str(folder / "home"),
        }

    def _kubeconfig(self) -> Path:
        """The cluster's kubeconfig, with the test's namespace instead of `default`."""
        config = yaml.safe_load(Path(self.client.kubectl.kubeconfig).read_text())
        for context in config["contexts"]:
            context["context"]["namespace"] = self.client.kubectl.namespace
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    def types(self, line: str) -> None:
        if load := re.match(r"minikube image load (\S+)$", line):
            self.cluster.load_image(self.folder / load[1])
        elif line == "kubectl apply -f manifests/elasticdl-rbac.yaml":
            self.client.allow()
        elif line.startswith("kubectl get pod "):
            until(f"`{line}` shows a running job", lambda: runs(self._run(line).stdout), LOOK_LIMIT)
        elif line.startswith("kubectl logs "):
            until(f"`{line}` shows something", lambda: self._run(line).stdout, LOOK_LIMIT)
        else:
            done = self._run(self._here(line))
            assert done.returncode == 0, (
                f"`{line}` exited with code {done.returncode}:\n{done.stderr}"
            )

    def _here(self, line: str) -> str:
        """The same command for this cluster: with its folder and namespace, and half the epochs."""
        line = line.replace("host_path=/data", f"host_path={self.client.work}")
        line = line.replace("--namespace=default", f"--namespace={self.client.kubectl.namespace}")
        return line.replace("--num_epochs=2", "--num_epochs=1")

    def _run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT,
            check=False,
        )


def runs(listed: str) -> bool:
    """Whether all pods of a job run, including its master."""
    pods = [line.split() for line in listed.splitlines()[1:]]
    has_master = any("-master-" in name for name, *_ in pods)
    return has_master and all(status == "Running" for _, _, status, *_ in pods)


def commands() -> list[str]:
    """The commands of those sections, up to the first that needs docker."""
    text = PAGE.read_text().splitlines()
    found = []
    for block in blocks(PAGE):
        headings = [line[3:] for line in text[: block.line] if line.startswith("## ")]
        if headings[-1:] and headings[-1] in SECTIONS and block.language in SHELL:
            found += [] if needs_docker(block) else [line for line, _ in block.commands()]
    return found


def needs_docker(block: Block) -> bool:
    return "docker-env" in block.text


@pytest.fixture
def reader(cluster: Cluster | Given, command: Path, kubectl: Kubectl, tmp_path: Path) -> Reader:
    client = Client(command, "", kubectl, tmp_path)
    client.put_mnist()
    folder = tmp_path / "reader"
    folder.mkdir()
    return Reader(client, folder, cluster)


def test_the_walkthrough_works_as_written(reader: Reader) -> None:
    typed = commands()
    assert any(line.startswith("elasticdl audit") for line in typed), typed
    for line in typed:
        reader.types(line)
