# SPDX-License-Identifier: Apache-2.0
"""An external cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from .kubectl import Kubectl
from .waiting import Failure

# The command that loads images, for example `minikube image load`; the tar file is appended.
LOAD_IMAGE = "K8S_LOAD_IMAGE"


class Impossible(Failure):
    """Only a cluster of the harness supports this."""


class Given:
    """The cluster of a kubeconfig."""

    def __init__(self, kubeconfig: Path, program: Path | str) -> None:
        self.kubeconfig = kubeconfig
        self.kubectl = Kubectl(kubeconfig, program)

    def load_image(self, tar: Path) -> None:
        """Loads the images in `tar` into the cluster."""
        command = os.environ.get(LOAD_IMAGE)
        if not command:
            raise Impossible(f"{LOAD_IMAGE} is not set; it must be the command that loads images")
        subprocess.run([*shlex.split(command), tar], check=True)
