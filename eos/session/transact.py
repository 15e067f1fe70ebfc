"""TransactSession: producer, consumer and group under one type; the only place that decides commit or abort.

The order of calls of a consume-transform-produce loop lives here. Modelled on franz-go's GroupTransactSession. Its
parts have a rule each: eos/session/intake.py what is read, eos/session/lanes.py who commits, eos/session/offsets.py
what is committed, eos/session/endings.py who is told, eos/session/recovery.py and eos/session/steps.py what a failed
call leads to. Rebalance callbacks (eos/session/membership.py) only record facts: what was assigned begins when no
transaction is open, what was revoked is forgotten, and if the open transaction took records of it, that transaction
aborts at its end (nothing of it can become visible, so giving the partition back first is safe).

A transaction in order: gather -> begin -> hand out records, send, poll for more -> flush -> latched delivery errors ->
the one before is committed -> member still in the group -> send_offsets -> commit. The backlog's next records are
fetched while a large transaction's flush and commit are waited for (`Intake.ahead`).

With `eos.producers=2` two producers take turns: the next transaction sends records only after the flush of the one
before (order per partition) and offsets only after that one's commit returned; if that commit did not come to pass, it
goes down with it (`_await_commit`). So what can be committed is always a beginning of what was read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer

from eos import log
from eos.app.dead_letters import dead_letter
from eos.app.definition import is_pattern
from eos.app.frames import frames_of
from eos.app.results import send_of
from eos.errors import Action, CallFailed, ConfigurationError, IllegalState, PoisonRecord
from eos.kafka import preflight
from eos.kafka.settings import OF_FUNCTIONS, Settings, settings_of
from eos.kafka.world import REAL, World
from eos.records import Fed, Feed, Headers, Record
from eos.session.asking import Stopped
from eos.session.claim import Claim
from eos.session.endings import Endings
from eos.session.intake import Intake
from eos.session.lanes import Lanes, UnderWay
from eos.session.membership import Membership
from eos.session.observe import Pulse
from eos.session.offsets import IDLE_PLACES_S, Offsets
from eos.session.pacing import Pacing
from eos.session.participants import Listener, Outcome, Participant
from eos.session.positions import TopicPartition as Partition
from eos.session.producer import ALWAYS, TransactionalProducer
from eos.session.recovery import Trouble
from eos.session.steps import Recovery
from eos.session.stopping import ShutdownExpired, StopSignals, took_too_long
from eos.session.successor import Successor


class Transaction:
    """One open transaction and its input records. Valid until the loop's next turn.

    When the session had to give it up meanwhile (the group took its place, the consumer died), the body need not know:
    no more records are handed out, what is sent leads nowhere, `commit` returns False, and its records come again.
    """

    __slots__ = (
        "_ahead", "_records", "_session", "_until",
        "began_at", "dead_letters", "first_timestamp_ms", "sent", "set_out", "skipped",
    )  # fmt: skip

    def __init__(self, session: TransactSession, began_at: float, until: float, first_timestamp_ms: int) -> None:
        self._session = session
        # World.now(); behind `until` no more records are handed out.
        self.began_at, self._until = began_at, until
        self.first_timestamp_ms = first_timestamp_ms  # of the first record that waited when it began
        self.set_out = False  # its commit was asked for
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

    def dead_letter(self, record: Record, error: BaseException) -> None:
        """Sends `record`, which could not be handled, to `<its topic>.dlq` in this transaction: as it came, with
        headers that say where it was and what `error` said, as an App's `eos.dlq` does. They name the group as the App.
        """
        if not self._session._has(self):
            return
        self._session._send(*dead_letter(record, error, frames_of(error), self._session.group))
        self.sent += 1
        self.dead_letters += 1

    @property
    def waited_s(self) -> float:
        """For how long its producer's sends have waited for room in the client's queue, in earlier transactions too."""
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
        if not self._session._has(self):
            return False
        with self._session._whole():
            return self._session._has(self) and self._session._end() and self._session._await_commit()

    def abort(self) -> None:
        """Gives the transaction up; its records will be handed out again."""
        if self._session._has(self):
            with self._session._whole():
                if self._session._has(self):
                    self._session._abort("asked by the application")


class TransactSession:
    """Iterate over it: each turn is one transaction with a batch of records.

    ::

        with TransactSession({"group.id": "g", "transactional.id": "g-1"}, ["in"]) as session:
            for txn in session:
                for record in txn.records:
                    txn.send("out", record.value, key=record.key)

    It goes on until it is stopped: by `stop`, or by signals (`with ... as session, session.stopping_on_signals():`).
    The body's end commits. An exception out of the body aborts; leaving the loop by `break` aborts too (call
    `txn.commit()` first to keep the work). A transaction that had to be aborted (a rebalance, a lost broker, ...) is
    not reported: its records are handed out again, in the same order. Raises EosError's subclasses (see eos.errors).

    Settings: Kafka's and `eos.*` names (docs/settings.md); a mapping is completed by the environment and eos.toml, as
    the flags of a command are. `group.id` and `transactional.id` must be set, `topics` may come from
    `eos.input.topics`. With `until_end` the loop ends when the whole group has handled what was readable at the start.
    `destinations` are the topics that it sends to: with them the block begins as a worker does, by a look whether the
    cluster is fit, and what is missing is told before the group is joined. One session belongs to one thread. More,
    with tests that need no broker: docs/sessions.md.
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
        """`participants`, `listener`: eos/session/participants.py. With a listener a session can be made before its
        topics are known: `read` says them before the start. `together`: how many records the application handles at
        once; a poll of a backlog takes whole batches of them."""
        self.settings = settings_of(settings)
        named = [t.strip() for t in self.settings["eos.input.topics"].split(",") if t.strip()]
        topics = list(topics) if topics is not None else named
        _check(self.settings, topics, topics_follow=listener is not None)
        self.group: str = self.settings["group.id"]
        self.transactional_id: str = self.settings["transactional.id"]
        self.destinations = list(destinations)
        self.until_end = until_end
        self.stop_requested = False
        self.pulse = Pulse(world.now)
        self._world = world
        self._listener = listener or Listener()
        self._participants = participants

        interval_s = self.settings["eos.transaction.interval.ms"] / 1000
        self._pacing = Pacing(interval_s, self.settings["eos.transaction.max.records"], together)
        self._endings = Endings(participants, self._listener, world)
        self.counters = self._endings.counters
        self._intake = Intake(
            self.settings,
            topics,
            self._pacing,
            participants,
            until_end=until_end,
            stopping=lambda: self.stop_requested,
            rebalances=self.counters.rebalances,
            pulse=self.pulse,
            world=world,
        )
        self._positions = self._intake.positions
        self._successor = Successor(self.settings, world)
        self._offsets = Offsets(self.settings, self._positions, participants, self._successor, world)
        self._lanes = Lanes(self.settings, self.pulse, world)
        self._claim = Claim(
            self.settings,
            self._successor.told,
            lambda: self.membership.member.nobody_took_our_place(),
            self.pulse,
            world,
        )
        self._recovery = Recovery(
            self.settings,
            self._lanes,
            self._intake,
            self._claim,
            self._pacing,
            self._endings,
            self._listener,
            world,
        )
        self._open: Transaction | None = None
        self._given_up: Transaction | None = None  # by us, while the loop's body has it
        self._failure: CallFailed | None = None  # of a send in the open transaction
        self._half_way = False  # see _whole

    # ---- life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> TransactSession:
        if self.destinations:
            need = preflight.need_of(self.settings, self.topics, self.destinations)
            preflight.require(self.settings, need, self._world)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A block that ended well is a final stop; after an exception a restart is expected soon.
        self.close(leave_group=kind is None)

    @property
    def topics(self) -> Sequence[str]:
        return self._intake.topics

    @property
    def membership(self) -> Membership:
        return self._intake.membership

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

    @property
    def commit_under_way_s(self) -> float:
        """For how long a commit has been on its way; 0 without one."""
        return self._lanes.under_way_s

    def lag(self) -> int | None:
        """Records (and markers) between what is committed and the last stable offsets; None: not known yet."""
        lags = list(self.membership.lags().values())
        known = [lag for lag in lags if lag is not None]
        return sum(known) if lags and len(known) == len(lags) else None

    def who(self) -> Mapping[str, object]:
        """For a line about a transaction: transactional.id, producer id, epoch and state."""
        return self.producer.who()

    def read(self, topics: Sequence[str], destinations: Sequence[str], by_pattern: Sequence[str]) -> None:
        """Before the start: what it reads and writes; `by_pattern` are those of the topics that nobody named."""
        self._intake.topics, self._intake.by_pattern = list(topics), set(by_pattern)
        self.destinations = list(destinations)

    def start(self) -> None:
        """Connects, fences predecessors and subscribes. Raises Unavailable within eos.startup.timeout.ms."""
        self.pulse.adopt()
        deadline = self._world.now() + self.settings["eos.startup.timeout.ms"] / 1000
        in_turn = self.settings["eos.producers"] == "2" and all(one.pipelines for one in self._participants)
        try:
            self._intake.connect(self.destinations, deadline)
            with self._world.admin(self.settings) as admin:
                self._lanes.start(admin, deadline, in_turn)
                self._intake.join(admin)
        except Stopped:
            log.info("stopped before the group was joined", group=self.group)  # the loop ends at its first turn
        except BaseException:
            self.close()
            raise
        self._successor.ours("our start")
        self.producer.identity(0.5)  # comes with the first statistics; the log should name it from the start
        log.info("session started", group=self.group, topics=",".join(self.topics), **self.producer.who())

    def close(self, leave_group: bool = False) -> None:
        """Aborts what is open and closes all clients. `leave_group`: a static member leaves for good."""
        if (done := self._lanes.await_at_close()) is not None:
            self._arrived(done)
        self._endings.ended(Outcome.UNKNOWN)
        self._open = None
        self._lanes.close()
        self._intake.close(leave_group)
        self._offsets.close()

    def stop(self) -> None:
        """The loop ends when the open transaction has, and while it waits for records: at once, or at most one
        `eos.transaction.interval.ms` later. From anywhere: the loop's body, a signal's handler, another thread."""
        self.stop_requested = True

    @contextlib.contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """In the block SIGTERM and SIGINT stop the loop, as they stop a worker's: at the first one the open transaction
        ends; a second one, or `eos.shutdown.timeout.ms` after the first, gives it up, and the block raises Temporary.
        The session's start and close lie outside of it.
        Raises IllegalState outside of the main thread, where no signal comes."""
        if threading.current_thread() is not threading.main_thread():
            raise IllegalState("signals come to the main thread alone: hear them there, and call `session.stop()`")
        try:
            with StopSignals(self):
                yield
        except ShutdownExpired as expired:
            raise took_too_long(expired) from expired

    def pause(self, seconds: float) -> None:
        """No transaction begins before so many seconds are over; meanwhile the group is polled as usual."""
        self._pacing.pause(self._world.now(), seconds)

    # ---- the loop ---------------------------------------------------------------------------------------------

    def __iter__(self) -> TransactSession:
        if not self._stops_half_way:
            with self._whole():
                if self._open is not None:
                    self._abort("the loop was left before the transaction ended")
        return self

    def __next__(self) -> Transaction:
        self._claim.hold()
        if not self._intake.started:
            raise IllegalState(
                "the session is not started, or closed: `with TransactSession(...) as session:` starts it"
            )
        begun = None
        if not self._stops_half_way:
            with self._whole():
                begun = self._following()
        if begun is None:
            raise StopIteration
        return begun

    @property
    def _stops_half_way(self) -> bool:
        """Nothing is recovered for a loop that is over: `close` ends what was begun."""
        return self.stop_requested and self._half_way

    def _following(self) -> Transaction | None:
        """Ends the open transaction and begins the next one, once there are records; None: the loop is over."""
        if self._open is not None:
            self._end()
        while not self.stop_requested:
            gathered = self._try(self._gather)
            if self.stop_requested:
                break
            if gathered and len(self._positions):
                if self._try(self._begin):
                    return self._open
            elif (under_way := self._lanes.under_way) is not None:
                if under_way.job.done.is_set():
                    self._await_commit()
            elif gathered and self._offsets.to_commit(self.membership.starts.uncommitted, IDLE_PLACES_S):
                if self._try(self._begin):
                    self._end()
            elif self._intake.finished():
                return None
            self._replace_while_idle()
            self._listener.idle()
        self._await_commit()
        return None

    def _gather(self) -> None:
        """Fetches records until it is time to begin; no transaction is open."""
        self.producer.poll(0)
        self._intake.wait_out_pause()
        if topics := self._listener.new_topics():
            self._intake.note(topics)
            # The group rebalances: offsets that are on their way would be refused, by the generation.
            self._await_commit()
            self._intake.read_too()
        # A partition that left and comes back begins behind what of it is on its way.
        if self.membership.changed and self._await_commit():
            self._intake.begin_partitions()
        self._intake.gather()

    def _replace_while_idle(self) -> None:
        """A late AddPartitionsToTxn would start a ghost transaction that fences an idle worker: not at a new epoch."""
        if self._lanes.under_way is not None:
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
        now, under_way = self._world.now(), self._lanes.under_way
        begun = Transaction(self, now, self._pacing.began(now), self._positions.first_timestamp_ms)
        self._endings.begun(begun, None if under_way is None else under_way.transaction)
        self._open = begun

    # ---- while a transaction is open --------------------------------------------------------------------------

    def _has(self, txn: Transaction) -> bool:
        """Whether it is open; False if this session gave it up under the loop's body. IllegalState: it has ended."""
        if txn is not self._open and txn is not self._given_up:
            raise IllegalState("this transaction has ended")
        return txn is self._open

    def _take(self, most: int) -> list[Record]:
        positions = self._positions
        most = min(most, self._pacing.limit - positions.taken)
        if not len(positions) and positions.taken > 0 and most > 0:
            with_the_body = self._open
            try:
                with self._whole():
                    self._try(self._intake.more)
            finally:
                self._given_up = with_the_body if self._open is None else None
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
            return fed if self._failure is None else Fed(fed.sent, len(records), None)
        return Fed(0, len(records), None)

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def _end(self) -> bool:
        """Sends the open transaction's commit on its way, behind the one before. False: it was aborted, alone or with
        the one before, and what they took will be handed out again."""
        assert self._open is not None
        self._open._give_back_ahead()
        offsets = self._offsets.to_commit(self.membership.starts.uncommitted)
        if not (self._try(self._flush) and self._await_commit()):
            return False
        # Behind both waits, in which a partition may be lost.
        gone = self._try(lambda: self._set_out(offsets, self.membership.metadata_to_commit(offsets)))
        return gone and (self._lanes.in_turn or self._await_commit())

    def _flush(self) -> None:
        # First: what failed for a lost partition is not ours to look into.
        self.membership.check_not_lost()
        for participant in self._participants:
            participant.last_sends(self._send)
        if self._failure is not None:
            raise self._failure
        self._world.step("flush")
        self.producer.flush(lambda: self._intake.ahead(self._positions.taken))
        self._world.step("flushed")

    def _set_out(self, offsets: Mapping[Partition, int], group_metadata: Any) -> None:
        """The flushed transaction's commit is sent on its way."""
        transaction = self._open
        assert transaction is not None
        job = self._lanes.commit_of(self._offsets.commits_of(offsets, self.producer), group_metadata)
        starts, taken = self.membership.starts.uncommitted, self._positions.taken
        commit = UnderWay(self.producer, transaction, offsets, starts, taken, self._world.now(), job)
        self._positions.set_out(offsets)
        # Nothing more can be sent in it, whatever interrupts us from here on.
        self._open, transaction.set_out = None, True
        self._lanes.send(commit)
        self.membership.starts.uncommitted = {}

    def _await_commit(self) -> bool:
        """Waits for the commit that is on its way, if any. False: it failed, and so did what was begun behind it; that
        is carried out already. Raises what a failed commit of the open transaction would."""
        commit = self._lanes.under_way
        if commit is None:
            return True
        error = self._lanes.await_commit(commit, lambda: self._intake.ahead(commit.taken))
        if error is None:
            self._arrived(commit)
            return True
        self.membership.starts.returned(commit.new_starts, self.membership.assigned)
        self._positions.returned()
        self._lanes.ended(commit)
        if not isinstance(error, CallFailed):
            raise error
        self._carry_out(error, commit.offsets)
        return False

    def _arrived(self, commit: UnderWay) -> None:
        self._positions.arrived()
        self._lanes.ended(commit)
        self._recovery.rebuilds_in_a_row = 0
        self._pacing.committed(commit.taken)
        self._successor.ours("our last commit")
        self._offsets.committed(commit)
        self._endings.committed(commit)
        self.counters.repeated, self.counters.replacements = self._positions.repeated, self._lanes.replacements

    # ---- recovery ---------------------------------------------------------------------------------------------

    def _abort(self, reason: str) -> None:
        """Aborts the open transaction; its records are handed out again. The producer is replaced before the next."""
        self._recover(self._failure or CallFailed("abort", Action.ABORT, RuntimeError(reason)))

    def _try(self, what: Callable[[], object]) -> bool:
        """Whether it was done; else what failed in it is recovered from, and no transaction is open."""
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
        interrupted, self._half_way, with_the_body = self._half_way, True, self._open
        if interrupted:
            self._claim.hold()  # who lost it never initialises again
            self._given_up = with_the_body
            self._recover(CallFailed("consume", Action.INTERRUPTED, RuntimeError("the loop was left half way")))
        try:
            yield
        except PoisonRecord:
            self._half_way = False  # its transaction is aborted, and all noted: an application that takes it can go on
            raise
        self._half_way = False

    def _recover(self, failure: CallFailed) -> None:
        """Carries out what a failed call asks for; returns when the loop can go on, raises when it must stop."""
        if not self._await_commit() and failure.call != "consume":
            return  # the transaction before failed and took the open one with it; the consumer's failure remains
        self._carry_out(failure, self.membership.starts.uncommitted | self._positions.offsets())

    def _carry_out(self, failure: CallFailed, offsets: Mapping[Partition, int]) -> None:
        self._open = None
        self._recovery.carry_out(Trouble(failure, self._positions.taken, self._positions.last_taken, offsets))


def _check(settings: Settings, topics: Sequence[str], topics_follow: bool) -> None:
    """Raises ConfigurationError. `topics_follow`: they need not be known yet."""
    for name in OF_FUNCTIONS:
        if name in settings.values:
            raise ConfigurationError(
                f"{name} is about an App's functions, and does nothing in a loop of your own",
                remedy="unset it; `txn.send(..., headers=...)` passes headers on, a span goes around the body",
            )
    for name in ("group.id", "transactional.id"):
        if not settings.get(name):
            raise ConfigurationError(f"{name} must be set for a session")
    if not topics and not topics_follow:
        raise ConfigurationError("a session needs topics: TransactSession(settings, [...]) or eos.input.topics")
    if patterns := [topic for topic in topics if is_pattern(topic)]:
        # librdkafka would take topics in, and out, at moments of its own.
        raise ConfigurationError(
            f"a session reads topics by their names, not by the pattern {patterns[0]!r}: patterns are for an App's "
            "functions"
        )
