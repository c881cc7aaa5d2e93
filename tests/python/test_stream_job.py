# SPDX-License-Identifier: Apache-2.0
"""Whole jobs that train a stream."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

import stream_script as script  # noqa: E402
from conftest import Cluster  # noqa: E402


def test_no_record_of_a_stream_is_passed_over_if_a_worker_and_its_positions_are_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder, kill = tmp_path / "stream", 9
    folder.mkdir()
    flags = ["--workers=2", f"--lanes={script.N_LANES}", "--job_name=stream"]
    cluster.run("run", *flags, script.__file__, str(folder), "2", str(kill))
    assert (folder / f"killed-{kill}").exists()
    assert len([*folder.glob("joined-*")]) == 3, "another worker took its place"
    model = torch.load(cluster.job("stream") / "output" / "model.pt")
    lanes = model["counts"].reshape(script.N_LANES, -1)
    assert lanes.sum() == lanes.numel(), "each step trained one batch of each lane"
    n_again = 0
    for lane in lanes:
        n_trained = int((lane > 0).sum())
        assert (lane[:n_trained] > 0).all(), "a record was passed over"
        again = int((lane[:n_trained] - 1).sum())
        assert again <= (script.N_LOST + 1) * script.BATCH, "only what follows the last position"
        n_again += again
    assert n_again > 0, "the positions were lost"
    audit = cluster.run("audit", "stream").stdout
    assert "the data is a stream: the records in these batches were trained at least once" in audit
