# SPDX-License-Identifier: Apache-2.0
"""Loaders whose processes read ahead, against a stand-in for the job's loop."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, get_worker_info  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

import elasticdl  # noqa: E402
import elasticdl.torch  # noqa: E402
from conftest import is_alive  # noqa: E402
from elasticdl import _read_ahead, _records  # noqa: E402

# The records and the seed of each turn; the second and the third are the same.
TURNS = [([3, 1], 11), ([0, 2], 22), ([0, 2], 22), ([7, 4], 33), ([5], 44), ([6, 6], 55)]
# What the job predicts after each turn, right or wrong.
RIGHT = [TURNS[n + 1 :] for n in range(len(TURNS))]
WRONG = [[([4, 5], 33), ([0, 2], 23)], TURNS[3:], [], [([5], 45)], [([5], 44)], []]
LIMIT = 60


class FakeLoop:
    """Asks for `turns`; predicts `guesses`."""

    turns = TURNS
    guesses = RIGHT
    is_script = False
    stepped = loaded = preemption = fail = again = None

    def __init__(self) -> None:
        self.n_turns = 0

    def attach(self, dense: np.ndarray, gradient: np.ndarray) -> None:
        dense[:] = 0

    def next(self):
        if self.n_turns == len(self.turns):
            return None
        records, seed = self.turns[self.n_turns]
        self.n_turns += 1
        return np.array(records, np.uint64), seed, self.n_turns - 1, True

    def upcoming(self, n: int):
        guesses = self.guesses[self.n_turns - 1][:n]
        return [(np.array(records, np.uint64), seed) for records, seed in guesses]

    def end(self):
        return len(self.turns), True

    def computed(self, loss: float) -> None:
        pass


class Noisy(Dataset):
    """Items with random numbers of all kinds; they say which process has read them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, record: int):
        is_loader = get_worker_info() is not None
        return record, torch.rand(2), np.random.rand(), random.random(), is_loader


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch, become_worker: Callable[[type], None]) -> None:
    become_worker(FakeLoop)
    monkeypatch.setattr(FakeLoop, "guesses", RIGHT)


def begin():
    model = nn.Linear(2, 1)
    return elasticdl.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), model


def by_job(**options):
    """Batches of the job's own loader."""
    job, model = begin()
    return job, model, job.batches(Noisy(), batch_size=2, **options)


def by_loader(**options):
    """Batches of a plain `DataLoader`."""
    job, model = begin()
    sampler = elasticdl.torch.ElasticSampler(job, 8, batch_size=2)
    return job, model, DataLoader(Noisy(), batch_sampler=sampler, **options)


def take(job, model, batches):
    """All batches, each with a random number that the loop draws, and which process read them."""
    seen, readers = [], []
    for *batch, is_loader in batches:
        seen.append([*batch, random.random()])
        readers += is_loader.tolist()
        model(batch[1]).mean().backward()
        job.allreduce(model)
        job.commit()
    return seen, readers


