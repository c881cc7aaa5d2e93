# SPDX-License-Identifier: Apache-2.0
"""Loading of the user's module, before its framework computes anything."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from elasticdl import _host

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
