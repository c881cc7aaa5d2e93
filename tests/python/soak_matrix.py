# SPDX-License-Identifier: Apache-2.0
"""Scripts of many libraries, plain and elastic, for `make soak`: the same bits, whatever fails."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import conftest
import matrix
from conftest import Cluster
from elasticdl import _state

N_LANES = 4
# The steps in which a worker is killed, by the number of workers.
KILLS = {1: (), 2: (4, 8), 4: (2, 4, 6, 8, 10)}
# A test that reaches this limit hangs: large models take long where there are few cores.
LIMIT_SECS = 1800
# Runs a script with the arithmetic of a worker.
PLAIN = (
    "import runpy, sys; from elasticdl import _torch_flat; _torch_flat.make_repeatable(1); "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)


def write_data(name: str, folder: Path) -> None:
    """Writes what a script reads, with the library that defines the format."""
    random = np.random.default_rng(1)
    vectors = random.standard_normal((96, 6), np.float32)
    if name == "webdataset":
        import webdataset

        for shard, part in enumerate(np.split(vectors, [50, 57])):
            with webdataset.TarWriter(str(folder / f"{shard}.tar")) as tar:
                for n, x in enumerate(part):
                    label = b"%d" % (x.sum() > 0)
                    tar.write({"__key__": f"{n:03}", "x": x.tobytes(), "cls": label})
    if name == "mds":
        import streaming

        columns = {"x": "ndarray:float32:6", "y": "int"}
        with streaming.MDSWriter(out=str(folder / "mds"), columns=columns, size_limit=900) as mds:
            for x in vectors:
                mds.write({"x": x, "y": int(x.sum() > 0)})


class Matrix:
    """The runs of one script."""

    def __init__(self, name: str, cluster: Cluster, folder: Path) -> None:
        self._case, self._cluster, self._folder = matrix.CASES[name], cluster, folder
        self._env = {"DATA": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        write_data(name, folder)

    def plain(self) -> dict[str, torch.Tensor]:
        script = self._folder / "plain.py"
        script.write_text(self._case.plain)
        command = [sys.executable, "-c", PLAIN, str(script)]
        env = {**os.environ, **self._env, "PYTHONPATH": "", "OUT": str(self._folder / "plain.pt")}
        subprocess.run(command, env=env, check=True, timeout=LIMIT_SECS)
        return torch.load(self._folder / "plain.pt")

    def job(self, n_workers: int, n_lanes: int, kills: tuple[int, ...]) -> dict[str, torch.Tensor]:
        folder = self._folder / f"job-{n_workers}-{n_lanes}"
        folder.mkdir()
        for module in ("faults.py", "matrix_faults.py"):
            shutil.copy(Path(__file__).with_name(module), folder)
        lines = self._case.elastic.splitlines(keepends=True)
        imports = [n for n, line in enumerate(lines) if line.startswith(("import ", "from "))]
        lines.insert(imports[-1] + 1, "import matrix_faults\n")
        script = folder / "elastic.py"
        script.write_text("".join(lines))
        env = {**self._env, "FAULTS": json.dumps([str(folder), n_workers, kills])}
        flags = [f"--workers={n_workers}:{n_workers}", f"--lanes={n_lanes}"]
        self._cluster.run(
            "run", *flags, f"--job_name={folder.name}", str(script),
            OUT=str(folder / "end.pt"), **env,
        )  # fmt: skip
        self._cluster.run("audit", folder.name)
        assert {path.name for path in folder.glob("killed-*")} == {f"killed-{n}" for n in kills}
        joined = [int(path.name.split("-")[1]) for path in folder.glob("joined-*")]
        assert not kills or max(joined) > min(kills), "a worker got the state from another one"
        return torch.load(self._cluster.job(folder.name) / "output" / "model.pt")


@pytest.mark.parametrize("name", matrix.CASES)
def test_a_script_has_the_same_bits(
    name: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "LIMIT", LIMIT_SECS)
    missing = [one for one in matrix.CASES[name].needs if importlib.util.find_spec(one) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    runs = Matrix(name, cluster, tmp_path)
    # One lane trains what the loop of one process does.
    plain, alone = runs.plain(), runs.job(1, 1, ())
    assert plain.keys() == alone.keys()
    for name, values in plain.items():
        if "running_" in name:  # Statistics are averaged over lanes.
            torch.testing.assert_close(alone[name], values)
        else:
            assert torch.equal(alone[name], values), name
    ends = {n: _state.dump({"": dict(runs.job(n, N_LANES, kills))}) for n, kills in KILLS.items()}
    assert ends[1] == ends[2] == ends[4]
