"""Update a CRC-32C after a few bytes have changed, without reading the other bytes.

A CRC is linear: the checksums of two messages of equal length differ by the checksum of their difference, computed
without the first and last inversion. So a damaged batch stays damaged, and a compressed batch needs no codec. The cost
grows with the logarithm of the batch's size: one table lookup per bit of the size and byte of the checksum.
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_Table = tuple[int, ...]
_Operator = tuple[_Table, _Table, _Table, _Table]  # a table per byte of the checksum, lowest byte first


def update(crc: int, before: bytes, after: bytes, bytes_behind: int) -> int:
    """Return the CRC-32C after `before` was replaced by `after`, with `bytes_behind` unchanged bytes after it."""
    assert len(before) == len(after)
    one_byte = _byte_table()
    difference = 0
    for old, new in zip(before, after, strict=True):
        difference = (difference >> 8) ^ one_byte[(difference ^ old ^ new) & 0xFF]
    power = 0
    while bytes_behind >> power and difference:
        if bytes_behind >> power & 1:
            difference = _apply(_zero_bytes(power), difference)
        power += 1
    return crc ^ difference


def _apply(operator: _Operator, crc: int) -> int:
    a, b, c, d = operator
    return a[crc & 0xFF] ^ b[crc >> 8 & 0xFF] ^ c[crc >> 16 & 0xFF] ^ d[crc >> 24]


@cache
def _byte_table() -> _Table:
    """Return the table that updates a checksum for one more byte."""

    def after(byte: int) -> int:
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        return byte

    return tuple(map(after, range(256)))


@cache
def _zero_bytes(power: int) -> _Operator:
    """Return the operator that updates a checksum for 2**power zero bytes."""
    if power == 0:
        one_byte = _byte_table()
        bits = [(bit >> 8) ^ one_byte[bit & 0xFF] for bit in (1 << at for at in range(32))]
    else:
        half = _zero_bytes(power - 1)
        bits = [_apply(half, _apply(half, 1 << at)) for at in range(32)]
    a, b, c, d = (_combine(bits[at : at + 8]) for at in range(0, 32, 8))
    return a, b, c, d


def _combine(bits: list[int]) -> _Table:
    """Return the value for each of 256 bytes from the values for the eight bits, because the operation is linear."""
    values = [0]
    for bit in bits:
        values += [value ^ bit for value in values]
    return tuple(values)
