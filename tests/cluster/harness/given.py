# SPDX-License-Identifier: Apache-2.0
"""A cluster that somebody else runs."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from .kubectl import Kubectl
from .waiting import Failure

# How images get into it, for example `minikube image load`; the tar file comes last.
LOAD_IMAGE = "K8S_LOAD_IMAGE"


class Impossible(Failure):
    """Only a cluster of the harness can do this by itself."""


class Given:
    """The cluster of a kubeconfig."""

    def __init__(self, kubeconfig: Path, program: Path | str) -> None:
        self.kubeconfig = kubeconfig
        self.kubectl = Kubectl(kubeconfig, program)

    def load_image(self, tar: Path) -> None:
        """Puts the images in `tar` where the cluster finds them."""
        command = os.environ.get(LOAD_IMAGE)
        if not command:
            raise Impossible(f"{LOAD_IMAGE} does not say how images get into this cluster")
        subprocess.run([*shlex.split(command), tar], check=True)
