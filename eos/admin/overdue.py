"""Ends a dead member's transaction as soon as its own timeout is over, instead of at the coordinator's next sweep.

The coordinator looks for transactions past their timeout only now and then (transaction.abort.timed.out.transaction.
cleanup.interval.ms, 10 s by default); until then readers wait, and so does whoever takes the dead member's partitions
over, for its pending offsets. So a member that got partitions asks for transactions of its App that are overdue by the
coordinator's own clock (ListTransactions with a duration, Kafka 3.8) and has each aborted by one request that changes
nothing unless it is still open. What that leaves is what the coordinator's own look leaves: epoch + 1, CompleteAbort. A
member that was only paused takes it for its own timeout and goes on (eos/ownership.py); ended before the timeout it
would have to take itself for replaced and exit with 79, which nobody restarts. That is why nothing is ended earlier.

Owns the asking and that one request. It never raises, never waits on the session's thread, and never ends a transaction
that the coordinator does not call overdue.
"""

from __future__ import annotations

import threading
import time

from eos import log
from eos.admin.cluster import ClusterAdmin, Listed
from eos.errors import EosError
from eos.settings import Settings

_ABORTING = "ConcurrentTransactions"  # the answer while the coordinator writes the markers
_LOOK_INTERVAL_S = 0.5
_MARGIN_S = 15.0
_STALE_S = 0.25  # between the coordinator's answer and our request nothing else may have happened


class OverdueWatch:
    """Looks after the other transactional.ids that begin with `prefix`, for one timeout after each rebalance."""

    def __init__(self, settings: Settings, prefix: str, own: str) -> None:
        self._settings, self._prefix, self._own = settings, prefix, own
        self._until = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def look(self) -> None:
        """The group changed: somebody may have died. Returns at once."""
        with self._lock:
            self._until = time.monotonic() + self._settings.transaction_timeout_ms / 1000 + _MARGIN_S
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="eos-overdue", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            with ClusterAdmin(self._settings) as admin:
                while self._watch(admin) and not self._stopped.wait(_LOOK_INTERVAL_S):
                    continue
        except EosError as error:
            # The coordinator ends them itself, later.
            log.debug("cannot look for overdue transactions", error=str(error))
        with self._lock:
            self._thread = None

    def _watch(self, admin: ClusterAdmin) -> bool:
        """One look; whether another one is worth it: something of our App's others is open, and time is left."""
        others = [t for t in admin.transactions(states=["Ongoing"]) if self._may_end(t.transactional_id)]
        for t in others:
            end_if_overdue(admin, t)
        return bool(others) and time.monotonic() < self._until

    def _may_end(self, transactional_id: str) -> bool:
        """Of this App, and not our own: neither the plain one nor its alternate."""
        ours = transactional_id == self._own or transactional_id.startswith(f"{self._own}-")
        return transactional_id.startswith(self._prefix) and not ours


def end_if_overdue(admin: ClusterAdmin, transaction: Listed) -> bool:
    """Ends it if its coordinator calls it open for longer than its own timeout; returns whether that was asked for."""
    asked = time.monotonic()
    overdue = admin.overdue(transaction)
    if not overdue or time.monotonic() - asked > _STALE_S:
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
