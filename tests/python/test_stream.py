# SPDX-License-Identifier: Apache-2.0
"""Streams: where workers continue in them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import datasets  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from elasticdl import ZooError, _records, _stream, data  # noqa: E402

N_LANES, BATCH = 2, 3


class Share(IterableDataset):
    """Every second number from the lane's on; `n_records` of them in a pass."""

    def __init__(self, lane: int, n_lanes: int, n_records: int = 10_000) -> None:
        self._numbers = range(lane, n_lanes * n_records, n_lanes)
        self._place = 0

    def __iter__(self) -> Iterator[int]:
        while self._place < len(self._numbers):
            self._place += 1
            yield self._numbers[self._place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


def batch(step: int, lane: int) -> list[int]:
    """What a lane trains in a step of a stream that is read once."""
    return [lane + N_LANES * (step * BATCH + place) for place in range(BATCH)]


@pytest.fixture
def worker(tmp_path: Path) -> Callable[..., Callable[[int, int], list]]:
    def start(source: Callable = Share, folder: Path | None = tmp_path) -> Callable:
        """Returns how a worker of the job reads a batch; it has read the one that checks it."""
        stream = data.stream(source, epoch_steps=100, at_least_once=True)
        stream.connect(folder)

        def read(step: int, lane: int) -> list:
            return stream.read(step, lane, N_LANES, BATCH)

        read(0, 0)
        return read

    return start


def test_a_worker_continues_where_another_one_was(worker, tmp_path: Path):
    first, second = worker(), worker()
    assert [first(step, 0) for step in range(3)] == [batch(step, 0) for step in range(3)]
    assert [second(step, 1) for step in range(3)] == [batch(step, 1) for step in range(3)]
    # The lanes change places, a step is repeated, and a worker joins.
    assert [first(3, 1), second(3, 0), first(3, 1)] == [batch(3, 1), batch(3, 0), batch(3, 1)]
    third = worker()
    assert [third(4, lane) for lane in (0, 1)] == [batch(4, lane) for lane in (0, 1)]
    # The job goes back to a checkpoint.
    assert [first(2, 0), first(3, 0), third(4, 0)] == [batch(step, 0) for step in (2, 3, 4)]
    assert worker(folder=None)(5, 1) == batch(0, 1), "without a folder, there is no other worker"


@pytest.mark.parametrize("is_torn", [False, True])
def test_records_after_the_last_position_are_read_again(worker, tmp_path: Path, is_torn: bool):
    first = worker()
    for step in range(6):
        first(step, 0)
    (file,) = (tmp_path / "stream_positions" / f"0-of-{N_LANES}").iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * 6
    if is_torn:  # A position that was being written.
        file.write_bytes(b"".join(lines[:-5]) + lines[-5][:-9])
    else:
        file.write_bytes(b"".join(lines[:-4]))
    place = 3 if is_torn else 4
    second = worker()
    assert second(6, 0) == batch(place, 0)
    assert second(7, 0) == batch(place + 1, 0)
    # The first worker was not lost.
    assert first(8, 0) == batch(place + 2, 0)


def test_the_position_that_is_furthest_back_holds(tmp_path: Path):
    ahead, behind = _stream._Positions(tmp_path), _stream._Positions(tmp_path)
    place = _stream._Position
    ahead.add(place(1, 3, b"1"))
    behind.add(place(1, 3, b"1"))
    behind.add(place(2, 3, b"behind"))
    ahead.add(place(2, 6, b"ahead"))
    assert ahead.at(2) == behind.at(2) == place(2, 3, b"behind")
    assert behind.at(1) == place(1, 3, b"1") and behind.at(0) is None
    behind.add(place(3, 6, b"3"))
    assert behind.at(3) == ahead.at(3) == place(3, 6, b"3")


def test_old_files_keep_their_last_position(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(_stream, "_FILE_STEPS", 4)
    positions = _stream._Positions(tmp_path)
    for step in range(1, 15):
        positions.add(_stream._Position(step, step, b"%d" % step))
    sizes = [(tmp_path / str(n)).read_bytes().count(b"\n") for n in range(4)]
    assert sizes == [1, 1, 8, 6]
    other = _stream._Positions(tmp_path)
    found = [other.at(step) for step in (2, 5, 7, 9, 14, 99)]
    assert [one and one.step for one in found] == [None, 3, 7, 9, 14, 14]


def test_a_full_disk_does_not_stop_a_worker(tmp_path: Path):
    (tmp_path / "no_folder").touch()
    positions = _stream._Positions(tmp_path / "no_folder")
    positions.add(_stream._Position(1, 3, b""))
    assert positions.at(2) is None


def test_a_share_that_ends_is_opened_again(worker):
    read = worker(lambda lane, n_lanes: Share(lane, n_lanes, 4))
    assert [read(step, 1) for step in range(3)] == [[1, 3, 5], [7, 1, 3], [5, 7, 1]]
    assert worker(lambda lane, n_lanes: Share(lane, n_lanes, 4))(2, 1) == [5, 7, 1]
    with pytest.raises(ValueError, match="share 1 of 2 of the stream has no records; use"):
        worker(lambda lane, n_lanes: Share(lane, n_lanes, 1 - lane))(0, 1)


def test_loaders_give_batches_and_continue_by_their_state(worker):
    def loader(lane: int, n_lanes: int) -> StatefulDataLoader:
        return StatefulDataLoader(Share(lane, n_lanes), batch_size=BATCH)

    first = worker(loader)
    for step in range(3):
        (found,) = first(step, 0)
        assert found.tolist() == batch(step, 0)
    assert worker(loader)(3, 0)[0].tolist() == batch(3, 0)


@pytest.mark.parametrize("n_shards", [1, N_LANES])
def test_streaming_datasets_of_hugging_face_are_divided_among_the_lanes(worker, n_shards: int):
    rows = datasets.Dataset.from_list([{"n": n} for n in range(60)])
    stream = rows.to_iterable_dataset(num_shards=n_shards)
    found = []
    for step in range(4):
        read = worker(stream)  # Another one in each step.
        found += [row["n"] for lane in range(N_LANES) for row in read(step, lane)]
    assert len({*found}) == len(found) == 4 * N_LANES * BATCH


class FakeJob:
    lanes, step = N_LANES, 0


def test_batches_are_made_of_the_numbers_that_the_job_shares_out():
    stream = data.stream(Share, epoch_steps=4, at_least_once=True)
    job = FakeJob()
    fetch = _stream.Fetch(stream, job, BATCH, None)

    def read(step: int, lane: int) -> list[int]:
        first = (step % 4 * N_LANES + lane) * BATCH
        return fetch(np.arange(first, first + BATCH)).tolist()

    assert read(0, 0) == batch(0, 0), "to show the model"
    for step in range(6):
        job.step = step
        assert [read(step, lane) for lane in range(N_LANES)] == [batch(step, 0), batch(step, 1)]
    job.step = 6
    assert read(5, 1) == batch(5, 1), "a worker without a lane gets its last batch again"
    assert read(6, 1) == batch(6, 1)
    assert _stream.Fetch(stream, job, BATCH, sum)(np.arange(15, 18)) == sum(batch(6, 1))


def plain_loader(lane: int, n_lanes: int) -> DataLoader:
    return DataLoader(Share(lane, n_lanes), batch_size=BATCH)


def loader_with_processes(lane: int, n_lanes: int) -> StatefulDataLoader:
    return StatefulDataLoader(Share(lane, n_lanes), batch_size=BATCH, num_workers=1)


def large_batches(lane: int, n_lanes: int) -> StatefulDataLoader:
    return StatefulDataLoader(Share(lane, n_lanes), batch_size=BATCH + 1)


def shuffled(_lane: int, _n_lanes: int) -> datasets.IterableDataset:
    stream = datasets.Dataset.from_list([{"n": 1}]).to_iterable_dataset()
    return stream.shuffle(buffer_size=5).map(lambda row: row)


def odd_state(lane: int, n_lanes: int) -> Share:
    share = Share(lane, n_lanes)
    share.state_dict = lambda: {"file": Path("x")}
    return share


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (plain_loader, "type DataLoader, which has no `state_dict`, so a worker that"),
        (loader_with_processes, "a StatefulDataLoader with num_workers=1, .* use num_workers=0"),
        (large_batches, "makes batches of 4 records, but the job's batches have 3"),
        (shuffled, "an? IterableDataset, is shuffled with a buffer, .* would be lost"),
        (odd_state, "position.file is a PosixPath; the state of"),
    ],
)
def test_shares_that_cannot_be_continued_are_refused(worker, source, sentence: str):
    with pytest.raises(ZooError, match=sentence):
        worker(source)(0, 0)


def test_a_stream_is_refused_unless_records_may_be_trained_again():
    with pytest.raises(ValueError, match="cannot promise that each record .* once: .* Pass"):
        data.stream(Share, epoch_steps=10)
    with pytest.raises(ValueError, match="epoch_steps=0; at least 1"):
        data.stream(Share, epoch_steps=0, at_least_once=True)
    with pytest.raises(TypeError, match="is a generator, which cannot be divided among the lanes"):
        data.stream((n for n in range(3)), epoch_steps=10, at_least_once=True)


@pytest.mark.parametrize("dataset", [Share(0, 1), (n for n in range(3)), iter([1])])
def test_an_error_about_data_without_numbers_offers_a_stream(dataset):
    with pytest.raises(TypeError, match=r"`elasticdl.data.stream\(…, at_least_once=True\)`"):
        _records.count(dataset)
