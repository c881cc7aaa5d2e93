# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit`: whole jobs on the torch backend, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("keras")

from conftest import ROOT, Cluster
from elasticdl import _state

# Jobs and refusals run in processes of their own: Keras has one backend per process.
pytestmark = pytest.mark.backends("torch", "tensorflow")

SCRIPT = Path(__file__).parent / "keras_script.py"
EPOCHS, STEPS = 3, 8


def train(cluster: Cluster, folder: Path, n_workers: int, *kills: int, lanes: int = 2, **env: str):
    """Runs a job; returns what its workers have at the end."""
    folder.mkdir()
    words = [str(SCRIPT), str(folder), str(n_workers), *map(str, kills)]
    return cluster.train(folder, words, n_workers, kills, lanes, **env)[1]


def test_fit_has_the_same_bits_and_callbacks_for_any_workers_and_after_a_kill(
    cluster: Cluster, tmp_path: Path
) -> None:
    alone = train(cluster, tmp_path / "alone", 1)
    assert train(cluster, tmp_path / "killed", 2, STEPS) == alone
    end = _state.parse(alone)
    batches = [f"batch {number}" for number in range(STEPS)]
    logs = "accuracy labels learning_rate loss val_accuracy val_labels val_loss"
    wanted = [[f"begin {epoch}", *batches, f"end {epoch} {logs}"] for epoch in range(EPOCHS)]
    assert end["seen"] == sum(wanted, [])
    assert {name: len(values) for name, values in end["history"].items()} == dict.fromkeys(
        logs.split(), EPOCHS
    )
    np.testing.assert_allclose(
        end["history"]["learning_rate"], [0.05 * 0.9**n for n in (1, 2, 3)], rtol=1e-5
    )
    losses = end["history"]["val_loss"]
    assert end["best"] == [int(np.argmin(losses)), min(losses), min(losses)]
    assert (tmp_path / "killed" / "best.keras").is_file()
    ends = [epoch * STEPS + STEPS - 1 for epoch in range(EPOCHS)]
    assert cluster.logged("killed") == dict.fromkeys(logs.split(), ends)
    outputs = (cluster.job("killed") / "logs").glob("worker-*.log")
    assert "Epoch 3/3" in "".join(path.read_text() for path in outputs), "after the leader's loss"
    params = json.loads((cluster.job("killed") / "model.json").read_text())["params"]
    states = [one["shape"] for one in params if one["name"].startswith("keras_")]
    assert states == [[5], [5], [], [], [], [], []], "batch norm, loss, accuracy and labels"


def test_metrics_are_sums_over_the_records_of_all_lanes(cluster: Cluster, tmp_path: Path) -> None:
    # The last step has two lanes of different sizes, or three records in a single lane.
    for n_records in (125, 115):
        name = f"records-{n_records}"
        end = _state.parse(train(cluster, tmp_path / name, 1, RECORDS=str(n_records)))
        y = np.random.default_rng(1).standard_normal((n_records, 6)).astype("float32").sum(1) > 0
        np.testing.assert_allclose(end["history"]["labels"], [y.sum()] * EPOCHS, rtol=1e-5)


def test_records_of_pandas_objects_are_taken_by_their_places() -> None:
    pytest.importorskip("pandas")
    code = """
import numpy as np, pandas as pd
import elasticdl.keras
x, y, order = np.arange(12.0).reshape(6, 2), np.arange(6), [3, 5, 0, 4, 1, 2]
frame, series = pd.DataFrame(x, index=order), pd.Series(y, index=order)
records = elasticdl.keras._Records({"x": frame}, series, None, 4, False)
found, labels = records.collate([0, 4])
assert found["x"].tolist() == [[0, 1], [8, 9]] and labels.tolist() == [0, 4], (found, labels)
rest, (_, labels, _) = records.split(0.5)
assert len(rest) == 3 and labels.tolist() == [3, 4, 5], labels
"""
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_job_of_one_lane_trains_like_keras(cluster: Cluster, tmp_path: Path) -> None:
    found = _state.parse(train(cluster, tmp_path / "plain", 1, lanes=1, PLAIN="1"))
    code = (
        "import json, keras_script as script\n"
        "print(json.dumps(script.fit(script.model(True), [], True)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    history = json.loads(done.stdout.strip().splitlines()[-1])
    assert history.keys() <= found["history"].keys()
    for name, values in history.items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-4, err_msg=name)


REFUSED = {
    "callback": ("fit(x, y, callbacks=[keras.callbacks.CSVLogger('log.csv')])", "`CSVLogger`"),
    "argument": ("fit(x, y, steps_per_epoch=3)", "steps_per_epoch=3 does not work in a job: "),
    "data": ("fit(Stream(), y)", "`fit` got a Stream, but a job assigns records by"),
    "labels": ("fit(loader, y)", "`fit` got `y` beside a DataLoader; its batches contain it"),
}

REFUSING = """
import os
os.environ["KERAS_BACKEND"] = {backend!r}
import keras
import numpy as np
import torch
import elasticdl.keras

class Own(keras.Model):
    def train_step(self, *args):
        return {{}}

class Fit(keras.Model):
    def fit(self, *args):
        return super().fit(*args)

class Stream:
    pass

x, y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
loader = torch.utils.data.DataLoader(list(zip(x, y)))
inputs = keras.Input((2,))
model = {kind}(inputs, keras.layers.Dense(1)(inputs))
model.compile({optimizer}, "mse", **{options})
elasticdl.keras.elastic(model).{call}
"""


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        *[({"call": call}, sentence) for call, sentence in REFUSED.values()],
        ({"kind": "Own"}, "the model `Own` overrides `train_step`"),
        ({"kind": "Fit"}, "the model `Fit` overrides `fit`"),
        (
            {"optimizer": "keras.optimizers.SGD(loss_scale_factor=8.0)"},
            "`loss_scale_factor` of the optimizer does not work in a job",
        ),
        ({"options": "{'jit_compile': True}"}, "jit_compile=True does not work in a job"),
        (
            {"backend": "tensorflow"},
            "Keras uses the backend `tensorflow`, but `fit` is only elastic on torch",
        ),
    ],
    ids=[*REFUSED, "train_step", "fit", "loss_scale_factor", "jit_compile", "backend"],
)
def test_what_a_job_cannot_follow_is_refused_by_name(
    cluster: Cluster, tmp_path: Path, values: dict[str, str], sentence: str
) -> None:
    parts = {"backend": "torch", "kind": "keras.Model", "call": "fit(x, y)"}
    parts |= {"optimizer": "'sgd'", "options": "{}", **values}
    (tmp_path / "refused.py").write_text(REFUSING.format(**parts))
    err = cluster.run("run", "--job_name=refused", str(tmp_path / "refused.py"), code=2).stderr
    assert sentence in err and "Traceback" not in err, err
    assert not cluster.job("refused").exists()


def test_the_example_changes_two_lines() -> None:
    code = (ROOT / "examples" / "keras_classify.py").read_text()
    lines = [line.strip() for line in code.splitlines()[6:] if "elasticdl" in line]
    assert lines == ["import elasticdl.keras", "model = elasticdl.keras.elastic(model)"]
