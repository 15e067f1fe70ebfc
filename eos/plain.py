"""Runs transactions without an input: `with eos.transaction(settings) as txn: txn.send(...)`.

Uses the same producer and rules as a session, without a consumer. There is no committed offset to check, so a commit
without an answer stays unknown and raises CommitOutcomeUnknown.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, Message, TopicPartition

from eos import log
from eos.encoding.sends import make_send
from eos.errors import (
    Action,
    CallFailed,
    CommitOutcomeUnknown,
    ConfigurationError,
    EosError,
    Fenced,
    IllegalState,
    PoisonRecord,
    Temporary,
    describe_error,
    stop_error,
)
from eos.kafka.admin.ownership import Owner
from eos.kafka.client.cluster import TransactionalIdState
from eos.kafka.client.settings import Settings, to_settings
from eos.kafka.client.world import REAL, World
from eos.records import Headers, format_position
from eos.session.producer.ownership import TransactionalIdOwnership
from eos.session.producer.producer import OLD_TRANSACTIONS, TransactionalProducer
from eos.session.producer.states import State
from eos.session.recovery import PLAN, Step


class Delivery:
    """Holds the result of one send, complete when the transaction's block has ended.

    If the record was refused, `offset` is -1 and `error` the reason. read_committed readers see the record only after
    the commit.
    """

    __slots__ = ("error", "offset", "partition", "topic")

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.partition = -1
        self.offset = -1
        self.error: str | None = None

    def _report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.error = describe_error(error)
        else:
            self.partition = -1 if message.partition() is None else int(str(message.partition()))
            self.offset = -1 if message.offset() is None else int(str(message.offset()))

    def __repr__(self) -> str:
        what = f"{self.topic} {self.error}" if self.error else format_position(self.topic, self.partition, self.offset)
        return f"<Delivery {what}>"


class PlainTransaction:
    """Sends the records of one transaction without an input, which ends with its block.

    `producer_reinitialised`: the producer was initialised again for this transaction, so another instance may have
    worked since the previous one. Code that sends offsets must then check that the committed offsets are unchanged.
    """

    def __init__(
        self,
        producer: TransactionalProducer,
        public: Callable[[CallFailed, str], EosError],
        sends_offsets: bool = False,
    ) -> None:
        self._producer, self._to_public_error, self._sends_offsets = producer, public, sends_offsets
        self.producer_reinitialised = False
        self.ended = False
        """True once the block has ended. If the producer then has an open transaction, it is another one."""
        self.failure: CallFailed | None = None
        """The error of a failed send, after which the transaction cannot be committed."""
        self.failed_topic = ""
        self.deliveries: list[Delivery] = []

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: object = None,
        partition: int | None = None,
        timestamp_ms: int = 0,
        headers: Headers = (),
    ) -> Delivery:
        """Queue one record, with value, key and headers encoded as in an App (see Out).

        Raises TypeError or ValueError for a value that cannot be sent, without queuing anything. Raises the
        transaction's failure as soon as it is known. The end of the block then aborts, and raises the failure again if
        the block caught it.
        """
        self._require_open("send")
        delivery = Delivery(topic)
        record = make_send("send", topic, value, key, partition, timestamp_ms, headers)
        try:
            self._producer.send(*record, delivery._report)
        except CallFailed as failure:
            self.failure, self.failed_topic = failure, topic
            delivery.error = str(failure)
            raise self._to_public_error(failure, topic) from failure
        self.deliveries.append(delivery)
        return delivery

    def send_offsets(self, offsets: list[TopicPartition], group_metadata: Any) -> None:
        """Commit offsets of a group with this transaction, for a reader that is not a member of the group.

        It must be the last call before the block's end, and needs `Transactions(..., offsets=True)`."""
        if not self._sends_offsets:
            raise IllegalState("send_offsets needs Transactions(settings, offsets=True)")
        self._require_open("send_offsets")
        try:
            self._producer.flush()
            self._producer.send_offsets(offsets, group_metadata)
        except CallFailed as failure:
            self.failure = failure
            raise self._to_public_error(failure, self.failed_topic) from failure

    def _require_open(self, call: str) -> None:
        if self.ended:
            raise IllegalState(f"{call} is not possible: this transaction's block has ended")
        if self._producer.state is not State.IN_TRANSACTION:
            raise IllegalState(f"{call} is not possible in state {self._producer.state.value}")


