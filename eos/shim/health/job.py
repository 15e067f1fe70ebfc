"""Count errors by API and transactions by outcome in the responses to clients.

The job owns the counts. It must never change a frame or prevent it from being forwarded.
"""

from __future__ import annotations

from collections import Counter

from eos.codes import error_name
from eos.shim import events
from eos.shim.errors import Malformed
from eos.shim.pipeline import Exchange, Job
from eos.shim.wire import api, messages

# Small responses with errors. Reading Fetch responses would cost too much.
_READ = frozenset(
    {
        api.PRODUCE,
        api.OFFSET_COMMIT,
        api.FIND_COORDINATOR,
        api.INIT_PRODUCER_ID,
        api.ADD_PARTITIONS_TO_TXN,
        api.ADD_OFFSETS_TO_TXN,
        api.END_TXN,
        api.TXN_OFFSET_COMMIT,
    }
)


class CountingJob(Job):
    """Count the `errors` of each (API, error), and the `ends`, "commit" or "abort", that the coordinator accepted."""

    def __init__(self) -> None:
        self.errors: Counter[tuple[str, str]] = Counter()
        self.ends: Counter[str] = Counter()
        self._warned: set[tuple[int, int]] = set()

    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key == api.END_TXN and messages.can_read(api_key, version)

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key in _READ and messages.can_read(api_key, version)

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        try:
            committed = messages.read_request(frame, api.END_TXN, exchange.version).committed
        except Malformed as error:  # for example a transactional.id that is not text, which brokers accept
            self._warn_once(exchange, error)
        else:
            exchange.notes[self] = "commit" if committed else "abort"
        return frame

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        key, version = exchange.api_key, exchange.version
        try:
            codes = [code for code in messages.error_codes(frame, key, version) if code]
        except Exception as error:  # noqa: BLE001 - counting must not reject a response
            self._warn_once(exchange, error)
            return frame
        if key == api.END_TXN and codes == [api.ABORTED_UNKNOWN_PRODUCER_ID]:
            codes = []
        # Count an error once per response, however many partitions it names.
        for code in set(codes):
            self.errors[api.api_name(key), error_name(code)] += 1
        if not codes and self in exchange.notes:
            self.ends[str(exchange.notes.pop(self))] += 1
        return frame

    def _warn_once(self, exchange: Exchange, error: Exception) -> None:
        key = (exchange.api_key, exchange.version)
        if key not in self._warned:
            self._warned.add(key)
            events.warning("response not counted", api=f"{api.api_name(key[0])} v{key[1]}", reason=error)
