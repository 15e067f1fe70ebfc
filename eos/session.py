"""TransactSession: producer, consumer and group under one type; the only place that decides commit or abort.

The order of calls and every rule of a consume-transform-produce loop live here. Modelled on franz-go's
GroupTransactSession. Rebalance callbacks only record facts: what was assigned waits in `_unresolved` until no
transaction is open, what was revoked is forgotten, and if the open transaction took records of it, that transaction
aborts at its end (nothing of it can become visible, so giving the partition back first is safe).

A transaction in order: gather -> begin -> hand out records, send, poll for more -> flush -> latched delivery errors ->
member still in the group -> send_offsets -> commit. What a failure of each step leads to is
eos/errors.py's answer; how it is carried out is `_recover`, `_abort`, `_rebuild` and `_settle` below.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from eos import log, ownership
from eos.admin.cluster import ClusterAdmin
from eos.app import Record, Send
from eos.errors import (
    Action,
    CallFailed,
    ConfigurationError,
    EosError,
    Fenced,
    IllegalState,
    InputGone,
    PoisonRecord,
    Temporary,
    Unavailable,
    classify,
    describe_error,
    stop_error,
)
from eos.ownership import Described, Owner, Situation
from eos.positions import Positions
from eos.producer import ALWAYS, TransactionalProducer
from eos.settings import Settings

_Partition = tuple[str, int]

IDLE_POLL_S = 0.1
_CLOSE_ABORT_S = 5.0
_RESOLVE_PAUSE_S = 0.2
_CHUNK = 5_000  # records of one poll inside a transaction
MOST_REBUILDS = 5  # without a commit in between; then a supervisor's back-off is the better place to wait
OLD_TRANSACTIONS = 2  # transaction.version below it: a replaced producer needs another transactional.id


@dataclass
class Counters:
    """What a session did so far; plain numbers, read by the worker's live line and by tests."""

    records_in: int = 0
    records_out: int = 0
    transactions: int = 0
    aborts: int = 0
    rebuilds: int = 0
    replacements: dict[str, int] = field(default_factory=dict)


class Transaction:
    """One open transaction and its input records. Valid until the loop's next turn."""

    __slots__ = ("_session", "_until", "sent")

    def __init__(self, session: TransactSession, until: float) -> None:
        self._session = session
        self._until = until  # time.monotonic() after which no more records are handed out
        self.sent = 0

    @property
    def records(self) -> Iterator[Record]:
        """Hands the records out one by one, until `eos.transaction.interval.ms` is over or none is left.

        A record that was handed out counts as handled when the body ends: send what it leads to before that.
        """
        while batch := self.take(64):
            for index, record in enumerate(batch):
                yield record
                if time.monotonic() >= self._until:
                    self.give_back(len(batch) - index - 1)
                    return

    def take(self, most: int) -> list[Record]:
        """The next records, at most `most`; an empty list when none is left, the interval is over or a send failed."""
        self._session._must_be(self)
        if self._session._failure is not None or (self._session._taken and time.monotonic() >= self._until):
            return []
        return self._session._take(most)

    def give_back(self, count: int) -> None:
        """The last `count` records taken were not handled: the next transaction hands them out again."""
        self._session._must_be(self)
        self._session._positions.give_back(count)

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int = 0,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        """Sends one record in this transaction; `timestamp_ms` 0 is now, `partition` None leaves it to the key."""
        where = -1 if partition is None else partition
        self.send_all([(topic, value, key, where, timestamp_ms, list(headers) or None)])

    def send_all(self, sends: Sequence[Send]) -> None:
        """Sends what App routes give: (topic, value, key, partition, timestamp_ms, headers) tuples."""
        self._session._must_be(self)
        self._session._send(sends)
        self.sent += len(sends)

    def commit(self) -> bool:
        """Ends the transaction now; False if it had to be aborted and its records will be handed out again."""
        self._session._must_be(self)
        return self._session.end()

    def abort(self) -> None:
        """Gives the transaction up; its records will be handed out again."""
        self._session._must_be(self)
        self._session.abort("asked by the application")


