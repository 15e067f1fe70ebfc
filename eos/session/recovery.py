"""How a session recovers from a failed call, as data: which steps an action takes, and which take a failed one's place.

Owns the order of the steps and when there is no way on. What a step does is eos/session/steps.py's; what a foreign
error asks for is eos/kafka/client/failures.py's. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from eos.errors import Action, CallFailed, stop_error
from eos.records import Record
from eos.session.positions import TopicPartition as Partition


class Step(Enum):
    ABORT = "the producer aborts the transaction"
    REWIND = "the consumer goes back to where the transaction began"
    ISOLATE = "the record that was refused is known or alone in it, and is told; else smaller transactions find it"
    ASK_OWNER = "whose the transactional.id is: a newer instance's, and this one stops, or still ours"
    REPLACE = "a new producer, whose init ends what was open"
    RESOLVE = "the group's stable committed offsets tell how the transaction ended; the consumer goes back behind them"
    LOOK = "the cluster tells whether a topic was deleted or recreated: then the session stops"
    REJOIN = "a new consumer joins the group and begins at what is committed; the producer is new as well"


# Any other action stops the session.
PLAN: Mapping[Action, tuple[Step, ...]] = {
    Action.ABORT: (Step.ABORT, Step.REWIND),
    Action.POISON: (Step.ABORT, Step.REWIND, Step.ISOLATE),
    Action.REBUILD: (Step.REPLACE, Step.RESOLVE),
    Action.LOOK: (Step.LOOK, Step.REPLACE, Step.RESOLVE),
    Action.SETTLE: (Step.ASK_OWNER, Step.REPLACE, Step.RESOLVE),
    Action.REJOIN: (Step.ASK_OWNER, Step.REJOIN),
    Action.INTERRUPTED: (Step.REJOIN,),
}

# In place of the rest of a plan, one of whose steps failed.
INSTEAD: Mapping[Step, tuple[Step, ...]] = {
    Step.REWIND: (Step.REJOIN,),
    Step.RESOLVE: (Step.REJOIN,),
}


@dataclass
class Trouble:
    """A failed call, and the transaction that it met."""

    failure: CallFailed
    taken: int
    """Records that the transaction took, the last of them `last`."""
    last: Record | None
    offsets: Mapping[Partition, int]
    """What its commit says: where these are committed, it came to pass."""
    open_s: float = 0.0
    """For how long it was open, of which its records were handled for `handling_s`: without what sends waited."""
    handling_s: float = 0.0
    delivered: float = 1.0
    """The share of its outputs that arrived."""
    first: CallFailed = field(init=False)
    """The failure that it began with; `failure` is the last one."""
    owner: str = ""
    """What the coordinator said of the transactional.id."""
    counted: bool = False
    too_slow: str = ""
    """What took too long in it, where it failed of that; then `next_is_smaller` says whether the next transaction takes
    fewer records."""
    next_is_smaller: bool = False

    def __post_init__(self) -> None:
        self.first = self.failure

    @property
    def is_of_handling(self) -> bool:
        """Whether handling its records took most of the time."""
        return self.handling_s > self.open_s / 2

    @property
    def reason(self) -> str:
        return f"{self.owner} ({self.failure})" if self.owner else str(self.failure)


def carry_out(trouble: Trouble, steps: Mapping[Step, Callable[[Trouble], None]]) -> None:
    """Takes the steps that the failure asks for; one that fails is the failure from then on, but a refused record is
    still to be found. Raises what stops."""
    plan = plan_of(trouble.failure)
    while plan:
        step, *plan = plan
        try:
            steps[step](trouble)
        except CallFailed as worse:
            trouble.failure = worse
            plan = [*(INSTEAD.get(step) or plan_of(worse, step)), *(left for left in plan if left is Step.ISOLATE)]


def plan_of(failure: CallFailed, failed: Step | None = None) -> list[Step]:
    action = failure.action
    if failed is Step.ABORT and action is Action.ABORT:
        action = Action.REBUILD  # it was tried
    if action not in PLAN:
        raise stop_error(failure) from failure
    return list(PLAN[action])
