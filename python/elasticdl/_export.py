# SPDX-License-Identifier: Apache-2.0
"""Exports a trained model in its framework's format: `python -m elasticdl._export JOB FOLDER`.

`JOB` is a JSON file with the job description. `FOLDER` contains the `model.safetensors` and
`model.json` that every job writes at its end; the export adds `model.keras` or `model.pt`.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np

from elasticdl import _host

_DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U64": "<u8"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name. The format is a JSON header followed by raw data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], _DTYPES[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


def export(job_json: str, folder: Path) -> list[str]:
    """Writes the model in `folder` in its framework's format; returns the file names."""
    spec = json.loads((folder / "model.json").read_text())["model"]
    tensors = read_safetensors(folder / "model.safetensors")
    parts = [tensors[param["name"]].reshape(-1) for param in spec["params"]]
    dense = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    tables = {
        table["name"]: (tensors[f"{table['name']}.ids"], tensors[f"{table['name']}.rows"])
        for table in spec["tables"]
    }
    return _host.open_model(job_json).export(str(folder), dense.astype(np.float32), tables)


def main() -> None:
    job, folder = sys.argv[1:]
    try:
        names = export(Path(job).read_text(), Path(folder))
    except Exception as error:
        sys.exit(_host.explain(error))
    print(" ".join(names), flush=True)
    # Everything is written; removing a framework's modules one by one takes up to a second.
    os._exit(0)


if __name__ == "__main__":
    main()
