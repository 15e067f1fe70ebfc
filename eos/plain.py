"""Transactions without an input: `with eos.transaction(settings) as txn: txn.send(...)`.

The same producer and the same rules as a session's, without a consumer. There is no offset to read back, so a commit
whose answer never came stays unknown and is raised as CommitOutcomeUnknown.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaError, Message, TopicPartition

from eos import log
from eos.encoding.sends import send_of
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
from eos.records import Headers, place_of
from eos.session.claim import Claim
from eos.session.producer import OLD_TRANSACTIONS, TransactionalProducer
from eos.session.recovery import PLAN, Step
from eos.session.states import State


class Delivery:
    """What became of one send; complete when the transaction's block has ended.

    `offset` is -1 and `error` a sentence when it was refused. Visible to read_committed readers only after the commit.
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
        what = f"{self.topic} {self.error}" if self.error else place_of(self.topic, self.partition, self.offset)
        return f"<Delivery {what}>"


class PlainTransaction:
    """One transaction without an input; ends with its block.

    `renewed`: the producer was initialised anew for it, so another instance may have been at work since the one before.
    Whoever sends offsets asks then whether they are still where it left them.
    """

    def __init__(
        self,
        producer: TransactionalProducer,
        public: Callable[[CallFailed, str], EosError],
        sends_offsets: bool = False,
    ) -> None:
        self._producer, self._public, self._sends_offsets = producer, public, sends_offsets
        self.renewed = False
        self.over = False
        """Its block has ended: what the producer has open is not this transaction."""
        self.failure: CallFailed | None = None
        """Of a send: the transaction cannot commit any more."""
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
        """Queues one record; value, key and headers are encoded as an App's are (bytes as they are, str as UTF-8, None,
        else JSON). Raises TypeError or ValueError for what cannot be sent: nothing was queued.

        Raises the transaction's failure as soon as it is known; the block's end aborts then, and raises it again if the
        block went on.
        """
        self._must_be_open("send")
        delivery = Delivery(topic)
        record = send_of("send", topic, value, key, partition, timestamp_ms, headers)
        try:
            self._producer.send(*record, delivery._report)
        except CallFailed as failure:
            self.failure, self.failed_topic = failure, topic
            delivery.error = str(failure)
            raise self._public(failure, topic) from failure
        self.deliveries.append(delivery)
        return delivery

    def send_offsets(self, offsets: list[TopicPartition], group_metadata: Any) -> None:
        """Commits offsets of a group with this transaction, for a reader of its own that is in no group; the last call
        before the block's end. The Transactions was made with `offsets=True`."""
        if not self._sends_offsets:
            raise IllegalState("send_offsets needs Transactions(settings, offsets=True)")
        self._must_be_open("send_offsets")
        try:
            self._producer.flush()
            self._producer.send_offsets(offsets, group_metadata)
        except CallFailed as failure:
            self.failure = failure
            raise self._public(failure, self.failed_topic) from failure

    def _must_be_open(self, call: str) -> None:
        if self.over:
            raise IllegalState(f"{call} is not possible: this transaction's block has ended")
        if self._producer.state is not State.IN_TRANSACTION:
            raise IllegalState(f"{call} is not possible in state {self._producer.state.value}")


