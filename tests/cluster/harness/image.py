# SPDX-License-Identifier: Apache-2.0
"""Writes container images as files for `ctr images import`, without a daemon.

An image has a single layer. The same content gives the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

TYPE = "application/vnd.oci.image"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# The prefix that containerd adds to a name without a host; pods use the short name.
DEFAULT_PREFIX = "docker.io/library/"
PROGRAM = "usr/local/bin/elasticdl"
USER = "1000:1000"


@dataclass(frozen=True)
class File:
    """A file of an image: a copy of `source`, a link to `target`, or else an empty folder."""

    path: str
    source: Path | None = None
    target: str | None = None
    mode: int = 0o755


def make_image(
    binary: Path,
    out: Path,
    extra_files: Mapping[str, Path] | None = None,
    name: str = "elasticdl:test",
) -> Path:
    """Writes an image that runs `binary` as the command `elasticdl`, without root.

    The image includes the libraries that it needs. `extra_files` maps paths in the image to files
    or folders of this machine.
    """
    files = [File(PROGRAM, source=binary)]
    files += [File(str(library).lstrip("/"), source=library) for library in _libraries(binary)]
    for path, source in (extra_files or {}).items():
        files += _tree(path.strip("/"), source)
    write(out, name, files, entrypoint=[f"/{PROGRAM}"], user=USER)
    return out


def make_host_image(out: Path, name: str = "elasticdl-host:test") -> Path:
    """Writes an empty image: with the machine's `/usr` mounted on `/usr`, its containers can run
    any program of the machine, such as its Python."""
    links = [File(folder, target=f"usr/{folder}") for folder in ("bin", "lib", "lib64", "sbin")]
    linker_cache = File("etc/ld.so.cache", source=Path("/etc/ld.so.cache"), mode=0o644)
    write(out, name, [*links, File("usr"), linker_cache], entrypoint=[], user=USER)
    return out


def write(
    out: Path,
    name: str,
    files: Iterable[File],
    entrypoint: Sequence[str],
    command: Sequence[str] = (),
    user: str = "",
) -> None:
    """Writes the image `name` to the tar file `out`."""
    layer = _layer([File("tmp", mode=0o1777), *files])
    packed = gzip.compress(layer, compresslevel=1, mtime=0)
    machine = platform.machine()
    config = _json(
        {
            "architecture": MACHINES.get(machine, machine),
            "os": "linux",
            "config": {
                "Entrypoint": list(entrypoint),
                "Cmd": list(command),
                "User": user,
                "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
                "WorkingDir": "/",
            },
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{TYPE}.manifest.v1+json",
            "config": _describe(f"{TYPE}.config.v1+json", config),
            "layers": [_describe(f"{TYPE}.layer.v1.tar+gzip", packed)],
        }
    )
    full_name = name if "/" in name else DEFAULT_PREFIX + name
    named = {
        "io.containerd.image.name": full_name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    index = _json(
        {
            "schemaVersion": 2,
            "manifests": [
                {**_describe(f"{TYPE}.manifest.v1+json", manifest), "annotations": named}
            ],
        }
    )
    with tarfile.open(out, "w") as tar:
        _add(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}), 0o644)
        _add(tar, "index.json", index, 0o644)
        for blob in (config, packed, manifest):
            _add(tar, f"blobs/sha256/{_digest(blob).partition(':')[2]}", blob, 0o644)


def _layer(files: Iterable[File]) -> bytes:
    packed = io.BytesIO()
    folders: set[str] = set()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in files:
            for folder in reversed(PurePosixPath(file.path).parents[:-1]):
                if str(folder) not in folders:
                    folders.add(str(folder))
                    _add_special(tar, str(folder), tarfile.DIRTYPE, 0o755)
            if file.source is not None:
                _add(tar, file.path, file.source.read_bytes(), file.mode)
            elif file.target is not None:
                _add_special(tar, file.path, tarfile.SYMTYPE, 0o777, file.target)
            elif file.path not in folders:
                folders.add(file.path)
                _add_special(tar, file.path, tarfile.DIRTYPE, file.mode)
    return packed.getvalue()


def _add(tar: tarfile.TarFile, path: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


def _add_special(tar: tarfile.TarFile, path: str, kind: bytes, mode: int, link: str = "") -> None:
    entry = tarfile.TarInfo(path)
    entry.type, entry.mode, entry.linkname = kind, mode, link
    tar.addfile(entry)


def _tree(path: str, source: Path) -> list[File]:
    if not source.is_dir():
        return [File(path, source=source, mode=source.stat().st_mode & 0o777)]
    listed = sorted(each for each in source.rglob("*") if each.is_file())
    return [
        File(f"{path}/{each.relative_to(source)}", source=each, mode=each.stat().st_mode & 0o777)
        for each in listed
    ]


def _libraries(binary: Path) -> list[Path]:
    """The shared libraries of a program and its loader; none for a static program."""
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False)
    words = [line.split() for line in listed.stdout.splitlines()]
    return [Path(word) for line in words for word in line if word.startswith("/")]


def _describe(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
