"""TransactSession: producer, consumer and group under one type; the only place that decides commit or abort.

The order of calls and every rule of a consume-transform-produce loop live here. Modelled on franz-go's
GroupTransactSession. Rebalance callbacks (eos/membership.py) only record facts: what was assigned begins when no
transaction is open, what was revoked is forgotten, and if the open transaction took records of it, that transaction
aborts at its end (nothing of it can become visible, so giving the partition back first is safe).

A transaction in order: gather -> begin -> hand out records, send, poll for more -> flush -> latched delivery errors ->
the one before is committed -> member still in the group -> send_offsets -> commit. What a failure of each step leads to
is eos/errors.py's answer, in which steps it is carried out is eos/recovery.py's; the steps are methods below.

The backlog's next records are fetched while a large transaction's flush and commit are waited for (`_fetch_ahead`).

With `eos.producers=2` two producers take turns (eos/lanes.py): the next transaction sends records only after the flush
of the one before (order per partition) and offsets only after that one's commit returned; if that commit did not come
to pass, it goes down with it (`_finish_leaving`). So what can be committed is always a beginning of what was read.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from eos import log
from eos.admin.cluster import ClusterAdmin
from eos.admin.places import Places
from eos.app import Fed, Feed, Headers, Record, is_pattern, send_of
from eos.claim import Claim
from eos.errors import (
    Action,
    CallFailed,
    ConfigurationError,
    EosError,
    IllegalState,
    PoisonRecord,
    Temporary,
    rebalanced,
)
from eos.lanes import Lanes, Leaving
from eos.lineage import OFFSET_FORMAT
from eos.membership import Finish, Membership, Stopped
from eos.observe import COMMIT_BOUNDS_S, END_TO_END_BOUNDS_S, Histogram, Pulse, add
from eos.ownership import Described
from eos.pacing import Pacing
from eos.participants import Listener, Outcome, Participant
from eos.positions import Positions
from eos.positions import TopicPartition as Partition
from eos.producer import ALWAYS, TransactionalProducer
from eos.recovery import Step, Trouble, carry_out
from eos.settings import OF_FUNCTIONS, Settings, settings_of
from eos.world import REAL, World

IDLE_POLL_S = 0.1
# How old the commit of a partition's place may become while we have it, and how soon after its start an idle session
# commits all anew. Under group.protocol=consumer the brokers count offsets.retention.minutes from each offset's own
# commit (measured, 4.3.1): a partition without new records would lose its place as soon as the group is empty.
_PLACES_S, _IDLE_PLACES_S = 6 * 3600.0, 60.0
_BACKLOG_PAUSE_S = 0.005  # how long an open transaction waits for the next record before it ends early
MOST_REBUILDS = 5  # without a commit in between; then a supervisor's back-off is the better place to wait
_ABORTS_TO_WARN_OF = 3  # in a row, by rebalances: one or two are what a member that comes or goes costs


@dataclass
class Counters:
    """What a session did so far; plain numbers, written per transaction, read by eos.health and by tests."""

    records_in: int = 0
    records_out: int = 0
    skipped: int = 0
    dead_letters: int = 0
    retries: int = 0
    repeated: int = 0
    """Input records that the client delivered a second time: dropped."""
    transactions: int = 0
    aborts: int = 0
    rebuilds: int = 0
    replacements: dict[str, int] = field(default_factory=dict)
    aborts_by_cause: dict[str, int] = field(default_factory=dict)
    """`application`, `rebalance`, `refused` (a record), or the call that failed (eos.errors.Call)."""
    rebuilds_by_cause: dict[str, int] = field(default_factory=dict)
    """`timeout`, `group`, or the call whose outcome was unknown."""
    rebalances: dict[str, int] = field(default_factory=dict)
    """`assigned`, `revoked` and `lost`: how often the group gave or took partitions."""
    commit_seconds: Histogram = field(default_factory=lambda: Histogram(COMMIT_BOUNDS_S))
    """From sending the offsets until the commit was answered."""
    end_to_end_seconds: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BOUNDS_S))
    """Once per transaction: the age of its first input record (by the record's timestamp) when it was committed."""


class Transaction:
    """One open transaction and its input records. Valid until the loop's next turn.

    When the session had to give it up meanwhile (the group took its place, the consumer died), the body need not know:
    no more records are handed out, what is sent leads nowhere, `commit` returns False, and its records come again.
    """

    __slots__ = (
        "_ahead", "_began_at", "_first_timestamp_ms", "_records", "_session", "_until",
        "dead_letters", "sent", "skipped",
    )  # fmt: skip

    def __init__(self, session: TransactSession, began_at: float, until: float, first_timestamp_ms: int) -> None:
        self._session = session
        # World.now(); behind `until` no more records are handed out.
        self._began_at, self._until = began_at, until
        self._first_timestamp_ms = first_timestamp_ms  # of the first record that waited when it began
        self._records: Iterator[Record] | None = None
        self._ahead = 0  # taken by `records`, but not handed out yet
        self.sent = self.skipped = self.dead_letters = 0

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
        now = self._session._world.now
        while batch := self.take(64):
            self._ahead = len(batch)
            for record in batch:
                self._ahead -= 1
                yield record
                if now() >= self._until:
                    self._give_back_ahead()
                    return

    def _give_back_ahead(self) -> None:
        self._session._positions.give_back(self._ahead)
        self._ahead = 0

    def take(self, most: int) -> list[Record]:
        """The next records, at most `most`; an empty list when none is left, the interval is over or a send failed."""
        if not self._session._has(self):
            return []
        self._give_back_ahead()
        if not self._session._going_well or (self._session.taken and self._session._world.now() >= self._until):
            return []
        return self._session._take(most)

    def give_back(self, count: int) -> None:
        """The last `count` records taken were not handled: the next transaction hands them out again."""
        if self._session._has(self):
            self._give_back_ahead()
            self._session._positions.give_back(count)

    def send(
        self,
        topic: str,
        value: object,
        *,
        key: object = None,
        partition: int | None = None,
        timestamp_ms: int = 0,
        headers: Headers = (),
    ) -> None:
        """Sends one record in this transaction; value, key and headers are encoded as an App's are (bytes as they are,
        str as UTF-8, None, else JSON). `timestamp_ms` 0 is now, `partition` None leaves it to the key.

        Raises TypeError or ValueError for what cannot be sent.
        """
        if not self._session._has(self):
            return
        asked = partition is not None or timestamp_ms or headers
        if type(value) is bytes and (key is None or type(key) is bytes) and not asked:
            self._session._send(topic, value, key, -1, 0, None)  # the usual: nothing to encode, nothing to check
        else:
            self._session._send(*send_of("send", topic, value, key, partition, timestamp_ms, headers))
        self.sent += 1

    @property
    def waited_s(self) -> float:
        """For how long sends have waited for room in the client's queue, from some moment on."""
        return self._session.producer.waited_s

    def feed(self, feed: Feed, records: list[Record]) -> Fed:
        """Sends what an App's `route.feed` makes of records that were taken; `Fed.error` is the user's own."""
        if not self._session._has(self):
            return Fed(0, len(records), None)
        fed = self._session._feed(feed, records)
        self.sent += fed.sent
        return fed

    def commit(self) -> bool:
        """Ends the transaction now, waits for its commit; False if it had to be aborted and its records will be handed
        out again."""
        with self._session._whole():
            return self._session._has(self) and self._session.end() and self._session._finish_leaving()

    def abort(self) -> None:
        """Gives the transaction up; its records will be handed out again."""
        with self._session._whole():
            if self._session._has(self):
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

    Settings: Kafka's and `eos.*` names (eos.settings); a mapping is completed by the environment and eos.toml, as the
    flags of a command are. `group.id` and `transactional.id` must be set, `topics` may come from `eos.input.topics`.
    With `until_end` the loop ends when the whole group has handled what was readable at the start. One session belongs
    to one thread.
    """

    def __init__(
        self,
        settings: Settings | Mapping[str, Any],
        topics: Sequence[str] | None = None,
        *,
        until_end: bool = False,
        destinations: Sequence[str] = (),
        participants: Sequence[Participant] = (),
        listener: Listener | None = None,
        together: int = 1,
        world: World = REAL,
    ) -> None:
        """`participants`, `listener`: eos/participants.py. With a listener a session can be made before its topics are
        known: `read` says them before the start. `together`: how many records the application handles at once; a poll
        of a backlog takes whole batches of them."""
        self.settings = settings_of(settings)
        named = [t.strip() for t in self.settings["eos.input.topics"].split(",") if t.strip()]
        self.topics = list(topics) if topics is not None else named
        self.destinations = list(destinations)
        for name in OF_FUNCTIONS:
            if name in self.settings.values:
                raise ConfigurationError(
                    f"{name} is about an App's functions, and does nothing in a loop of your own",
                    remedy="unset it; `txn.send(..., headers=...)` passes headers on, a span goes around the body",
                )
        for name in ("group.id", "transactional.id"):
            if not self.settings.get(name):
                raise ConfigurationError(f"{name} must be set for a session")
        if not self.topics and listener is None:
            raise ConfigurationError("a session needs topics: TransactSession(settings, [...]) or eos.input.topics")
        if patterns := [topic for topic in self.topics if is_pattern(topic)]:
            # librdkafka would take topics in, and out, at moments of its own.
            raise ConfigurationError(
                f"a session reads topics by their names, not by the pattern {patterns[0]!r}: patterns are for an App's "
                "functions"
            )
        self.group: str = self.settings["group.id"]
        self.transactional_id: str = self.settings["transactional.id"]
        self._world = world
        self._started_at_ms = int(world.started_at * 1000)
        self.counters = Counters()
        self.pulse = Pulse(world.now)
        self.stop_requested = False
        self.until_end = until_end
        self._listener = listener or Listener()
        self._participants = participants
        self._by_pattern: set[str] = set()  # those of `topics` that nobody named

        interval_s = self.settings["eos.transaction.interval.ms"] / 1000
        self._pacing = Pacing(interval_s, self.settings["eos.transaction.max.records"], together)
        self._positions: Positions[Record] = Positions()
        self._came_later: set[str] = set()  # see Membership
        self._open: Transaction | None = None
        # Whose end nobody was told: the one that is leaving, the open one.
        self._under_way: list[Transaction] = []
        self._given_up: Transaction | None = None  # by us, while the loop's body has it
        self._half_way = False  # see _whole
        self._failure: CallFailed | None = None  # of a send in the open transaction
        self._rebuilds_in_a_row = 0
        self._finish: Finish | None = None
        self._consumer_failure: CallFailed | None = None  # met while something else was waited for
        self._membership: Membership | None = None
        self._member_ids: set[str] = set()  # see Membership
        self._lanes = Lanes(self.settings, self.transactional_id, self.pulse, world)
        self._places = Places(self.settings, self.group, world)
        self._places_due = world.now()  # when the places of all partitions are to be committed again
        self._ours_until, self._ours_by = world.unix(), "our start"  # nobody newer owned the transactional.id then
        self._steps: dict[Step, Callable[[Trouble], None]] = {
            Step.ABORT: self._abort,
            Step.REWIND: self._rewind,
            Step.ISOLATE: self._isolate,
            Step.ASK_OWNER: self._ask_owner,
            Step.REPLACE: self._replace,
            Step.RESOLVE: self._resolve,
            Step.REJOIN: self._rejoin,
        }
        self._claim = Claim(
            self.settings, self._lost_to, lambda: self.membership.nobody_took_our_place(), self.pulse, world
        )

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
        """The one whose turn it is."""
        return self._lanes.turn

    @property
    def assignment(self) -> frozenset[Partition]:
        """Partitions owned as of the last poll."""
        return frozenset(self.membership.owned)

    @property
    def committed(self) -> Mapping[Partition, int]:
        """Next offset of each owned partition, as far as it is committed or its commit is on its way."""
        return self._positions.committed

    @property
    def taken(self) -> int:
        """Records that the open transaction took."""
        return self._positions.taken

    def start(self) -> None:
        """Connects, fences predecessors and subscribes. Raises Unavailable within eos.startup.timeout.ms."""
        self.pulse.adopt()
        deadline = self._world.now() + self.settings["eos.startup.timeout.ms"] / 1000
        self._membership = self._new_membership()
        try:
            self._membership.check_topics([*self.topics, *self.destinations], deadline)
            with self._world.admin(self.settings) as admin:
                pipelines = all(one.pipelines for one in self._participants)
                self._lanes.start(admin, deadline, in_turn=self.settings["eos.producers"] == "2" and pipelines)
                self._membership.make_way(admin)
                self._came_later |= self._came_without_us(admin)
            if self.until_end:
                self._finish = Finish(self._membership)
            self._membership.join()
        except Stopped:
            log.info("stopped before the group was joined", group=self.group)  # the loop ends at its first turn
        except BaseException:
            self.close()
            raise
        self._ours_until = self._world.unix()
        self.producer.identity(0.5)  # comes with the first statistics; the log should name it from the start
        log.info("session started", group=self.group, topics=",".join(self.topics), **self.producer.who())

    def _came_without_us(self, admin: ClusterAdmin) -> set[str]:
        """Topics of patterns that came while no worker ran, or whose first worker died before it committed anything of
        them: the group has offsets, but none of these. Where it has none at all, `latest` is about every topic."""
        if not self._by_pattern or self.settings.get("auto.offset.reset") != "latest":
            return set()
        committed = self.membership.topics_with_commits(admin)
        return self._by_pattern - committed if committed else set()

    def close(self, leave_group: bool = False) -> None:
        """Aborts what is open and closes all clients. `leave_group`: a static member leaves for good."""
        if (left := self._lanes.await_at_close()) is not None:
            self._positions.arrived()
            self._count_commit(left)
        # What had not set out for its commit cannot become visible, whether the abort below succeeds or not.
        self._tell_ended(Outcome.ABORTED if self._under_way == [self._open] else Outcome.UNKNOWN)
        self._open = None
        self._lanes.close()
        if self._membership is not None:
            self._membership.close(leave_group)
            self._membership = None
        self._places.close()

    def _new_membership(self) -> Membership:
        return Membership(
            self.settings,
            self.topics,
            self._positions,
            with_ends=self.until_end,
            pulse=self.pulse,
            world=self._world,
            stopping=lambda: self.stop_requested,
            rebalances=self.counters.rebalances,
            member_ids=self._member_ids,
            came_later=self._came_later,
        )

    def read(self, topics: Sequence[str], destinations: Sequence[str], by_pattern: Sequence[str]) -> None:
        """Before the start: what it reads and writes; `by_pattern` are those of the topics that nobody named."""
        self.topics, self.destinations, self._by_pattern = list(topics), list(destinations), set(by_pattern)

    def who(self) -> Mapping[str, object]:
        """For a line about a transaction: transactional.id, producer id, epoch and state."""
        return self.producer.who()

    def pause(self, seconds: float) -> None:
        """No transaction begins before so many seconds are over; meanwhile the group is polled as usual."""
        self._pacing.pause(self._world.now(), seconds)

    # ---- the loop ---------------------------------------------------------------------------------------------

    def __iter__(self) -> TransactSession:
        with self._whole():
            if self._open is not None:
                self.abort("the loop was left before the transaction ended")
        return self

    def __next__(self) -> Transaction:
        self._claim.hold()
        with self._whole():
            begun = self._following()
        if begun is None:
            raise StopIteration
        return begun

    def _following(self) -> Transaction | None:
        """Ends the open transaction and begins the next one, once there are records; None: the loop is over."""
        if self._open is not None:
            self.end()
        while not self.stop_requested:
            self._gather()
            if len(self._positions):
                if self._try(self._begin):
                    return self._open
            elif (leaving := self._lanes.leaving) is not None:
                if leaving.job.done.is_set():
                    self._finish_leaving()
            elif self._to_commit(_IDLE_PLACES_S):
                if self._try(self._begin):
                    self.end()
            elif self._finish is not None and self._finish.reached(self.membership):
                return None
            self._replace_while_idle()
            self._listener.idle()
        self._finish_leaving()
        return None

    def _replace_while_idle(self) -> None:
        """A late AddPartitionsToTxn would start a ghost transaction that fences an idle worker: not at a new epoch."""
        if self._lanes.leaving is not None:
            return
        for producer in self._lanes.producers:
            producer.poll(0)  # the one whose turn it is not, too
            reason = producer.must_replace()
            if reason is not None and reason != ALWAYS:
                self._claim.replace(producer, reason)

    def _begin(self) -> None:
        asked = self._world.now()
        if reason := self.producer.must_replace():
            self._claim.replace(self.producer, reason)
        self._pacing.delayed(self._world.now() - asked)
        self._world.step("begin")
        self.producer.begin()
        self._world.step("begun")
        self._failure = self.membership.lost_sentence = self._given_up = None
        now, leaving = self._world.now(), self._lanes.leaving
        begun = Transaction(self, now, self._pacing.began(now), self._positions.first_timestamp_ms)
        self._under_way = [begun] if leaving is None else [leaving.transaction, begun]
        self._open = begun

    def _has(self, txn: Transaction) -> bool:
        """Whether it is open; False if this session gave it up under the loop's body. IllegalState: it has ended."""
        if txn is not self._open and txn is not self._given_up:
            raise IllegalState("this transaction has ended")
        return txn is self._open

    def _take(self, most: int) -> list[Record]:
        positions = self._positions
        most = min(most, self._pacing.limit - positions.taken)
        if not len(positions) and positions.taken > 0 and most > 0:
            with self._whole():
                self._poll_on(self._pacing.more(positions.taken))
        # What follows is the application's: how long it takes is counted from here.
        self.pulse.beat("handling")
        return positions.take(most) if self._open is not None and self._going_well else []

    @property
    def _going_well(self) -> bool:
        return self._failure is None and self.membership.lost_sentence is None

    # A send that failed is a fact for `end`: the body need not know, its further sends lead nowhere.

    def _send(self, *send: Any) -> None:
        if self._going_well:
            try:
                self.producer.send(*send)
            except CallFailed as failure:
                self._failure = failure

    def _feed(self, feed: Feed, records: list[Record]) -> Fed:
        if self._going_well:
            fed = self.producer.feed(feed, records)
            self._failure = fed.failure
            if self._failure is None:
                return fed
        return Fed(0, len(records), None)

    # ---- polling ----------------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Polls until the interval since the last transaction's begin is over; no transaction is open."""
        self.producer.poll(0)
        self._wait_out_pause()
        if topics := self._listener.new_topics():
            self._read_too(topics)
        # A partition that left and comes back begins behind what of it is on its way.
        if self.membership.new_partitions and not (self._finish_leaving() and self._try(self._begin_partitions)):
            return
        self._pacing.gathers(now := self._world.now())
        if not len(self._positions) and not self._pacing.left_s(now):
            self._poll(1, IDLE_POLL_S)  # idle: the first record starts a transaction at once
            if not len(self._positions):
                return
            self._pacing.gathers(now := self._world.now())
        # So many are a backlog, also before the interval is over: the producer has nothing to send until we begin.
        self._poll(self._pacing.first(len(self._positions)), self._pacing.gather_s(now))

    def _read_too(self, topics: Sequence[str]) -> None:
        # Noted first: whatever the commit on its way comes to, a consumer that takes this one's place reads them too.
        self.topics.extend(topics)
        self._came_later |= set(topics)
        # The group rebalances: offsets that are on their way would be refused, by the generation.
        self._finish_leaving()
        self._try(lambda: self.membership.read_too(self.topics))

    def _begin_partitions(self) -> None:
        starts = self.membership.begin_new_partitions()
        for participant in self._participants:
            participant.restore(starts)

    def _poll_on(self, most: int) -> None:
        """More for the open transaction, if there is a backlog: its queue may run dry for a moment."""
        self._poll(most, 0.0)
        if not len(self._positions) and self._going_well:
            self._poll(1, _BACKLOG_PAUSE_S)
            self._poll(most, 0.0)

    def _wait_out_pause(self) -> None:
        """After an abort: gives the group and the cluster a moment, polling so that callbacks come through."""
        while (left_s := self._pacing.pause_left_s(self._world.now())) and not self.stop_requested:
            self._poll(1, min(left_s, IDLE_POLL_S))
            self._world.sleep(min(0.05, self._pacing.pause_left_s(self._world.now())))

    def _poll(self, most: int, timeout_s: float) -> None:
        self.pulse.beat("polling")
        with_the_body = self._open
        if not self._try(lambda: self._fetch(most, timeout_s)):
            self._given_up = with_the_body if self._open is None else None

    def _fetch(self, most: int, timeout_s: float) -> None:
        if self._consumer_failure is not None:
            failure, self._consumer_failure = self._consumer_failure, None
            raise failure
        self.membership.poll(most, timeout_s)
        if (newest := self._positions.newest) is not None:
            self._pacing.saw(_size(newest))

    def _fetch_ahead(self, taken: int) -> bool:
        """While the producer is waited for, with a transaction that took so many records: the next ones of a backlog.
        False: there is nothing to do meanwhile."""
        before, newest = len(self._positions), self._positions.newest
        most = self._pacing.ahead(taken, before, _size(newest))
        if most == 0 or self._consumer_failure is not None:
            return False
        try:
            self.membership.poll(most, 0.0)
        except CallFailed as failure:
            self._consumer_failure = failure  # the next poll's: what is waited for goes first
        return len(self._positions) > before

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def end(self) -> bool:
        """Sends the open transaction's commit on its way, behind the one before. False: it was aborted, alone or with
        the one before, and what they took will be handed out again."""
        if self._open is None:
            raise IllegalState("no transaction is open")
        self._open._give_back_ahead()
        offsets = self._to_commit()
        if not (self._try(self._flush) and self._finish_leaving()):
            return False
        # Behind both waits, in which a partition may be lost.
        left = self._try(lambda: self._leave(offsets, self.membership.metadata_to_commit(offsets)))
        return left and (self._lanes.in_turn or self._finish_leaving())

    def _flush(self) -> None:
        # First: what failed for a lost partition is not ours to look into.
        self.membership.check_not_lost()
        if self._failure is not None:
            raise self._failure
        self._world.step("flush")
        self.producer.flush(lambda: self._fetch_ahead(self._positions.taken))
        self._world.step("flushed")

    def _to_commit(self, patience_s: float = 0.0) -> dict[Partition, int]:
        """Where each partition goes on behind the open transaction; with places that nothing of is new, when they are
        due since `patience_s`."""
        offsets = self.membership.new_starts | self._positions.offsets()
        if self._world.now() < self._places_due + patience_s:
            return offsets
        return self._positions.places() | offsets

    def _leave(self, offsets: Mapping[Partition, int], group_metadata: Any) -> None:
        """The flushed transaction's commit is sent on its way."""
        assert self._open is not None
        owner = self._owner()
        job = self._lanes.commit_of(
            [self._commit_of(p, offset, owner) for p, offset in offsets.items()], group_metadata
        )
        starts, taken = self.membership.new_starts, self._positions.taken
        self._positions.leave(offsets)
        self._lanes.send(Leaving(self.producer, self._open, offsets, starts, taken, self._world.now(), job))
        self.membership.new_starts = {}
        self._open = None

    def _finish_leaving(self) -> bool:
        """Waits for the commit that is on its way, if any. False: it failed, and so did what was begun behind it; that
        is carried out already. Raises what a failed commit of the open transaction would."""
        leaving = self._lanes.leaving
        if leaving is None:
            return True
        error = self._lanes.await_commit(leaving, lambda: self._fetch_ahead(leaving.taken))
        if error is None:
            self._positions.arrived()
            self._lanes.ended(leaving)
            self._count_commit(leaving)
            return True
        # Not those of a partition that went while its commit was on its way: it begins where its next owner says.
        starts = {p: offset for p, offset in leaving.new_starts.items() if p in self.membership.owned}
        self.membership.new_starts = starts | self.membership.new_starts
        self._positions.returned()
        self._lanes.ended(leaving)
        if not isinstance(error, CallFailed):
            raise error
        self._carry_out(error, leaving.offsets, asked=True)
        return False

    def _count_commit(self, leaving: Leaving) -> None:
        self._rebuilds_in_a_row = 0
        self._pacing.committed(leaving.taken)
        self._ours_until, self._ours_by = self._world.unix(), "our last commit"
        self._places.committed(leaving.offsets)
        if leaving.left_at >= self._places_due and leaving.offsets.keys() >= self._positions.places().keys():
            self._places_due = leaving.left_at + _PLACES_S
        self._tell_ended(Outcome.COMMITTED, leaving.transaction)
        counters = self.counters
        counters.transactions += 1
        counters.records_in += leaving.taken
        counters.records_out += leaving.transaction.sent
        counters.skipped += leaving.transaction.skipped
        counters.dead_letters += leaving.transaction.dead_letters
        counters.repeated = self._positions.repeated
        counters.replacements = self._lanes.replacements
        ended_at: float = leaving.job.result
        counters.commit_seconds.observe(ended_at - leaving.left_at)
        first_ms, began_at = leaving.transaction._first_timestamp_ms, leaving.transaction._began_at
        if leaving.taken and first_ms > 0:
            ended_ms = (self._world.unix() - self._world.now() + ended_at) * 1000
            # Clocks differ: a record from the future is no age below zero.
            counters.end_to_end_seconds.observe(max(0.0, (ended_ms - first_ms) / 1000))
        ms = round((ended_at - began_at) * 1000)
        who = leaving.producer.who()
        log.debug("committed", taken=leaving.taken, sent=leaving.transaction.sent, ms=ms, **who)

    def _tell_ended(self, outcome: Outcome, last: Transaction | None = None) -> None:
        """Of all that is under way, up to `last`: the first ended so. What was begun behind a transaction that did not
        commit was given up with it."""
        until = len(self._under_way) if last is None else self._under_way.index(last) + 1
        ended, self._under_way = self._under_way[:until], self._under_way[until:]
        for transaction in ended:
            for participant in self._participants:
                (participant.committed if outcome is Outcome.COMMITTED else participant.undone)()
            self._listener.ended(transaction, outcome)
            outcome = Outcome.ABORTED

    def _owner(self) -> dict[str, object]:
        """Committed beside each offset, so that a fenced instance can say who replaced it."""
        identity = self.producer.client.identity
        return {
            "v": OFFSET_FORMAT,
            "instance": self.transactional_id,
            "host": socket.gethostname(),
            "since": self._started_at_ms,
            "epoch": identity.epoch if identity else None,
        }

    def _commit_of(self, partition: Partition, offset: int, owner: Mapping[str, object]) -> TopicPartition:
        metadata = dict(owner)
        for participant in self._participants:
            metadata |= participant.beside(partition)
        return TopicPartition(*partition, offset, json.dumps(metadata, separators=(",", ":")))

    # ---- recovery ---------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Aborts the open transaction; its records are handed out again. The producer is replaced before the next."""
        if self._open is None:
            raise IllegalState("no transaction is open")
        self._recover(self._failure or CallFailed("abort", Action.ABORT, RuntimeError(reason)))

    def _try(self, what: Callable[[], object]) -> bool:
        """Whether it was done; else what failed in it is recovered from, and there may be no open transaction."""
        try:
            what()
        except CallFailed as failure:
            self._recover(failure)
            return False
        return True

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """What ends half way, by a signal's exception or by an error that the application takes and goes on, is not
        gone on with: some of it may have happened that nobody noted."""
        interrupted, self._half_way = self._half_way, True
        if interrupted:
            self._given_up = self._open
            self._recover(CallFailed("consume", Action.INTERRUPTED, RuntimeError("the loop was left half way")))
        yield
        self._half_way = False

    def _recover(self, failure: CallFailed) -> None:
        """Carries out what a failed call asks for; returns when the loop can go on, raises when it must stop."""
        if not self._finish_leaving() and failure.call != "consume":
            return  # the transaction before failed and took the open one with it; the consumer's failure remains
        self._carry_out(failure, self.membership.new_starts | self._positions.offsets(), asked=False)

    def _carry_out(self, failure: CallFailed, offsets: Mapping[Partition, int], asked: bool) -> None:
        taken, last = self._positions.taken, self._positions.last_taken
        asked = asked or failure.action is Action.INTERRUPTED  # it may have been
        carry_out(Trouble(failure, taken, last, offsets, asked), self._steps)

    def _abort(self, trouble: Trouble) -> None:
        self.producer.abort()
        self._open = None
        self._tell_ended(Outcome.ABORTED)

    def _rewind(self, trouble: Trouble) -> None:
        self.membership.go_back(self._positions.rewind)
        self._pacing.aborted(self._world.now())
        self.counters.aborts += 1
        add(self.counters.aborts_by_cause, _cause(trouble.failure))
        rebalance = rebalanced(trouble.failure)
        if rebalance:
            log.debug("refused", error=trouble.reason, group=self.group)
        usual = rebalance and self._pacing.aborts_in_a_row < _ABORTS_TO_WARN_OF
        (log.info if usual else log.warning)(
            "transaction aborted", reason=rebalance or trouble.reason, **self.producer.who()
        )

    def _isolate(self, trouble: Trouble) -> None:
        failure, last = trouble.failure, trouble.last
        if last is None:
            raise PoisonRecord(f"an output without an input was refused: {failure}", "", -1, -1) from failure
        if failure.record is not None or trouble.taken == 1:
            self._pacing.refused_found()
            try:
                self._listener.refused(failure.record or last, failure)
            except PoisonRecord:
                self._half_way = False  # all is noted: an application that takes it can go on
                raise
        else:
            self._pacing.refused_among(trouble.taken)

    def _ask_owner(self, trouble: Trouble) -> None:
        self._open = None
        trouble.owner = self._claim.settle(self.producer, str(trouble.failure)).value

    def _replace(self, trouble: Trouble) -> None:
        self._open = None
        self._count_rebuild(trouble)
        self._claim.replace(self.producer, f"failure: {trouble.reason}")

    def _resolve(self, trouble: Trouble) -> None:
        stable = self.membership.stable_committed(list(trouble.offsets))
        committed = all(stable[p].offset >= offset for p, offset in trouble.offsets.items()) and bool(trouble.offsets)
        self._tell_ended(Outcome.COMMITTED if committed else Outcome.ABORTED)
        known = {p: tp.offset if tp.offset >= 0 else None for p, tp in stable.items()}
        self.membership.go_back(lambda: self._positions.resolve(known))
        starts = self.membership.new_starts
        self.membership.new_starts = {p: offset for p, offset in starts.items() if stable[p].offset < 0}
        self._pacing.rebuilt()
        log.warning(
            "rebuilt from the committed offsets",
            reason=trouble.reason,
            outcome="committed" if committed else "aborted",
            **self.producer.who(),
        )

    def _rejoin(self, trouble: Trouble) -> None:
        self._open = None
        self._count_rebuild(trouble)
        self._claim.confirm(self.producer, trouble.reason)
        gone = self.membership
        fresh = self._new_membership()
        fresh.begin_at(gone.starts())
        self._membership = fresh
        gone.abandon()
        self._positions.clear()
        self._tell_ended(Outcome.UNKNOWN if trouble.asked else Outcome.ABORTED)
        for other in self._lanes.producers[1:]:
            other.give_up(trouble.reason)
        self.producer.replace(f"failure: {trouble.reason}")  # ends what was open
        if self._came_later:
            with contextlib.suppress(EosError), self._world.admin(self.settings, timeout_ms=5_000) as admin:
                fresh.make_way(admin)
        fresh.join()
        log.warning("joined the group again", reason=trouble.reason, group=self.group, **self.producer.who())

    def _count_rebuild(self, trouble: Trouble) -> None:
        """The breaker: rebuilds without a commit in between do not go on for ever."""
        if trouble.counted:
            return
        trouble.counted = True
        self._rebuilds_in_a_row += 1
        self.counters.rebuilds += 1
        add(self.counters.rebuilds_by_cause, _cause(trouble.failure))
        if self._rebuilds_in_a_row > MOST_REBUILDS:
            raise Temporary(
                f"{self._rebuilds_in_a_row} rebuilds without one commit, the last because of: {trouble.reason}. If "
                f"handling {trouble.taken} records takes longer than transaction.timeout.ms="
                f"{self.settings.transaction_timeout_ms}, raise it; if two processes share {self.transactional_id}, "
                "give each its own --instance"
            )

    def _lost_to(self, producer: TransactionalProducer, reason: str, answer: Described | None) -> str:
        """Exit 79's sentence: producer id, epoch, since when, and who, as far as the cluster tells."""
        mine = producer.identity()
        who = ""
        try:
            with self._world.admin(self.settings) as admin:
                answer = answer or admin.describe(producer.transactional_id)
                who = successor_of(self.transactional_id, self._started_at_ms, admin.committed_metadata(self.group))
        except EosError as error:
            log.debug("the owner could not be asked", error=str(error))
        theirs = ""
        if answer is not None:
            since = f" since {_clock(answer.start_ms / 1000)}" if answer.start_ms > 0 else ""
            theirs = f"; now producer id {answer.producer_id} epoch {answer.epoch} in state {answer.state}{since}"
        if not who and (answer is None or answer.start_ms <= 0):
            who = f"; initialised after {_clock(self._ours_until)} ({self._ours_by})"
        ours = f"producer id {mine.producer_id} epoch {mine.epoch}" if mine else "its epoch was not known yet"
        return (
            f"a newer instance took over transactional.id {self.transactional_id} (ours: {ours}{theirs}){who}. "
            f"This one stops and has written nothing since. [{reason}]"
        )

    @property
    def commit_under_way_s(self) -> float:
        """For how long a commit has been on its way; 0 without one."""
        return self._lanes.under_way_s

    def lag(self) -> int | None:
        """Records (and markers) between what is committed and the last stable offsets; None: not known yet."""
        return self.membership.lag()


def _size(record: Record | None) -> int:
    return len((record and record.value) or b"")


_CAUSES = {
    Action.POISON: "refused",
    Action.SETTLE: "timeout",
    Action.REJOIN: "group",
    Action.INTERRUPTED: "application",
}


def _cause(failure: CallFailed) -> str:
    """Why a transaction did not commit, in a word: a label of a metric, so there are few of them."""
    if failure.action in _CAUSES:
        return _CAUSES[failure.action]
    if failure.action is not Action.ABORT:
        return failure.call
    return {"abort": "application", "send_offsets": "rebalance"}.get(failure.call, failure.call)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def successor_of(transactional_id: str, our_start_ms: int, metadata: Sequence[str]) -> str:
    """The process that was started after ours under the same transactional.id and has committed, from the committed
    offsets' metadata: "; the last commit is by ..."; "" when there is none, as before its first commit."""
    owners = []
    for text in metadata:
        try:
            owner = json.loads(text.rstrip("\0"))
            if owner["instance"] == transactional_id and owner["since"] > our_start_ms:
                owners.append((owner["since"], owner["host"]))
        except (ValueError, KeyError, TypeError):
            continue  # somebody else's metadata
    if not owners:
        return ""
    since, host = max(owners)
    return f"; the last commit is by {transactional_id} on {host}, started {_clock(since / 1000)}"
