"""TransactSession: producer, consumer and group under one type; the only place that decides commit or abort.

The order of calls and every rule of a consume-transform-produce loop live here. Modelled on franz-go's
GroupTransactSession. Rebalance callbacks (eos/membership.py) only record facts: what was assigned begins when no
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, TopicPartition

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
    PoisonRecord,
    Temporary,
    Unavailable,
    stop_error,
)
from eos.membership import Finish, Membership
from eos.ownership import Described, Owner, Situation
from eos.positions import Positions
from eos.positions import TopicPartition as Partition
from eos.producer import ALWAYS, TransactionalProducer
from eos.settings import Settings

IDLE_POLL_S = 0.1
_CLOSE_ABORT_S = 5.0
_CHUNK = 2_000  # records of one poll on a backlog: while it runs the producer is given nothing to send
_BACKLOG_PAUSE_S = 0.005  # how long an open transaction waits for the next record before it ends early
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

    __slots__ = ("_ahead", "_records", "_session", "_until", "sent")

    def __init__(self, session: TransactSession, until: float) -> None:
        self._session = session
        self._until = until  # time.monotonic() after which no more records are handed out
        self._records: Iterator[Record] | None = None
        self._ahead = 0  # taken by `records`, but not handed out yet
        self.sent = 0

    @property
    def records(self) -> Iterator[Record]:
        """Hands the records out one by one, until `eos.transaction.interval.ms` is over or none is left.

        A record that was handed out counts as handled when the body ends: send what it leads to before that. Records
        that were not handed out (a `break`) come again in the next transaction.
        """
        if self._records is None:
            self._records = self._hand_out()
        return self._records

    def _hand_out(self) -> Iterator[Record]:
        while batch := self.take(64):
            self._ahead = len(batch)
            for record in batch:
                self._ahead -= 1
                yield record
                if time.monotonic() >= self._until:
                    self._give_back_ahead()
                    return

    def _give_back_ahead(self) -> None:
        self._session._positions.give_back(self._ahead)
        self._ahead = 0

    def take(self, most: int) -> list[Record]:
        """The next records, at most `most`; an empty list when none is left, the interval is over or a send failed."""
        self._session._must_be(self)
        self._give_back_ahead()
        if not self._session._going_well or (self._session.taken and time.monotonic() >= self._until):
            return []
        return self._session._take(most)

    def give_back(self, count: int) -> None:
        """The last `count` records taken were not handled: the next transaction hands them out again."""
        self._session._must_be(self)
        self._give_back_ahead()
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
        self._began_at = 0.0
        self._failure: CallFailed | None = None  # of a send in the open transaction
        self._rebuilds_in_a_row = 0
        self._aborts_in_a_row = 0
        self._pause_until = 0.0
        self._finish: Finish | None = None
        self._membership: Membership | None = None
        self._producer: TransactionalProducer | None = None

    # ---- life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> TransactSession:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A block that ended well is a final stop; after an exception a restart is expected soon.
        self.close(leave_group=kind is None)

    @property
    def membership(self) -> Membership:
        assert self._membership is not None, "the session is not started"
        return self._membership

    @property
    def consumer(self) -> Consumer:
        return self.membership.consumer

    @property
    def producer(self) -> TransactionalProducer:
        assert self._producer is not None, "the session is not started"
        return self._producer

    @property
    def assignment(self) -> frozenset[Partition]:
        """Partitions owned as of the last poll."""
        return frozenset(self.membership.owned)

    @property
    def taken(self) -> int:
        """Records that the open transaction took."""
        return self._positions.taken

    def start(self) -> None:
        """Connects, fences predecessors and subscribes. Raises Unavailable within eos.startup.timeout.ms."""
        deadline = time.monotonic() + self.settings["eos.startup.timeout.ms"] / 1000
        self._membership = self._new_membership()
        try:
            self._membership.check_topics([*self.topics, *self.destinations], deadline)
            alternate = self._needs_alternate_id()
            self._producer = TransactionalProducer(self.settings, self.transactional_id, alternate)
            self._producer.start(deadline)
            if self.until_end:
                self._finish = Finish(self._membership)
            self._membership.join()
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
        if self._membership is not None:
            self._membership.close(leave_group)
            self._membership = None

    def _new_membership(self) -> Membership:
        return Membership(self.settings, self.topics, self._positions, with_ends=self.until_end)

    def _needs_alternate_id(self) -> bool:
        with ClusterAdmin(self.settings) as admin:
            return admin.transaction_version() < OLD_TRANSACTIONS

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
            if self.membership.new_starts or self._positions.offsets():
                self._begin()
                self.end()
            elif self._finish is not None and self._finish.reached(self.membership):
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
        self._failure = self.membership.lost_sentence = None
        self._open = Transaction(self, self._began_at + self._interval_s)
        return self._open

    def _must_be(self, txn: Transaction) -> None:
        if txn is not self._open:
            raise IllegalState("this transaction has ended")

    def _take(self, most: int) -> list[Record]:
        positions = self._positions
        most = min(most, self._limit - positions.taken)
        if not len(positions) and positions.taken > 0 and most > 0:
            self._poll_on(min(_CHUNK, self._most - positions.taken))
        return positions.take(most) if self._going_well else []

    @property
    def _going_well(self) -> bool:
        return self._failure is None and self.membership.lost_sentence is None

    def _send(self, sends: Sequence[Send]) -> None:
        # A failure is a fact for `end`: the body need not know, its further sends lead nowhere.
        if self._going_well:
            try:
                self.producer.send_all(sends)
            except CallFailed as failure:
                self._failure = failure

    # ---- polling ----------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Polls until the interval since the last transaction's begin is over; no transaction is open."""
        self.producer.poll(0)
        self._wait_out_pause()
        self.membership.begin_new_partitions()
        due = self._began_at + self._interval_s
        if not len(self._positions) and time.monotonic() >= due:
            self._poll(1, IDLE_POLL_S)  # idle: the first record starts a transaction at once
            if not len(self._positions):
                return
        # At least one, even when there is no room: the callbacks must be served.
        room = max(1, self._most - len(self._positions))
        early_s = 0.0 if self._aborts_in_a_row else max(0.0, due - time.monotonic())
        # A chunk is a backlog, also before the interval is over: the producer has nothing to send until we begin.
        self._poll(min(room, _CHUNK), early_s)

    def _poll_on(self, most: int) -> None:
        """More for the open transaction, if there is a backlog: its queue may run dry for a moment."""
        self._poll(1, _BACKLOG_PAUSE_S)
        if len(self._positions):
            self._poll(most, 0.0)

    def _wait_out_pause(self) -> None:
        """After an abort: gives the group and the cluster a moment, polling so that callbacks come through."""
        while (left := self._pause_until - time.monotonic()) > 0 and not self.stop_requested:
            self._poll(1, min(left, IDLE_POLL_S))
            time.sleep(min(0.05, max(0.0, self._pause_until - time.monotonic())))

    def _poll(self, most: int, timeout_s: float) -> None:
        try:
            self.membership.poll(most, timeout_s)
        except CallFailed as failure:
            self._recover(failure)

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def end(self) -> bool:
        """Commits the open transaction. False: it was aborted and its records will be handed out again."""
        if self._open is None:
            raise IllegalState("no transaction is open")
        self._open._give_back_ahead()
        offsets = self.membership.new_starts | self._positions.offsets()
        sent, taken = self._open.sent, self._positions.taken
        try:
            # First: what failed for a lost partition is not ours to look into.
            self.membership.check_not_lost()
            if self._failure is not None:
                raise self._failure
            self._flush_and_commit(offsets)
        except CallFailed as failure:
            self._recover(failure)
            return False
        self._open = None
        self._positions.commit(offsets)
        self.membership.new_starts = {}
        self._committed(sent, taken)
        return True

    def _flush_and_commit(self, offsets: Mapping[Partition, int]) -> None:
        producer = self.producer
        self._step("flush")
        producer.flush()
        self._step("flushed")
        if offsets:
            metadata = self.membership.metadata_to_commit(offsets)
            owner = self._owner()
            producer.send_offsets([TopicPartition(*p, offset, owner) for p, offset in offsets.items()], metadata)
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

    def _owner(self) -> str:
        """Committed beside each offset, so that a fenced instance can say who replaced it."""
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
        self._recover(self._failure or CallFailed("abort", Action.ABORT, RuntimeError(reason)))

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
            self._settle_place(failure)
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
        if taken == 0:
            raise PoisonRecord(f"an output without an input was refused: {failure}", "", -1, -1) from failure
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
        self._count_rebuild(reason)
        touched = self.membership.new_starts | self._positions.offsets()
        self._open = None
        self.producer.replace(f"failure: {reason}")
        stable = self.membership.stable_committed(list(touched))
        dropped = self._positions.resolve({p: tp.offset if tp.offset >= 0 else None for p, tp in stable.items()})
        starts = self.membership.new_starts
        self.membership.new_starts = {p: offset for p, offset in starts.items() if stable[p].offset < 0}
        self._aborts_in_a_row += 1
        log.warning(
            "rebuilt from the committed offsets",
            reason=reason,
            outcome="committed" if dropped else "aborted",
            **self.producer.who(),
        )

    def _rejoin(self, reason: str) -> None:
        """The consumer is dead and nobody took its place: a new one, whose partitions begin at what is committed."""
        self._count_rebuild(reason)
        self._open = None
        self.membership.close(leave=False)
        self._positions.clear()
        self._membership = self._new_membership()
        self.producer.replace(f"failure: {reason}")  # ends what was open
        self._membership.join()
        log.warning("joined the group again", reason=reason, group=self.group, **self.producer.who())

    def _count_rebuild(self, reason: str) -> None:
        """The breaker: rebuilds without a commit in between do not go on for ever."""
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

    def _settle(self, failure: CallFailed) -> None:
        """Fenced: by our own timeout (rebuild and go on) or by a newer instance (stop, touch nothing)."""
        owner, answer = self._ask_owner(failure)
        if owner is Owner.NEWER:
            raise self._fenced(str(failure), answer) from failure
        self._rebuild(owner.value)

    def _settle_place(self, failure: CallFailed) -> None:
        """The group refuses our static member. A newer instance initialised our transactional.id before it joined; else
        librdkafka fenced itself: its session ended unnoticed and it went on under its instance id alone."""
        owner, answer = self._ask_owner(failure, place_too=True)
        if owner is Owner.NEWER:
            raise self._fenced(str(failure), answer) from failure
        self._rejoin(str(failure))

    def _ask_owner(self, failure: CallFailed, place_too: bool = False) -> tuple[Owner, Described | None]:
        """Who owns the transactional.id now and, with `place_too`, our place in the group.

        Waits for an unreachable cluster: without it nothing can be decided.
        """
        producer = self.producer
        age_ms = (time.monotonic() - producer.began_at) * 1000
        identity = producer.identity()
        if identity is None:
            raise self._fenced(f"{failure}; this producer's own epoch is not known", None) from failure
        situation = Situation(identity, producer.acknowledged, age_ms, self.settings.transaction_timeout_ms)
        while True:
            try:
                with ClusterAdmin(self.settings) as admin:
                    owner, answer = ownership.settle(situation, lambda: admin.describe(producer.transactional_id))
                if (place_too or owner is Owner.GHOST) and not self.membership.nobody_took_our_place():
                    owner = Owner.NEWER
                break
            except Unavailable as error:
                log.warning("waiting for the cluster", call="DescribeTransactions", error=str(error))
                time.sleep(0.5)
        log.warning("fenced", owner=owner.value, age_ms=round(age_ms), answer=answer, **producer.who())
        return owner, answer

    def _fenced(self, reason: str, answer: Described | None) -> Fenced:
        """Exit 79's sentence: producer id, epoch, since when, and who, as far as the cluster tells."""
        self._open = None
        mine = self.producer.identity()
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

    def lag(self) -> int | None:
        """Records (and markers) between what is committed and the last stable offsets; None: not known yet."""
        return self.membership.lag()


# Of this process; milliseconds since the epoch.
_STARTED_AT = int(time.time() * 1000)


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
