# SPDX-License-Identifier: Apache-2.0
"""Lets pods run this machine's Python, with the wheel and the frameworks that tests install."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import wanted
from harness.cluster import Cluster
from harness.given import Given
from harness.image import make_host_image

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "elasticdl"
# `make python` installs the wheel there.
PYTHON = CACHE / "venv-wheel"


@dataclass(frozen=True)
class MachinePython:
    """An empty image, and what its pods need to run Python."""

    image: str
    volumes: tuple[str, ...]
    envs: str


def load(cluster: Cluster | Given, folder: Path, image: str) -> MachinePython:
    """Loads such an image on every node."""
    if isinstance(cluster, Given):
        pytest.skip("nodes of an external cluster do not have this machine's Python")
    missing = f"`{PYTHON}` does not exist; `make python` creates it"
    wanted.require(None if (PYTHON / "bin" / "elasticdl").exists() else missing)
    cluster.load_image(make_host_image(folder / "host.tar", image))
    script = "import sys; print(sys.base_prefix, sys.path[-1], sep='\\n')"
    done = subprocess.run(
        [PYTHON / "bin" / "python", "-c", script], capture_output=True, text=True, check=True
    )
    base, frameworks = done.stdout.split()
    folders = {Path("/usr"), PYTHON, Path(base), Path(frameworks)}
    volumes = tuple(f"host_path={each},mount_path={each}" for each in sorted(folders))
    return MachinePython(image, volumes, f"PATH={PYTHON}/bin:/usr/bin:/bin")
