"""Keep clients on the shim by rewriting addresses, and close a connection before an address would leak.

The job is always in the pipeline, on the broker's side of the other jobs. It must never forward a response that it
could not read to its end. The final search for addresses needs no layout, so it also covers APIs and versions that are
newer than this program.
"""

from __future__ import annotations

from collections.abc import Mapping

from eos.shim.addresses import fetch, layouts
from eos.shim.addresses.book import AddressBook
from eos.shim.errors import Leak
from eos.shim.pipeline import Exchange, Job
from eos.shim.wire import api
from eos.shim.wire.frames import Piece, Stream

# APIs with addresses of controllers, which clients rarely use. Responses are searched and not rewritten.
# Vote, BeginQuorumEpoch, EndQuorumEpoch, DescribeQuorum, FetchSnapshot, UpdateRaftVoter
_WATCHED = frozenset({52, 53, 54, 55, 59, 82})

# Fetch responses up to this size are collected and rewritten; larger ones stream, with their endpoints hidden.
WHOLE_FETCH_BYTES = 64 * 1024


class AddressJob(Job):
    def __init__(self, book: AddressBook) -> None:
        self._book = book

    def wants_response(self, api_key: int, version: int) -> bool:
        known = layouts.KNOWN.get(api_key)
        if known is None:
            return api_key in _WATCHED or api_key > api.NEWEST_KNOWN
        return version >= known[0]

    def response_stream(self, exchange: Exchange, size: int) -> Stream | None:
        if not self._layout_known(exchange):
            return LeakScan(self._book.search_patterns, _describe(exchange))
        if exchange.api_key == api.FETCH and size > WHOLE_FETCH_BYTES:
            return fetch.HideEndpoints(size)
        return None

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        key, version = exchange.api_key, exchange.version
        if key == api.FETCH:
            # Records may contain any bytes, so a Fetch response is not searched.
            return layouts.rewrite(frame, fetch.find(frame), True, self._book.translate)
        found = layouts.find(key, version, frame)
        made = layouts.rewrite(frame, found, api.is_flexible(key, version), self._book.translate)
        if key != api.SHARE_FETCH:
            check(made, self._book.search_patterns, _describe(exchange))
        return made

    def _layout_known(self, exchange: Exchange) -> bool:
        known = layouts.KNOWN.get(exchange.api_key)
        return known is not None and exchange.version <= known[1]


def _describe(exchange: Exchange) -> str:
    return f"a response to {api.api_name(exchange.api_key)} v{exchange.version}"


def check(frame: bytes, search_patterns: Mapping[bytes, str], what: str) -> None:
    """Raise Leak if one of the search patterns is in the frame."""
    for pattern, address in search_patterns.items():
        if pattern in frame:
            raise Leak(f"the upstream address {address} is in {what}")


class LeakScan:
    """Search a stream of one frame. An address that spans two pieces is found before its last byte is forwarded."""

    def __init__(self, search_patterns: Mapping[bytes, str], what: str) -> None:
        self._search_patterns, self._what = search_patterns, what
        self._keep = max(map(len, search_patterns), default=1) - 1
        self._tail = b""

    def feed(self, piece: Piece) -> Piece:
        seen = self._tail + piece
        check(seen, self._search_patterns, self._what)
        self._tail = seen[max(0, len(seen) - self._keep) :]
        return piece
