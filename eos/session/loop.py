"""The order of calls of a consume-transform-produce loop: the only place that decides commit or abort.

Modelled on franz-go's GroupTransactSession. The parts that it plays together (eos/session/parts.py) have a rule each:
intake.py what is read, lanes.py who commits, offsets.py what is committed, endings.py who is told, recovery.py and
steps.py what a failed call leads to. Rebalance callbacks (membership.py) only record facts: what was assigned begins
when no transaction is open, what was revoked is forgotten, and if the open transaction took records of it, that
transaction aborts at its end (nothing of it can become visible, so giving the partition back first is safe).

A transaction in order: gather -> begin -> hand out records, send, poll for more -> flush -> latched delivery errors ->
the one before is committed -> member still in the group -> send_offsets -> commit. The backlog's next records are
fetched while a large transaction's flush and commit are waited for (`Intake.ahead`).

With `eos.producers=2` two producers take turns: the next transaction sends records only after the flush of the one
before (order per partition) and offsets only after that one's commit returned; if that commit did not come to pass, it
goes down with it (`_await_commit`). So what can be committed is always a beginning of what was read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eos.errors import Action, CallFailed, IllegalState, PoisonRecord
from eos.records import Fed, Feed, Record
from eos.session.lanes import UnderWay
from eos.session.membership import Membership
from eos.session.offsets import IDLE_PLACES_S
from eos.session.participants import Outcome
from eos.session.parts import Parts
from eos.session.positions import TopicPartition as Partition
from eos.session.producer import ALWAYS, TransactionalProducer
from eos.session.recovery import Trouble
from eos.session.steps import Recovery
from eos.session.transaction import Transaction


class Loop:
    """One transaction after the other. What its body may do while one is open is a Transaction's."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._world, self._listener = parts, parts.world, parts.listener
        self._intake, self._lanes, self._claim = parts.intake, parts.lanes, parts.claim
        self._positions, self._offsets = parts.positions, parts.offsets
        self._pacing, self._endings = parts.pacing, parts.endings
        self._recovery = Recovery(parts)
        self.group, self.now = parts.group, parts.world.now
        self._open: Transaction | None = None
        self._given_up: Transaction | None = None  # by us, while the loop's body has it
        self._failure: CallFailed | None = None  # of a send in the open transaction
        self._half_way = False  # see _whole

    @property
    def _producer(self) -> TransactionalProducer:
        """The one whose turn it is."""
        return self._lanes.turn

    @property
    def _membership(self) -> Membership:
        return self._intake.membership

    def close(self) -> None:
        """Nothing is begun or recovered any more; what is open is aborted with its producer."""
        if (done := self._lanes.await_at_close()) is not None:
            self._arrived(done)
        self._endings.ended(Outcome.UNKNOWN)
        self._open = None

    # ---- its turns --------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """It is entered, or entered again behind a body that was left."""
        if not self._stops_half_way:
            with self._whole():
                if self._open is not None:
                    self._abort("the loop was left before the transaction ended")

    def following(self) -> Transaction | None:
        """The next transaction; None: the loop is over. IllegalState: it has not begun, or is closed."""
        self._claim.hold()
        if not self._intake.started:
            raise IllegalState(
                "the session is not started, or closed: `with TransactSession(...) as session:` starts it"
            )
        if self._stops_half_way:
            return None
        with self._whole():
            return self._following()

    @property
    def _stops_half_way(self) -> bool:
        """Nothing is recovered for a loop that is over: `close` ends what was begun."""
        return self._parts.stopping() and self._half_way

    def _following(self) -> Transaction | None:
        """Ends the open transaction and begins the next one, once there are records; None: the loop is over."""
        if self._open is not None:
            self._end()
        while not self._parts.stopping():
            gathered = self._try(self._gather)
            if self._parts.stopping():
                break
            if gathered and len(self._positions):
                if self._try(self._begin):
                    return self._open
            elif (under_way := self._lanes.under_way) is not None:
                if under_way.job.done.is_set():
                    self._await_commit()
            elif gathered and self._offsets.to_commit(self._membership.starts.uncommitted, IDLE_PLACES_S):
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
        self._producer.poll(0)
        self._intake.wait_out_pause()
        if topics := self._listener.new_topics():
            self._intake.note(topics)
            # The group rebalances: offsets that are on their way would be refused, by the generation.
            self._await_commit()
            self._intake.read_too()
        # A partition that left and comes back begins behind what of it is on its way.
        if self._membership.changed and self._await_commit():
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
        if reason := self._producer.must_replace():
            self._claim.replace(self._producer, reason)
        self._pacing.delayed(self._world.now() - asked)
        self._world.step("begin")
        self._producer.begin()
        self._world.step("begun")
        self._failure = self._membership.lost_sentence = self._given_up = None
        now, under_way = self._world.now(), self._lanes.under_way
        begun = Transaction(self, now, self._pacing.began(now), self._positions.first_timestamp_ms)
        begun.waited_before = self.waited_s
        self._endings.begun(begun, None if under_way is None else under_way.transaction)
        self._open = begun

    # ---- while a transaction is open: what it asks for (eos/session/transaction.py) -----------------------------

    @property
    def taken(self) -> int:
        return self._positions.taken

    @property
    def waited_s(self) -> float:
        return self._producer.waited_s

    def has(self, txn: Transaction) -> bool:
        if txn is not self._open and txn is not self._given_up:
            raise IllegalState("this transaction has ended")
        return txn is self._open

    def take(self, most: int) -> list[Record]:
        positions = self._positions
        if not self._going_well:
            return []
        most = min(most, self._pacing.limit - positions.taken)
        if not len(positions) and positions.taken > 0 and most > 0:
            with_the_body = self._open
            try:
                with self._whole():
                    self._try(self._intake.more)
            finally:
                self._given_up = with_the_body if self._open is None else None
        # What follows is the application's: how long it takes is counted from here.
        self._parts.pulse.beat("handling")
        return positions.take(most) if self._open is not None and self._going_well else []

    def give_back(self, count: int) -> None:
        self._positions.give_back(count)

    def end_now(self, txn: Transaction) -> bool:
        with self._whole():
            return self.has(txn) and self._end() and self._await_commit()

    def abort(self, txn: Transaction, why: str) -> None:
        with self._whole():
            if self.has(txn):
                self._abort(why)

    @property
    def _going_well(self) -> bool:
        return self._failure is None and self._membership.lost_sentence is None

    # A send that failed is a fact for `end`: the body need not know, its further sends lead nowhere.

    def send(self, *send: Any) -> None:
        if self._going_well:
            try:
                self._producer.send(*send)
            except CallFailed as failure:
                self._failure = failure

    def feed(self, feed: Feed, records: list[Record]) -> Fed:
        if self._going_well:
            fed = self._producer.feed(feed, records)
            self._failure = fed.failure
            return fed if self._failure is None else Fed(fed.sent, len(records), None)
        return Fed(0, len(records), None)

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def _end(self) -> bool:
        """Sends the open transaction's commit on its way, behind the one before. False: it was aborted, alone or with
        the one before, and what they took will be handed out again."""
        assert self._open is not None
        self._open._give_back_ahead()
        offsets = self._offsets.to_commit(self._membership.starts.uncommitted)
        if not (self._try(lambda: self._flush(offsets)) and self._await_commit()):
            return False
        # Behind both waits, in which a partition may be lost.
        gone = self._try(lambda: self._set_out(offsets, self._membership.metadata_to_commit(offsets)))
        return gone and (self._lanes.in_turn or self._await_commit())

    def _flush(self, offsets: Mapping[Partition, int]) -> None:
        assert self._open is not None
        self._open.handling_s = self._handling_s(self._open)
        # First: what failed for a lost partition is not ours to look into.
        self._membership.check_not_lost()
        for participant in self._parts.participants:
            participant.last_sends(self.send, offsets.keys())
        if self._failure is not None:
            raise self._failure
        self._world.step("flush")
        self._producer.flush(lambda: self._intake.ahead(self._positions.taken))
        self._world.step("flushed")

    def _handling_s(self, transaction: Transaction) -> float:
        """For how long its records have been handled, or were."""
        if transaction.handling_s is not None:
            return transaction.handling_s
        return self._world.now() - transaction.began_at - (self.waited_s - transaction.waited_before)

    def _set_out(self, offsets: Mapping[Partition, int], group_metadata: Any) -> None:
        """The flushed transaction's commit is sent on its way."""
        transaction = self._open
        assert transaction is not None
        job = self._lanes.commit_of(self._offsets.commits_of(offsets, self._producer), group_metadata)
        starts, taken = self._membership.starts.uncommitted, self._positions.taken
        commit = UnderWay(self._producer, transaction, offsets, starts, taken, self._world.now(), job)
        self._positions.set_out(offsets)
        # Nothing more can be sent in it, whatever interrupts us from here on.
        self._open, transaction.set_out = None, True
        self._lanes.send(commit)
        self._membership.starts.uncommitted = {}

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
        self._membership.starts.returned(commit.new_starts, self._membership.assigned)
        self._positions.returned()
        self._lanes.ended(commit)
        if not isinstance(error, CallFailed):
            raise error
        self._carry_out(error, commit.offsets, commit.transaction)
        return False

    def _arrived(self, commit: UnderWay) -> None:
        self._positions.arrived()
        self._lanes.ended(commit)
        self._recovery.rebuilds_in_a_row = 0
        open_s = commit.job.result - commit.transaction.began_at
        self._pacing.committed(commit.taken, open_s, open_s - (commit.transaction.handling_s or 0.0))
        self._parts.successor.ours("our last commit")
        self._offsets.committed(commit)
        self._endings.committed(commit)
        counters = self._parts.counters
        counters.repeated, counters.replacements = self._positions.repeated, self._lanes.replacements

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
        self._carry_out(failure, self._membership.starts.uncommitted | self._positions.offsets(), self._open)

    def _carry_out(
        self, failure: CallFailed, offsets: Mapping[Partition, int], transaction: Transaction | None = None
    ) -> None:
        trouble = Trouble(failure, self._positions.taken, self._positions.last_taken, offsets)
        if transaction is not None:
            trouble.open_s = self._world.now() - transaction.began_at
            trouble.handling_s, trouble.delivered = self._handling_s(transaction), self._producer.delivered
        self._open = None
        self._recovery.carry_out(trouble)
