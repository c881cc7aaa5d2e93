# SPDX-License-Identifier: Apache-2.0
"""Loading of the user's module, before its framework computes anything."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from elasticdl import ZooError, _host

MODULE = """
import gc

was_enabled = gc.isenabled()
custom_model = loss = optimizer = print
"""


def load(folder: Path, text: str) -> _host.Zoo:
    folder.mkdir()
    path = folder / "model_of_a_user.py"
    path.write_text(text)
    return _host._load({"model_def": str(path), "model_zoo": "", "model_params": {}})


def test_garbage_is_collected_except_during_imports(tmp_path: Path) -> None:
    n_frozen = gc.get_freeze_count()
    assert not load(tmp_path / "good", MODULE).module.was_enabled
    assert gc.isenabled() and gc.get_freeze_count() > n_frozen
    with pytest.raises(ModuleNotFoundError):
        load(tmp_path / "bad", "import no_such_package_here")
    assert gc.isenabled(), "also after an import that failed"
    gc.unfreeze()


class Adapter:
    """Predicts ones, and fails to train after its feed."""

    dense = np.zeros(0, np.float32)
    watch = evaluate = None

    def begin_trial(self, watch: object) -> None:
        self.watch = watch

    def train(self, batch: _host.Batch, rows: list, seed: int) -> tuple[float, list]:
        if self.watch is not None:
            labels = {"a": batch.records, "b": None}
            self.watch((np.ones((2, 3), np.float32), "text"), labels)
        raise ValueError("no such shape")

    def predict(self, batch: _host.Batch, rows: list) -> np.ndarray:
        return np.ones((len(batch), 1), np.float32)


def test_a_trial_shows_what_feed_returned_and_processes_no_predictions() -> None:
    processed = []
    processor = SimpleNamespace(process=lambda *call: processed.append(call))
    zoo = SimpleNamespace(prediction_outputs_processor=processor)
    hosted = _host.Hosted(Adapter(), zoo, {})
    batch = _host.Batch({}, np.arange(2, dtype=np.uint64))
    hosted.predict(batch, [])
    assert len(processed) == 1
    with pytest.raises(ValueError, match="^no such shape$"):
        hosted.train(batch, [], 1)
    hosted.begin_trial()
    hosted.predict(batch, [])
    assert len(processed) == 1
    with pytest.raises(ZooError) as raised:
        hosted.train(batch, [], 1)
    lines = str(raised.value).splitlines()
    assert lines[-2:] == [
        "ValueError: no such shape",
        "`feed` returned the features (float32 [2, 3], str) and the labels "
        "{a: uint64 [2], b: NoneType}",
    ]
