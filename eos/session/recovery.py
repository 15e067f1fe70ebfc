"""Recovers a session from a failed call: the plan for each action, and the effect of each step.

PLAN lists the steps of each action, and INSTEAD the steps that replace a failed one. Recovery owns the counts of aborts
and rebuilds, and the breaker that stops a session which rebuilds again and again. eos/kafka/client/failures.py maps
foreign errors to actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from eos import log
from eos.errors import Action, CallFailed, Temporary, stop_error
from eos.kafka.client.failures import describe_rebalance
from eos.records import Record
from eos.session.consumer.positions import TopicPartition as Partition
from eos.session.outcomes import Commit, Outcome
from eos.session.parts import Parts


class Step(Enum):
    ABORT = "the producer aborts the transaction"
    REWIND = "the consumer goes back to where the transaction began"
    ISOLATE = "report the record that was refused; if it is unknown, smaller transactions find it"
    ASK_OWNER = "find out who owns the transactional.id; stop if a newer instance does"
    REPLACE = "a new producer, whose init ends the open transaction"
    RESOLVE = "the group's stable committed offsets show how the transaction ended; the consumer continues after them"
    CHECK_TOPICS = "find out whether a topic was deleted or recreated; stop if one was"
    REJOIN = "a new consumer joins the group and starts at the committed offsets; the producer is new as well"


# Every other action stops the session.
PLAN: Mapping[Action, tuple[Step, ...]] = {
    Action.ABORT: (Step.ABORT, Step.REWIND),
    Action.POISON: (Step.ABORT, Step.REWIND, Step.ISOLATE),
    Action.REBUILD: (Step.REPLACE, Step.RESOLVE),
    Action.CHECK_TOPICS: (Step.CHECK_TOPICS, Step.REPLACE, Step.RESOLVE),
    Action.SETTLE: (Step.ASK_OWNER, Step.REPLACE, Step.RESOLVE),
    Action.REJOIN: (Step.ASK_OWNER, Step.REJOIN),
    Action.INTERRUPTED: (Step.REJOIN,),
}

# Steps that replace the rest of a plan when one of its steps failed.
INSTEAD: Mapping[Step, tuple[Step, ...]] = {
    Step.REWIND: (Step.REJOIN,),
    Step.RESOLVE: (Step.REJOIN,),
}


@dataclass
class FailedTransaction:
    """Holds a failed call, and the transaction in which it failed."""

    failure: CallFailed
    """The last failure: a failed step replaces it."""
    taken: int
    """Number of records that the transaction took."""
    last: Record | None
    """The last record that the transaction took."""
    offsets: Mapping[Partition, int]
    """The offsets of the transaction's commit. If the group has committed them, the commit succeeded."""
    open_s: float = 0.0
    """For how many seconds the transaction was open."""
    handling_s: float = 0.0
    """The part of that time in which its records were handled, without the waits of sends."""
    delivered: float = 1.0
    """The share of its outputs that arrived."""
    first: CallFailed = field(init=False)
    """The first failure, which no failed step replaces."""
    owner: str = ""
    """The coordinator's answer about the transactional.id."""
    is_counted: bool = False
    """Whether the breaker has counted this failure."""
    too_slow: str = ""
    """A sentence about the part that took too long, if the transaction failed because of that."""
    next_is_smaller: bool = False
    """Whether the next transaction takes fewer records, because a transaction was too slow."""

    def __post_init__(self) -> None:
        self.first = self.failure

    @property
    def is_slow_handling(self) -> bool:
        """Return True if handling the transaction's records took most of the time."""
        return self.handling_s > self.open_s / 2

    @property
    def reason(self) -> str:
        return f"{self.owner} ({self.failure})" if self.owner else str(self.failure)


def carry_out(failed: FailedTransaction, steps: Mapping[Step, Callable[[FailedTransaction], None]]) -> None:
    """Take the steps that the failure requires. Raises the error that stops the session.

    If a step fails, the plan of its failure replaces the remaining steps, except for the search for a refused
    record."""
    plan = plan_of(failed.failure)
    while plan:
        step, *plan = plan
        try:
            steps[step](failed)
        except CallFailed as worse:
            failed.failure = worse
            plan = [*(INSTEAD.get(step) or plan_of(worse, step)), *(left for left in plan if left is Step.ISOLATE)]


