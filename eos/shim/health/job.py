"""Counts errors by API and transactions by their end, as clients are told them.

Owns the counts. It must never change a frame, nor be the reason that one does not pass.
"""

from __future__ import annotations

from collections import Counter

from eos.codes import error_name
from eos.shim import events
from eos.shim.errors import Malformed
from eos.shim.pipeline import Exchange, Job
from eos.shim.wire import answers, api

# Small answers that carry errors; a Fetch is not worth the reading.
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
    """`errors` by (API, error); `ends` by commit or abort, as the coordinator accepted them."""

    def __init__(self) -> None:
        self.errors: Counter[tuple[str, str]] = Counter()
        self.ends: Counter[str] = Counter()
        self._complained: set[tuple[int, int]] = set()

    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key == api.END_TXN and answers.known(api_key, version)

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key in _READ and answers.known(api_key, version)

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        try:
            committed = answers.read(frame, api.END_TXN, exchange.version).committed
        except Malformed as error:  # a transactional.id that is no text, for one: brokers take any bytes
            self._complain(exchange, error)
        else:
            exchange.notes[self] = "commit" if committed else "abort"
        return frame

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        key, version = exchange.api_key, exchange.version
        try:
            codes = [code for code in answers.errors_of(frame, key, version) if code]
        except Exception as error:  # noqa: BLE001 - not ours to refuse
            self._complain(exchange, error)
            return frame
        if key == api.END_TXN and codes == [api.ABORTED_TAKE_THE_NEXT_IDENTITY]:
            codes = []
        # Once per answer and error, however many partitions it names.
        for code in set(codes):
            self.errors[api.api_name(key), error_name(code)] += 1
        if not codes and self in exchange.notes:
            self.ends[str(exchange.notes.pop(self))] += 1
        return frame

    def _complain(self, exchange: Exchange, error: Exception) -> None:
        key = (exchange.api_key, exchange.version)
        if key not in self._complained:
            self._complained.add(key)
            events.warning("not counted", api=f"{api.api_name(key[0])} v{key[1]}", reason=error)
