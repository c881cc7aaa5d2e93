# SPDX-License-Identifier: Apache-2.0
"""Shards of data in the formats that `elasticdl.data.shards` reads.

A shard is scanned once for an index, from which the number of its records follows. Records are read
by their place, piece by piece: a piece is what is opened or loaded to read any of its records.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Arrays by name; `ends` has the number of records up to the end of each piece.
Index = dict[str, np.ndarray]


class Piece(Protocol):
    """Consecutive records of a shard that are read together."""

    def read(self, places: list[int]) -> list[Any]:
        """Returns the records at these places of the piece."""
        ...


class Shard(Protocol):
    """A part of a dataset, with records in a fixed order."""

    name: str
    # What a stored index depends on.
    version: str
    # Whether the index follows from a file alone, so that other jobs can use it.
    is_file: bool

    def scan(self) -> Index: ...

    def open(self, index: Index, number: int) -> Piece: ...


class _Listed:
    """Records in memory."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records

    def read(self, places: list[int]) -> list[Any]:
        return [self._records[place] for place in places]


class Stream:
    """Whatever `open_source` makes of a source: records that can only be read from the first on.

    `call` distinguishes functions of the user, which can make anything of the same source.
    """

    def __init__(
        self, source: Any, open_source: Callable[[Any], Iterable[Any]], call: str = ""
    ) -> None:
        self.name = str(source)
        is_path = isinstance(source, (str, os.PathLike)) and os.path.exists(source)
        self.is_file = is_path and not call
        self.version = f"{call} {_version(source) if is_path else repr(source)}"
        self._source, self._open = source, open_source

    def scan(self) -> Index:
        with _undivided():
            return {"ends": np.array([sum(1 for _ in self._open(self._source))])}

    def open(self, index: Index, number: int) -> Piece:
        with _undivided():
            records = list(self._open(self._source))
        if len(records) != index["ends"][0]:
            raise RuntimeError(
                f"shard `{self.name}` has {len(records)} records, but had {index['ends'][0]} when "
                "they were counted; every pass must give the same records"
            )
        return _Listed(records)


class Tar:
    """A tar file of WebDataset: consecutive files with the same base name are a record."""

    is_file = True

    def __init__(self, path: str) -> None:
        self.name, self.version = path, _version(path)

    def scan(self) -> Index:
        records: list[list[int]] = []
        files: list[tuple[int, int, str]] = []
        key = None
        with tarfile.open(self.name, "r:") as tar:
            for member in tar:
                split = _split_name(member)
                if split is None:
                    continue
                if split[0] != key:
                    key = split[0]
                    records.append([])
                records[-1].append(len(files))
                files.append((member.offset_data, member.size, member.name))
                # Otherwise, tarfile keeps all of them.
                tar.members = []
        return {
            "ends": np.array([len(records)]),
            # The first file of each record, and the end of the last record.
            "first": np.array([numbers[0] for numbers in records] + [len(files)], np.int64),
            "offset": np.array([file[0] for file in files], np.int64),
            "size": np.array([file[1] for file in files], np.int64),
            "name": np.array([os.fsencode(file[2]) for file in files], np.bytes_),
        }

    def open(self, index: Index, number: int) -> Piece:
        return _OpenTar(self.name, index)


class _OpenTar:
    def __init__(self, path: str, index: Index) -> None:
        self._path, self._index = path, index
        self._file = io.FileIO(path)

    def read(self, places: list[int]) -> list[Any]:
        return [self._record(place) for place in places]

    def _record(self, place: int) -> dict[str, Any]:
        index = self._index
        record: dict[str, Any] = {}
        for number in range(index["first"][place], index["first"][place + 1]):
            match = _NAME.match(os.fsdecode(index["name"][number]))
            key, suffix = match[1], match[2].lower()
            record = record or {"__key__": key, "__url__": self._path}
            if suffix in record:
                raise ValueError(f"`{self._path}` has two files `{key}.{suffix}`; remove one")
            size, offset = int(index["size"][number]), int(index["offset"][number])
            # Unlike a seek, it does not depend on processes that share the file.
            content = os.pread(self._file.fileno(), size, offset)
            if len(content) < size:
                raise ValueError(f"`{self._path}` is shorter than when it was indexed")
            record[suffix] = content
        return record


# The base name ends at the first dot after the last slash.
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
# Such files describe the archive.
_META = re.compile(r"^__[^/]*__($|/)")


