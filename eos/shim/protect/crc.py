"""The CRC-32C of bytes of which a few changed, without reading the others.

A CRC is linear: the checksums of two messages of one length differ by the checksum, without its first and last
inversion, of their difference. So a damaged batch stays damaged, compressed ones need no codec, and the cost grows with
the logarithm of the batch's size.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_ONE = 1 << 31  # the polynomial 1, reflected


def changed(crc: int, before: bytes, after: bytes, bytes_behind: int) -> int:
    """The CRC-32C once `before` is `after`, with `bytes_behind` unchanged bytes behind it and any number in front."""
    assert len(before) == len(after)
    difference = 0
    for old, new in zip(before, after, strict=True):
        difference ^= old ^ new
        for _ in range(8):
            difference = (difference >> 1) ^ (_POLYNOMIAL if difference & 1 else 0)
    return crc ^ _times(_zero_bytes(bytes_behind), difference)


def _times(a: int, b: int) -> int:
    """The product of two reflected polynomials modulo the CRC's."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _zero_bytes(count: int) -> int:
    """x to the power of 8 * count: what that many zero bytes do to a checksum."""
    power, result = _ONE >> 8, _ONE
    while count:
        if count & 1:
            result = _times(power, result)
        power = _times(power, power)
        count >>= 1
    return result
