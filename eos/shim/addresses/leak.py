"""The last look at what goes to a client: does it contain an upstream address?

Owns the search, whole or piece by piece. It knows no layout, so it also works where the layout is not known: an API
or a version newer than this program.
"""

from __future__ import annotations

from collections.abc import Mapping

from eos.shim.errors import Leak
from eos.shim.wire.frames import Piece


def check(frame: bytes, needles: Mapping[bytes, str], what: str) -> None:
    """Raises Leak when one of the needles is in the frame."""
    for needle, address in needles.items():
        if needle in frame:
            raise Leak(f"the upstream address {address} is in {what}")


class LeakScan:
    """A `Stream` that checks one frame; an address across two pieces is found before its last byte passes."""

    def __init__(self, needles: Mapping[bytes, str], what: str) -> None:
        self._needles, self._what = needles, what
        self._keep = max(map(len, needles), default=1) - 1
        self._tail = b""

    def feed(self, piece: Piece) -> Piece:
        seen = self._tail + piece
        check(seen, self._needles, self._what)
        self._tail = seen[max(0, len(seen) - self._keep) :]
        return piece