def check_equal(ours, theirs) -> None:
    assert len(ours) == len(theirs) == len(TURNS)
    for one, other, (records, _) in zip(ours, theirs, TURNS):
        assert one[0].tolist() == other[0].tolist() == records
        assert all(np.array_equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("open_batches", [by_job, by_loader])
@pytest.mark.parametrize("guesses", [RIGHT, WRONG])
def test_the_batches_do_not_depend_on_who_reads_them(monkeypatch, open_batches, guesses):
    monkeypatch.setattr(FakeLoop, "guesses", guesses)
    here, readers = take(*open_batches())
    assert not any(readers)
    first, again = here[1], here[2]
    assert torch.equal(first[1], again[1]), "random numbers follow from the batch"
    assert not torch.equal(here[0][1], first[1])
    assert here[0][3][0] != here[0][4], "the loop draws other numbers than the dataset"
    elsewhere, readers = take(*open_batches(num_workers=2, prefetch_factor=2))
    assert all(readers)
    check_equal(here, elsewhere)


def test_batches_are_read_before_they_are_requested(tmp_path):
    folder = tmp_path / "touched"
    folder.mkdir()

    class Touched(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, record: int) -> int:
            (folder / str(record)).touch()
            return record

    job, _ = begin()
    batches = job.batches(Touched(), batch_size=2, num_workers=1, prefetch_factor=3)
    assert next(batches).tolist() == TURNS[0][0]
    # The next three batches, of which two are the same.
    wait(lambda: {path.name for path in folder.iterdir()} == {*"310274"})


def test_batches_that_are_not_wanted_any_more_are_not_read(tmp_path):
    class Slow(Dataset):
        """Record 0 takes until it is released."""

        def __getitem__(self, record: int) -> int:
            (tmp_path / str(record)).touch()
            while record == 0 and not (tmp_path / "released").exists():
                time.sleep(0.001)
            return record

    reader = _read_ahead.Reader(_records.Fetch(Slow(), None), {"num_workers": 1})
    one, blocked, dropped, other = (np.array([number]) for number in (1, 0, 2, 3))
    assert reader.read(one, 1, lambda n: [(blocked, 2), (dropped, 3)][:n]).tolist() == [1]
    wait((tmp_path / "0").exists)
    reader._want({_read_ahead._key(other, 4): (4, other)})
    (tmp_path / "released").touch()
    assert reader.read(other, 4, lambda n: []).tolist() == [3]
    assert not (tmp_path / "2").exists()


def test_steps_read_ahead_too(monkeypatch):
    monkeypatch.setattr(FakeLoop, "is_script", True)
    monkeypatch.setattr(FakeLoop, "stepped", lambda self: None)
    lanes = [(np.array([1, 2], np.uint64), 5, 0, True), ("step", (7, 0.5), 0, True)]
    monkeypatch.setattr(FakeLoop, "next", lambda self: lanes.pop(0) if lanes else None)
    monkeypatch.setattr(FakeLoop, "upcoming", lambda self, n: [])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    job = elasticdl.init(model, optimizer)
    seen = []
    for step in job.steps(Noisy(), batch_size=2, num_workers=1):
        for records, x, *_, is_loader in step:
            seen.append((records.tolist(), is_loader.tolist()))
            model(x).mean().backward()
        optimizer.step()
    assert seen == [([1, 2], [True, True])]


def test_a_process_is_started_with_the_dataset_of_the_user():
    class Named(Dataset):
        name = ""

        def __len__(self) -> int:
            return 8

        def __getitem__(self, record: int) -> str:
            return self.name

    def start(worker_id: int) -> None:
        get_worker_info().dataset.name = f"process {worker_id}"

    job, _ = begin()
    sampler = elasticdl.torch.ElasticSampler(job, 8, batch_size=2)
    loader = DataLoader(Named(), batch_sampler=sampler, num_workers=1, worker_init_fn=start)
    assert next(iter(loader)) == ["process 0"] * 2


def test_an_error_in_a_process_reaches_the_loop():
    class Broken(Noisy):
        def __getitem__(self, record: int) -> None:
            raise OSError(f"cannot read record {record}")

    job, _ = begin()
    with pytest.raises(OSError, match="cannot read record 3"):
        next(job.batches(Broken(), num_workers=1))


def test_other_loaders_are_left_alone():
    loader = DataLoader(torch.arange(4), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_stateful_loader_takes_one_batch_after_the_other():
    job, model = begin()
    sampler = elasticdl.torch.ElasticSampler(job, 8, batch_size=2)
    seen, _ = take(job, model, StatefulDataLoader(Noisy(), batch_sampler=sampler))
    assert [batch[0].tolist() for batch in seen] == [records for records, _ in TURNS]
    job, _ = begin()
    sampler = elasticdl.torch.ElasticSampler(job, 8, batch_size=2)
    with pytest.raises(RuntimeError, match="`num_workers` only for the `DataLoader` of torch"):
        next(iter(StatefulDataLoader(Noisy(), batch_sampler=sampler, num_workers=1)))


@pytest.mark.parametrize(
    "options", [{"num_wokers": 2}, {"num_workers": 2, "in_order": False}, {"drop_last": True}]
)
def test_options_that_a_job_cannot_follow_are_refused_by_name(options):
    job, _ = begin()
    with pytest.raises(TypeError, match=f"`{[*options][-1]}` does not exist or does not work in a"):
        job.batches(Noisy(), **options)
    with pytest.raises(TypeError, match="use num_workers, prefetch_factor, pin_memory, "):
        job.steps(Noisy(), **options)


def test_the_order_of_a_loader_is_that_of_the_job():
    job, model, loader = by_loader(num_workers=2, in_order=False)
    seen, _ = take(job, model, loader)
    assert [batch[0].tolist() for batch in seen] == [records for records, _ in TURNS]


PARENT = """
import os, time
import numpy as np
from elasticdl import _read_ahead, _records

class Slow:
    def __getitem__(self, record):
        if record == 1:
            time.sleep(1000)
        return os.getpid()

reader = _read_ahead.Reader(_records.Fetch(Slow(), None), {"num_workers": 1})
print(reader.read(np.array([0]), 0, lambda n: [(np.array([1]), 1)]).item(), flush=True)
time.sleep(1000)
"""


def test_the_processes_end_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait(lambda: not is_alive(child))


def wait(look: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not look():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_processes_end_with_the_job(monkeypatch):
    pids: list[int] = []

    class Pids(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, record: int) -> int:
            return os.getpid()

    job, model = begin()
    for batch in job.batches(Pids(), num_workers=2, persistent_workers=True):
        pids += batch.tolist()
        model(torch.zeros(1, 2)).mean().backward()
        job.allreduce(model)
        job.commit()
    assert os.getpid() not in pids
    assert not any(map(is_alive, pids))