def _split_name(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Returns the base name and the suffix of a file that belongs to a record."""
    if not member.isreg() or _META.match(member.name):
        return None
    match = _NAME.match(member.name)
    return (match[1], match[2]) if match else None


def stream_tar(path: str) -> Iterator[dict[str, Any]]:
    """Reads the records of a compressed tar file from the first on."""
    record: dict[str, Any] = {}
    with tarfile.open(path, "r|*") as tar:
        for member in tar:
            split = _split_name(member)
            if split is None:
                continue
            key, suffix = split[0], split[1].lower()
            if record and record["__key__"] != key:
                yield record
                record = {}
            record = record or {"__key__": key, "__url__": path}
            record[suffix] = tar.extractfile(member).read()
    if record:
        yield record


class Parquet:
    """A Parquet file; its pieces are row groups."""

    is_file = True

    def __init__(self, path: str) -> None:
        self.name, self.version = path, _version(path)

    def scan(self) -> Index:
        with self._open() as file:
            groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
        groups = groups or [0]
        return {"ends": np.cumsum(groups, dtype=np.int64)}

    def open(self, index: Index, number: int) -> Piece:
        with self._open() as file:
            return _Rows(file.read_row_group(number, use_threads=False))

    def _open(self) -> Any:
        return _pyarrow("pyarrow.parquet").ParquetFile(self.name)


class Arrow:
    """An Arrow file in the file or in the stream format, as `datasets` writes them."""

    is_file = True

    def __init__(self, path: str) -> None:
        self.name, self.version = path, _version(path)

    def scan(self) -> Index:
        return {"ends": np.array([self._table().num_rows])}

    def open(self, index: Index, number: int) -> Piece:
        return _Rows(self._table())

    def _table(self) -> Any:
        pyarrow, ipc = _pyarrow("pyarrow"), _pyarrow("pyarrow.ipc")
        # Rows are loaded when they are read.
        mapped = pyarrow.memory_map(self.name)
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        return (ipc.open_file if is_file else ipc.open_stream)(mapped).read_all()


class _Rows:
    """Rows of a table, as dictionaries."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def read(self, places: list[int]) -> list[Any]:
        return self._table.take(places).to_pylist()


class Mds:
    """A shard of MosaicML Streaming, which `index.json` in its folder describes."""

    is_file = True

    def __init__(self, folder: str, described: dict[str, Any]) -> None:
        file = described["raw_data"]["basename"]
        self.name = os.path.join(folder, file)
        if (described["format"], described["version"]) != ("mds", 2):
            raise ValueError(f"`{self.name}` is not in the format MDS 2; convert it")
        if not os.path.exists(self.name):
            raise FileNotFoundError(
                f"`{self.name}` does not exist; copy or decompress the shards of `{folder}` first"
            )
        self.version = _version(self.name)
        self._n_records = described["samples"]
        names, encodings = described["column_names"], described["column_encodings"]
        self._columns = list(zip(names, encodings, described["column_sizes"]))
        for name, encoding in zip(names, encodings):
            if encoding.split(":")[0] not in _DECODERS:
                raise ValueError(
                    f"column `{name}` of `{self.name}` has the encoding {encoding}, which is not "
                    f"supported; use one of {', '.join(_DECODERS)}"
                )

    def scan(self) -> Index:
        return {"ends": np.array([self._n_records])}

    def open(self, index: Index, number: int) -> Piece:
        return _OpenMds(self.name, self._n_records, self._columns)


class _OpenMds:
    def __init__(self, path: str, n_records: int, columns: list[tuple[str, str, int | None]]):
        self._columns = columns
        self._file = io.FileIO(path)
        # After the number of records come the offset of each and the end of the last.
        offsets = os.pread(self._file.fileno(), 4 * (n_records + 1), 4)
        self._offsets = np.frombuffer(offsets, "<u4")
        if len(self._offsets) != n_records + 1:
            raise ValueError(f"`{path}` is incomplete; copy it again")

    def read(self, places: list[int]) -> list[Any]:
        return [self._record(place) for place in places]

    def _record(self, place: int) -> dict[str, Any]:
        begin, end = int(self._offsets[place]), int(self._offsets[place + 1])
        data = os.pread(self._file.fileno(), end - begin, begin)
        # First come the sizes of those columns whose size varies.
        n_varying = sum(not size for *_, size in self._columns)
        varying = iter(np.frombuffer(data, "<u4", n_varying).tolist())
        at, record = 4 * n_varying, {}
        for name, encoding, fixed in self._columns:
            size = fixed or next(varying)
            kind, _, options = encoding.partition(":")
            record[name] = _DECODERS[kind](data[at : at + size], options)
            at += size
        return record


def _scalar(dtype: str) -> Callable[[bytes, str], Any]:
    return lambda data, _options: np.frombuffer(data, dtype)[0]


def _array(data: bytes, options: str) -> np.ndarray:
    dtype, _, shape = options.partition(":")
    at = 0
    if not dtype:
        dtype, at = _MDS_DTYPES[data[0]], 1
    if shape:
        sizes = [int(size) for size in shape.split(",")]
    else:
        n_dims, width = data[at] >> 2, 1 << (data[at] & 3)
        sizes = np.frombuffer(data, f"<u{width}", n_dims, at + 1).tolist()
        at += 1 + n_dims * width
    return np.frombuffer(data, dtype, offset=at).reshape(sizes)


def _image(data: bytes, _options: str) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(data))


_MDS_DTYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32"},
    **{34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
_DECODERS: dict[str, Callable[[bytes, str], Any]] = {
    "bytes": lambda data, _options: data,
    "str": lambda data, _options: data.decode(),
    "int": lambda data, _options: int(np.frombuffer(data, "<i8")[0]),
    "str_int": lambda data, _options: int(data),
    "str_float": lambda data, _options: float(data),
    "json": lambda data, _options: json.loads(data),
    "ndarray": _array,
    "jpeg": _image,
    "png": _image,
    **{dtype: _scalar(dtype) for dtype in _MDS_DTYPES.values()},
}


def mds_shards(folder: str) -> list[Shard]:
    described = json.loads((Path(folder) / "index.json").read_text())
    return [Mds(folder, shard) for shard in described["shards"]]


def _version(path: Any) -> str:
    stat = os.stat(path)
    return f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns}"


@contextlib.contextmanager
def _undivided() -> Iterator[None]:
    """Hides that this process is one of several of a loader.

    Many streams give each process of a loader a part of their records, but a shard is read whole.
    """
    worker = sys.modules.get("torch.utils.data._utils.worker")
    info = getattr(worker, "_worker_info", None)
    if info is None:
        yield
        return
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


def _pyarrow(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "pyarrow is not installed; install it with `pip install pyarrow`", name="pyarrow"
        ) from None
