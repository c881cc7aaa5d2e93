# SPDX-License-Identifier: Apache-2.0
"""Long variants of the tests of trainers, for `make soak`: other models, more workers and kills."""

from __future__ import annotations

from pathlib import Path

import pytest

import sft_script
import test_accelerate
import test_lightning
import test_transformers
from conftest import Cluster
from elasticdl import _state

KILLS = (2, 4, 5, 6, 7)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "lora"])
def test_hugging_face(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    alone = test_transformers.train(cluster, tmp_path / "alone", kind, 1)
    wanted = test_transformers.expected(tmp_path / "alone", kind)
    test_transformers.check(alone["model"], wanted)
    two = test_transformers.train(cluster, tmp_path / "two", kind, 2, 3, 6)
    four = test_transformers.train(cluster, tmp_path / "four", kind, 4, *KILLS)
    assert _state.dump(alone) == _state.dump(two) == _state.dump(four)


def test_trl(cluster: Cluster, tmp_path: Path) -> None:
    ends = set()
    for n_workers, kills in ((1, ()), (2, (3, 6))):
        folder = tmp_path / f"sft-{n_workers}"
        folder.mkdir()
        flags = [f"--workers={n_workers}:{n_workers}", "--lanes=3", f"--job_name={folder.name}"]
        words = [sft_script.__file__, str(folder), str(n_workers), *map(str, kills)]
        cluster.run("run", *flags, *words, **test_transformers.OFFLINE)
        cluster.run("audit", folder.name)
        ends |= {path.read_bytes() for path in folder.glob("end-*")}
    assert len(ends) == 1


def test_lightning_with_many_kills(cluster: Cluster, tmp_path: Path) -> None:
    end = test_lightning.train(cluster, tmp_path / "four", 4, *KILLS)
    test_lightning.check(end, tmp_path / "four")


def test_accelerate_with_many_kills(cluster: Cluster, tmp_path: Path) -> None:
    end = test_accelerate.train(cluster, tmp_path / "four", 4, *KILLS)
    test_accelerate.check(end["model"])
