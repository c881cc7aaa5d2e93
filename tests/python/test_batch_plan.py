# SPDX-License-Identifier: Apache-2.0
"""A second implementation of the batch plan: the records of a batch, in each version.

The Rust tests compare the real plan with `plans.json`; this file computes the same examples
independently. Run it as a program to print them.
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "crates/edl-core/src/batch/plans.json"
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    z = (word + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(*words: int) -> int:
    state = 0x5851F42D4C957F2D
    for word in words:
        state = mix(state ^ mix(word))
    return state


def shuffled_table(n: int, seed: int) -> list[int]:
    """Version 1: Fisher–Yates shuffle, with unbiased numbers from a SplitMix stream."""
    order, state = list(range(n)), seed
    for last in range(n - 1, 0, -1):
        limit = last + 1
        threshold = (-limit & MASK) % limit
        while True:
            wide = mix(state) * limit
            state = (state + GOLDEN) & MASK
            if wide & MASK >= threshold:
                break
        other = wide >> 64
        order[last], order[other] = order[other], order[last]
    return order


def computed_place(n: int, seed: int, place: int) -> int:
    """Version 2: twelve Feistel rounds over two halves, repeated until the number is below n."""
    n_high = math.isqrt(n - 1) + 1
    n_low = -(-n // n_high)
    keys = [key(seed, turn) for turn in range(12)]
    while True:
        high, low = divmod(place, n_low)
        for turn in range(0, 12, 2):
            high = (high + (mix(keys[turn] ^ low) * n_high >> 64)) % n_high
            low = (low + (mix(keys[turn + 1] ^ high) * n_low >> 64)) % n_low
        place = high * n_low + low
        if place < n:
            return place


def records(plan: dict, epoch: int, index: int) -> list[int]:
    n_records, size, seed = plan["n_records"], plan["minibatch_size"], plan["seed"]

    def at(n: int, seed: int, places: range) -> list[int]:
        if not plan["shuffle"]:
            return list(places)
        if plan["version"] == 1:
            return shuffled_table(n, seed)[places.start : places.stop]
        return [computed_place(n, seed, place) for place in places]

    per_shard = size * plan["batches_per_shard"]
    shard, in_shard = divmod(index, plan["batches_per_shard"])
    n_full = n_records // per_shard
    if shard < n_full:
        shard = at(n_full, key(seed, 1, epoch), range(shard, shard + 1))[0]
    start = shard * per_shard
    n = min(per_shard, n_records - start)
    places = range(in_shard * size, min(n, (in_shard + 1) * size))
    return [start + place for place in at(n, key(seed, 2, epoch, start), places)]


def plan(version: int, n_records: int, *, size: int = 10, seed: int = 3, shuffle: bool = True):
    return {
        "version": version,
        "n_records": n_records,
        "minibatch_size": size,
        "batches_per_shard": 8,
        "seed": seed,
        "shuffle": shuffle,
    }


def examples() -> list[dict]:
    cases = [
        (plan(version, n_records, size=size, seed=seed), epoch, index)
        for version in (1, 2)
        for n_records, size, seed, epoch, index in [
            (1, 10, 3, 0, 0),
            (1003, 10, 3, 1, 9),
            (1003, 10, 3, 1, 100),
            (60_000, 64, 2**64 - 1, 7, 11),
        ]
    ]
    cases.append((plan(2, 1003, shuffle=False), 1, 9))
    cases += [(plan(2, 10**9, size=64), epoch, 15_624_999) for epoch in (0, 1)]
    cases.append((plan(2, 10**9, size=64), 0, 1_000_000))
    return [
        {"plan": plan, "epoch": epoch, "index": index, "records": records(plan, epoch, index)}
        for plan, epoch, index in cases
    ]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("n_records", [1, 79, 80, 81, 1003])
def test_every_epoch_has_every_record_once(version: int, n_records: int) -> None:
    planned = plan(version, n_records)
    epochs = [
        [
            record
            for index in range(-(-n_records // 10))
            for record in records(planned, epoch, index)
        ]
        for epoch in range(4)
    ]
    for epoch in epochs:
        assert sorted(epoch) == list(range(n_records))
    assert n_records == 1 or all(first != second for first, second in pairwise(epochs))


def test_the_examples_of_the_rust_tests_match_the_plan() -> None:
    assert json.loads(EXAMPLES.read_text()) == examples()


if __name__ == "__main__":
    print(json.dumps(examples()))
