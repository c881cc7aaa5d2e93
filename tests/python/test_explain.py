# SPDX-License-Identifier: Apache-2.0
"""`elasticdl explain` after faults in Python code: it names the line.

`crates/elasticdl/tests/e2e/verdict.rs` has the other faults and the confusion matrix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import DATA, ROOT, Cluster

MODEL = """
import os

import numpy as np
import torch

{top}

def custom_model():
    return torch.nn.Linear(784, 10)

def loss(labels, predictions):
    return torch.nn.functional.cross_entropy(predictions, labels)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def deep_inside(batch):
    {body}

def feed(batch, mode, metadata):
    images = batch["image"].reshape(-1, 784).astype(np.float32)
    if "ELASTICDL_WORKER_ID" in os.environ:
        deep_inside(batch)
    return images, batch["label"]
"""

# The top of the module, the body of `deep_inside`, the cause, and text in the answer.
FAULTS = {
    "the Python code raises an error": (
        "",
        "raise RuntimeError('a bug in user code')",
        "code_error",
        ["RuntimeError: a bug in user code", "in deep_inside", "(records "],
    ),
    "the Python code never returns": (
        "",
        "while True: pass",
        "hang",
        ["no progress for 3s while training", "in deep_inside", "(records "],
    ),
    "the Python code never releases the interpreter lock": (
        "import ctypes",
        "ctypes.PyDLL(None).pause()",
        "hang",
        ["no progress for 3s while training", "in deep_inside", "(records "],
    ),
    "an import fails on a worker": (
        "if 'ELASTICDL_WORKER_ID' in os.environ:\n    import no_such_package_here",
        "pass",
        "code_error",
        ["ModuleNotFoundError", "no_such_package_here"],
    ),
    "Python crashes in native code": (
        "import ctypes",
        "ctypes.string_at(0)",
        "code_error",
        ["Fatal Python error: Segmentation fault", "in deep_inside", "(records "],
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_in_python_code_is_explained_with_its_line(
    cluster: Cluster, tmp_path: Path, what: str
) -> None:
    top, body, cause, expected = FAULTS[what]
    (tmp_path / "model.py").write_text(MODEL.format(top=top, body=body))
    cluster.run(
        "train",
        f"--model_def={tmp_path / 'model.py'}",
        f"--training_data={DATA / 'test'}",
        "--job_name=x",
        "--num_workers=1",
        "--task_timeout_secs=3",
        "--max_batch_failures=2",
        "--relaunch_on_worker_failure=1",
        code=1,
    )
    answer: dict[str, Any] = json.loads(cluster.run("explain", "x", "--json").stdout)
    text = cluster.run("explain", "x").stdout
    assert (answer["cause"], answer["advice"]) == (cause, "fix_code"), text
    assert answer["process"].startswith("worker-"), text
    for words in expected:
        assert words in text, text
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert f"| {what} | `{cause}` | `fix_code` |" in page


def test_a_job_that_waits_for_python_code_is_explained_with_its_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    model = MODEL.format(top="import time", body="time.sleep(10000)")
    (tmp_path / "model.py").write_text(model)
    flags = [f"--model_def={tmp_path / 'model.py'}", f"--training_data={DATA / 'test'}"]
    cluster.start("train", *flags, "--job_name=x", "--num_workers=1")

    def stalled() -> bool:
        return "without progress" in json.dumps(cluster.written_status("x") or {})

    cluster.wait("a stall", stalled)
    text = cluster.run("explain", "x").stdout
    for words in ["worker-0 hung", "in deep_inside", "elasticdl stop x", "(records "]:
        assert words in text, text
