# SPDX-License-Identifier: Apache-2.0
"""Reads protobuf messages without their description."""

from __future__ import annotations

from collections.abc import Iterator


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: numbers of variable length, or bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        length = {1: 8, 5: 4}.get(key & 7) or number()
        yield key >> 3, message[at : at + length]
        at += length
