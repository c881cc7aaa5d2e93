# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that train models of other types, on another device, and with unusual parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tensors_script  # noqa: E402
from conftest import Cluster  # noqa: E402
from elasticdl import _state  # noqa: E402

SCRIPT = tensors_script.__file__


@pytest.mark.parametrize("kind", ["parts", "device"])
def test_a_job_has_the_bits_of_a_loop_without_a_job(
    kind: str, cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    words = [SCRIPT, str(folder), kind, "2", "4"]
    lanes = f"--lanes={tensors_script.N_LANES}"
    cluster.run("run", "--workers=2", "--min_workers=1", lanes, "--job_name=job", *words)
    cluster.run("audit", "job")
    assert (folder / "killed-4").exists()
    assert len([*folder.glob("joined-*")]) == 3, "a worker got the state from another one"
    # Not in this process: it would have the second device from then on.
    subprocess.run([sys.executable, SCRIPT, str(folder), "plain", kind], check=True)
    expected = (folder / "plain").read_bytes()
    ends = [path.read_bytes() for path in folder.glob("end-*")]
    assert ends and all(end == expected for end in ends)
    model = _state.parse(expected)["model"]
    exported = torch.load(cluster.job("job") / "output" / "model.pt")
    assert _state.dump({"": dict(exported)}) == _state.dump({"": model})
