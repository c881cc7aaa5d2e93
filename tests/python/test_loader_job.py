# SPDX-License-Identifier: Apache-2.0
"""Whole jobs whose loaders read shards ahead in other processes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import loader_script  # noqa: E402
from conftest import Cluster, is_alive  # noqa: E402


def write_shards(folder: Path) -> None:
    """Writes shards of different sizes, none of which is a multiple of a step."""
    random = np.random.default_rng(1)
    for shard, n_records in enumerate([50, 7, 61, 30]):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(n_records):
                x = random.standard_normal(6, np.float32)
                for suffix, content in (("x", x.tobytes()), ("y", b"%d" % (x.sum() > 0))):
                    member = tarfile.TarInfo(f"{number:04}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def train(cluster: Cluster, folder: Path, n_loaders: int, n_workers: int, *kills: int) -> dict:
    """Trains; returns the parameters of the model."""
    folder.mkdir()
    words = [loader_script.__file__, folder, n_loaders, n_workers, *kills]
    workers = [f"--workers={n_workers}", f"--min_workers={-(-n_workers // 2)}"]
    lanes = f"--lanes={loader_script.N_LANES}"
    cluster.run("run", *workers, lanes, f"--job_name={folder.name}", *map(str, words))
    cluster.run("audit", folder.name)
    for path in folder.glob("loader-*"):
        assert not is_alive(int(path.name.split("-")[1])), "a process of a loader is left"
    return torch.load(cluster.job(folder.name) / "output" / "model.pt")


def test_neither_loaders_nor_workers_that_join_or_die_in_a_shard_change_a_bit(
    cluster: Cluster, tmp_path: Path
) -> None:
    write_shards(tmp_path)
    alone = train(cluster, tmp_path / "alone", 0, 1)
    kill = 7
    ahead = tmp_path / "ahead"
    killed = train(cluster, ahead, 2, 2, kill)
    assert (ahead / f"killed-{kill}").exists()
    assert len([*ahead.glob("joined-*")]) == 3, "another worker took its place"
    assert alone.keys() == killed.keys()
    assert all(torch.equal(alone[name], killed[name]) for name in alone)
    index = cluster.job("ahead") / "data_index"
    assert len([*index.glob("*.npz")]) == 4, "each shard was scanned once for the job"
