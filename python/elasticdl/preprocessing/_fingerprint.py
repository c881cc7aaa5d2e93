# SPDX-License-Identifier: Apache-2.0
"""FarmHash's Fingerprint64 in numpy: the hash behind TensorFlow's `to_hash_bucket_fast`.

Strings of the same length are hashed together: each is a row of bytes, and every step operates on
whole columns of 64-bit words. Arithmetic wraps around, as in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_U64 = np.uint64
_K0 = _U64(0xC3A5C85C97CB3127)
_K1 = _U64(0xB492B66FBE98F273)
_K2 = _U64(0x9AE16A3B2F90404F)
_SEED = 81  # For strings longer than 64 bytes.


def fingerprint64(strings: Sequence[bytes]) -> np.ndarray:
    """Returns the fingerprint of each string as `uint64`.

    >>> [hex(one) for one in fingerprint64([b"", b"elastic"]).tolist()]
    ['0x9ae16a3b2f90404f', '0xcd8ac631b7ab3aa7']
    """
    lengths = np.fromiter(map(len, strings), np.int64, len(strings))
    hashes = np.empty(len(strings), np.uint64)
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length)
        joined = b"".join([strings[place] for place in places])
        rows = np.frombuffer(joined, np.uint8).reshape(len(places), length)
        hashes[places] = _hash(_Rows(rows))
    return hashes


class _Rows:
    """Strings of one length, read as little-endian words; offsets can count from the end."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.length = rows.shape[1]

    def byte(self, place: int) -> np.ndarray:
        return self.rows[:, place].astype(_U64)

    def half(self, place: int) -> np.ndarray:
        return self._word(place, 4, "<u4")

    def word(self, place: int) -> np.ndarray:
        return self._word(place, 8, "<u8")

    def _word(self, place: int, size: int, dtype: str) -> np.ndarray:
        place %= self.length
        cut = np.ascontiguousarray(self.rows[:, place : place + size])
        return cut.view(dtype)[:, 0].astype(_U64)


def _hash(text: _Rows) -> np.ndarray:
    if text.length > 64:
        return _long(text)
    if text.length > 32:
        return _up_to_64(text)
    if text.length > 16:
        return _up_to_32(text)
    if text.length >= 8:
        return _up_to_16(text)
    if text.length >= 4:
        return _up_to_7(text)
    return _up_to_3(text)


def _up_to_3(text: _Rows) -> np.ndarray:
    if text.length == 0:
        return np.full(len(text.rows), _K2)
    low = text.byte(0) + (text.byte(text.length >> 1) << _U64(8))
    high = _U64(text.length) + (text.byte(-1) << _U64(2))
    return _mix(low * _K2 ^ high * _K0) * _K2


def _up_to_7(text: _Rows) -> np.ndarray:
    first = _U64(text.length) + (text.half(0) << _U64(3))
    return _join(first, text.half(-4), _multiplier(text))


def _up_to_16(text: _Rows) -> np.ndarray:
    multiplier = _multiplier(text)
    first, last = text.word(0) + _K2, text.word(-8)
    left = _rotate(last, 37) * multiplier + first
    right = (_rotate(first, 25) + last) * multiplier
    return _join(left, right, multiplier)


def _up_to_32(text: _Rows) -> np.ndarray:
    multiplier = _multiplier(text)
    left, right = _ends(text, _K1)
    return _join(left, right, multiplier)


def _up_to_64(text: _Rows) -> np.ndarray:
    multiplier = _multiplier(text)
    left, right = _ends(text, _K2)
    both = _join(left, right, multiplier)
    third, fourth = text.word(16) * multiplier, text.word(24)
    fifth = (left + text.word(-32)) * multiplier
    sixth = (both + text.word(-24)) * multiplier
    left = _rotate(third + fourth, 43) + _rotate(fifth, 30) + sixth
    right = third + _rotate(fourth + text.word(0) * _K2, 18) + fifth
    return _join(left, right, multiplier)


def _ends(text: _Rows, factor: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    """Mixes the first and the last 16 bytes."""
    first, second = text.word(0) * factor, text.word(8)
    last, last_but_one = text.word(-8) * _multiplier(text), text.word(-16) * _K2
    left = _rotate(first + second, 43) + _rotate(last, 30) + last_but_one
    right = first + _rotate(second + _K2, 18) + last
    return left, right


def _long(text: _Rows) -> np.ndarray:
    n = len(text.rows)
    y = np.full(n, (_SEED * int(_K1) + 113) & 0xFFFF_FFFF_FFFF_FFFF, _U64)
    z = _mix(y * _K2 + _U64(113)) * _K2
    x = np.full(n, _SEED, _U64) * _K2 + text.word(0)
    v = w = (np.zeros(n, _U64), np.zeros(n, _U64))
    state = (x, y, z, v, w)
    n_blocks = (text.length - 1) // 64
    for block in range(n_blocks):
        state = _round(text, block * 64, state, _K1, _U64(1))
    x, y, z, v, w = state
    # The last 64 bytes are always processed, even if they overlap with a block.
    multiplier = _K1 + ((z & _U64(0xFF)) << _U64(1))
    w0 = w[0] + _U64((text.length - 1) & 63)
    v0 = v[0] + w0
    w0 = w0 + v0
    state = (x, y, z, (v0, v[1]), (w0, w[1]))
    x, y, z, v, w = _round(text, text.length - 64, state, multiplier, _U64(9))
    left = _join(v[0], w[0], multiplier) + _mix(y) * _K0 + z
    right = _join(v[1], w[1], multiplier) + x
    return _join(left, right, multiplier)


def _round(text: _Rows, at: int, state: tuple, multiplier: np.ndarray, weight: np.uint64) -> tuple:
    """Mixes 64 bytes into the state."""
    x, y, z, v, w = state
    x = _rotate(x + y + v[0] + text.word(at + 8), 37) * multiplier
    y = _rotate(y + v[1] + text.word(at + 48), 42) * multiplier
    x = x ^ (w[1] * weight)
    y = y + v[0] * weight + text.word(at + 40)
    z = _rotate(z + w[0], 33) * multiplier
    v = _weak(text, at, v[1] * multiplier, x + w[0])
    w = _weak(text, at + 32, z + w[1], y + text.word(at + 16))
    return z, y, x, v, w


def _weak(text: _Rows, at: int, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes 32 bytes quickly to 128 bits."""
    first, last = text.word(at), text.word(at + 24)
    a = a + first
    b = _rotate(b + a + last, 21)
    total = a + text.word(at + 8) + text.word(at + 16)
    return total + last, b + _rotate(total, 44) + a


def _multiplier(text: _Rows) -> np.ndarray:
    return np.full(1, _K2) + _U64(2 * text.length)


def _join(u: np.ndarray, v: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """Combines two words into one."""
    a = _mix((u ^ v) * multiplier)
    return _mix((v ^ a) * multiplier) * multiplier


def _mix(word: np.ndarray) -> np.ndarray:
    return word ^ (word >> _U64(47))


def _rotate(word: np.ndarray, n_bits: int) -> np.ndarray:
    return (word >> _U64(n_bits)) | (word << _U64(64 - n_bits))