class Transactions:
    """A started transactional producer: `with transactions.begin() as txn:` as often as needed, one block at a time.

    Several threads take one each, with a transactional.id of its own. `offsets`: its transactions may `send_offsets`.
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
        self._open: PlainTransaction | None = None  # whose block has the producer
        self._beginning = threading.Lock()
        self._claim = Claim(self.settings, _lost_to, world=world)

    def __enter__(self) -> Transactions:
        alternate = False
        if self._sends_offsets:
            # On brokers before 4.0 a late TxnOffsetCommit takes pending offsets from a replacement of the same id.
            with self._world.admin(self.settings) as admin:
                alternate = admin.transaction_version() < OLD_TRANSACTIONS
        deadline = self._world.now() + self.settings["eos.startup.timeout.ms"] / 1000
        self._producer.start(deadline, alternate=alternate)
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()

    @contextlib.contextmanager
    def begin(self) -> Iterator[PlainTransaction]:
        """One transaction: the block's end commits, an exception out of it aborts and goes on up.

        Raises IllegalState while another block of this producer is open, in whichever thread: what both sent would be
        one transaction, and the end of one the end of the other. Raises Fenced (and from then on always: a newer
        instance owns the id), CommitOutcomeUnknown, NotAuthorised, ..., or Temporary when it was aborted for another
        reason, its own timeout for one: then nothing of it is visible, and it may be tried again.
        """
        txn = PlainTransaction(self._producer, self._public, self._sends_offsets)
        try:
            self._begin(txn)
            yield from self._block(txn)
        finally:
            txn.over = True
            if self._open is txn:
                self._open = None

    def _begin(self, txn: PlainTransaction) -> None:
        producer = self._producer
        with self._beginning:
            if self._open is not None:
                raise IllegalState(
                    "a transaction of this producer is open: end its block first, or take another Transactions with a "
                    "transactional.id of its own"
                )
            self._open = txn
            self._claim.hold()
            # An exception that is none of the client's (a signal's) ended a transaction half way: nobody waits for its
            # answer any more, and the new producer's init settles it.
            producer.give_up("the transaction before it was not ended")
            try:
                if reason := producer.must_replace():
                    txn.renewed = True
                    self._claim.replace(producer, reason)
                producer.begin()
            except CallFailed as failure:
                raise self._public(failure) from failure

    def _block(self, txn: PlainTransaction) -> Iterator[PlainTransaction]:
        """The transaction's life behind its begin: the user's block, and its end."""
        producer = self._producer
        try:
            yield txn
        except BaseException:
            self._give_up()
            raise
        try:
            if txn.failure is not None:
                raise txn.failure  # a send's, which the block took for handled: without that record there is no commit
            producer.flush()
            producer.commit()
        except CallFailed as failure:
            self._give_up()
            if failure.call == "commit" and failure.action is Action.REBUILD:
                raise CommitOutcomeUnknown(f"the commit's outcome is unknown: {failure}") from failure
            raise self._public(failure, txn.failed_topic) from failure
        except BaseException:
            # A signal's handler raised, or a callback of the user's.
            if producer.state is State.COMMITTING:
                log.warning("interrupted in a commit: whether it came to pass is not known", **producer.who())
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self._producer.may_abort:
            try:
                self._producer.abort()
            except CallFailed as failure:
                if failure.action not in (Action.ABORT, Action.REBUILD, Action.RETRY):
                    raise self._public(failure) from failure  # fenced: there is nothing of ours left to abort
                # Nobody will commit it: the next begin's new producer aborts it, or the broker at its timeout. It must
                # not hide why the block ended. (An abort right behind the first send is refused: the coordinator may
                # not have heard of the transaction yet.)
                log.warning("the abort failed", error=str(failure), **self._producer.who())

    def _public(self, failure: CallFailed, topic: str = "") -> EosError:
        steps = PLAN.get(failure.action, ())
        if Step.ASK_OWNER in steps:
            return self._settle(failure)
        if Step.ISOLATE in steps:
            return PoisonRecord(f"the record was refused: {failure}", topic, -1, -1)
        if steps or failure.action is Action.RETRY:
            return Temporary(f"the transaction was aborted: {failure}")
        return stop_error(failure)

    def _settle(self, failure: CallFailed) -> EosError:
        """Fenced: by our own timeout (the next begin replaces the producer) or by a newer instance (none does)."""
        timeout_ms = self.settings.transaction_timeout_ms
        try:
            owner = self._claim.settle(self._producer, str(failure))
        except Fenced as fenced:
            return fenced
        if owner is Owner.OWN_TIMEOUT:
            return Temporary(f"the transaction outlived transaction.timeout.ms={timeout_ms} and was aborted: {failure}")
        # Its client failed for good all the same; then a commit that was under way may have come to pass.
        kind = CommitOutcomeUnknown if failure.call == "commit" else Temporary
        return kind(f"the producer failed; {owner.value} (transaction.timeout.ms={timeout_ms}): {failure}")


def _lost_to(producer: TransactionalProducer, answer: TransactionalIdState | None) -> tuple[str, str]:
    return "", "" if answer is None else f"now producer id {answer.producer_id} epoch {answer.epoch}"


@contextlib.contextmanager
def transaction(settings: Settings | Mapping[str, Any]) -> Iterator[PlainTransaction]:
    """One transaction without an input, from start to end; `transactional.id` must be set. A mapping is completed by
    the environment and eos.toml, as the flags of a command are; Settings are taken as they are.

    For many transactions keep the producer: `with Transactions(settings) as p: with p.begin() as txn: ...`.
    """
    with Transactions(settings) as transactions, transactions.begin() as txn:
        yield txn
