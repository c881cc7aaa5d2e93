# SPDX-License-Identifier: Apache-2.0
"""The state of a training script as bytes."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from elasticdl import ZooError, _state  # noqa: E402


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        is_tensor = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return is_tensor and a.untyped_storage() is not b.untyped_storage() and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def test_a_tree_is_read_back_as_it_was():
    tree = {
        "numbers": [0, -1, 1 << 80, 0.1, -0.0, math.inf, -math.inf, math.nan, True, None],
        "text": ("", "a\u00e9\n", ("nested",), []),
        3: {"deep": OrderedDict(x=1), -7: {}},
        "milestones": Counter({30: 1, 80: 2}),
        "tensors": [
            torch.tensor(1.5),
            torch.zeros(0, 3),
            torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
            torch.tensor([True, False]),
            torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
            torch.tensor([1, 255], dtype=torch.uint8),
        ],
    }
    read = _state.parse(_state.dump({"all": tree, "none": None}))
    assert same(read, {"all": tree, "none": None})
    assert isinstance(read["all"]["milestones"], Counter)
    assert _state.dump(read) == _state.dump({"all": tree, "none": None})


def test_the_state_of_optimizers_and_schedulers_is_read_back():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    objects = {"optimizer": optimizer, "scheduler": scheduler, "ema": average}
    states = {name: value.state_dict() for name, value in objects.items()}
    read = _state.parse(_state.dump(states))
    for name, value in objects.items():
        value.load_state_dict(read[name])
        assert _state.dump({name: value.state_dict()}) == _state.dump({name: states[name]})


def test_the_file_is_a_safetensors_file():
    data = _state.dump({"a": {"w": torch.ones(2)}})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["0"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert header["__metadata__"]["elasticdl.format"] == "1"
    assert len(data) == 8 + length + 8


class Foo:
    pass


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"state": {3: {"x": Foo()}}}, 'optimizer.state[3]["x"] is a Foo;'),
        ({"a b": Foo()}, 'optimizer["a b"] is a Foo;'),
        ([lambda: None], "optimizer[0] is a function;"),
        ({"x": {1}}, "optimizer.x is a set;"),
        ({"x": b"bytes"}, "optimizer.x is a bytes;"),
        ({"x": {1.5: 0}}, "the key 1.5 of optimizer.x is a float;"),
        ({"x": torch.ones(1, dtype=torch.complex64)}, "optimizer.x is a tensor of complex64"),
        ({"x": torch.ones(2).to_sparse()}, "optimizer.x is a tensor of sparse_coo"),
    ],
)
def test_anything_else_is_refused_by_its_path(tree, sentence):
    with pytest.raises(ZooError) as refused:
        _state.dump({"optimizer": tree})
    assert str(refused.value).startswith(sentence)


def test_damaged_bytes_are_refused():
    data = _state.dump({"a": {"w": torch.ones(3), "n": 1}})
    for length in range(len(data)):
        with pytest.raises(ZooError, match="is corrupt"):
            _state.parse(data[:length])
    for place in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[place] ^= 0x11
        with contextlib.suppress(ZooError):
            _state.parse(bytes(damaged))
    with pytest.raises(ZooError, match="it has format 2, this version reads 1"):
        _state.parse(data.replace(b'"elasticdl.format": "1"', b'"elasticdl.format": "2"'))


@pytest.mark.parametrize(
    "start", ["", "import torch; _state.hold_arrays()"], ids=["without", "for another purpose"]
)
def test_arrays_take_the_place_of_tensors_where_pytorch_does_not_train(
    tmp_path: Path, start: str
) -> None:
    code = """
import sys
import numpy as np
from elasticdl import _state
START
x = np.arange(6, dtype="float32").reshape(2, 3)
tree = {"x": x, "n": np.array(3, "int64"), "none": np.zeros((0, 2), "float16")}
data = _state.dump({"a": tree})
found = _state.parse(data)["a"]
assert _state.difference(tree, found) is None and found["x"].flags.writeable
assert _state.difference(tree, {**found, "n": np.array(4)}) == ("n",)
assert ("torch" in sys.modules) == bool("START")
open(sys.argv[1], "wb").write(data)
"""
    path = tmp_path / "state"
    code = code.replace("START", start)
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    tree = {"x": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}
    assert path.read_bytes() == _state.dump({"a": {**tree, "none": torch.zeros(0, 2).half()}})
