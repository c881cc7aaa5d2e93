# SPDX-License-Identifier: Apache-2.0
"""Datasets of shards: written by the libraries that define the formats, read by elasticdl."""

from __future__ import annotations

import os
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import datasets  # noqa: E402
import pyarrow  # noqa: E402
import pyarrow.feather  # noqa: E402
import pyarrow.parquet  # noqa: E402
import webdataset  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from elasticdl import _records, _shards, data  # noqa: E402

MDS = Path(__file__).with_name("mds")
ROWS = [{"n": n, "text": "t" * n, "vector": [n / 2, -1.0]} for n in range(23)]


def check(dataset: data.Shards, expected: list) -> None:
    """The dataset has these records, in any order, and in another process, too."""
    assert len(dataset) == len(expected)
    assert [*dataset] == expected
    order = np.random.default_rng(0).permutation(len(expected)).tolist()
    assert dataset.__getitems__(order) == [expected[number] for number in order]
    loader = DataLoader(dataset, batch_size=5, num_workers=1, collate_fn=list)
    assert [record for batch in loader for record in batch] == expected


@pytest.fixture
def tars(tmp_path: Path) -> list[str]:
    paths = []
    for shard, n_records in enumerate([4, 1, 6]):
        paths.append(str(tmp_path / f"train-{shard + 8:02}.tar"))
        with webdataset.TarWriter(paths[-1]) as writer:
            for number in range(n_records):
                record = {"__key__": f"a.b/{shard}{number:03}", "txt": f"text {number}"}
                writer.write({**record, "cls": number, "seg.JSON": [shard, number]})
    return paths


def by_webdataset(paths: list[str]) -> list[dict]:
    found = [*webdataset.WebDataset(paths, shardshuffle=False)]
    return [{k: v for k, v in one.items() if k != "__local_path__"} for one in found]


@pytest.mark.parametrize("pattern", ["train-*.tar", "train-{08..10}.tar", None])
def test_tar_files_have_the_records_of_webdataset(tars: list[str], pattern: str | None):
    sources = tars if pattern is None else str(Path(tars[0]).parent / pattern)
    expected = by_webdataset(tars)
    assert [record["seg.json"] for record in expected][4:6] == [b"[1, 0]", b"[2, 0]"]
    check(data.shards(sources), expected)


def test_files_that_belong_to_no_record_are_left_out(tmp_path: Path):
    (tmp_path / "content").write_text("x")
    names = ["__meta__", "readme", "folder/.hidden", "a.txt", "a.cls", "__more__/b.txt", "c.txt"]
    path = str(tmp_path / "odd.tar")
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("folder.d"))
        for name in names:
            tar.add(tmp_path / "content", name)
    check(data.shards([path]), by_webdataset([path]))


def test_a_compressed_tar_file_is_read_from_the_first_record_on(tars: list[str], tmp_path: Path):
    path = str(tmp_path / "packed.tar.gz")
    with tarfile.open(path, "w:gz") as packed, tarfile.open(tars[2]) as plain:
        for member in plain:
            packed.addfile(member, plain.extractfile(member))
    check(data.shards([path]), by_webdataset([path]))


def test_records_are_decoded_when_they_are_read(tars: list[str]):
    decode = webdataset.autodecode.Decoder([webdataset.autodecode.basichandlers])
    dataset = data.shards(tars, map=decode)
    assert (dataset[5]["cls"], dataset[5]["txt"]) == (0, "text 0")


def test_parquet_files_are_read_by_row_group(tmp_path: Path, monkeypatch):
    for part, rows in enumerate([ROWS[:9], [], ROWS[9:]]):
        table = pyarrow.Table.from_pylist(rows, schema=pyarrow.Table.from_pylist(ROWS).schema)
        pyarrow.parquet.write_table(table, tmp_path / f"{part}.parquet", row_group_size=4)
    loads = []
    opened = _shards.Parquet.open

    def count(self, index, number):
        loads.append(number)
        return opened(self, index, number)

    monkeypatch.setattr(_shards.Parquet, "open", count)
    dataset = data.shards(f"{tmp_path}/*.parquet")
    assert dataset.__getitems__([8, 1, 8, 0, 22]) == [ROWS[n] for n in (8, 1, 8, 0, 22)]
    assert loads == [2, 0, 3], "each once"
    check(dataset, ROWS)
    small = data.shards(f"{tmp_path}/*.parquet", cache=1)
    loads.clear()
    small.__getitems__([3, 4, 3, 4]), small.__getitems__([4, 3])
    assert loads == [0, 1], "two stay open"
    small.__getitems__([8]), small.__getitems__([3]), small.__getitems__([4])
    assert loads == [0, 1, 2, 1], "the one that was used longest ago is closed"


def test_arrow_files_of_both_formats_are_read(tmp_path: Path):
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.feather.write_feather(table[:10], str(tmp_path / "1.arrow"), "uncompressed")
    datasets.Dataset(table[10:]).save_to_disk(tmp_path / "saved")
    (saved,) = (tmp_path / "saved").glob("*.arrow")
    check(data.shards([tmp_path / "1.arrow", saved]), ROWS)


def test_datasets_of_hugging_face_are_used_as_they_are(tmp_path: Path):
    dataset = datasets.Dataset.from_list(ROWS).with_format("torch")
    batch = _records.Fetch(dataset.remove_columns("text"), None)(np.array([3, 1]))
    assert torch.equal(batch["n"], torch.tensor([3, 1]))
    assert torch.equal(batch["vector"], torch.tensor([[1.5, -1.0], [0.5, -1.0]]))


