"""Decide whether a request of a transaction may have been sent twice: the evidence for the replacement rule, no I/O.

No Python client implements KIP-890 part 2. A retried EndTxn, TxnOffsetCommit, AddOffsetsToTxn or AddPartitionsToTxn
leaves a copy on a dead connection. The copy may reach the coordinator while the *next* transaction is open, where
producer id and epoch still match. Then the coordinator obeys it, and that transaction is torn or lost without any
error. A new producer with the same transactional.id has a new epoch, so the copy is refused (INVALID_PRODUCER_EPOCH).
This module says when that is needed. Its rules were measured for every kind of cut:

- Time: a call that needed a retry cannot be faster than the retry backoff. librdkafka retries AddPartitionsToTxn and
  TxnOffsetCommit after a fixed 500 ms, and EndTxn and AddOffsetsToTxn after retry.backoff.ms (from 80 % of it, its
  jitter, to retry.backoff.max.ms). A faster call was not retried, however far the broker is. A slower one is undecided,
  because the broker may be far or busy.
- librdkafka's statistics of the coordinator's connection: disconnects, requests that timed out, and more EndTxn
  requests than transactions.
- For an undecided call, statistics emitted after it returned. They clear the call if they count exactly one request for
  each call of its kind, and show the same connections as before it began. Statistics that are missing, count anything
  else or show another connection clear nothing. No next transaction begins before the call is decided.

AddOffsetsToTxn may be counted more often. As the first request of a transaction (of a filter that sends no record) it
is answered CONCURRENT_TRANSACTIONS while the markers of the previous transaction are written, and sent again on the
same connection. An answered request leaves no copy that could be late; the other evidence detects an unanswered
request.

The round trip is not part of the bound, although a retry takes another round trip. An event that breaks a connection
(another route, another coordinator) also changes the round trip, so a bound computed before the event would be too high
exactly then.
"""

from __future__ import annotations

import sys

import msgspec

COORDINATOR = "TxnCoordinator"  # librdkafka's logical broker for the transaction coordinator
FIXED_BACKOFF_MS = 500  # the backoff of AddPartitionsToTxn and TxnOffsetCommit, in rdkafka_txnmgr.c
MARGIN = 0.8
# librdkafka's clock (rdtime.h) is time.monotonic() on Linux only. Elsewhere it is unknown whether statistics were
# emitted before or after a call, so every slow call counts as retried.
ONE_CLOCK = sys.platform == "linux"


class _Broker(msgspec.Struct):
    nodeid: int = -1
    state: str = ""
    stateage: int = 0
    connects: int = 0
    disconnects: int = 0
    req_timeouts: int = 0
    req: dict[str, int] = {}

    @property
    def up(self) -> bool:
        return self.state == "UP"


class _Eos(msgspec.Struct):
    producer_id: int = -1
    producer_epoch: int = -1


class Statistics(msgspec.Struct):
    """Holds the part of librdkafka's statistics that is read (STATISTICS.md). `ts` is in microseconds of its clock."""

    ts: int = 0
    brokers: dict[str, _Broker] = {}
    eos: _Eos = msgspec.field(default_factory=_Eos)

    def since(self, name: str) -> int:
        """Return the time at which this broker's connection reached its state. Computed from one reading of the clock,
        so it is the same number in all statistics of one connection, and another number for the next connection."""
        return self.ts - self.brokers[name].stateage

    def count(self, request: str) -> int:
        """Return how often a request was sent. A partly sent request does not count: no broker obeys it."""
        return sum(broker.req.get(request, 0) for broker in self.brokers.values())


_decode = msgspec.json.Decoder(Statistics).decode


def decode_statistics(text: str) -> Statistics:
    """Decode statistics without their topics.

    The topics are most of the text with many partitions, and lie between the brokers and `eos` (rdkafka.c). Parsing
    them ten times a second took 2 ms each with 1,000 partitions."""
    topics, eos = text.find('"topics":'), text.rfind('"eos":')
    return _decode(text[:topics] + text[eos:] if 0 <= topics < eos else text)


# Requests that each call sends once. TxnOffsetCommit goes to the group coordinator, over an ordinary broker connection.
REQUESTS = {"send_offsets": ("AddOffsetsToTxn", "TxnOffsetCommit"), "commit": ("EndTxn",)}

SENT_AGAIN_WHEN_ANSWERED = frozenset({"AddOffsetsToTxn"})


