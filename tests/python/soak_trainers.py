# SPDX-License-Identifier: Apache-2.0
"""Long variants of the tests of trainers, for `make soak`: other models, more workers and kills."""

from __future__ import annotations

from pathlib import Path

import pytest

import accelerate_script
import lightning_script
import sft_script
import test_accelerate
import test_keras_fit
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


def test_lightning_from_the_end_of_an_epoch(cluster: Cluster, tmp_path: Path) -> None:
    whole = test_lightning.train(cluster, tmp_path / "whole", 2, ODD="1")
    place = tmp_path / "whole" / "best" / f"epoch=0-step={lightning_script.STEPS_PER_EPOCH}.ckpt"
    train = test_lightning.train
    again = train(cluster, tmp_path / "epoch", 1, ODD="1", RESUMED=str(place))
    place = tmp_path / "whole" / "steps" / f"epoch=0-step={lightning_script.SAVE_STEPS}.ckpt"
    killed = train(cluster, tmp_path / "step", 2, 8, ODD="1", RESUMED=str(place))
    for end in (again, killed):
        for name in ("model", "optimizer", "seen"):
            assert _state.difference(whole[name], end[name]) is None, name


def test_keras_on_jax(cluster: Cluster, tmp_path: Path) -> None:
    name = "test_fit_has_the_same_bits_and_callbacks_for_any_workers_and_after_a_kill"
    getattr(test_keras_fit, name)(cluster, tmp_path, "jax")


def test_accelerate_with_many_kills(cluster: Cluster, tmp_path: Path) -> None:
    end = test_accelerate.train(cluster, tmp_path / "four", 4, *KILLS)
    test_accelerate.check(end["model"])


def test_accelerate_from_the_end_of_an_epoch(cluster: Cluster, tmp_path: Path) -> None:
    whole = test_accelerate.train(cluster, tmp_path / "whole", 2)
    place = test_accelerate.place(tmp_path / "whole", 1, accelerate_script.STEPS_PER_EPOCH)
    end = test_accelerate.train(cluster, tmp_path / "again", 2, 8, **place)
    assert _state.difference(whole, end) is None