class Transactions:
    """Runs many transactions with one producer: `with transactions.begin() as txn:`, one block at a time.

    Each thread needs a Transactions of its own, with its own transactional.id. `offsets`: transactions may call
    `send_offsets`.
    """

    def __init__(self, settings: Settings | Mapping[str, Any], *, offsets: bool = False, world: World = REAL) -> None:
        self._world = world
        self.settings = to_settings(settings)
        if not self.settings.get("transactional.id"):
            raise ConfigurationError("transactional.id must be set for a transaction")
        self._sends_offsets = offsets
        self._producer = TransactionalProducer(
            self.settings, self.settings["transactional.id"], reports=True, world=world
        )
        self._open_transaction: PlainTransaction | None = None  # the transaction whose block is open
        self._begin_lock = threading.Lock()
        self._ownership = TransactionalIdOwnership(self.settings, _describe_owner, world=world)

    def __enter__(self) -> Transactions:
        alternate = False
        if self._sends_offsets:
            # On brokers before 4.0 a late TxnOffsetCommit could overwrite offsets of a replacement with the same id.
            with self._world.admin(self.settings) as admin:
                alternate = admin.transaction_version() < OLD_TRANSACTIONS
        deadline = self._world.now() + self.settings["eos.startup.timeout.ms"] / 1000
        self._producer.start(deadline, alternate=alternate)
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()

    @contextlib.contextmanager
    def begin(self) -> Iterator[PlainTransaction]:
        """Run one transaction: the end of the block commits it; an exception from the block aborts it and is raised.

        Raises IllegalState while another block of this producer is open in any thread, because both would share one
        transaction. Raises Fenced if a newer instance owns the id, from then on at every call. Raises
        CommitOutcomeUnknown, NotAuthorised and so on. Raises Temporary if the transaction was aborted for another
        reason, such as its timeout: none of its records is visible, and it may be tried again.
        """
        txn = PlainTransaction(self._producer, self._to_public_error, self._sends_offsets)
        try:
            self._begin(txn)
            yield from self._run_block(txn)
        finally:
            txn.ended = True
            if self._open_transaction is txn:
                self._open_transaction = None

    def _begin(self, txn: PlainTransaction) -> None:
        producer = self._producer
        with self._begin_lock:
            if self._open_transaction is not None:
                raise IllegalState(
                    "a transaction of this producer is open: end its block first, or use another Transactions with its "
                    "own transactional.id"
                )
            self._open_transaction = txn
            self._ownership.raise_if_lost()
            # An exception from outside the client (a signal's) interrupted the previous transaction before its answer
            # arrived. The new producer's init ends it.
            producer.give_up("the previous transaction was neither committed nor aborted")
            try:
                if reason := producer.decide_replacement():
                    txn.producer_reinitialised = True
                    self._ownership.replace(producer, reason)
                producer.begin()
            except CallFailed as failure:
                raise self._to_public_error(failure) from failure

    def _run_block(self, txn: PlainTransaction) -> Iterator[PlainTransaction]:
        """Run the user's block of a transaction that has begun, and end the transaction."""
        producer = self._producer
        try:
            yield txn
        except BaseException:
            self._try_abort()
            raise
        try:
            if txn.failure is not None:
                raise txn.failure  # the block caught a send's failure, but a record is missing: no commit
            producer.flush()
            producer.commit()
        except CallFailed as failure:
            self._try_abort()
            if failure.call == "commit" and failure.action is Action.REBUILD:
                raise CommitOutcomeUnknown(f"the commit's outcome is unknown: {failure}") from failure
            raise self._to_public_error(failure, txn.failed_topic) from failure
        except BaseException:
            # A signal handler or a user's callback raised.
            if producer.state is State.COMMITTING:
                log.warning("commit interrupted, its outcome is unknown", **producer.who())
            self._try_abort()
            raise

    def _try_abort(self) -> None:
        if self._producer.may_abort:
            try:
                self._producer.abort()
            except CallFailed as failure:
                if failure.action not in (Action.ABORT, Action.REBUILD, Action.RETRY):
                    raise self._to_public_error(failure) from failure  # fenced: we have no transaction left to abort
                # Nothing will commit the transaction: the next begin's new producer aborts it, or the broker does at
                # its timeout. Only log the failed abort, so that it does not hide why the block ended. (The coordinator
                # refuses an abort right after the first send if it does not know the transaction yet.)
                log.warning("abort failed", error=str(failure), **self._producer.who())

    def _to_public_error(self, failure: CallFailed, topic: str = "") -> EosError:
        steps = PLAN.get(failure.action, ())
        if Step.ASK_OWNER in steps:
            return self._settle(failure)
        if Step.ISOLATE in steps:
            return PoisonRecord(f"the record was refused: {failure}", topic, -1, -1)
        if steps or failure.action is Action.RETRY:
            return Temporary(f"the transaction was aborted: {failure}")
        return stop_error(failure)

    def _settle(self, failure: CallFailed) -> EosError:
        """Return the error of a fenced call.

        After our own timeout the next begin replaces the producer; after a newer instance's init every begin fails."""
        timeout_ms = self.settings.transaction_timeout_ms
        try:
            owner = self._ownership.settle(self._producer, str(failure))
        except Fenced as fenced:
            return fenced
        if owner is Owner.OWN_TIMEOUT:
            return Temporary(f"the transaction exceeded transaction.timeout.ms={timeout_ms} and was aborted: {failure}")
        # The client has failed anyway, and a commit in progress may have succeeded.
        kind = CommitOutcomeUnknown if failure.call == "commit" else Temporary
        return kind(f"the producer failed; {owner.value} (transaction.timeout.ms={timeout_ms}): {failure}")


def _describe_owner(producer: TransactionalProducer, answer: TransactionalIdState | None) -> tuple[str, str]:
    return "", "" if answer is None else f"now producer id {answer.producer_id} epoch {answer.epoch}"


@contextlib.contextmanager
def transaction(settings: Settings | Mapping[str, Any]) -> Iterator[PlainTransaction]:
    """Run one transaction without an input, with its own producer; `transactional.id` must be set.

    A mapping is completed from the environment and eos.toml, like the flags of a command; Settings are used unchanged.
    For many transactions keep the producer: `with Transactions(settings) as p: with p.begin() as txn: ...`.
    """
    with Transactions(settings) as transactions, transactions.begin() as txn:
        yield txn
