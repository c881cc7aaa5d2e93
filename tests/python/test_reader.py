# SPDX-License-Identifier: Apache-2.0
"""`custom_data_reader`: records by number from a custom reader, and whole jobs with one."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import Cluster
from elasticdl import ZooError, _reader

MODULE = '''
import torch
from torch import nn


class Numbers:
    """Three shards of distinguishable rows."""

    def __init__(self, data_origin, records_per_task, scale="1"):
        assert data_origin == "a table", data_origin
        self.scale = float(scale)
        self.metadata = None

    def create_shards(self):
        return {SHARDS}

    def read_records(self, task):
        for at in range(task.shard.start, task.shard.end):
            number = hash_of(task.shard.name, at)
            {READ}
            yield [[number * self.scale, 1.0], at % 2]


def hash_of(name, at):
    return (len(name) * 1000 + ord(name[0]) + at) % 97 / 97


def custom_data_reader(data_origin, records_per_task, **params):
    return Numbers(data_origin, records_per_task, **params)


def custom_model():
    return nn.Linear(2, 2)


def loss(labels, predictions):
    return nn.functional.cross_entropy(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def feed(columns, mode, metadata):
    assert columns["0"].shape[1:] == (2,), columns
    return columns["0"], columns.get("1")
'''

SHARDS = '{"a": (0, 300), "bb": (100, 500), "c": (0, 160)}'


def module(folder: Path, shards: str = SHARDS, read: str = "pass") -> Path:
    path = folder / "numbers_model.py"
    path.write_text(MODULE.replace("{SHARDS}", shards).replace("{READ}", read))
    return path


def job_flags(name: str, path: Path, *more: str) -> list[str]:
    return [
        "train",
        f"--model_def={path}",
        f"--job_name={name}",
        "--training_data=a table",
        "--minibatch_size=16",
        "--num_minibatches_per_task=2",
        "--evaluation_epochs=false",
        *more,
    ]


class Rows:
    """A reader of a list that counts requests."""

    def __init__(self, shards: object, rows: dict[str, list]) -> None:
        self.shards = shards
        self.rows = rows
        self.requests: list[tuple[str, int, int]] = []

    def create_shards(self) -> object:
        return self.shards

    def read_records(self, task: SimpleNamespace) -> list:
        assert (task.shard_name, task.start, task.end) == (
            *(task.shard.name, task.shard.start, task.shard.end),
        )
        self.requests.append((task.shard.name, task.shard.start, task.shard.end))
        return self.rows[task.shard.name][task.shard.start : task.shard.end]


def reader(shards: object, block: int = 4, **rows: list) -> _reader.Reader:
    return _reader.Reader(Rows(shards, rows), "here", block)


def test_records_are_numbered_across_all_shards() -> None:
    shards = {"a": (2, 3), "none": (0, 0), "b": (0, 5)}
    read = reader(shards, a=list(range(10)), b=list(range(100, 110)))
    assert len(read) == 8
    assert read.records(range(8)) == [2, 3, 4, 100, 101, 102, 103, 104]
    assert read.records([7, 0, 3]) == [104, 2, 100]
    with pytest.raises(ZooError, match="there is no record 8"):
        read.records([8])


def test_shards_can_be_a_list_and_their_order_is_part_of_the_location() -> None:
    one = reader([("a", 0, 2), ("b", 0, 2)], a=[1, 2], b=[3, 4])
    other = reader([("b", 0, 2), ("a", 0, 2)], a=[1, 2], b=[3, 4])
    assert one.records(range(4)) == [1, 2, 3, 4]
    assert one.location.startswith("reader:4:") and one.location.endswith(":here")
    assert one.location != other.location


def test_a_range_is_read_once_for_adjacent_records() -> None:
    read = reader({"a": (0, 10)}, a=list(range(10)))
    read.records([5, 4, 7, 6, 5])
    assert read._made.requests == [("a", 4, 8)]


@pytest.mark.parametrize(("length", "found"), [(9, "1 record"), (8, "0 records")])
def test_a_reader_that_returns_too_few_records_is_refused(length: int, found: str) -> None:
    read = reader({"a": (0, 10)}, a=list(range(length)))
    with pytest.raises(ZooError, match=f"returned {found} for 8 to 10 of the shard `a`"):
        read.records([9])


def test_a_reader_that_returns_too_many_records_is_refused() -> None:
    read = reader({"a": (0, 2)}, a=[1, 2])
    read._made.read_records = lambda task: [1, 2, 3]
    with pytest.raises(ZooError, match="returned more than 2 records"):
        read.records([0])


def test_an_inconsistent_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reader, "MAX_KEPT", 4)
    read = reader({"a": (0, 8)}, a=list(range(8)))
    read.records([0, 4])
    read._made.rows["a"].reverse()
    with pytest.raises(ZooError, match="returned different records for 0 to 4 of the shard `a`"):
        read.records([0])


def test_records_are_converted_to_columns() -> None:
    rows = reader({"a": (0, 2)}, a=[(1, "x", [1.5, 2.5]), (2, "y", [3.5, 4.5])]).columns([1, 0])
    assert rows["0"].tolist() == [2, 1] and rows["0"].dtype == np.int64
    assert rows["1"] == [b"y", b"x"]
    assert rows["2"].tolist() == [[3.5, 4.5], [1.5, 2.5]] and rows["2"].dtype == np.float32
    named = reader({"a": (0, 1)}, a=[{"x": 1, "y": b"z"}])
    assert named.columns([0])["y"] == [b"z"]
    fields, is_raw = named.schema()
    assert [(f["name"], f["dtype"]) for f in fields] == [("x", "i64"), ("y", "bytes")]
    assert not is_raw
    assert reader({"a": (0, 1)}, a=[b"raw"]).schema()[1]


def test_an_invalid_reader_is_refused() -> None:
    with pytest.raises(ZooError, match="without `create_shards`"):
        _reader.Reader(object(), "here", 4)
    with pytest.raises(ZooError, match="`create_shards` must return"):
        reader(["a", "b"])


def weights(job: Path) -> str:
    return hashlib.sha256((job / "output" / "model.safetensors").read_bytes()).hexdigest()


def test_a_job_with_a_reader_is_bit_identical(cluster: Cluster, tmp_path: Path) -> None:
    path = module(tmp_path)
    more = ["--distribution_strategy=AllreduceStrategy", "--lanes=2"]
    for n_workers in (1, 2):
        flags = [*more, f"--num_workers={n_workers}", "--data_reader_params=scale=2"]
        cluster.run(*job_flags(f"bits-{n_workers}", path, *flags))
        audit = cluster.run("audit", f"bits-{n_workers}").stdout
        assert "960" in audit.replace(",", ""), audit
    assert weights(cluster.job("bits-1")) == weights(cluster.job("bits-2"))


def test_a_killed_worker_loses_no_record_of_a_reader(cluster: Cluster, tmp_path: Path) -> None:
    path = module(tmp_path, read="__import__('time').sleep(0.002)")
    job = cluster.start(*job_flags("killed", path, "--num_workers=2", "--num_epochs=2"))

    def pid() -> int | None:
        assert job.poll() is None, job.communicate()
        status = cluster.written_status("killed")
        if not status:
            return None
        workers = [i for i in status["instances"] if i["role"] == "worker" and i.get("pid")]
        return int(workers[0]["pid"]) if int(status["step"]) > 2 and workers else None

    os.kill(cluster.wait("training", pid), signal.SIGKILL)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0, out + err
    cluster.run("audit", "killed")


def test_a_reader_that_fails_shows_the_users_traceback(cluster: Cluster, tmp_path: Path) -> None:
    path = module(tmp_path, read="assert at != 321, 'row 321 is bad'")
    done = cluster.run(*job_flags("bad", path, "--num_workers=1"), code=1)
    assert "row 321 is bad" in done.stderr + done.stdout


def test_a_reader_without_records_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(*job_flags("none", module(tmp_path, shards="{}")), code=2)
    assert "`create_shards` of `custom_data_reader` found no records in `a table`" in done.stderr
    assert not cluster.job("none").exists()
