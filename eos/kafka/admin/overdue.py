"""Aborts a dead member's transaction as soon as its timeout has passed, before the coordinator's next sweep does.

The coordinator checks for transactions past their timeout only at intervals (transaction.abort.timed.out.transaction.
cleanup.interval.ms, 10 s by default). Until then readers wait, and so does the member that takes over the dead member's
partitions, for its pending offsets. So a member that was assigned partitions asks for transactions of its group that
are overdue by the coordinator's clock (ListTransactions with a duration, Kafka 3.8). It aborts each with one request
that changes nothing unless the transaction is still open. The result is the same as after the coordinator's own sweep:
epoch + 1, CompleteAbort. A member that was only paused treats it as its own timeout and continues
(eos/kafka/admin/ownership.py). No transaction is aborted before its timeout.

Names do not show who is a member: "orders-eu-a" may belong to "orders-eu" or to "orders". A member is a
transactional.id that the metadata of a committed offset of the group names, or whose open transaction contains offsets
of this group. The cluster's transactions are listed once after a rebalance; later only those still open are described.

Owns these queries and that one request. It runs on the watcher's thread and never aborts a transaction that the
coordinator does not report as overdue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from eos import log
from eos.errors import EosError
from eos.kafka.admin.transactions import log_partition_of
from eos.kafka.admin.watcher import Check, Watcher
from eos.kafka.client.cluster import OFFSETS_LOG, ClusterAdmin, ListedTransaction
from eos.kafka.client.settings import Settings, alternate_transactional_id
from eos.kafka.client.world import REAL, World
from eos.records import parse_metadata

_ABORT_STARTED = "ConcurrentTransactions"  # the coordinator's answer while it writes the markers
_CHECK_INTERVAL_S = 0.5
_MAX_INTERVAL_S = 5.0  # longest time between two checks: our clock may be wrong about when a transaction is due
_MARGIN_S = 15.0
_STALE_S = 0.25  # seconds after which an answer is too old to abort a transaction


class OverdueTransactions:
    """Checks the transactions of a group's other members for one transaction timeout after each rebalance.

    `own_id`: the transactional.id of this member."""

    def __init__(self, settings: Settings, group: str, own_id: str, watcher: Watcher, world: World = REAL) -> None:
        self._settings, self._group, self._own_id, self._world = settings, group, own_id, world
        self._watcher, self._check = watcher, Check(self._run, self._on_error)
        self._deadline = 0.0
        self._is_rebalanced = False
        self._watched: list[ListedTransaction] = []
        watcher.add(self._check)

    def watch(self) -> None:
        """Start to check because the group rebalanced, so a member may have died. Return at once."""
        self._deadline = self._world.now() + self._settings.transaction_timeout_ms / 1000 + _MARGIN_S
        self._is_rebalanced = True
        self._watcher.wake(self._check)

    def stop(self) -> None:
        self._watcher.remove(self._check)

    def _run(self, admin: ClusterAdmin) -> float | None:
        """Check until no transaction from the first check is open any more, or the time is over."""
        if self._world.now() >= self._deadline:
            return None
        if self._is_rebalanced:
            self._is_rebalanced = False
            self._watched = self._transactions_of_others(admin)
        else:
            self._watched = find_still_open(admin, self._watched)
        if not self._watched:
            return None
        pause_s = seconds_until_check(self._watched, self._world.unix() * 1000)
        if pause_s <= _CHECK_INTERVAL_S:
            for transaction in self._watched:
                abort_if_overdue(admin, transaction, self._world.now)
        return pause_s

    def _on_error(self, error: Exception) -> None:
        # The failure does no harm, because the coordinator aborts overdue transactions itself later.
        level = log.debug if isinstance(error, EosError) else log.warning
        level("overdue transaction query failed", error=str(error), group=self._group)

    def _transactions_of_others(self, admin: ClusterAdmin) -> list[ListedTransaction]:
        wrote = transactional_ids_in(self._group, admin.committed_metadata(self._group))
        offsets = OFFSETS_LOG, log_partition_of(self._group, len(admin.partitions([OFFSETS_LOG])))
        others = {*wrote, *admin.ongoing(f"{self._group}-")} - {self._own_id, alternate_transactional_id(self._own_id)}
        found = [t for t in admin.describe_transactions(sorted(others)) if t.state == "Ongoing"]
        return [t for t in found if t.transactional_id in wrote or offsets in t.partitions]


def transactional_ids_in(group: str, metadata: Iterable[str]) -> set[str]:
    """Return the transactional.ids named in the metadata of committed offsets, each with its alternate id.

    Metadata of other programs is ignored. Earlier versions of eos wrote the instance without the group."""
    names = set()
    for text in metadata:
        name = parse_metadata(text).get("instance")
        names |= {name, f"{group}-{name}"} if isinstance(name, str) else set()
    return names | {alternate_transactional_id(name) for name in names}


def find_still_open(admin: ClusterAdmin, seen: Iterable[ListedTransaction]) -> list[ListedTransaction]:
    """Return the transactions that are still open; a live member ends each of its transactions within moments."""
    key = {(t.transactional_id, t.start_ms) for t in seen}
    now = admin.describe_transactions(sorted(t.transactional_id for t in seen))
    return [t for t in now if t.state == "Ongoing" and (t.transactional_id, t.start_ms) in key]


def seconds_until_check(transactions: Iterable[ListedTransaction], now_ms: float) -> float:
    """Return the seconds until the next check: until the first transaction is due by our clock, but at most 5."""
    due_ms = min((t.start_ms + t.timeout_ms - now_ms for t in transactions), default=0.0)
    return max(_CHECK_INTERVAL_S, min(_MAX_INTERVAL_S, due_ms / 1000))


def abort_if_overdue(admin: ClusterAdmin, transaction: ListedTransaction, now: Callable[[], float]) -> bool:
    """Abort the transaction if its coordinator reports it as overdue. Return True if the abort was started."""
    asked = now()
    overdue = admin.is_overdue(transaction)
    if not overdue or now() - asked > _STALE_S:
        return False
    answer = admin.abort_if_ongoing(transaction)
    who = {
        "transactional_id": transaction.transactional_id,
        "producer_id": transaction.producer_id,
        "epoch": transaction.epoch,
    }
    if answer != _ABORT_STARTED:
        log.debug("overdue transaction abort refused", answer=answer, **who, state=transaction.state)
        return False
    log.info("overdue transaction of another member aborted", state="PrepareAbort", **who)
    return True
