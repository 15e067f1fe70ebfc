"""Whether a request of a transaction may have been sent twice: the replacement rule's senses, no I/O.

No Python client speaks KIP-890 part 2. A retried EndTxn, TxnOffsetCommit, AddOffsetsToTxn or AddPartitionsToTxn leaves
a copy on a dead connection that may reach the coordinator while the *next* transaction is open, where producer id and
epoch still fit: it is then obeyed, and that transaction is torn or lost without any error. A new producer with the
same transactional.id has a new epoch, so the copy is refused (INVALID_PRODUCER_EPOCH). This module says when that is
needed, from two kinds of signs that were measured for every kind of cut:

- time: a call that needed a retry cannot be faster than the retry backoff; librdkafka retries AddPartitionsToTxn and
  TxnOffsetCommit after a fixed 500 ms, EndTxn and AddOffsetsToTxn after retry.backoff.ms (from 80 %, its jitter; at
  most retry.backoff.max.ms);
- librdkafka's statistics of the coordinator's connection: disconnects, and more EndTxn requests than transactions.
"""

from __future__ import annotations

import msgspec

COORDINATOR = "TxnCoordinator"  # librdkafka's logical broker for the transaction coordinator
FIXED_BACKOFF_MS = 500  # of AddPartitionsToTxn and TxnOffsetCommit, in rdkafka_txnmgr.c
MARGIN = 0.8


class _Broker(msgspec.Struct):
    nodeid: int = -1
    connects: int = 0
    disconnects: int = 0
    txretries: int = 0
    req: dict[str, int] = {}


class _Eos(msgspec.Struct):
    producer_id: int = -1
    producer_epoch: int = -1


class Statistics(msgspec.Struct):
    """The part of librdkafka's statistics that is looked at (STATISTICS.md)."""

    brokers: dict[str, _Broker] = {}
    eos: _Eos = msgspec.field(default_factory=_Eos)


decode_statistics = msgspec.json.Decoder(Statistics).decode


class RetryEvidence:
    """Gathers signs over the life of one producer; `reason` is the first one found, or None.

    `retry_backoff_ms` is the backoff that librdkafka really uses (Settings.retry_backoff_ms).
    """

    def __init__(self, retry_backoff_ms: int = 100) -> None:
        # send_offsets sends a TxnOffsetCommit too: with a long retry.backoff.ms that one is retried sooner.
        self.fastest_retry_ms = {
            "send_offsets": MARGIN * min(retry_backoff_ms, FIXED_BACKOFF_MS),
            "commit": MARGIN * retry_backoff_ms,
        }
        self.reason: str | None = None
        self.ended = 0  # EndTxn calls made by the application
        self._last: dict[str, _Broker] | None = None

    def _found(self, reason: str) -> None:
        self.reason = self.reason or reason

    def call_took(self, call: str, took_ms: float) -> None:
        """`send_offsets` or `commit` returned without an error after so long."""
        if took_ms >= self.fastest_retry_ms[call]:
            self._found(f"{call} took {took_ms:.0f} ms: it may have been sent twice")

    def statistics(self, now: Statistics) -> None:
        """A new statistics event; compared with the one before it."""
        if now.eos.producer_epoch < 0:
            return  # taken during the init, when connections still come and go
        before, self._last = self._last, now.brokers
        coordinator = now.brokers.get(COORDINATOR)
        if coordinator is not None and coordinator.req.get("EndTxn", 0) > self.ended:
            self._found(f"{coordinator.req['EndTxn']} EndTxn requests for {self.ended} transactions")
        if before is None:
            if coordinator is not None and coordinator.disconnects:
                self._found("the connection to the transaction coordinator was lost")
            return
        for name, old in before.items():
            if name == COORDINATOR:
                self._compare_coordinator(old, coordinator)
            elif old.nodeid >= 0 and name in now.brokers and now.brokers[name].disconnects > old.disconnects:
                self._found(f"the connection to {name} was lost")

    def _compare_coordinator(self, old: _Broker, new: _Broker | None) -> None:
        if new is None:
            self._found("the transaction coordinator's entry vanished from the statistics")
        elif new.disconnects > old.disconnects or new.connects != old.connects:
            self._found("the connection to the transaction coordinator was lost")
        elif new.txretries > old.txretries:
            self._found("a request to the transaction coordinator was retried")
