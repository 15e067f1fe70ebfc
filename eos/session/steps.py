"""What each step of a session's recovery does; in which order they are taken is eos/session/recovery.py's.

Owns the counts of aborts and rebuilds, and the breaker. No transaction is open any more for anybody but its producer.
"""

from __future__ import annotations

from eos import log
from eos.errors import Action, CallFailed, PoisonRecord, Temporary
from eos.kafka.client.failures import describe_rebalance
from eos.session.committer import Commit
from eos.session.observe import add
from eos.session.participants import Outcome
from eos.session.parts import Parts
from eos.session.recovery import Step, Trouble, carry_out

MOST_REBUILDS = 5  # without a commit in between; then a supervisor's back-off is the better place to wait
_ABORTS_TO_WARN_OF = 3  # in a row, by rebalances: one or two are what a member that comes or goes costs
# By which actions and calls a transaction that was open for too long shows it.
_BY_TIME = frozenset({Action.ABORT, Action.REBUILD, Action.SETTLE, Action.LOOK, Action.RETRY})
_NOT_BY_TIME = frozenset({"abort", "consume"})
_CAUSES = {
    Action.POISON: "refused",
    Action.SETTLE: "timeout",
    Action.REJOIN: "group",
    Action.INTERRUPTED: "application",
}