def test_streaming_datasets_of_hugging_face_are_read_by_shard(tmp_path: Path):
    for part, rows in enumerate([ROWS[:9], ROWS[9:]]):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{part}.parquet")
    files = [str(tmp_path / f"{part}.parquet") for part in (0, 1)]
    options = {"split": "train", "streaming": True, "cache_dir": str(tmp_path / "cache")}
    stream = datasets.load_dataset("parquet", data_files=files, **options)
    dataset = data.shards(stream.map(lambda row: {"n": row["n"] + 1}))
    assert len(dataset) == 23 and dataset.locate(9) == (1, 0)
    check(dataset, [{**row, "n": row["n"] + 1} for row in ROWS])


def test_shards_of_mosaicml_streaming_are_read():
    # Written by MDSWriter of mosaicml-streaming 0.13.
    dataset = data.shards(MDS)
    assert len(dataset) == 5 and len(dataset._shards) > 1
    for n, record in enumerate(dataset):
        e, f, i = (record.pop(name) for name in "efi")
        assert np.array_equal(e, np.arange(n + 1).reshape(1, -1)) and e.dtype == np.int64
        assert np.array_equal(f, np.array([n, 0.5], np.float32)) and f.dtype == np.float32
        assert np.array_equal(i, np.full((n + 1, 2), n)) and i.dtype == np.int16
        expected = {"a": n - 2, "b": "wört" * n, "c": bytes(range(n)), "d": {"n": [n, None]}}
        assert record == {**expected, "g": n / 3, "h": 10 ** (n * 6), "j": n}


class Numbers(torch.utils.data.IterableDataset):
    """Divides its records among the processes of a loader, as many streams do."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        yield from self._numbers if info is None else self._numbers[info.id :: info.num_workers]


def test_any_iterable_is_a_shard():
    sources = [range(5), range(5, 6), range(6, 20)]
    dataset = data.shards(sources, open=Numbers)
    check(dataset, [*range(20)])
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    assert torch.equal(torch.cat([*loader]), torch.arange(20)), "every process reads whole shards"


def test_shards_that_change_are_found():
    passes = iter([3, 4, 4])
    dataset = data.shards(["stream"], open=lambda _source: range(next(passes)))
    with pytest.raises(RuntimeError, match="`stream` has 4 records, but had 3"):
        dataset[0]
    with pytest.raises(ValueError, match="`stream` has 4 records, but 7 are expected"):
        data.shards(["stream"], open=lambda _source: range(next(passes)), counts=[7])[0]


def test_an_index_is_made_once_and_kept(tars: list[str], tmp_path: Path, monkeypatch):
    expected = by_webdataset(tars)
    job = tmp_path / "job"
    for folder, option in [(tmp_path / "mine", str(tmp_path / "mine")), (job / "data_index", None)]:
        monkeypatch.setenv("ELASTICDL_JOB_DIR", str(job))
        assert len(data.shards(tars, index=option)) == len(expected)
        assert len([*folder.glob("*.npz")]) == 3
    monkeypatch.setattr(_shards.Tar, "scan", None)
    dataset = data.shards(tars)
    assert [*dataset] == expected
    assert [*pickle.loads(pickle.dumps(dataset))] == expected
    os.utime(tars[0])
    with pytest.raises(TypeError, match="not callable"):  # It would be scanned again.
        data.shards(tars)


def test_streams_with_the_same_sources_have_their_own_indexes(tmp_path: Path, monkeypatch):
    def first(n: int) -> Callable[[str], range]:
        return lambda _source: range(n)

    data._N_CALLS.clear()
    monkeypatch.setenv("ELASTICDL_JOB_DIR", str(tmp_path / "job"))
    (tmp_path / "part").touch()
    for source in ("part", str(tmp_path / "part")):
        few, many = (data.shards([source], first(n), index=tmp_path / "kept") for n in (3, 5))
        assert ([*few], [*many]) == ([0, 1, 2], [0, 1, 2, 3, 4])
    streams = [datasets.Dataset.from_list(ROWS[:n]).to_iterable_dataset() for n in (2, 4)]
    few, many = map(data.shards, streams)
    assert ([*few], [*many]) == (ROWS[:2], ROWS[:4])
    assert not (tmp_path / "kept").exists(), "another run may open them differently"
    # A worker that starts later makes the same datasets, in the same order.
    data._N_CALLS.clear()
    monkeypatch.setattr(_shards.Stream, "scan", None)
    assert len(data.shards(["part"], first(3))) == 3


def test_counts_that_are_known_need_no_scan(tars: list[str], monkeypatch):
    scanned = []
    scan = _shards.Tar.scan
    monkeypatch.setattr(_shards.Tar, "scan", lambda self: scanned.append(self.name) or scan(self))
    dataset = data.shards(tars, counts=[4, 1, 6])
    assert dataset[4]["__key__"] == "a.b/1000" and scanned == [tars[1]]


@pytest.mark.parametrize(
    ("sources", "options", "sentence"),
    [
        ([], {}, "there are no shards"),
        (["missing.tar"], {}, "`missing.tar` does not exist; download it, or pass `open`"),
        ([__file__], {}, "is not known; use .tar, .parquet or .arrow files, or pass `open`"),
        (str(Path(__file__).parent), {}, "is a folder without `index.json`"),
        (["a"], {"open": iter, "counts": [1, 2]}, "1 shards, but `counts` has 2"),
    ],
)
def test_what_cannot_be_read_is_refused(sources, options, sentence):
    with pytest.raises((ValueError, FileNotFoundError), match=sentence):
        data.shards(sources, **options)


def test_a_stream_that_is_not_divided_into_shards_is_refused():
    with pytest.raises(TypeError, match="a Numbers, have no numbers; .*`elasticdl.data.shards"):
        _records.count(Numbers(range(3)))