def plan_of(failure: CallFailed, failed_step: Step | None = None) -> list[Step]:
    """Return the steps for a failure. Raises the error that stops the session if there is no plan.

    `failed_step`: the step in which the failure happened, if any."""
    action = failure.action
    if failed_step is Step.ABORT and action is Action.ABORT:
        action = Action.REBUILD  # a second abort would fail too
    if action not in PLAN:
        raise stop_error(failure) from failure
    return list(PLAN[action])


# After this many rebuilds in a row, without a commit in between, the session stops: a supervisor restarts it with a
# growing delay.
MOST_REBUILDS = 5
_ABORTS_TO_WARN_OF = 3  # rebalance aborts in a row; a member that comes or goes causes one or two
# _BY_TIME has the actions of failures that a timeout may have caused. _NOT_BY_TIME has the calls whose failures a
# timeout never causes.
_BY_TIME = frozenset({Action.ABORT, Action.REBUILD, Action.SETTLE, Action.CHECK_TOPICS, Action.RETRY})
_NOT_BY_TIME = frozenset({"abort", "consume"})
_CAUSES = {
    Action.POISON: "refused",
    Action.SETTLE: "timeout",
    Action.REJOIN: "group",
    Action.INTERRUPTED: "application",
}


class Recovery:
    """Recovers a session from failed calls; no transaction is open afterwards."""

    def __init__(self, parts: Parts) -> None:
        self._settings, self._fetcher, self._ownership = parts.settings, parts.fetcher, parts.ownership
        self._producer = parts.producer
        self._offsets, self._pacing, self._outcomes = parts.offsets, parts.pacing, parts.outcomes
        self._counters = parts.counters
        self._listener, self._world, self._group = parts.listener, parts.world, parts.group
        self.rebuilds_in_a_row = 0
        parts.outcomes.subscribe(self._committed)
        self.steps = {
            Step.ABORT: self._abort,
            Step.REWIND: self._rewind,
            Step.ISOLATE: self._isolate,
            Step.ASK_OWNER: self._ask_owner,
            Step.REPLACE: self._replace,
            Step.CHECK_TOPICS: self._check_topics,
            Step.RESOLVE: self._resolve,
            Step.REJOIN: self._rejoin,
        }

    def _committed(self, _: Commit) -> None:
        self.rebuilds_in_a_row = 0

    def carry_out(self, failed: FailedTransaction) -> None:
        """Return if the loop can go on, raise if it must stop."""
        if self._has_timed_out(failed):
            failed.too_slow = self._explain_slowness(failed)
            # If records were handled too slowly, some of them were perhaps not sent yet, so they do not show how many
            # can be sent.
            failed.next_is_smaller = self._pacing.timed_out(
                failed.taken, None if failed.is_slow_handling else failed.delivered
            )
            at_most = self._pacing.limit
            log.warning("transaction timed out", why=failed.too_slow, next_at_most=at_most, **self._producer.who())
        carry_out(failed, self.steps)

    def _has_timed_out(self, failed: FailedTransaction) -> bool:
        """Return whether the transaction failed because its records, or the transaction itself, ran out of time. The
        clock decides, because the client raises a different error in each call that can detect it."""
        failure, timeout_ms = failed.failure, self._settings.transaction_timeout_ms
        limit_ms = min(int(self._settings.get("message.timeout.ms", timeout_ms)), timeout_ms)
        return failure.action in _BY_TIME and failure.call not in _NOT_BY_TIME and failed.open_s * 1000 >= limit_ms

    def _explain_slowness(self, failed: FailedTransaction) -> str:
        """Return a sentence that names the slow part and the settings that change it."""
        limit = f"transaction.timeout.ms={self._settings.transaction_timeout_ms}"
        if failed.is_slow_handling:
            return f"handling {_records(failed.taken)} took {failed.handling_s:.1f} s, longer than {limit}: raise it"
        return (
            f"sending the outputs of {_records(failed.taken)} took longer than {limit} "
            f"({failed.delivered:.0%} of them arrived): raise it, or lower eos.transaction.max.records"
        )

    # ---- steps ------------------------------------------------------------------------------------------------

    def _abort(self, failed: FailedTransaction) -> None:
        self._producer.abort()
        self._outcomes.ended(Outcome.ABORTED)

    def _rewind(self, failed: FailedTransaction) -> None:
        self._fetcher.group_consumer.seek(self._fetcher.positions.rewind())
        self._pacing.aborted(self._world.now())
        self._counters.count_abort(_cause(failed.failure))
        rebalance = describe_rebalance(failed.failure)
        if rebalance:
            log.debug("refused", error=failed.reason, group=self._group)
        usual = rebalance and self._pacing.aborts_in_a_row < _ABORTS_TO_WARN_OF
        (log.info if usual else log.warning)(
            "transaction aborted", reason=rebalance or failed.reason, **self._producer.who()
        )

    def _isolate(self, failed: FailedTransaction) -> None:
        failure, last = failed.first, failed.last
        record = failure.record or (last if failed.taken == 1 else None)
        if record is not None:
            self._pacing.stop_search()
            self._listener.on_refused(record, failure)
        elif not failed.taken:
            self._listener.on_refused_without_record(failure)
        else:
            self._pacing.search_refused(failed.taken)

    def _ask_owner(self, failed: FailedTransaction) -> None:
        failed.owner = self._ownership.settle(self._producer, str(failed.failure)).value

    def _check_topics(self, failed: FailedTransaction) -> None:
        self._fetcher.group_consumer.topic_ids.check_now()

    def _replace(self, failed: FailedTransaction) -> None:
        self._count_rebuild(failed)
        self._ownership.replace(self._producer, f"failure: {failed.reason}")

    def _resolve(self, failed: FailedTransaction) -> None:
        consumer, positions = self._fetcher.group_consumer, self._fetcher.positions
        stable = consumer.queries.stable_committed(list(failed.offsets))
        outcome = self._offsets.outcome_of(failed.offsets, stable)
        self._outcomes.ended(outcome)
        consumer.seek(positions.resolve({p: tp.offset if tp.offset >= 0 else None for p, tp in stable.items()}))
        consumer.start_offsets.resolve(stable)
        self._pacing.rebuilt()
        who = self._producer.who()
        log.warning("rebuilt from the committed offsets", reason=failed.reason, outcome=outcome.value, **who)

    def _rejoin(self, failed: FailedTransaction) -> None:
        self._count_rebuild(failed)
        self._ownership.confirm(self._producer, failed.reason)
        self._outcomes.ended(Outcome.UNKNOWN)  # report the outcome while the old assignment is known
        self._fetcher.replace_consumer()
        self._producer.replace(f"failure: {failed.reason}")
        self._fetcher.rejoin()
        log.warning("rejoined the group", reason=failed.reason, group=self._group, **self._producer.who())

    def _count_rebuild(self, failed: FailedTransaction) -> None:
        """Count a rebuild; raise Temporary after too many without a commit in between."""
        if failed.is_counted:
            return
        failed.is_counted = True
        # A transaction with fewer records may succeed, so it does not count.
        self.rebuilds_in_a_row += not failed.next_is_smaller
        self._counters.count_rebuild(_cause(failed.failure))
        if self.rebuilds_in_a_row > MOST_REBUILDS:
            rebuilds = f"{self.rebuilds_in_a_row} rebuilds without one commit, the last because of: {failed.reason}"
            if failed.too_slow:
                raise Temporary(f"{rebuilds}; {failed.too_slow}")
            raise Temporary(
                f"{rebuilds}. If two processes share {self._settings['transactional.id']}, give each its own --instance"
            )


def _cause(failure: CallFailed) -> str:
    """Return the reason why a transaction did not commit, in a word: one of the few labels of a metric."""
    if failure.action in _CAUSES:
        return _CAUSES[failure.action]
    if failure.action is not Action.ABORT:
        return failure.call
    return {"abort": "application", "send_offsets": "rebalance"}.get(failure.call, failure.call)


def _records(count: int) -> str:
    return "one record" if count == 1 else f"{count} records"
