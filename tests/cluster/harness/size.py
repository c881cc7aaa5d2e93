# SPDX-License-Identifier: Apache-2.0
"""Resources of a node for pods. A kubelet sees the whole machine, so the rest is reserved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .waiting import Failure

# The resource that pods with a GPU request.
GPU = "nvidia.com/gpu"
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
# With less free memory, a kubelet evicts pods; this memory counts as reserved.
EVICTION = "100Mi"


@dataclass(frozen=True)
class Size:
    """Resources of one node for pods; none means all."""

    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0

    def reserved(self) -> dict[str, str]:
        """The resources that a kubelet must reserve, so this much is left for pods."""
        kept = {}
        if self.cpu is not None:
            kept["cpu"] = f"{_rest('CPU', (os.cpu_count() or 1) * 1000, millicpus(self.cpu))}m"
        if self.memory is not None:
            has = machine_memory() - quantity(EVICTION)
            kept["memory"] = str(_rest("memory", has, quantity(self.memory)))
        return kept


def millicpus(text: str) -> int:
    """`0.5`, `500m` and `2` as thousandths of a CPU."""
    return int(text[:-1]) if text.endswith("m") else round(float(text) * 1000)


def quantity(text: str) -> int:
    """`512Mi` and so on as bytes."""
    number = text.rstrip("KMGi")
    unit = text[len(number) :]
    if unit not in UNITS or not number.isdigit():
        raise Failure(f"`{text}` is not an amount of memory; use for example 512Mi")
    return int(number) * UNITS[unit]


def _rest(what: str, has: int, wanted: int) -> int:
    if wanted > has:
        raise Failure(f"a real node cannot have more {what} than this machine: {wanted} of {has}")
    return has - wanted


def machine_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    raise Failure("cannot read the machine's amount of memory")
