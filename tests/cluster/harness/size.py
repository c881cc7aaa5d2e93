# SPDX-License-Identifier: Apache-2.0
"""What a node has for pods. A real kubelet sees the whole machine, so the rest is set aside."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .waiting import Failure

# What a pod asks for that wants a GPU.
GPU = "nvidia.com/gpu"
UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
# Below this much free memory a kubelet evicts pods; it is not for pods, so it counts as set aside.
EVICTION = "100Mi"


@dataclass(frozen=True)
class Size:
    """What pods may ask of one node; none means all that there is."""

    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0

    def set_aside(self) -> dict[str, str]:
        """What a kubelet of this machine must keep back, so that this much is left for pods."""
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
    """`512Mi` and the like as bytes."""
    number = text.rstrip("KMGi")
    unit = text[len(number) :]
    if unit not in UNITS or not number.isdigit():
        raise Failure(f"`{text}` is no amount of memory; say for example 512Mi")
    return int(number) * UNITS[unit]


def _rest(what: str, has: int, wanted: int) -> int:
    if wanted > has:
        raise Failure(f"a real node cannot have more {what} than this machine: {wanted} of {has}")
    return has - wanted


def machine_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    raise Failure("the machine does not say how much memory it has")
