# SPDX-License-Identifier: Apache-2.0
"""The resources of a node for pods."""

from __future__ import annotations

import os

import pytest

from harness import size
from harness.size import Size
from harness.waiting import Failure


@pytest.mark.parametrize(("text", "thousandths"), [("2", 2000), ("0.5", 500), ("250m", 250)])
def test_cpus_are_counted_in_thousandths(text: str, thousandths: int) -> None:
    assert size.millicpus(text) == thousandths


def test_reserved_and_allocatable_resources_add_up_to_the_machine() -> None:
    kept = Size(cpu="0.3", memory="64Mi").reserved()
    assert size.millicpus(kept["cpu"]) + 300 == (os.cpu_count() or 1) * 1000
    left = size.machine_memory() - int(kept["memory"]) - size.quantity(size.EVICTION)
    assert left == size.quantity("64Mi")


def test_a_real_node_cannot_be_larger_than_the_machine() -> None:
    with pytest.raises(Failure, match="cannot have more CPU"):
        Size(cpu="4096").reserved()


@pytest.mark.parametrize("text", ["", "2GB", "half", "1.5Gi"])
def test_an_invalid_amount_of_memory_is_rejected(text: str) -> None:
    with pytest.raises(Failure, match="is not an amount of memory"):
        size.quantity(text)
