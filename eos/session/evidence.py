"""Whether a request of a transaction may have been sent twice: the replacement rule's senses, no I/O.

No Python client speaks KIP-890 part 2. A retried EndTxn, TxnOffsetCommit, AddOffsetsToTxn or AddPartitionsToTxn leaves
a copy on a dead connection that may reach the coordinator while the *next* transaction is open, where producer id and
epoch still fit: it is then obeyed, and that transaction is torn or lost without any error. A new producer with the
same transactional.id has a new epoch, so the copy is refused (INVALID_PRODUCER_EPOCH). This module says when that is
needed. What it goes by was measured for every kind of cut:

- time: a call that needed a retry cannot be faster than the retry backoff; librdkafka retries AddPartitionsToTxn and
  TxnOffsetCommit after a fixed 500 ms, EndTxn and AddOffsetsToTxn after retry.backoff.ms (from 80 %, its jitter; at
  most retry.backoff.max.ms). A faster call is innocent, however far the broker; a slower one is only a suspect, because
  the broker may be far or slow;
- librdkafka's statistics of the coordinator's connection: disconnects, requests that were not answered in time, and
  more EndTxn requests than transactions;
- for a suspect, statistics that were made after it had returned. They acquit it when they count as many of its requests
  as there were calls, on connections that are the same as before it began. Statistics that are missing, that count
  anything else or that know another connection acquit nobody. Until then no next transaction may begin.

AddOffsetsToTxn may be counted more often. As the first request of a transaction (a filter's, which sends no record) it
is answered CONCURRENT_TRANSACTIONS while the markers of the one before are written, and sent again on the same
connection. What was answered is no copy that could be late; what was not shows by one of the other signs.

The round trip is not made a part of the bound, though a retry takes one more: what breaks a connection (another route,
another coordinator) changes the round trip as well, and a bound from before would be too high exactly then.
"""

from __future__ import annotations

import sys

import msgspec

COORDINATOR = "TxnCoordinator"  # librdkafka's logical broker for the transaction coordinator
FIXED_BACKOFF_MS = 500  # of AddPartitionsToTxn and TxnOffsetCommit, in rdkafka_txnmgr.c
MARGIN = 0.8
# Only there librdkafka's clock (rdtime.h) is time.monotonic(): elsewhere it cannot be told whether statistics were made
# after a call, and a slow one is taken for a retried one.
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
    """The part of librdkafka's statistics that is looked at (STATISTICS.md). `ts` is in microseconds of its clock."""

    ts: int = 0
    brokers: dict[str, _Broker] = {}
    eos: _Eos = msgspec.field(default_factory=_Eos)

    def since(self, name: str) -> int:
        """When this broker's connection came to its state. Made from one reading of the clock, so it is the same number
        in all statistics of one connection, and another for the next."""
        return self.ts - self.brokers[name].stateage

    def count(self, request: str) -> int:
        """How often it was sent. A request that was sent in part does not count: no broker obeys it."""
        return sum(broker.req.get(request, 0) for broker in self.brokers.values())


decode_statistics = msgspec.json.Decoder(Statistics).decode

# What each call sends once. TxnOffsetCommit goes to the group's coordinator, over an ordinary broker's connection.
REQUESTS = {"send_offsets": ("AddOffsetsToTxn", "TxnOffsetCommit"), "commit": ("EndTxn",)}

SENT_AGAIN_WHEN_ANSWERED = frozenset({"AddOffsetsToTxn"})