class Recovery:
    def __init__(self, parts: Parts) -> None:
        self._settings, self._intake, self._claim = parts.settings, parts.intake, parts.claim
        self._producer = parts.producer
        self._offsets, self._pacing, self._outcomes = parts.offsets, parts.pacing, parts.outcomes
        self._listener, self._world, self._group = parts.listener, parts.world, parts.group
        self.rebuilds_in_a_row = 0
        parts.outcomes.follow(self._committed)
        self.steps = {
            Step.ABORT: self._abort,
            Step.REWIND: self._rewind,
            Step.ISOLATE: self._isolate,
            Step.ASK_OWNER: self._ask_owner,
            Step.REPLACE: self._replace,
            Step.LOOK: self._look,
            Step.RESOLVE: self._resolve,
            Step.REJOIN: self._rejoin,
        }

    def _committed(self, _: Commit) -> None:
        self.rebuilds_in_a_row = 0

    def carry_out(self, trouble: Trouble) -> None:
        """Returns when the loop can go on, raises when it must stop."""
        if self._timed_out(trouble):
            trouble.too_slow = self._too_slow(trouble)
            # What was handled too slowly may not have been sent yet: that says nothing of how much can be.
            trouble.next_is_smaller = self._pacing.timed_out(
                trouble.taken, None if trouble.is_of_handling else trouble.delivered
            )
            at_most = self._pacing.limit
            log.warning("transaction timed out", why=trouble.too_slow, next_at_most=at_most, **self._producer.who())
        carry_out(trouble, self.steps)

    def _timed_out(self, trouble: Trouble) -> bool:
        """Whether it failed because its records, or their transaction, had no more time. Judged by the clock: the
        client has an error of its own for each call in which it may learn that."""
        failure, timeout_ms = trouble.failure, self._settings.transaction_timeout_ms
        limit_ms = min(int(self._settings.get("message.timeout.ms", timeout_ms)), timeout_ms)
        return failure.action in _BY_TIME and failure.call not in _NOT_BY_TIME and trouble.open_s * 1000 >= limit_ms

    def _too_slow(self, trouble: Trouble) -> str:
        """What took too long in it, and which settings are about that."""
        limit = f"transaction.timeout.ms={self._settings.transaction_timeout_ms}"
        if trouble.is_of_handling:
            return f"handling {_records(trouble.taken)} took {trouble.handling_s:.1f} s, longer than {limit}: raise it"
        return (
            f"sending the outputs of {_records(trouble.taken)} took longer than {limit} "
            f"({trouble.delivered:.0%} of them arrived): raise it, or lower eos.transaction.max.records"
        )

    def _abort(self, trouble: Trouble) -> None:
        self._producer.abort()
        self._outcomes.ended(Outcome.ABORTED)

    def _rewind(self, trouble: Trouble) -> None:
        self._intake.membership.go_back(self._intake.positions.rewind)
        self._pacing.aborted(self._world.now())
        counters = self._outcomes.counters
        counters.aborts += 1
        add(counters.aborts_by_cause, _cause(trouble.failure))
        rebalance = describe_rebalance(trouble.failure)
        if rebalance:
            log.debug("refused", error=trouble.reason, group=self._group)
        usual = rebalance and self._pacing.aborts_in_a_row < _ABORTS_TO_WARN_OF
        (log.info if usual else log.warning)(
            "transaction aborted", reason=rebalance or trouble.reason, **self._producer.who()
        )

    def _isolate(self, trouble: Trouble) -> None:
        failure, last = trouble.first, trouble.last
        if last is None:
            raise PoisonRecord(f"an output without an input was refused: {failure}", "", -1, -1) from failure
        if failure.record is not None or trouble.taken == 1:
            self._pacing.refused_found()
            self._listener.refused(failure.record or last, failure)
        else:
            self._pacing.refused_among(trouble.taken)

    def _ask_owner(self, trouble: Trouble) -> None:
        trouble.owner = self._claim.settle(self._producer, str(trouble.failure)).value

    def _look(self, trouble: Trouble) -> None:
        self._intake.membership.look_for_topics()

    def _replace(self, trouble: Trouble) -> None:
        self._count_rebuild(trouble)
        self._claim.replace(self._producer, f"failure: {trouble.reason}")

    def _resolve(self, trouble: Trouble) -> None:
        membership, positions = self._intake.membership, self._intake.positions
        stable = membership.asking.stable_committed(list(trouble.offsets))
        outcome = self._offsets.outcome_of(trouble.offsets, stable)
        self._outcomes.ended(outcome)
        known = {p: tp.offset if tp.offset >= 0 else None for p, tp in stable.items()}
        membership.go_back(lambda: positions.resolve(known))
        membership.starts.resolved(stable)
        self._pacing.rebuilt()
        who = self._producer.who()
        log.warning("rebuilt from the committed offsets", reason=trouble.reason, outcome=outcome.value, **who)

    def _rejoin(self, trouble: Trouble) -> None:
        self._count_rebuild(trouble)
        self._claim.confirm(self._producer, trouble.reason)
        self._outcomes.ended(Outcome.UNKNOWN)  # while what is ours is known
        self._intake.begin_anew()
        self._producer.replace(f"failure: {trouble.reason}")
        self._intake.join_again()
        log.warning("joined the group again", reason=trouble.reason, group=self._group, **self._producer.who())

    def _count_rebuild(self, trouble: Trouble) -> None:
        """The breaker: rebuilds without a commit in between do not go on for ever."""
        if trouble.counted:
            return
        trouble.counted = True
        self.rebuilds_in_a_row += not trouble.next_is_smaller  # a smaller one has its own chance
        self._outcomes.counters.rebuilds += 1
        add(self._outcomes.counters.rebuilds_by_cause, _cause(trouble.failure))
        if self.rebuilds_in_a_row > MOST_REBUILDS:
            rebuilds = f"{self.rebuilds_in_a_row} rebuilds without one commit, the last because of: {trouble.reason}"
            if trouble.too_slow:
                raise Temporary(f"{rebuilds}; {trouble.too_slow}")
            raise Temporary(
                f"{rebuilds}. If two processes share {self._settings['transactional.id']}, give each its own --instance"
            )


def _cause(failure: CallFailed) -> str:
    """Why a transaction did not commit, in a word: a label of a metric, so there are few of them."""
    if failure.action in _CAUSES:
        return _CAUSES[failure.action]
    if failure.action is not Action.ABORT:
        return failure.call
    return {"abort": "application", "send_offsets": "rebalance"}.get(failure.call, failure.call)


def _records(count: int) -> str:
    return "one record" if count == 1 else f"{count} records"
