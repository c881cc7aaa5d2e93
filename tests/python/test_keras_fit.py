# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit`: whole jobs on the torch backend. `test_keras_elastic.py` tests the parts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("keras") is None:  # Not imported: that would be on another backend.
    pytest.skip("keras is not installed", allow_module_level=True)

from conftest import ROOT, Cluster  # noqa: E402
from elasticdl import _state  # noqa: E402

# Jobs run in processes of their own: Keras has one backend per process.
pytestmark = pytest.mark.backends("torch", "tensorflow")

SCRIPT = Path(__file__).parent / "keras_script.py"
EPOCHS, STEPS = 3, 8


def train(
    cluster: Cluster,
    folder: Path,
    n_workers: int,
    *kills: int,
    lanes: int = 2,
    backend: str = "torch",
    **env: str,
):
    """Runs a job; returns what its workers have at the end."""
    folder.mkdir()
    words = [str(SCRIPT), str(folder), str(n_workers), *map(str, kills)]
    return cluster.train(folder, words, n_workers, kills, lanes, KERAS_BACKEND=backend, **env)[1]


# JAX is in the soak: it compiles for each size of a batch, in each process.
@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_fit_has_the_same_bits_and_callbacks_for_any_workers_and_after_a_kill(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    alone = train(cluster, tmp_path / "alone", 1, backend=backend)
    assert train(cluster, tmp_path / "killed", 2, STEPS, backend=backend) == alone
    end = _state.parse(alone)
    batches = [f"batch {number}" for number in range(STEPS)]
    logs = "accuracy labels learning_rate loss val_accuracy val_labels val_loss"
    wanted = [[f"begin {epoch}", *batches, f"end {epoch} {logs}"] for epoch in range(EPOCHS)]
    assert end["seen"] == sum(wanted, [])
    assert {name: len(values) for name, values in end["history"].items()} == dict.fromkeys(
        logs.split(), EPOCHS
    )
    losses = end["history"]["val_loss"]
    np.testing.assert_allclose(end["history"]["learning_rate"], expected_rates(losses), rtol=1e-5)
    assert end["best"] == [int(np.argmin(losses)), min(losses), min(losses)]
    assert (tmp_path / "alone" / "best.keras").is_file()
    # The leader is lost before it can write that of the first epoch.
    assert (tmp_path / "killed" / "best.keras").is_file() or end["best"][0] == 0
    ends = [epoch * STEPS + STEPS - 1 for epoch in range(EPOCHS)]
    assert cluster.logged("killed") == dict.fromkeys(logs.split(), ends)
    outputs = (cluster.job("killed") / "logs").glob("worker-*.log")
    assert "Epoch 3/3" in "".join(path.read_text() for path in outputs), "after the leader's loss"
    exported = "model.pt" if backend == "torch" else "model.keras"
    assert (cluster.job("killed") / "output" / exported).is_file()
    params = json.loads((cluster.job("killed") / "model.json").read_text())["params"]
    states = [one["shape"] for one in params if one["name"].startswith("keras_")]
    assert states == [[5], [5], [], [], [], [], []], "batch norm, loss, accuracy and labels"
    check_labels(end, 125)
    assert end["again"].startswith("`fit()` was called, but this script has already trained")


def expected_rates(losses: list[float]) -> list[float]:
    """The rates of a schedule by epoch, and of ReduceLROnPlateau after epochs without progress."""
    rates, rate, best = [], 0.05, float("inf")
    for loss in losses:
        rate *= 0.9
        rates.append(rate)
        rate *= 1.0 if loss < best - 1e-4 else 0.5
        best = min(best, loss)
    return rates


def check_labels(end: dict, n_records: int) -> None:
    """Metrics are sums over the records of all lanes."""
    y = np.random.default_rng(1).standard_normal((n_records, 6)).astype("float32").sum(1) > 0
    np.testing.assert_allclose(end["history"]["labels"], [y.sum()] * EPOCHS, rtol=1e-5)


def test_metrics_are_sums_if_the_last_step_has_a_single_lane(
    cluster: Cluster, tmp_path: Path
) -> None:
    # Of three records. In the other test, it has two lanes of different sizes.
    check_labels(_state.parse(train(cluster, tmp_path / "records", 1, RECORDS="115")), 115)


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "jax"])
def test_a_job_of_one_lane_trains_like_keras(
    cluster: Cluster, tmp_path: Path, backend: str
) -> None:
    job = train(cluster, tmp_path / "plain", 1, lanes=1, backend=backend, PLAIN="1")
    found = _state.parse(job)
    code = (
        "import json, keras_script as script\n"
        "print(json.dumps(script.fit(script.model(True), [], True)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "KERAS_BACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    history = json.loads(done.stdout.strip().splitlines()[-1])
    assert history.keys() <= found["history"].keys()
    for name, values in history.items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-4, err_msg=name)


def test_what_a_job_cannot_follow_is_refused_before_it(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "refused.py"
    script.write_text(
        "import keras_script as script\n"
        "model = script.elasticdl.keras.elastic(script.model())\n"
        "model.fit(script.X, script.Y, initial_epoch=1)\n"
    )
    env = {"PYTHONPATH": str(SCRIPT.parent), "KERAS_BACKEND": "torch"}
    err = cluster.run("run", "--job_name=refused", str(script), code=2, **env).stderr
    assert "initial_epoch=1 does not work in a job: " in err and "Traceback" not in err, err
    assert not cluster.job("refused").exists()


def test_the_example_changes_two_lines() -> None:
    code = (ROOT / "examples" / "keras_classify.py").read_text()
    lines = [line.strip() for line in code.splitlines()[6:] if "elasticdl" in line]
    assert lines == ["import elasticdl.keras", "model = elasticdl.keras.elastic(model)"]