class RetryEvidence:
    """Collects evidence that one producer may have retried a request; `reason` is the first that it found, or None.

    `retry_backoff_ms` is the backoff that librdkafka really uses (Settings.retry_backoff_ms). Times are
    time.monotonic(). Without `one_clock` no statistics clear a slow call.
    """

    def __init__(self, retry_backoff_ms: int = 100, one_clock: bool = ONE_CLOCK) -> None:
        # send_offsets sends a TxnOffsetCommit too, which is retried sooner than a long retry.backoff.ms.
        self.fastest_retry_ms = {
            "send_offsets": MARGIN * min(retry_backoff_ms, FIXED_BACKOFF_MS),
            "commit": MARGIN * retry_backoff_ms,
        }
        self.reason: str | None = None
        self._has_begun = False
        self._ended = 0  # EndTxn calls by the application
        self._offsets_sent = 0
        self._one_clock = one_clock
        self._last_statistics: Statistics | None = None
        self._running_call = False
        # The last statistics from before the running call and all undecided calls.
        self._statistics_before: Statistics | None = None
        self._undecided_calls: dict[str, tuple[float, float]] = {}  # call -> milliseconds it took, time of its return

    @property
    def has_undecided_calls(self) -> bool:
        """Return True if a call was slow and no statistics were emitted since: the next ones will decide."""
        return self.reason is None and bool(self._undecided_calls)

    @property
    def has_no_statistics(self) -> bool:
        """Return True if a slow call could not be cleared, because no statistics arrived yet."""
        return self._statistics_before is None

    # ---- events -----------------------------------------------------------------------------------------------

    def begin_transaction(self) -> None:
        self._has_begun = True

    def expect_end_txn(self) -> None:
        """Record that the application calls commit or abort, which sends one EndTxn."""
        self._ended += 1

    def begin_call(self) -> None:
        self._running_call = True

    def return_from(self, call: str, took_ms: float, returned: float) -> None:
        """Record that `send_offsets` or `commit` returned without an error."""
        self._running_call = False
        if call == "send_offsets":
            self._offsets_sent += 1
        if took_ms < self.fastest_retry_ms[call]:
            return
        self._undecided_calls[call] = took_ms, returned
        if not self._one_clock:
            self.stop_waiting()

    def stop_waiting(self) -> None:
        """Treat calls that are still undecided as retried, and wait for no more statistics."""
        for call in list(self._undecided_calls):
            self._decide_retried(call, "no statistics rule it out")

    def add_statistics(self, now: Statistics) -> None:
        """Compare new statistics with the previous ones, and decide the undecided calls."""
        if now.eos.producer_epoch < 0:
            return  # emitted during the init, when connections open and close normally
        before, self._last_statistics = self._last_statistics, now
        self._compare(before, now)
        for call, (_, returned) in list(self._undecided_calls.items()):
            if now.ts > returned * 1e6:
                if because := self._objection(call, now):
                    self._decide_retried(call, because)
                else:
                    del self._undecided_calls[call]
        if not self._running_call and not self._undecided_calls:
            self._statistics_before = now

    # ---- decisions --------------------------------------------------------------------------------------------

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _decide_retried(self, call: str, because: str) -> None:
        took_ms, _ = self._undecided_calls.pop(call)
        harmless = "a late copy will find a new epoch and be refused"
        self._note(f"{call} took {took_ms:.0f} ms: it may have been sent twice; {harmless} ({because})")

    def _compare(self, before: Statistics | None, now: Statistics) -> None:
        coordinator = now.brokers.get(COORDINATOR)
        if coordinator is not None and coordinator.req.get("EndTxn", 0) > self._ended:
            self._note(f"{coordinator.req['EndTxn']} EndTxn requests for {self._ended} transactions")
        if before is None:
            # Statistics from before the first transaction describe the init. On a new cluster, connections break during
            # the init, which is no evidence.
            if coordinator is not None and self._has_begun:
                self._compare_coordinator(_Broker(connects=coordinator.connects), coordinator)
            return
        for name, old in before.brokers.items():
            if name == COORDINATOR:
                self._compare_coordinator(old, coordinator)
            elif old.nodeid >= 0 and name in now.brokers and now.brokers[name].disconnects > old.disconnects:
                self._note(f"the connection to {name} was lost")

    def _compare_coordinator(self, old: _Broker, new: _Broker | None) -> None:
        if new is None:
            self._note("the transaction coordinator's entry vanished from the statistics")
        elif new.disconnects > old.disconnects or new.connects != old.connects:
            self._note("the connection to the transaction coordinator was lost")
        elif new.req_timeouts > old.req_timeouts:
            self._note("a request to the transaction coordinator timed out")

    def _objection(self, call: str, now: Statistics) -> str:
        """Return why statistics emitted after a slow call do not clear it, or "" if they clear it."""
        expected = self._ended if call == "commit" else self._offsets_sent
        for request in REQUESTS[call]:
            sent = now.count(request)
            if sent < expected or (sent > expected and request not in SENT_AGAIN_WHEN_ANSWERED):
                return f"{request} was sent {sent} times instead of {expected}"
        return _describe_connection_change(self._statistics_before, now)


def _describe_connection_change(before: Statistics | None, now: Statistics) -> str:
    """Return the change of a connection that may have counted a request, or "" if all are the same.

    librdkafka recreates a broker's entry when all brokers are down (metadata.recovery.strategy=rebootstrap) or when the
    cluster forgot it for a moment. The entry's counters then start again, and one copy counted on each entry would look
    like one copy in all.
    """
    if before is None:
        return "there are no statistics from before the call"
    for name, new in now.brokers.items():
        if name not in before.brokers and any(new.req.get(one, 0) for sent in REQUESTS.values() for one in sent):
            return f"{name} was unknown before the call"
    for name, old in before.brokers.items():
        if old.nodeid < 0 and name != COORDINATOR:
            continue  # a bootstrap address: it only answers metadata queries, and may disappear
        if name not in now.brokers:
            return f"{name} is no longer known"
        new = now.brokers[name]
        if old.up:
            same = new.up and now.since(name) == before.since(name)
        else:  # the first send_offsets connects to the group coordinator
            same = new.disconnects == old.disconnects and new.connects - old.connects in (0, 1)
        if not same:
            return f"the connection to {name} was replaced by another one"
    return ""
