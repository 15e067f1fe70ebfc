"""Ends a dead member's transaction as soon as its own timeout is over, instead of at the coordinator's next sweep.

The coordinator looks for transactions past their timeout only now and then (transaction.abort.timed.out.transaction.
cleanup.interval.ms, 10 s by default); until then readers wait, and so does whoever takes the dead member's partitions
over, for its pending offsets. So a member that got partitions asks for transactions of its group that are overdue by
the coordinator's own clock (ListTransactions with a duration, Kafka 3.8) and has each aborted by one request that
changes nothing unless it is still open. What that leaves is what the coordinator's own look leaves: epoch + 1,
CompleteAbort. A member that was only paused takes it for its own timeout and goes on (eos/kafka/admin/ownership.py).
Nothing is ended earlier.

Who is a member is told by the group, not by names: "orders-eu-a" is a member of "orders-eu" or of "orders". It is who
wrote beside one of the group's committed offsets, or has an open transaction with offsets of this group in it. The
cluster's transactions are listed once after a rebalance; from then on only those are asked for that stay open.

Owns the asking and that one request. It never raises, never waits on the session's thread, and never ends a transaction
that the coordinator does not call overdue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from eos import log
from eos.errors import EosError
from eos.kafka.admin.transactions import partition_of
from eos.kafka.client.cluster import OFFSETS_LOG, ClusterAdmin, Listed
from eos.kafka.client.settings import Settings, alternate_of
from eos.kafka.client.world import REAL, World
from eos.records import noted

_ABORTING = "ConcurrentTransactions"  # the answer while the coordinator writes the markers
_LOOK_INTERVAL_S = 0.5
_LONGEST_S = 5.0  # between two looks: our clock may be wrong about when a transaction is due
_MARGIN_S = 15.0
_STALE_S = 0.25  # between the coordinator's answer and our request nothing else may have happened


class OverdueWatch:
    """Looks after the transactions of a group's other members, for one timeout after each rebalance. `own`: the
    transactional.id of this one."""

    def __init__(self, settings: Settings, group: str, own: str, world: World = REAL) -> None:
        self._settings, self._group, self._own, self._world = settings, group, own, world
        self._until = 0.0
        self._lock = threading.Lock()
        self._watching = False
        self._changed = threading.Event()
        self._stopped = False

    def look(self) -> None:
        """The group changed: somebody may have died. Returns at once."""
        with self._lock:
            self._until = self._world.now() + self._settings.transaction_timeout_ms / 1000 + _MARGIN_S
            self._changed.set()
            if not self._watching and not self._stopped:
                self._watching = True
                self._world.background("eos-overdue", self._run)

    def stop(self) -> None:
        self._stopped = True
        self._changed.set()

    def _run(self) -> None:
        try:
            with self._world.admin(self._settings) as admin:
                self._watch(admin)
        except EosError as error:
            # The coordinator ends them itself, later.
            log.debug("cannot look for overdue transactions", error=str(error))
        with self._lock:
            self._watching = False

    def _watch(self, admin: ClusterAdmin) -> None:
        """Until nothing is open any more that was open at the first look, or the time is over."""
        watched: list[Listed] = []
        pause_s = 0.0
        while self._world.now() < self._until:
            changed = self._changed.wait(pause_s)
            if self._stopped:
                return
            self._changed.clear()
            watched = self._of_others(admin) if changed else still_open(admin, watched)
            if not watched and not self._changed.is_set():
                return
            pause_s = pause_before(watched, self._world.unix() * 1000)
            if pause_s <= _LOOK_INTERVAL_S:
                for transaction in watched:
                    end_if_overdue(admin, transaction, self._world.now)

    def _of_others(self, admin: ClusterAdmin) -> list[Listed]:
        wrote = committers(self._group, admin.committed_metadata(self._group))
        offsets = OFFSETS_LOG, partition_of(self._group, len(admin.partitions([OFFSETS_LOG])))
        others = {*wrote, *admin.ongoing(f"{self._group}-")} - {self._own, alternate_of(self._own)}
        found = [t for t in admin.describe_all(sorted(others)) if t.state == "Ongoing"]
        return [t for t in found if t.transactional_id in wrote or offsets in t.partitions]


def committers(group: str, metadata: Iterable[str]) -> set[str]:
    """The transactional.ids of who wrote this beside committed offsets, each with its alternate. What another program
    wrote tells nothing; an earlier version of this one named the instance alone."""
    names = set()
    for text in metadata:
        name = noted(text).get("instance")
        names |= {name, f"{group}-{name}"} if isinstance(name, str) else set()
    return names | {alternate_of(name) for name in names}


def still_open(admin: ClusterAdmin, seen: Iterable[Listed]) -> list[Listed]:
    """Those that were not ended since: a member that lives ends its transactions within moments."""
    key = {(t.transactional_id, t.start_ms) for t in seen}
    now = admin.describe_all(sorted(t.transactional_id for t in seen))
    return [t for t in now if t.state == "Ongoing" and (t.transactional_id, t.start_ms) in key]


def pause_before(transactions: Iterable[Listed], now_ms: float) -> float:
    """Seconds until the next look: when the first is due by our clock, which may not be the coordinator's."""
    due_ms = min((t.start_ms + t.timeout_ms - now_ms for t in transactions), default=0.0)
    return max(_LOOK_INTERVAL_S, min(_LONGEST_S, due_ms / 1000))


def end_if_overdue(admin: ClusterAdmin, transaction: Listed, now: Callable[[], float]) -> bool:
    """Ends it if its coordinator calls it open for longer than its own timeout; returns whether that was asked for."""
    asked = now()
    overdue = admin.overdue(transaction)
    if not overdue or now() - asked > _STALE_S:
        return False
    answer = admin.abort_if_ongoing(transaction)
    who = {
        "transactional_id": transaction.transactional_id,
        "producer_id": transaction.producer_id,
        "epoch": transaction.epoch,
    }
    if answer != _ABORTING:
        log.debug("an overdue transaction was not ended", answer=answer, **who, state=transaction.state)
        return False
    log.info("ended the transaction of another member, which was past its timeout", state="PrepareAbort", **who)
    return True
