"""Encodes and decodes lineage: the header of an output that names its input, and the counts in the offset metadata.

Owns both formats; eos/app/lineage.py counts. Header `eos-lineage`: 28 bytes, little endian, `<iqiiq` (source partition,
source offset, i, n, number), then the source topic in UTF-8. Metadata: the key `lineage` of the JSON in the offset
metadata, `[begin, inputs, outputs]`.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass
from typing import NamedTuple

from eos.records import parse_metadata

HEADER = "eos-lineage"
KEY = "lineage"
OFFSET_FORMAT = 1  # the version of the offset metadata, its field `v`: docs/reference/formats.md
FORMAT = struct.Struct("<iqiiq")


class Source(NamedTuple):
    """Names the input record of an output, which is output `i` of `n`, and the `number`-th of its input partition."""

    topic: str
    partition: int
    offset: int
    i: int
    n: int
    number: int


def encode(source: Source) -> bytes:
    topic, *numbers = source
    return FORMAT.pack(*numbers) + topic.encode()


def decode(header: bytes) -> Source:
    """Return the source in a header. Raise ValueError for bytes that no worker wrote."""
    if len(header) <= FORMAT.size:
        raise ValueError(f"{len(header)} bytes cannot name a source: it takes {FORMAT.size} and a topic")
    return Source(header[FORMAT.size :].decode(), *FORMAT.unpack_from(header))


@dataclass
class Tally:
    """Holds the counts of one input partition: since offset `begin`, `inputs` were handled and produced `outputs`."""

    begin: int
    inputs: int = 0
    outputs: int = 0


def tally_of(metadata: str | None) -> Tally | None:
    """Return the counts in a committed offset's metadata, or None if it has none."""
    found = parse_metadata(metadata)
    try:
        begin, inputs, outputs = map(operator.index, found[KEY])
        if found.get("v", OFFSET_FORMAT) > OFFSET_FORMAT:
            return None
    except (ValueError, KeyError, TypeError):
        return None  # another program wrote the metadata, or a worker without lineage
    return Tally(begin, inputs, outputs)