class TransactSession:
    """Iterate over it: each turn is one transaction with a batch of records.

    ::

        with TransactSession({"group.id": "g", "transactional.id": "g-1"}, ["in"]) as session:
            for txn in session:
                for record in txn.records:
                    txn.send("out", record.value, key=record.key)

    The body's end commits. An exception out of the body aborts; leaving the loop by `break` aborts too (call
    `txn.commit()` first to keep the work). A transaction that had to be aborted (a rebalance, a lost broker, ...) is
    not reported: its records are handed out again, in the same order. Raises EosError's subclasses (see eos.errors).

    Settings: Kafka's and `eos.*` names (eos.settings); `group.id` and `transactional.id` must be set, `topics` may
    come from `eos.input.topics`. With `until_end` the loop ends when the whole group has handled what was readable at
    the start. One session belongs to one thread.
    """

    def __init__(
        self,
        settings: Settings | Mapping[str, Any],
        topics: Sequence[str] | None = None,
        *,
        until_end: bool = False,
        destinations: Sequence[str] = (),
    ) -> None:
        self.settings = settings if isinstance(settings, Settings) else Settings(settings)
        named = [t.strip() for t in self.settings["eos.input.topics"].split(",") if t.strip()]
        self.topics = list(topics) if topics is not None else named
        self.destinations = list(destinations)
        for name in ("group.id", "transactional.id"):
            if not self.settings.get(name):
                raise ConfigurationError(f"{name} must be set for a session")
        if not self.topics:
            raise ConfigurationError("a session needs topics: TransactSession(settings, [...]) or eos.input.topics")
        self.group: str = self.settings["group.id"]
        self.transactional_id: str = self.settings["transactional.id"]
        self.counters = Counters()
        self.stop_requested = False
        self.until_end = until_end
        self.on_event: Callable[[str], None] | None = None
        """Test seam: called with the name of each step before it happens; the product never sets it."""
        self.on_idle: Callable[[], None] = lambda: None
        """Called about every 100 ms while there is nothing to do."""

        self._interval_s: float = self.settings["eos.transaction.interval.ms"] / 1000
        self._most: int = self.settings["eos.transaction.max.records"]
        self._limit = self._most  # shrinks while a record that the broker refuses is being found
        self._positions: Positions[Record] = Positions()
        self._open: Transaction | None = None
        self._taken = False
        self._began_at = 0.0
        self._owned: set[_Partition] = set()
        self._unresolved: set[_Partition] = set()  # assigned by the group, not begun yet
        self._next_resolve = 0.0
        self._new_starts: dict[_Partition, int] = {}  # `latest`: where partitions began, committed at once
        self._latched: BaseException | None = None  # out of a rebalance callback
        self._failure: CallFailed | None = None  # of a send in the open transaction
        self._rebuilds_in_a_row = 0
        self._aborts_in_a_row = 0
        self._pause_until = 0.0
        self._targets: dict[_Partition, int] = {}
        self._next_done_check = 0.0
        self._consumer: Consumer | None = None
        self._producer: TransactionalProducer | None = None

    # ---- life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> TransactSession:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    @property
    def consumer(self) -> Consumer:
        assert self._consumer is not None, "the session is not started"
        return self._consumer

    @property
    def producer(self) -> TransactionalProducer:
        assert self._producer is not None, "the session is not started"
        return self._producer

    @property
    def assignment(self) -> frozenset[_Partition]:
        """Partitions owned as of the last poll."""
        return frozenset(self._owned)

    @property
    def taken(self) -> int:
        """Records that the open transaction took."""
        return self._positions.taken

    def start(self) -> None:
        """Connects, fences predecessors and subscribes. Raises Unavailable within eos.startup.timeout.ms."""
        deadline = time.monotonic() + self.settings["eos.startup.timeout.ms"] / 1000
        configuration = self.settings.consumer() | {"logger": log.client_logger}
        if self.until_end:
            configuration["enable.partition.eof"] = True
        configuration.setdefault("error_cb", self._client_error)
        try:
            self._consumer = Consumer(configuration)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the consumer's settings were refused: {describe_error(error)}") from error
        try:
            self._check_topics(deadline)
            alternate = self._needs_alternate_id()
            self._producer = TransactionalProducer(self.settings, self.transactional_id, alternate)
            self._producer.start(deadline)
            if self.until_end:
                self._targets = self._stable_ends()
            self.consumer.subscribe(
                self.topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        except BaseException:
            self.close()
            raise
        self.producer.identity(0.5)  # comes with the first statistics; the log should name it from the start
        log.info("session started", group=self.group, topics=",".join(self.topics), **self.producer.who())

    def close(self, leave_group: bool = False) -> None:
        """Aborts what is open and closes both clients. `leave_group`: a static member leaves for good."""
        self._open = None
        if self._producer is not None and self._producer.may_abort:
            try:
                self._producer.abort(time.monotonic() + _CLOSE_ABORT_S)
            except CallFailed as failure:
                # The broker aborts it at its timeout, or our successor's init does.
                log.warning("abort at close failed", error=str(failure), **self.producer.who())
        if self._producer is not None:
            self._producer.close()
        if self._consumer is not None:
            try:
                self._consumer.close()
            except (KafkaException, RuntimeError) as error:
                log.debug("closing the consumer raised", error=describe_error(error))
            self._consumer = None
        if leave_group and self.settings.classic_group:
            self._remove_static_member()

    def _remove_static_member(self) -> None:
        instance = self.settings.consumer()["group.instance.id"]
        try:
            with ClusterAdmin(self.settings, timeout_ms=5_000) as admin:
                admin.remove_member(self.group, instance)
        except EosError as error:
            log.warning(
                "could not leave the group: its partitions move at the session timeout",
                instance=instance,
                error=str(error),
            )

    def _check_topics(self, deadline: float) -> None:
        """Every topic named exists, or Unavailable with the name; so does an unreachable cluster."""
        servers = self.settings.bootstrap_servers
        try:
            known = self.consumer.list_topics(timeout=max(1.0, deadline - time.monotonic())).topics
        except KafkaException as error:
            action = classify("consume", error.args[0])
            if action is Action.UNAUTHORISED:
                raise stop_error(CallFailed("consume", action, error)) from error
            raise Unavailable(f"{servers} cannot be reached: {describe_error(error)}") from error
        for topic in [*self.topics, *self.destinations]:
            if topic not in known or known[topic].error is not None:
                detail = f" ({known[topic].error.str()})" if topic in known and known[topic].error else ""
                raise Unavailable(f"topic {topic} does not exist at {servers}{detail}")

    def _needs_alternate_id(self) -> bool:
        with ClusterAdmin(self.settings) as admin:
            return admin.transaction_version() < OLD_TRANSACTIONS

    def _client_error(self, error: KafkaError) -> None:
        log.debug("client error", error=describe_error(error))

    # ---- the loop ---------------------------------------------------------------------------------------------

    def __iter__(self) -> TransactSession:
        if self._open is not None:
            self.abort("the loop was left before the transaction ended")
        return self

    def __next__(self) -> Transaction:
        if self._open is not None:
            self.end()
        while True:
            if self.stop_requested:
                raise StopIteration
            self._gather()
            if len(self._positions):
                return self._begin()
            if self._new_starts or self._positions.offsets():
                self._begin()
                self.end()
            elif self.until_end and self._group_is_done():
                raise StopIteration
            self._replace_while_idle()
            self.on_idle()

    def _replace_while_idle(self) -> None:
        """A late AddPartitionsToTxn would start a ghost transaction that fences an idle worker: not at a new epoch."""
        reason = self.producer.must_replace()
        if reason is not None and reason != ALWAYS:
            self.producer.replace(reason)

    def _step(self, name: str) -> None:
        if self.on_event is not None:
            self.on_event(name)

    def _begin(self) -> Transaction:
        if reason := self.producer.must_replace():
            self.producer.replace(reason)
        self._step("begin")
        try:
            self.producer.begin()
        except CallFailed as failure:
            self._recover(failure)
            return self._begin()
        self._step("begun")
        self._began_at = time.monotonic()
        self._taken = False
        self._failure = None
        self._open = Transaction(self, self._began_at + self._interval_s)
        return self._open

    def _must_be(self, txn: Transaction) -> None:
        if txn is not self._open:
            raise IllegalState("this transaction has ended")

    def _take(self, most: int) -> list[Record]:
        positions = self._positions
        most = min(most, self._limit - positions.taken)
        if not len(positions) and positions.taken > 0 and most > 0:
            self._poll(min(_CHUNK, self._most - positions.taken), 0.0)  # a backlog: go on in the same transaction
        batch = positions.take(most) if self._failure is None else []
        self._taken = self._taken or bool(batch)
        return batch

    def _send(self, sends: Sequence[Send]) -> None:
        # A failure is a fact for `end`: the body need not know, its further sends lead nowhere.
        if self._failure is None:
            try:
                self.producer.send_all(sends)
            except CallFailed as failure:
                self._failure = failure

    # ---- polling ----------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Polls until the interval since the last transaction's begin is over; no transaction is open."""
        self.producer.poll(0)
        self._wait_out_pause()
        if self._unresolved:
            self._assign_resolved()
        due = self._began_at + self._interval_s
        if not len(self._positions) and time.monotonic() >= due:
            self._poll(1, IDLE_POLL_S)  # idle: the first record starts a transaction at once
            if not len(self._positions):
                return
        # At least one, even when there is no room: the callbacks must be served.
        room = max(1, self._most - len(self._positions))
        early_s = 0.0 if self._aborts_in_a_row else max(0.0, due - time.monotonic())
        # On a backlog only a chunk: the producer has nothing to send until the transaction has begun.
        self._poll(room if early_s else min(room, _CHUNK), early_s)

    def _wait_out_pause(self) -> None:
        """After an abort: gives the group and the cluster a moment, polling so that callbacks come through."""
        while (left := self._pause_until - time.monotonic()) > 0 and not self.stop_requested:
            self._poll(1, min(left, IDLE_POLL_S))
            time.sleep(min(0.05, max(0.0, self._pause_until - time.monotonic())))

    def _poll(self, most: int, timeout_s: float) -> None:
        messages: list[Any] = []
        failed: KafkaError | None = None
        try:
            messages = self.consumer.consume(most, timeout_s)
        except KafkaException as error:
            failed = error.args[0]
        if self._latched is not None:
            latched, self._latched = self._latched, None
            raise latched
        if failed is not None:
            self._consumer_failed(failed, None)
        if any(m.error() is not None for m in messages):
            messages = [m for m in messages if self._is_record(m)]
        self._positions.fetched(
            [
                Record(m.topic(), m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), m.headers() or ())
                for m in messages
            ]
        )

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() == KafkaError._PARTITION_EOF:
            self._positions.reached_end((message.topic(), message.partition()), message.offset())
        else:
            self._consumer_failed(error, message)
        return False

    def _consumer_failed(self, error: KafkaError, message: Any) -> None:
        action = classify("consume", error)
        if action is Action.INPUT_GONE and message is not None:
            raise self._input_gone(message, error)
        if action is Action.FENCED:
            raise self._fenced(f"the consumer was fenced: {error.str()}", None)
        if action is not Action.RETRY:
            raise stop_error(CallFailed("consume", action, error))
        log.warning("the consumer reports", error=describe_error(error), group=self.group)

    def _input_gone(self, message: Any, error: KafkaError) -> InputGone:
        topic, partition = message.topic(), message.partition()
        at = self._positions.committed.get((topic, partition))
        low, high = self.consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=5.0)
        return InputGone(
            f"the input is gone: {topic} [{partition}] is committed at offset {at}, but the topic now holds {low} to "
            f"{high}; reset the group's offset on purpose to go on ({error.str()})"
        )

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def end(self) -> bool:
        """Commits the open transaction. False: it was aborted and its records will be handed out again."""
        if self._open is None:
            raise IllegalState("no transaction is open")
        offsets = self._new_starts | self._positions.offsets()
        sent, taken = self._open.sent, self._positions.taken
        try:
            if self._failure is not None:
                raise self._failure
            self._flush_and_commit(offsets)
        except CallFailed as failure:
            self._recover(failure)
            return False
        self._open = None
        self._positions.commit(offsets)
        self._new_starts = {}
        self._committed(sent, taken)
        return True

    def _flush_and_commit(self, offsets: Mapping[_Partition, int]) -> None:
        producer = self.producer
        self._step("flush")
        producer.flush()
        self._step("flushed")
        if offsets:
            metadata = self._group_metadata(offsets)
            producer.send_offsets([self._with_owner(*p, offset) for p, offset in offsets.items()], metadata)
        self._step("offsets sent")
        producer.commit()
        self._step("committed")

    def _committed(self, sent: int, taken: int) -> None:
        self._rebuilds_in_a_row = self._aborts_in_a_row = 0
        self._limit = min(self._most, self._limit * 2)
        counters = self.counters
        counters.transactions += 1
        counters.records_in += taken
        counters.records_out += sent
        counters.replacements = self.producer.replacements
        log.debug("committed", taken=taken, sent=sent, ms=round((time.monotonic() - self._began_at) * 1000))

    def _group_metadata(self, offsets: Mapping[_Partition, int]) -> Any:
        """Fresh group metadata of a live member that owns all these partitions, or CallFailed(ABORT)."""
        metadata = self.consumer.consumer_group_metadata()
        # The broker skips its check for a member without an id (generation -1), so we must not ask it then. Asked
        # after the metadata was taken: a member that lost its id gets no new one before its callbacks ran.
        if not self.consumer.memberid():
            raise self._abortable("this consumer is not a member of its group any more")
        if not self._owned.issuperset(offsets):
            raise self._abortable("a partition of this transaction is not ours any more")
        return metadata

    def _abortable(self, sentence: str) -> CallFailed:
        return CallFailed("send_offsets", Action.ABORT, RuntimeError(sentence))

    def _with_owner(self, topic: str, partition: int, offset: int) -> TopicPartition:
        """An offset that says in its metadata who committed it, so that a fenced instance can say who replaced it."""
        return TopicPartition(topic, partition, offset, self._owner_metadata)

    @property
    def _owner_metadata(self) -> str:
        identity = self.producer.client.identity
        return json.dumps(
            {
                "instance": self.settings.instance,
                "host": socket.gethostname(),
                "since": _STARTED_AT,
                "epoch": identity.epoch if identity else None,
            },
            separators=(",", ":"),
        )

    # ---- recovery ---------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Aborts the open transaction; its records are handed out again. The producer is replaced before the next."""
        if self._open is None:
            raise IllegalState("no transaction is open")
        self._recover(CallFailed("abort", Action.ABORT, RuntimeError(reason)))

    def _recover(self, failure: CallFailed) -> None:
        """Carries out what a failed call asks for; returns when the loop can go on, raises when it must stop."""
        if failure.action is Action.ABORT:
            self._abort(failure)
        elif failure.action is Action.REBUILD:
            self._rebuild(str(failure))
        elif failure.action is Action.SETTLE:
            self._settle(failure)
        elif failure.action is Action.POISON:
            self._abort_poisoned(failure)
        elif failure.action is Action.FENCED:
            raise self._fenced(str(failure), None) from failure
        else:
            raise stop_error(failure) from failure

    def _abort(self, failure: CallFailed) -> None:
        """A known abort: the records are handed out again as they are."""
        try:
            self.producer.abort()
        except CallFailed as worse:
            self._recover(CallFailed(worse.call, Action.REBUILD, worse) if worse.action is Action.ABORT else worse)
            return
        self._open = None
        self._positions.rewind()
        self._aborts_in_a_row += 1
        self.counters.aborts += 1
        # The group or the cluster needs a moment; without a pause this would spin through aborts.
        self._pause_until = time.monotonic() + min(5.0, 0.05 * 2 ** min(self._aborts_in_a_row, 7))
        log.warning("transaction aborted", reason=str(failure), **self.producer.who())

    def _abort_poisoned(self, failure: CallFailed) -> None:
        """A record is refused for good. Alone in its transaction it is found; else smaller transactions find it."""
        taken = self._positions.taken
        self._abort(failure)
        if taken > 1:
            self._limit = max(1, taken // 2)
            self._pause_until = 0.0
            return
        culprit = self._positions.take(1)[0]
        self._positions.give_back(1)
        where = f"{culprit.topic} [{culprit.partition}] offset {culprit.offset}"
        raise PoisonRecord(
            f"an output of {where} was refused: {failure}", culprit.topic, culprit.partition, culprit.offset
        ) from failure

    def _rebuild(self, reason: str) -> None:
        """Outcome unknown or producer dead: a new producer, then the group's stable committed offsets decide."""
        self._rebuilds_in_a_row += 1
        self.counters.rebuilds += 1
        if self._rebuilds_in_a_row > MOST_REBUILDS:
            self._open = None
            raise Temporary(
                f"{self._rebuilds_in_a_row} rebuilds without one commit, the last because of: {reason}. If handling "
                f"{self._positions.taken} records takes longer than transaction.timeout.ms="
                f"{self.settings.transaction_timeout_ms}, raise it; if two processes share {self.transactional_id}, "
                "give each its own --instance"
            )
        touched = self._new_starts | self._positions.offsets()
        self._open = None
        self.producer.replace(f"failure: {reason}")
        stable = self._stable_committed(list(touched))
        dropped = self._positions.resolve({p: tp.offset if tp.offset >= 0 else None for p, tp in stable.items()})
        self._new_starts = {p: o for p, o in self._new_starts.items() if stable[p].offset < 0}
        self._aborts_in_a_row += 1
        log.warning(
            "rebuilt from the committed offsets",
            reason=reason,
            outcome="committed" if dropped else "aborted",
            **self.producer.who(),
        )

    def _settle(self, failure: CallFailed) -> None:
        """Fenced: by our own timeout (rebuild and go on) or by a newer instance (stop, touch nothing)."""
        producer = self.producer
        age_ms = (time.monotonic() - producer.began_at) * 1000
        identity = producer.identity()
        if identity is None:
            raise self._fenced(f"{failure}; this producer's own epoch is not known", None) from failure
        situation = Situation(identity, producer.acknowledged, age_ms, self.settings.transaction_timeout_ms)
        owner, answer = self._ask_owner(situation)
        log.warning("fenced", owner=owner.value, age_ms=round(age_ms), answer=answer, **producer.who())
        if owner is Owner.GHOST and not self._still_member():
            owner = Owner.NEWER
        if owner is Owner.NEWER:
            raise self._fenced(str(failure), answer) from failure
        self._rebuild(owner.value)

    def _ask_owner(self, situation: Situation) -> tuple[Owner, Described | None]:
        """Waits for an unreachable cluster: nothing can be decided, and nothing lost, without it."""
        while True:
            try:
                with ClusterAdmin(self.settings) as admin:
                    return ownership.settle(situation, lambda: admin.describe(self.producer.transactional_id))
            except Unavailable as error:
                log.warning("waiting for the cluster", call="DescribeTransactions", error=str(error))
                time.sleep(0.5)

    def _still_member(self) -> bool:
        """The group still counts this very consumer as its member; a newer static member would have taken its id."""
        member = self.consumer.memberid()
        if not self.settings.classic_group:
            return bool(member)
        with ClusterAdmin(self.settings) as admin:
            return any(m.get("member_id") == member for m in admin.members(self.group))

    def _fenced(self, reason: str, answer: Described | None) -> Fenced:
        """Exit 79's sentence: producer id, epoch, since when, and who, as far as the cluster tells."""
        self._open = None
        mine = self.producer.client.identity
        who = ""
        try:
            with ClusterAdmin(self.settings) as admin:
                answer = answer or admin.describe(self.producer.transactional_id)
                who = _newest_owner(admin.committed_metadata(self.group))
        except EosError as error:
            log.debug("the owner could not be asked", error=str(error))
        theirs = ""
        if answer is not None:
            since = f" since {_clock(answer.start_ms / 1000)}" if answer.start_ms > 0 else ""
            theirs = f"; now producer id {answer.producer_id} epoch {answer.epoch} in state {answer.state}{since}"
        ours = f"producer id {mine.producer_id} epoch {mine.epoch}" if mine else "its epoch was not known yet"
        return Fenced(
            f"a newer instance took over transactional.id {self.transactional_id} (ours: {ours}{theirs}){who}. "
            f"This one stops and has written nothing since. [{reason}]"
        )

    # ---- the group: callbacks record facts --------------------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        try:
            # An empty assignment: the partitions begin in `_assign_resolved`, once it is known where.
            (consumer.incremental_assign if self._cooperative else consumer.assign)([])
            self._unresolved |= {(p.topic, p.partition) for p in partitions}
            self._next_resolve = 0.0
        except BaseException as error:  # noqa: BLE001 - must not pass through C frames; raised after the poll
            self._latched = self._latched or error

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gave_up(consumer, partitions, "revoked")

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._gave_up(consumer, partitions, "lost")

    def _gave_up(self, consumer: Consumer, partitions: list[TopicPartition], how: str) -> None:
        try:
            gone = {(p.topic, p.partition) for p in partitions}
            if self._cooperative:
                consumer.incremental_unassign([TopicPartition(*p) for p in gone & self._owned])
            else:
                consumer.unassign()
            self._owned -= gone
            self._unresolved -= gone
            self._new_starts = {p: offset for p, offset in self._new_starts.items() if p not in gone}
            if self._positions.forget(gone) and self._open is not None and self._failure is None:
                self._failure = self._abortable(f"partitions of this transaction were {how}")
            log.info(f"partitions {how}", partitions=_names(gone), group=self.group)
        except BaseException as error:  # noqa: BLE001 - see _on_assign
            self._latched = self._latched or error

    @property
    def _cooperative(self) -> bool:
        if not self.settings.classic_group:
            return True
        return "cooperative" in str(self.settings.consumer()["partition.assignment.strategy"])

    def _assign_resolved(self) -> None:
        """Begins the new partitions, if their stable committed offsets can be had: not while a predecessor's open
        transaction pends on them. Partitions that we have already go on meanwhile."""
        if time.monotonic() < self._next_resolve:
            return
        wanted = self._unresolved
        starts = self._resolve_starts(sorted(wanted))
        if starts is None or self._unresolved != wanted:
            self._next_resolve = time.monotonic() + _RESOLVE_PAUSE_S
            return
        positions = list(starts.values())
        (self.consumer.incremental_assign if self._cooperative else self.consumer.assign)(positions)
        self._unresolved = set()
        self._owned |= set(starts)
        self._positions.assigned({p: max(tp.offset, 0) for p, tp in starts.items()})
        log.info("partitions assigned", partitions=_names(starts), group=self.group)

    def _resolve_starts(self, partitions: Sequence[_Partition]) -> dict[_Partition, TopicPartition] | None:
        """Where each new partition begins: its stable committed offset, else by auto.offset.reset (loop rule 16)."""
        starts = self._try_committed(partitions, 0.3)
        if starts is None:
            return None
        missing = [p for p, tp in starts.items() if tp.offset < 0]
        latest = str(self.settings.get("auto.offset.reset", "earliest")) == "latest"
        known = self._topics_with_commits({topic for topic, _ in missing}) if latest and missing else set()
        for topic, partition in missing:
            # A partition that came later than the group's first commit is new: its first records count too.
            if not latest or topic in known:
                starts[topic, partition] = TopicPartition(topic, partition, OFFSET_BEGINNING)
            else:
                _, end = self._watermarks(topic, partition)
                starts[topic, partition] = TopicPartition(topic, partition, end)
                self._new_starts[topic, partition] = end
        return starts

    def _topics_with_commits(self, topics: set[str]) -> set[str]:
        with_commits = set()
        for topic in topics:
            metadata = self.consumer.list_topics(topic, timeout=10.0).topics[topic]
            committed = self._stable_committed([(topic, partition) for partition in metadata.partitions])
            if any(tp.offset >= 0 for tp in committed.values()):
                with_commits.add(topic)
        return with_commits

    def _stable_committed(self, partitions: Sequence[_Partition]) -> dict[_Partition, TopicPartition]:
        """The group's committed offsets once no transaction pends on them (KIP-447); waits for them."""
        told = time.monotonic()
        while (found := self._try_committed(partitions, 5.0)) is None:
            if time.monotonic() - told > 10.0:
                told = time.monotonic()
                log.warning("waiting for stable committed offsets", group=self.group)
            time.sleep(0.05)
        return found

    def _try_committed(
        self, partitions: Sequence[_Partition], timeout_s: float
    ) -> dict[_Partition, TopicPartition] | None:
        """Stable committed offsets, or None if they cannot be had yet."""
        if not partitions:
            return {}
        try:
            found = self.consumer.committed([TopicPartition(*p) for p in partitions], timeout=timeout_s)
            error = next((tp.error for tp in found if tp.error is not None), None)
            if error is None:
                return {(tp.topic, tp.partition): tp for tp in found}
        except KafkaException as raised:
            error = raised.args[0]
        action = classify("committed", error)
        if action is not Action.RETRY:
            raise stop_error(CallFailed("committed", action, error))
        log.debug("committed offsets cannot be had yet", error=describe_error(error), group=self.group)
        return None

    def _watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Low watermark and last stable offset of a partition (a read_committed consumer's end)."""
        while True:
            try:
                low, high = self.consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=5.0)
                return low, high
            except KafkaException as error:
                action = classify("consume", error.args[0])
                if action is not Action.RETRY:
                    raise stop_error(CallFailed("consume", action, error)) from error
                time.sleep(0.1)

    # ---- until the end ----------------------------------------------------------------------------------------

    def _stable_ends(self) -> dict[_Partition, int]:
        """Last stable offsets of all input partitions now; those without a readable offset are left out."""
        ends = {}
        for topic in self.topics:
            for partition in self.consumer.list_topics(topic, timeout=10.0).topics[topic].partitions:
                low, end = self._watermarks(topic, partition)
                if end > low:
                    ends[topic, partition] = end
        return ends

    def lag(self) -> int | None:
        """Offsets between what is committed and the last stable offsets of the owned partitions, as last fetched.

        Control markers take offsets too, so a caught-up group can show a few (loop rule 14). None: not known yet.
        """
        total = 0
        for partition in self._owned:
            try:
                _, end = self.consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
            except KafkaException:
                return None
            if end < 0:
                return None
            total += max(0, end - max(self._positions.committed.get(partition, 0), 0))
        return total if self._owned else None

    def _group_is_done(self) -> bool:
        """Every partition of the group, whoever owns it, is committed up to where it ended at the start."""
        now = time.monotonic()
        if now < self._next_done_check:
            return False
        self._next_done_check = now + 0.25
        committed = self._stable_committed(list(self._targets))
        self._targets = {p: end for p, end in self._targets.items() if committed[p].offset < end}
        return not self._targets


# Of this process; milliseconds since the epoch.
_STARTED_AT = int(time.time() * 1000)


def _names(partitions: Iterable[_Partition]) -> str:
    return ",".join(f"{topic}[{partition}]" for topic, partition in sorted(partitions))


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _newest_owner(metadata: Sequence[str]) -> str:
    """Who committed last, from the committed offsets' metadata: ", instance a on host b since ..."."""
    owners = []
    for text in metadata:
        try:
            owner = json.loads(text.rstrip("\0"))
            owners.append((owner["since"], owner["instance"], owner["host"]))
        except (ValueError, KeyError, TypeError):
            continue  # somebody else's metadata
    if not owners:
        return ""
    since, instance, host = max(owners)
    return f"; the last commit is by instance {instance} on {host}, started {_clock(since / 1000)}"
