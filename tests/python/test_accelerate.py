# SPDX-License-Identifier: Apache-2.0
"""Training loops with Accelerate: whole jobs, and what they refuse."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from safetensors.torch import load_file  # noqa: E402

import accelerate_script as script  # noqa: E402
from conftest import ROOT, Cluster  # noqa: E402
from elasticdl import _state  # noqa: E402


def train(cluster: Cluster, folder: Path, n_workers: int, *kills: int) -> dict:
    """Runs a job; returns what its workers have at the end."""
    folder.mkdir()
    words = [script.__file__, str(folder), str(n_workers), *map(str, kills)]
    done, end = cluster.train(folder, words, n_workers, kills, script.N_LANES)
    assert done.stdout.count("ended after") + done.stderr.count("ended after") == 1
    assert [*folder.glob("loader-*")], "a loader has read ahead"
    return _state.parse(end)


def check(found: dict[str, torch.Tensor]) -> None:
    wanted = script.plain().state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], values) for name, values in wanted.items())


def test_a_loop_has_the_bits_of_one_process_after_a_kill(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    end = train(cluster, folder, 2, 3)
    check(end["model"])
    check(load_file(folder / "state" / "model.safetensors"))
    assert cluster.logged("killed") == {"loss": [*range(script.N_STEPS)]}


def test_the_example_changes_two_lines_and_runs_without_a_job(cluster: Cluster) -> None:
    example = ROOT / "examples" / "accelerate_classify.py"
    code = example.read_text()
    text = ast.get_docstring(ast.parse(code), clean=False)
    changed = [
        line for line in code.replace(text, "").splitlines() if re.search("elasticdl|epochs", line)
    ]
    assert len(changed) == 2, changed
    import runpy

    runpy.run_path(str(example), run_name="__main__")