class RetryEvidence:
    """Gathers signs over the life of one producer; `reason` is the first one found, or None.

    `retry_backoff_ms` is the backoff that librdkafka really uses (Settings.retry_backoff_ms). Times are
    time.monotonic(); without `one_clock` statistics acquit nobody.
    """

    def __init__(self, retry_backoff_ms: int = 100, one_clock: bool = ONE_CLOCK) -> None:
        # send_offsets sends a TxnOffsetCommit too: with a long retry.backoff.ms that one is retried sooner.
        self.fastest_retry_ms = {
            "send_offsets": MARGIN * min(retry_backoff_ms, FIXED_BACKOFF_MS),
            "commit": MARGIN * retry_backoff_ms,
        }
        self.reason: str | None = None
        self.begun = False  # a transaction, by the application
        self.ended = 0  # EndTxn calls made by the application
        self._offsets_sent = 0
        self._one_clock = one_clock
        self._last: Statistics | None = None
        self._calling = False
        self._before: Statistics | None = None  # the last from before the call that runs, and before every suspect
        self._suspects: dict[str, tuple[float, float]] = {}  # call -> milliseconds it took, when it returned

    def _found(self, reason: str) -> None:
        self.reason = self.reason or reason

    @property
    def undecided(self) -> bool:
        """A call was slow, and no statistics were made since: whoever waits for the next ones will know more."""
        return self.reason is None and bool(self._suspects)

    @property
    def blind(self) -> bool:
        """No statistics yet: a slow call could not be acquitted."""
        return self._before is None

    def call_began(self) -> None:
        self._calling = True

    def call_took(self, call: str, took_ms: float, returned: float) -> None:
        """`send_offsets` or `commit` returned without an error after so long, at this moment."""
        self._calling = False
        if call == "send_offsets":
            self._offsets_sent += 1
        if took_ms < self.fastest_retry_ms[call]:
            return
        self._suspects[call] = took_ms, returned
        if not self._one_clock:
            self.no_statistics()

    def no_statistics(self) -> None:
        """Nothing is waited for any longer: who is a suspect still is convicted."""
        for call in list(self._suspects):
            self._convict(call, "nothing shows that it was not")

    def _convict(self, call: str, because: str) -> None:
        took_ms, _ = self._suspects.pop(call)
        harmless = "a late copy finds a new epoch and does nothing"
        self._found(f"{call} took {took_ms:.0f} ms: it may have been sent twice; {harmless} ({because})")

    def statistics(self, now: Statistics) -> None:
        """A new statistics event; compared with the one before it, and with the suspects."""
        if now.eos.producer_epoch < 0:
            return  # taken during the init, when connections still come and go
        before, self._last = self._last, now
        self._compare(before, now)
        for call, (_, returned) in list(self._suspects.items()):
            if now.ts > returned * 1e6:
                if because := self._against(call, now):
                    self._convict(call, because)
                else:
                    del self._suspects[call]
        if not self._calling and not self._suspects:
            self._before = now

    def _compare(self, before: Statistics | None, now: Statistics) -> None:
        coordinator = now.brokers.get(COORDINATOR)
        if coordinator is not None and coordinator.req.get("EndTxn", 0) > self.ended:
            self._found(f"{coordinator.req['EndTxn']} EndTxn requests for {self.ended} transactions")
        if before is None:
            # Statistics that came before the first transaction tell of the init, which a new cluster interrupts.
            if coordinator is not None and self.begun:
                self._compare_coordinator(_Broker(connects=coordinator.connects), coordinator)
            return
        for name, old in before.brokers.items():
            if name == COORDINATOR:
                self._compare_coordinator(old, coordinator)
            elif old.nodeid >= 0 and name in now.brokers and now.brokers[name].disconnects > old.disconnects:
                self._found(f"the connection to {name} was lost")

    def _compare_coordinator(self, old: _Broker, new: _Broker | None) -> None:
        if new is None:
            self._found("the transaction coordinator's entry vanished from the statistics")
        elif new.disconnects > old.disconnects or new.connects != old.connects:
            self._found("the connection to the transaction coordinator was lost")
        elif new.req_timeouts > old.req_timeouts:
            self._found("a request to the transaction coordinator was not answered in time")

    def _against(self, call: str, now: Statistics) -> str:
        """What speaks against a suspect in statistics from behind its end; "" when it is acquitted."""
        owed = self.ended if call == "commit" else self._offsets_sent
        for request in REQUESTS[call]:
            sent = now.count(request)
            if sent < owed or (sent > owed and request not in SENT_AGAIN_WHEN_ANSWERED):
                return f"{request} was sent {sent} times, {owed} would be right"
        return _changed(self._before, now)


def _changed(before: Statistics | None, now: Statistics) -> str:
    """Whether a request may have been counted by a connection that is gone: which one, or "".

    librdkafka makes a broker's entry anew when all are down (metadata.recovery.strategy=rebootstrap) or when the
    cluster forgot it for a moment; its counters then start again, and one copy on each would look like one in all.
    """
    if before is None:
        return "there are no statistics from before it"
    for name, new in now.brokers.items():
        if name not in before.brokers and any(new.req.get(one, 0) for sent in REQUESTS.values() for one in sent):
            return f"{name} was not known before it"
    for name, old in before.brokers.items():
        if old.nodeid < 0 and name != COORDINATOR:
            continue  # the first address: it is only asked for the others, and may go
        if name not in now.brokers:
            return f"{name} is not known any more"
        new = now.brokers[name]
        if old.up:
            same = new.up and now.since(name) == before.since(name)
        else:  # the first send_offsets connects to the group's coordinator
            same = new.disconnects == old.disconnects and new.connects - old.connects in (0, 1)
        if not same:
            return f"the connection to {name} is another one"
    return ""
