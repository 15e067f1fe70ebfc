"""Defines the order of calls of a consume-transform-produce loop: the only place that decides to commit or abort.

Modelled on franz-go's GroupTransactSession. Each part of a session (parts.py) has one task:

- consumer/fetcher.py decides which records are read, and when.
- committer.py decides on which thread a commit runs.
- commit_offsets.py decides which offsets are committed.
- outcomes.py notifies the subscribers of each outcome.
- recovery.py decides what follows a failed call.

Rebalance callbacks (consumer/group_consumer.py) only record facts: assigned partitions start while no transaction is
open, and revoked ones are dropped. If the open transaction took records of a revoked partition, it aborts at its end.
None of its records can become visible, so giving the partition back first is safe.

One transaction, in order: gather records, begin, hand out records and send outputs, fetch more, flush, check delivery
errors, check the group membership, send offsets, commit. While a large transaction's flush and commit run, the next
records of a backlog are fetched (`Fetcher.prefetch`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eos import log
from eos.errors import Action, CallFailed, IllegalState, PoisonRecord
from eos.records import Feed, FeedResult, Record, Send
from eos.session.commit_offsets import IDLE_REFRESH_S
from eos.session.consumer.group_consumer import GroupConsumer
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.outcomes import Commit, Outcome
from eos.session.parts import Parts
from eos.session.recovery import FailedTransaction, Recovery
from eos.session.transaction import Phase, Transaction

_CLOSE_ABORT_S = 5.0
_OPEN = Phase.OPEN


class Loop:
    """Runs one transaction after the other. A Transaction offers what the loop's body may do in one."""

    def __init__(self, parts: Parts) -> None:
        self._world, self._listener, self._participants = parts.world, parts.listener, parts.participants
        self._fetcher, self._ownership = parts.fetcher, parts.ownership
        self._producer, self._committer = parts.producer, parts.committer
        self._positions, self._offsets = parts.positions, parts.offsets
        self._pacing, self._outcomes, self._pulse = parts.pacing, parts.outcomes, parts.pulse
        self._stopping = parts.stopping
        self._recovery = Recovery(parts)
        self.group, self.now = parts.group, parts.world.now
        self._latest_transaction: Transaction | None = (
            None  # the transaction that began last; its phase shows its progress
        )
        self._failure: CallFailed | None = None  # the failure of a send in the open transaction
        self._commit: Commit | None = None  # a started commit whose outcome is not noted yet
        self._is_turn_running = False  # true while a turn runs, and after an exception has interrupted it

    @property
    def _consumer(self) -> GroupConsumer:
        return self._fetcher.group_consumer

    @property
    def _open(self) -> Transaction | None:
        latest = self._latest_transaction
        return latest if latest is not None and latest.phase is _OPEN else None

    # ---- turns ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Record that the loop is entered, or entered again after its body was left."""
        if not self._is_stopping_in_turn:
            with self._turn():
                if self._open is not None:
                    self._abort("the loop was left before the transaction ended")

    def next_transaction(self) -> Transaction | None:
        """End the open transaction and begin the next one. Return None when the loop is over.

        Raises IllegalState if the session is not started or is closed, Fenced if it lost its transactional.id."""
        self._ownership.raise_if_lost()
        if not self._fetcher.is_started:
            raise IllegalState(
                "the session is not started, or closed: `with TransactSession(...) as session:` starts it"
            )
        if self._is_stopping_in_turn:
            return None
        with self._turn():
            return self._next()

    @property
    def _is_stopping_in_turn(self) -> bool:
        """Return True if a turn was interrupted and a stop was requested. Nothing is recovered then: `close` aborts."""
        return self._stopping() and self._is_turn_running

    def _next(self) -> Transaction | None:
        if self._open is not None:
            self._end()
        while not self._stopping():
            gathered = False
            with self._recovering():
                self._gather()
                gathered = True
            if self._stopping():
                break
            if gathered and (len(self._positions) or self._listener.has_work()):
                with self._recovering():
                    self._begin()
                    return self._open
            elif gathered and self._offsets.offsets_to_commit(self._consumer.start_offsets.uncommitted, IDLE_REFRESH_S):
                self._commit_offsets()
            elif self._fetcher.query_finished() and self._listener.may_finish():
                return None
            self._replace_while_idle()
            self._listener.on_idle()
        if self._offsets.has_deferred:
            self._commit_offsets()
        return None

    def _commit_offsets(self) -> None:
        """Commit offsets in a transaction without records."""
        with self._recovering():
            self._begin()
        if self._open is not None:
            self._end()

    def _gather(self) -> None:
        """Fetch records until it is time to begin a transaction; none is open."""
        self._producer.poll(0)
        self._fetcher.wait_out_pause()
        if topics := self._listener.find_new_topics():
            self._fetcher.add_topics(topics)
        self._fetcher.update_partitions()
        self._fetcher.gather()

    def _replace_while_idle(self) -> None:
        """Replace the producer of an idle worker if needed.

        Otherwise a late AddPartitionsToTxn could begin an empty transaction, whose timeout would fence the producer.
        The broker refuses such a request after the epoch has changed.
        """
        self._producer.poll(0)
        if reason := self._producer.decide_replacement():
            self._ownership.replace(self._producer, reason)

    def _begin(self) -> None:
        started = self._world.now()
        if reason := self._producer.decide_replacement():
            self._ownership.replace(self._producer, reason)
        self._pacing.exclude(self._world.now() - started)
        self._world.step("begin")
        self._producer.begin()
        self._world.step("begun")
        self._failure = None
        self._consumer.begin_transaction()
        if self._latest_transaction is not None:
            # If the latest transaction was given up, mark it as aborted. A committed one stays unchanged.
            self._latest_transaction.mark_aborted()
        now, first_ms = self._world.now(), self._positions.first_timestamp_ms
        begun = Transaction(self, now, self._pacing.begin(now), first_ms, self.waited_s)
        self._outcomes.begun(begun)
        self._latest_transaction = begun

    def close(self) -> None:
        """Abort the open transaction and close the producer. Nothing can begin or recover afterwards."""
        commit, self._commit = self._commit, None
        if commit is not None and self._commits_at_close(commit):
            self._succeeded(commit)
        self._outcomes.ended(Outcome.UNKNOWN)
        if self._open is not None:
            self._open.mark_aborted()
        if self._producer.may_abort:
            try:
                self._producer.abort(self.now() + _CLOSE_ABORT_S)
            except CallFailed as failure:
                # The broker aborts it at its timeout, or our successor's init aborts it.
                log.warning("abort at close failed", error=str(failure), **self._producer.who())
        self._producer.close()
        self._committer.close()

    def _commits_at_close(self, commit: Commit) -> bool:
        """Wait a moment for a commit whose wait was interrupted; return whether it succeeded."""
        if not commit.job.done.wait(_CLOSE_ABORT_S):
            self._producer.abandon()  # the coordinator decides the outcome, and our successor learns it
            return False
        if commit.job.error is not None:
            log.warning("commit at close failed", error=str(commit.job.error), **self._producer.who())
        return commit.job.error is None

    # ---- calls of the open transaction (transaction.py) ---------------------------------------------------------

    @property
    def taken(self) -> int:
        return self._positions.taken

    @property
    def waited_s(self) -> float:
        return self._producer.waited_s

    def is_open(self, txn: Transaction) -> bool:
        if txn.phase is _OPEN:  # the common case of each send
            return True
        if txn.phase is Phase.GIVEN_UP:
            return False
        raise IllegalState("this transaction has ended")

    @property
    def _can_commit(self) -> bool:
        return self._failure is None and self._consumer.lost_reason is None

    def take(self, most: int) -> list[Record]:
        positions = self._positions
        if not self._can_commit:
            return []
        most = min(most, self._pacing.limit - positions.taken)
        if not len(positions) and positions.taken > 0 and most > 0:
            in_body = self._open
            try:
                with self._turn(), self._recovering():
                    self._fetcher.fetch_more()
            finally:
                if in_body is not None and self._open is None:
                    in_body.mark_aborted(during_body=True)
        # The time that passes from now on is the application's.
        self._pulse.beat("handling")
        return positions.take(most) if self._open is not None and self._can_commit else []

    def give_back(self, count: int) -> None:
        self._positions.give_back(count)

    # A failed send is kept for the end of the transaction. The body need not check for it: its further sends are
    # ignored.

    def send(self, *send: Any) -> None:
        if self._can_commit:
            try:
                self._producer.send(*send)
            except CallFailed as failure:
                self._failure = failure

    def _send_all(self, sends: Iterable[Send]) -> None:
        if self._can_commit:
            try:
                self._producer.send_all(sends)
            except CallFailed as failure:
                self._failure = failure

    def feed(self, feed: Feed, records: list[Record]) -> FeedResult:
        if self._can_commit:
            fed = self._producer.feed(feed, records)
            self._failure = fed.failure
            return fed if self._failure is None else FeedResult(fed.sent, len(records), None)
        return FeedResult(0, len(records), None)

    def end_now(self, txn: Transaction) -> bool:
        with self._turn():
            return self.is_open(txn) and self._end()

    def abort(self, txn: Transaction, why: str) -> None:
        with self._turn():
            if self.is_open(txn):
                self._abort(why)

    # ---- the end of a transaction -----------------------------------------------------------------------------

    def _end(self) -> bool:
        """Commit the open transaction. Return False if it was aborted; its records are handed out again."""
        transaction = self._open
        assert transaction is not None
        transaction.finish_handling(self._world.now())
        with self._recovering():
            # 1. Choose the offsets. A lost partition is reported before a failed send, because its records must not be
            # committed.
            new_starts = self._consumer.start_offsets.uncommitted
            offsets = self._offsets.offsets_to_commit(new_starts)
            self._consumer.raise_if_lost()
            if self._failure is not None:
                raise self._failure
            # 2. Send the participants' own records, for example changelogs.
            for participant in self._participants:
                participant.before_flush(self._send_all, offsets)
            if self._failure is not None:
                raise self._failure
            # 3. Flush, which raises the first delivery error.
            self._world.step("flush")
            self._producer.flush(lambda: self._fetcher.prefetch(self._positions.taken))
            self._world.step("flushed")
            # 4. After the flush, check that we are still a member of the group and own all partitions.
            group = self._consumer.group_metadata(offsets)
            # 5. Send the offsets and commit, on the committer's thread.
            has_only_offsets = self._positions.taken > 0 and not new_starts and not self._producer.has_sent
            self._start_commit(transaction, offsets, group, has_only_offsets and self._offsets.may_defer(offsets))
            self._finish_commit()
            return True
        return False

    def _start_commit(
        self, transaction: Transaction, offsets: Mapping[Partition, int], group_metadata: Any, defers_offsets: bool
    ) -> None:
        sent = [] if defers_offsets else self._offsets.with_metadata(offsets, self._producer)
        job = self._committer.job_of(sent, group_metadata)
        commit = Commit(transaction, offsets, self._positions.taken, self._world.now(), job, defers_offsets)
        # Nothing more can be sent in the transaction, even if a signal interrupts us from here on.
        transaction.start_commit()
        self._commit = commit

    def _finish_commit(self) -> None:
        """Wait for the commit that was started, if any. The next turn repeats an interrupted wait."""
        if (commit := self._commit) is None:
            return
        if (error := self._committer.wait(commit.job, lambda: self._fetcher.prefetch(commit.taken))) is not None:
            if not isinstance(error, CallFailed):
                self._commit = None  # no recovery follows
            raise error
        self._succeeded(commit)

    def _succeeded(self, commit: Commit) -> None:
        self._outcomes.committed(commit)
        self._commit = None
        ms = round(commit.open_s * 1000)
        log.debug("committed", taken=commit.taken, sent=commit.transaction.sent, ms=ms, **self._producer.who())

    # ---- recovery ---------------------------------------------------------------------------------------------

    def _abort(self, reason: str) -> None:
        """Abort the open transaction; its records are handed out again. The producer is then replaced before the next
        transaction.
        """
        self._recover(self._failure or CallFailed("abort", Action.ABORT, RuntimeError(reason)))

    @contextlib.contextmanager
    def _recovering(self) -> Iterator[None]:
        """Recover from a failed call that ends the block; no transaction is open afterwards."""
        try:
            yield
        except CallFailed as failure:
            self._recover(failure)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Run one turn of the loop. If an exception interrupted the last one, recover first.

        The exception may be a signal handler's, or one that the application caught. The interrupted turn may have taken
        effect in part without any note of it."""
        was_interrupted, self._is_turn_running, in_body = self._is_turn_running, True, self._open
        if was_interrupted:
            self._ownership.raise_if_lost()  # a session that lost its transactional.id must not initialise it again
            with self._recovering():
                self._finish_commit()
            if in_body is not None:
                in_body.mark_aborted(during_body=True)
            self._recover(CallFailed("consume", Action.INTERRUPTED, RuntimeError("the loop was interrupted")))
        try:
            yield
        except PoisonRecord:
            self._is_turn_running = False  # aborted and noted: an application may catch this and continue
            raise
        self._is_turn_running = False

    def _recover(self, failure: CallFailed) -> None:
        """Do what the failed call requires. Return if the loop can go on, raise if it must stop."""
        commit, self._commit = self._commit, None
        if commit is not None:
            self._carry_out(failure, commit.offsets, commit.transaction)
        else:
            offsets = self._consumer.start_offsets.uncommitted | self._positions.offsets()
            self._carry_out(failure, offsets, self._open)

    def _carry_out(
        self, failure: CallFailed, offsets: Mapping[Partition, int], transaction: Transaction | None
    ) -> None:
        now, taken = self._world.now(), self._positions.taken
        if transaction is None:
            failed = FailedTransaction(failure, taken, self._positions.last_taken, offsets)
        else:
            failed = FailedTransaction(
                failure,
                taken,
                self._positions.last_taken,
                offsets,
                open_s=now - transaction.began_at,
                handling_s=transaction.handling_until(now),
                delivered=self._producer.delivered,
            )
            transaction.mark_aborted()
        self._recovery.carry_out(failed)
