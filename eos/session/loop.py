"""The order of calls of a consume-transform-produce loop: the only place that decides commit or abort.

Modelled on franz-go's GroupTransactSession. The parts that it plays together (eos/session/parts.py) have a rule each:
intake.py what is read, committer.py where a commit runs, offsets.py what is committed, endings.py who is told,
recovery.py and steps.py what a failed call leads to. Rebalance callbacks (membership.py) only record facts: what was
assigned begins when no transaction is open, what was revoked is forgotten, and if the open transaction took records of
it, that transaction aborts at its end (nothing of it can become visible, so giving the partition back first is safe).

A transaction in order: gather -> begin -> hand out records, send, poll for more -> flush -> latched delivery errors ->
member still in the group -> send_offsets -> commit. The backlog's next records are fetched while a large transaction's
flush and commit are waited for (`Intake.ahead`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eos import log
from eos.errors import Action, CallFailed, IllegalState, PoisonRecord
from eos.records import Fed, Feed, Record
from eos.session.committer import Commit
from eos.session.membership import Membership
from eos.session.offsets import IDLE_PLACES_S
from eos.session.participants import Outcome
from eos.session.parts import Parts
from eos.session.positions import TopicPartition as Partition
from eos.session.recovery import Trouble
from eos.session.steps import Recovery
from eos.session.transaction import Transaction

_CLOSE_ABORT_S = 5.0


class Loop:
    """One transaction after the other. What its body may do while one is open is a Transaction's."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._world, self._listener = parts, parts.world, parts.listener
        self._intake, self._claim = parts.intake, parts.claim
        self._producer, self._committer = parts.producer, parts.committer
        self._positions, self._offsets = parts.positions, parts.offsets
        self._pacing, self._endings = parts.pacing, parts.endings
        self._recovery = Recovery(parts)
        self.group, self.now = parts.group, parts.world.now
        self._open: Transaction | None = None
        self._given_up: Transaction | None = None  # by us, while the loop's body has it
        self._failure: CallFailed | None = None  # of a send in the open transaction
        self._commit: Commit | None = None  # started; how it ended is not noted yet
        self._half_way = False  # see _whole

    @property
    def _membership(self) -> Membership:
        return self._intake.membership

    def close(self) -> None:
        """Abort what is open and close the producer. Nothing is begun or recovered after it."""
        commit, self._commit = self._commit, None
        if commit is not None and self._succeeds_at_close(commit):
            self._succeeded(commit)
        self._endings.ended(Outcome.UNKNOWN)
        self._open = None
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
            elif gathered and self._offsets.to_commit(self._membership.starts.uncommitted, IDLE_PLACES_S):
                if self._try(self._begin):
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
        self._failure = self._membership.lost_sentence = self._given_up = None
        now = self._world.now()
        begun = Transaction(self, now, self._pacing.began(now), self._positions.first_timestamp_ms)
        begun.waited_before = self.waited_s
        self._endings.begun(begun)
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
            return self.has(txn) and self._end()

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
        """Commit the open transaction. Return False if it was aborted; its records are handed out again."""
        assert self._open is not None
        self._open._give_back_ahead()
        offsets = self._offsets.to_commit(self._membership.starts.uncommitted)
        return (
            self._try(lambda: self._flush(offsets))
            # After the flush, during which a partition may be lost.
            and self._try(lambda: self._start_commit(offsets, self._membership.metadata_to_commit(offsets)))
            and self._finish_commit()
        )

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

    def _start_commit(self, offsets: Mapping[Partition, int], group_metadata: Any) -> None:
        transaction = self._open
        assert transaction is not None
        job = self._committer.job_of(self._offsets.commits_of(offsets, self._producer), group_metadata)
        commit = Commit(transaction, offsets, self._positions.taken, self._world.now(), job)
        # Nothing more can be sent in it, whatever interrupts us from here on.
        self._open, transaction.commit_started = None, True
        self._commit = commit

    def _finish_commit(self) -> bool:
        """Wait for the commit that was started, if any. Return False if it failed; that is recovered from already."""
        commit = self._commit
        if commit is None:
            return True
        error = self._committer.wait(commit.job, lambda: self._intake.ahead(commit.taken))
        if error is None:
            self._succeeded(commit)
            return True
        self._commit = None
        if not isinstance(error, CallFailed):
            raise error
        self._carry_out(error, commit.offsets, commit.transaction)
        return False

    def _succeeded(self, commit: Commit) -> None:
        self._positions.commit(commit.offsets)
        self._membership.starts.uncommitted = {}
        self._commit = None
        self._recovery.rebuilds_in_a_row = 0
        open_s = commit.job.result - commit.transaction.began_at
        self._pacing.committed(commit.taken, open_s, open_s - (commit.transaction.handling_s or 0.0))
        self._parts.successor.ours("our last commit")
        self._offsets.committed(commit)
        self._endings.committed(commit, self._producer.who())
        counters = self._parts.counters
        counters.repeated, counters.replacements = self._positions.repeated, dict(self._producer.replacements)

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
            self._finish_commit()
            self._recover(CallFailed("consume", Action.INTERRUPTED, RuntimeError("the loop was left half way")))
        try:
            yield
        except PoisonRecord:
            self._half_way = False  # its transaction is aborted, and all noted: an application that takes it can go on
            raise
        self._half_way = False

    def _recover(self, failure: CallFailed) -> None:
        """Carries out what a failed call asks for; returns when the loop can go on, raises when it must stop."""
        self._carry_out(failure, self._membership.starts.uncommitted | self._positions.offsets(), self._open)

    def _carry_out(
        self, failure: CallFailed, offsets: Mapping[Partition, int], transaction: Transaction | None
    ) -> None:
        trouble = Trouble(failure, self._positions.taken, self._positions.last_taken, offsets)
        if transaction is not None:
            trouble.open_s = self._world.now() - transaction.began_at
            trouble.handling_s, trouble.delivered = self._handling_s(transaction), self._producer.delivered
        self._open = None
        self._recovery.carry_out(trouble)
