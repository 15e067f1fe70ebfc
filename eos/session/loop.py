"""The order of calls of a consume-transform-produce loop: the only place that decides commit or abort.

Modelled on franz-go's GroupTransactSession. The parts that it plays together (eos/session/parts.py) have a rule each:
intake.py what is read, committer.py where a commit runs, offsets.py what is committed, outcomes.py who is notified,
recovery.py and steps.py what a failed call leads to. Rebalance callbacks (membership.py) only record facts: what was
assigned begins when no transaction is open, what was revoked is forgotten, and if the open transaction took records of
it, that transaction aborts at its end (nothing of it can become visible, so giving the partition back first is safe).

A transaction in order: gather -> begin -> hand out records, send, poll for more -> flush -> latched delivery errors ->
member still in the group -> send_offsets -> commit. The backlog's next records are fetched while a large transaction's
flush and commit are waited for (`Intake.ahead`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from eos import log
from eos.errors import Action, CallFailed, IllegalState, PoisonRecord
from eos.records import Feed, FeedResult, Record
from eos.session.committer import Commit
from eos.session.membership import Membership
from eos.session.offsets import IDLE_PLACES_S
from eos.session.participants import Outcome
from eos.session.parts import Parts
from eos.session.positions import TopicPartition as Partition
from eos.session.recovery import Trouble
from eos.session.steps import Recovery
from eos.session.transaction import Phase, Transaction

_CLOSE_ABORT_S = 5.0
_OPEN = Phase.OPEN


class Loop:
    """One transaction after the other. What its body may do while one is open is a Transaction's."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._world, self._listener = parts, parts.world, parts.listener
        self._intake, self._claim = parts.intake, parts.claim
        self._producer, self._committer = parts.producer, parts.committer
        self._positions, self._offsets = parts.positions, parts.offsets
        self._pacing, self._outcomes = parts.pacing, parts.outcomes
        self._recovery = Recovery(parts)
        self.group, self.now = parts.group, parts.world.now
        self._last: Transaction | None = None  # begun; its phase tells what became of it
        self._failure: CallFailed | None = None  # of a send in the open transaction
        self._commit: Commit | None = None  # started; how it ended is not noted yet
        self._in_a_turn = False  # see _turn

    @property
    def _membership(self) -> Membership:
        return self._intake.membership

    def close(self) -> None:
        """Abort what is open and close the producer. Nothing is begun or recovered after it."""
        commit, self._commit = self._commit, None
        if commit is not None and self._succeeds_at_close(commit):
            self._succeeded(commit)
        self._outcomes.ended(Outcome.UNKNOWN)
        if self._open is not None:
            self._open.aborted()
        if self._producer.may_abort:
            try:
                self._producer.abort(self.now() + _CLOSE_ABORT_S)
            except CallFailed as failure:
                # The broker aborts it at its timeout, or our successor's init does.
                log.warning("abort at close failed", error=str(failure), **self._producer.who())
        self._producer.close()
        self._committer.close()

    def _succeeds_at_close(self, commit: Commit) -> bool:
        """Return whether a commit whose wait was interrupted succeeds within a moment."""
        if not commit.job.done.wait(_CLOSE_ABORT_S):
            self._producer.abandon()  # its outcome is the coordinator's, and our successor's to learn
            return False
        if commit.job.error is not None:
            log.warning("commit at close failed", error=str(commit.job.error), **self._producer.who())
        return commit.job.error is None

    @property
    def _open(self) -> Transaction | None:
        return self._last if self._last is not None and self._last.phase is _OPEN else None

    # ---- its turns --------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Note that the loop is entered, or entered again after its body was left."""
        if not self._stops_in_a_turn:
            with self._turn():
                if self._open is not None:
                    self._abort("the loop was left before the transaction ended")

    def following(self) -> Transaction | None:
        """The next transaction; None: the loop is over. IllegalState: it has not begun, or is closed."""
        self._claim.hold()
        if not self._intake.started:
            raise IllegalState(
                "the session is not started, or closed: `with TransactSession(...) as session:` starts it"
            )
        if self._stops_in_a_turn:
            return None
        with self._turn():
            return self._following()

    @property
    def _stops_in_a_turn(self) -> bool:
        """Whether a turn was interrupted and a stop was asked for. Nothing is recovered then: `close` aborts."""
        return self._parts.stopping() and self._in_a_turn

    def _following(self) -> Transaction | None:
        """End the open transaction and begin the next one once there are records. Return None when the loop is over."""
        if self._open is not None:
            self._end()
        while not self._parts.stopping():
            gathered = False
            with self._recovering():
                self._gather()
                gathered = True
            if self._parts.stopping():
                break
            if gathered and len(self._positions):
                with self._recovering():
                    self._begin()
                    return self._open
            elif gathered and self._offsets.to_commit(self._membership.starts.uncommitted, IDLE_PLACES_S):
                with self._recovering():
                    self._begin()
                if self._open is not None:
                    self._end()
            elif self._intake.finished():
                return None
            self._replace_while_idle()
            self._listener.idle()
        return None

    def _gather(self) -> None:
        """Fetches records until it is time to begin; no transaction is open."""
        self._producer.poll(0)
        self._intake.wait_out_pause()
        if topics := self._listener.new_topics():
            self._intake.note(topics)
            self._intake.read_too()
        if self._membership.changed:
            self._intake.begin_partitions()
        self._intake.gather()

    def _replace_while_idle(self) -> None:
        """A late AddPartitionsToTxn would start a ghost transaction that fences an idle worker: not at a new epoch."""
        self._producer.poll(0)
        if reason := self._producer.must_replace():
            self._claim.replace(self._producer, reason)

    def _begin(self) -> None:
        asked = self._world.now()
        if reason := self._producer.must_replace():
            self._claim.replace(self._producer, reason)
        self._pacing.delayed(self._world.now() - asked)
        self._world.step("begin")
        self._producer.begin()
        self._world.step("begun")
        self._failure = None
        self._membership.begun()
        if self._last is not None:
            self._last.aborted()  # one that was given up; for all others nothing changes
        now, began = self._world.now(), self._positions.first_timestamp_ms
        begun = Transaction(self, now, self._pacing.began(now), began, self.waited_s)
        self._outcomes.begun(begun)
        self._last = begun

    # ---- while a transaction is open: what it asks for (eos/session/transaction.py) -----------------------------

    @property
    def taken(self) -> int:
        return self._positions.taken

    @property
    def waited_s(self) -> float:
        return self._producer.waited_s

    def has(self, txn: Transaction) -> bool:
        if txn.phase is _OPEN:  # asked for each send
            return True
        if txn.phase is Phase.GIVEN_UP:
            return False
        raise IllegalState("this transaction has ended")

    def take(self, most: int) -> list[Record]:
        positions = self._positions
        if not self._can_commit:
            return []
        most = min(most, self._pacing.limit - positions.taken)
        if not len(positions) and positions.taken > 0 and most > 0:
            with_the_body = self._open
            try:
                with self._turn(), self._recovering():
                    self._intake.more()
            finally:
                if with_the_body is not None and self._open is None:
                    with_the_body.aborted(under_its_body=True)
        # What follows is the application's: how long it takes is counted from here.
        self._parts.pulse.beat("handling")
        return positions.take(most) if self._open is not None and self._can_commit else []

    def give_back(self, count: int) -> None:
        self._positions.give_back(count)

    def end_now(self, txn: Transaction) -> bool:
        with self._turn():
            return self.has(txn) and self._end()

    def abort(self, txn: Transaction, why: str) -> None:
        with self._turn():
            if self.has(txn):
                self._abort(why)

    @property
    def _can_commit(self) -> bool:
        return self._failure is None and self._membership.lost_sentence is None

    # A send that failed is a fact for `end`: the body need not know, its further sends lead nowhere.

    def send(self, *send: Any) -> None:
        if self._can_commit:
            try:
                self._producer.send(*send)
            except CallFailed as failure:
                self._failure = failure

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        if self._can_commit:
            fed = self._producer.feed(feed, records)
            self._failure = fed.failure
            return fed if self._failure is None else FeedResult(fed.sent, len(records), None)
        return FeedResult(0, len(records), None)

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def _end(self) -> bool:
        """Commit the open transaction. Return False if it was aborted; its records are handed out again."""
        transaction = self._open
        assert transaction is not None
        transaction._give_back_ahead()
        with self._recovering():
            offsets = self._offsets.to_commit(self._membership.starts.uncommitted)
            transaction.handled(self._world.now())
            self._membership.raise_if_lost()  # before a failed send: what failed for a lost partition is not ours
            for participant in self._parts.participants:
                participant.last_sends(self.send, offsets.keys())
            if self._failure is not None:
                raise self._failure
            self._world.step("flush")
            self._producer.flush(lambda: self._intake.ahead(self._positions.taken))  # raises the first delivery error
            self._world.step("flushed")
            group = self._membership.metadata_to_commit(offsets)  # again after the flush: still the owner of them all
            self._start_commit(transaction, offsets, group)
            self._finish_commit()
            return True
        return False

    def _start_commit(self, transaction: Transaction, offsets: Mapping[Partition, int], group_metadata: Any) -> None:
        job = self._committer.job_of(self._offsets.commits_of(offsets, self._producer), group_metadata)
        commit = Commit(transaction, offsets, self._positions.taken, self._world.now(), job)
        # Nothing more can be sent in it, whatever interrupts us from here on.
        transaction.starts_commit()
        self._commit = commit

    def _finish_commit(self) -> None:
        """Wait for the commit that was started, if any. An interrupted wait is repeated by the next turn."""
        if (commit := self._commit) is None:
            return
        if (error := self._committer.wait(commit.job, lambda: self._intake.ahead(commit.taken))) is not None:
            if not isinstance(error, CallFailed):
                self._commit = None  # nothing recovers from it
            raise error
        self._succeeded(commit)

    def _succeeded(self, commit: Commit) -> None:
        self._outcomes.committed(commit)
        self._commit = None
        ms = round(commit.open_s * 1000)
        log.debug("committed", taken=commit.taken, sent=commit.transaction.sent, ms=ms, **self._producer.who())

    # ---- recovery ---------------------------------------------------------------------------------------------

    def _abort(self, reason: str) -> None:
        """Abort the open transaction; its records are handed out again. The producer is replaced before the next."""
        self._recover(self._failure or CallFailed("abort", Action.ABORT, RuntimeError(reason)))

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        """Recover from the failed call that ends the block, if one does: no transaction is open then."""
        try:
            yield
        except CallFailed as failure:
            self._recover(failure)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Do not go on with what an exception interrupted, be it a signal's or one that the application caught: some
        of it may have happened that nothing noted."""
        interrupted, self._in_a_turn, with_the_body = self._in_a_turn, True, self._open
        if interrupted:
            self._claim.hold()  # a session that lost its transactional.id must not initialise it again
            with self._recovering():
                self._finish_commit()
            if with_the_body is not None:
                with_the_body.aborted(under_its_body=True)
            self._recover(CallFailed("consume", Action.INTERRUPTED, RuntimeError("the loop was left half way")))
        try:
            yield
        except PoisonRecord:
            self._in_a_turn = False  # its transaction is aborted, and all noted: an application that takes it can go on
            raise
        self._in_a_turn = False

    def _recover(self, failure: CallFailed) -> None:
        """Do what the failed call asks for. Return when the loop can go on, raise when it must stop."""
        commit, self._commit = self._commit, None
        if commit is not None:
            self._carry_out(failure, commit.offsets, commit.transaction)
        else:
            offsets = self._membership.starts.uncommitted | self._positions.offsets()
            self._carry_out(failure, offsets, self._open)

    def _carry_out(
        self, failure: CallFailed, offsets: Mapping[Partition, int], transaction: Transaction | None
    ) -> None:
        trouble = Trouble(failure, self._positions.taken, self._positions.last_taken, offsets)
        if transaction is not None:
            now = self._world.now()
            trouble.open_s, trouble.delivered = now - transaction.began_at, self._producer.delivered
            trouble.handling_s = transaction.handling_until(now)
            transaction.aborted()
        self._recovery.carry_out(trouble)
