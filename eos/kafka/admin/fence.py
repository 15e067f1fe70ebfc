"""Aborts the open transaction of a transactional.id with InitProducerId, which fences its current owner.

Owns only that request; the caller decides whether the owner may be fenced.
"""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import KafkaException

from eos import log
from eos.errors import Action, CallFailed, EosError, Temporary, Unavailable, stop_error
from eos.kafka.client.cluster import ClusterAdmin, TransactionalIdState
from eos.kafka.client.failures import classify, explain_denied
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World

_TIMEOUT_S = 30.0
_ABORT_LEFTOVERS_S = 2.0  # afterwards the init itself waits until the open transaction is aborted
_ABORT_LEFTOVERS_PAUSE_S = 0.01
_BUSY = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")


def abort_open_transaction(
    admin: ClusterAdmin, settings: Settings, transactional_id: str
) -> tuple[TransactionalIdState, TransactionalIdState | None]:
    """Abort the open transaction of `transactional_id`. Return the coordinator's view before and after.

    Raise Unavailable if no coordinator knows the id, and Temporary if the abort takes longer than 30 s.
    """
    before = admin.describe(transactional_id)
    if before is None:
        raise Unavailable(f"{transactional_id}: no coordinator knows this transactional.id (never used, or expired)")
    # Use the id's own timeout, so that this init does not change what DescribeTransactions shows.
    found = admin.describe_transactions([transactional_id])
    timeout_ms = found[0].timeout_ms if found else settings.transaction_timeout_ms
    fence(settings.with_values(**{"transaction.timeout.ms": timeout_ms}), transactional_id)
    return before, admin.describe(transactional_id)


def fence(settings: Settings, transactional_id: str, timeout_s: float = _TIMEOUT_S, world: World = REAL) -> None:
    """Send InitProducerId, and return once the coordinator has aborted the open transaction and bumped the epoch."""
    deadline = world.now() + timeout_s
    configuration = settings.producer(transactional_id) | {"logger": log.client_logger}
    producer = world.producer(configuration)
    while True:
        left = deadline - world.now()
        try:
            producer.init_transactions(max(0.1, left))
            return
        except KafkaException as error:
            action = classify("init", error.args[0])
            if action is not Action.RETRY:
                right = explain_denied(error, transactional_id=transactional_id)
                raise stop_error(CallFailed("init", action, error, right)) from error
            if world.now() >= deadline:
                raise Temporary(
                    f"{transactional_id}: its coordinator did not end the transaction within {timeout_s:.0f} s, maybe "
                    "because one of its partitions has no leader: see `eos txn describe`"
                ) from error


def abort_open_transactions(admin: ClusterAdmin, transactional_ids: Sequence[str], world: World = REAL) -> None:
    """Abort the transactions that a killed predecessor left open under these ids, before this process's init.

    This only saves time, because the init would do the same. The init's first answer would be CONCURRENT_TRANSACTIONS,
    and librdkafka then waits a fixed 500 ms before it retries (rdkafka_idempotence.c), once or twice for each id:
    measured 0.56 or 1.02 s, where a coordinator takes some 10 ms.
    """
    deadline = world.now() + _ABORT_LEFTOVERS_S
    ended: set[str] = set()
    try:
        while busy := [row for row in admin.describe_transactions(transactional_ids) if row.state in _BUSY]:
            if world.now() >= deadline:
                return
            for row in busy:
                if row.state == "Ongoing" and row.transactional_id not in ended:
                    ended.add(row.transactional_id)
                    answer = admin.abort_if_ongoing(row)
                    who = {"transactional_id": row.transactional_id, "producer_id": row.producer_id, "epoch": row.epoch}
                    log.debug("transaction of a predecessor aborted", answer=answer, **who, state=row.state)
            world.sleep(_ABORT_LEFTOVERS_PAUSE_S)
    except EosError as error:
        log.debug("abort of a predecessor's transaction failed", error=str(error))
