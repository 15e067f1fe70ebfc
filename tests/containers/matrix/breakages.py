"""Remove one rule of the product at a time, and name the verdict that must find each removal.

A worker's process applies them by patching; the product has no switch for them. `cell` is the fault that exposes the
missing rule. Without this fault, the broken worker is right by luck and no check fails.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from eos.shim.faults import Rule
from eos.testing.sweeping import Case
from tests.containers.matrix.cells import Cell
from tests.support.sessions import keep_producers


@dataclass(frozen=True)
class Breakage:
    """Describe one removed rule. `expected`: the rules of the checker that must all fail; other failures do not
    count.

    `settings`: more settings of the workers. `requests`: faults on the requests of this transactional.id, applied by a
    shim between workers and brokers.
    """

    what: str
    expected: frozenset[str]
    cell: Cell
    apply: Callable[[], None] = lambda: None
    settings: Mapping[str, str] = field(default_factory=dict)
    requests: Callable[[str], Sequence[Rule]] | None = None
    faults: int = 2
    work_ms: float | None = None  # per record, instead of the matrix's


def _replace(owner: type, name: str, by: Callable[..., Any]) -> None:
    """Replace an attribute, which must exist: a patch of a missing name would remove nothing."""
    assert callable(getattr(owner, name))
    setattr(owner, name, by)


def _offsets_outside_the_transaction() -> None:
    from confluent_kafka import KafkaException

    from eos.errors import Action, CallFailed
    from eos.session.committer import Committer
    from eos.session.session import TransactSession

    consumers: list[Any] = []
    start = TransactSession.start

    def known(self: TransactSession) -> None:
        start(self)
        consumers.append(lambda: self.consumer)

    def commit_by_the_consumer(self: Committer, offsets: list[Any], metadata: Any) -> float:
        try:
            if offsets:
                consumers[-1]().commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            raise CallFailed("send_offsets", Action.ABORT, error) from error
        self._world.step("offsets sent")
        self._producer.commit()
        self._world.step("committed")
        return time.monotonic()

    _replace(TransactSession, "start", known)
    _replace(Committer, "_send_and_commit", commit_by_the_consumer)


def _rewind_missing() -> None:
    from eos.session.consumer.group_consumer import GroupConsumer

    _replace(
        GroupConsumer, "go_back", lambda self, rewind: rewind() and None
    )  # the rewind is recorded, but the consumer does not seek


def _no_ownership_check() -> None:
    from eos.session.consumer.group_consumer import GroupConsumer
    from eos.session.consumer.positions import Positions

    def unchecked(self: GroupConsumer, offsets: Mapping[Any, int]) -> Any:
        return self.consumer.consumer_group_metadata()

    _replace(GroupConsumer, "group_metadata", unchecked)
    _replace(GroupConsumer, "raise_if_lost", lambda self: None)
    _replace(Positions, "forget", lambda self, partitions: False)


def _revocation_not_recorded() -> None:
    from confluent_kafka import TopicPartition

    from eos.session.consumer.group_consumer import GroupConsumer

    def give_up_in_silence(self: GroupConsumer, consumer: Any, partitions: list[Any], how: str) -> None:
        if self._incremental:
            consumer.incremental_unassign([TopicPartition(p.topic, p.partition) for p in partitions])
        else:
            consumer.unassign()

    _replace(GroupConsumer, "_on_revoke", give_up_in_silence)


def _stale_group_metadata() -> None:
    from confluent_kafka import Consumer

    from eos.session.consumer.group_consumer import GroupConsumer

    join = GroupConsumer.join

    def with_metadata_from_before(self: GroupConsumer) -> None:
        # No generation, member id or instance id, so the broker checks nothing.
        outsider = Consumer({"bootstrap.servers": self._settings.bootstrap_servers, "group.id": self.group})
        taken = outsider.consumer_group_metadata()
        self.group_metadata = lambda offsets: taken  # type: ignore[method-assign]
        join(self)

    _replace(GroupConsumer, "join", with_metadata_from_before)


def _random_transactional_id() -> None:
    from eos.session.session import TransactSession

    start = TransactSession.start

    def under_a_new_name(self: TransactSession) -> None:
        self._parts.producer._id += f"-{uuid.uuid4().hex[:8]}"
        start(self)

    _replace(TransactSession, "start", under_a_new_name)


def _outputs_before_the_function_returned() -> None:
    """Fail every 97th record in the middle of its first run, when its first output is already sent."""
    from eos.app.policies import retry
    from eos.app.routes import Route, send_to
    from eos.records import FeedResult, Record, Sink

    original = Route.__init__

    def eager(self: Route, *arguments: Any) -> None:
        original(self, *arguments)
        seen: set[tuple[str, int, int]] = set()

        def feed(records: list[Record], sink: Sink) -> FeedResult:
            sent = 0
            for handled, record in enumerate(records):
                position = (record.topic, record.partition, record.offset)
                for number, send in enumerate(self.outputs(record)):
                    send_to(send, sink)
                    sent += 1
                    if number == 0 and record.offset % 97 == 96 and position not in seen:
                        seen.add(position)
                        return FeedResult(sent, handled, BlockingIOError("the function failed half way"))
            return FeedResult(sent, len(records), None)

        self.feed = feed

        self.on_error = retry(100, backoff_ms=1)

    _replace(Route, "__init__", eager)


def _an_output_topic_outside_the_transaction() -> None:
    """Send the second topic's outputs with another producer, which waits for more of them."""
    from confluent_kafka import Producer

    from eos.app.routes import Route
    from eos.records import FeedResult, Record, Sink
    from tests.containers.matrix.stage_worker import ENVIRONMENT

    servers = json.loads(os.environ[ENVIRONMENT])["settings"]["bootstrap.servers"]
    outside = Producer({"bootstrap.servers": servers, "linger.ms": 5_000})
    atexit.register(outside.flush)  # A worker that ends normally leaves nothing behind.
    original = Route.__init__

    def with_a_separate_topic(self: Route, *arguments: Any) -> None:
        original(self, *arguments)
        feed, separate = self.feed, self.destinations[1]

        def feed_both(records: list[Record], sink: Sink) -> FeedResult:
            def send(topic: str, *fields: Any) -> None:
                (outside.produce if topic == separate else sink.produce)(topic, *fields)

            return feed(records, SimpleNamespace(produce=send, on_produce_error=sink.on_produce_error))

        self.feed = feed_both

    _replace(Route, "__init__", with_a_separate_topic)


def _rewind_to_the_committed_offset_of_the_assignment() -> None:
    from eos.session.consumer.positions import Positions

    starts: dict[Any, int] = {}
    assigned, rewind = Positions.assign, Positions.rewind

    def remember(self: Positions[Any], new: Mapping[Any, int]) -> None:
        starts.update(new)
        assigned(self, new)

    def to_the_assignment(self: Positions[Any]) -> dict[Any, int]:
        targets = {partition: starts[partition] for partition in rewind(self)}
        self._next_fetch |= (
            targets  # Without this, repeated records would be dropped, as records are that the client delivers twice.
        )
        return targets

    _replace(Positions, "assign", remember)
    _replace(Positions, "rewind", to_the_assignment)


def _a_late_end_of_transaction(transactional_id: str) -> Sequence[Rule]:
    """Deliver a copy of EndTxn in the middle of the next transaction of this id (H1), which is aborted then."""
    return Case("EndTxn", "late copy, then abort").rules(transactional_id)


def _a_refused_commit(transactional_id: str) -> Sequence[Rule]:
    """Abort while the member keeps its partitions; after losing them it would start at the committed offsets anyway.

    The aborted transaction is not among the first, during which the two workers still share out the partitions.
    """
    return [Rule("TxnOffsetCommit", "error", nth=12, error="ILLEGAL_GENERATION", transactional_id=transactional_id)]


def _state_of_an_abort_kept() -> None:
    from eos.state.keeper import Keeper

    Keeper.aborted = lambda self: None  # type: ignore[method-assign]


DOUBLED, LOST = frozenset({"no_duplicates"}), frozenset({"no_losses"})
TORN, OFFSET_REGRESSION = frozenset({"atomic"}), frozenset({"no_rewind"})
# Long enough that rebalances happen during an open transaction.
_LONG_INTERVAL = {"eos.transaction.interval.ms": "1000"}
# With short intervals there are many transactions before the first fault. So the request with a rule's number is sent
# by the first process, after it has committed offsets since its assignment.
_SHORT_INTERVAL = {"eos.transaction.interval.ms": "50", "linger.ms": "5"}
_BUSY_MS = 6.0  # milliseconds per record: so slow that records wait, and the worker handles some that it no longer owns
_LONG_TIMEOUT = {"transaction.timeout.ms": "600000"}  # long enough that a zombie finds its transaction open

ALL: dict[str, Breakage] = {
    "offsets outside the transaction": Breakage(
        "the consumer commits the offsets before the transaction ends",
        LOST,
        Cell("kill at offsets sent", "worker", "classic-4.4.0", 1),
        _offsets_outside_the_transaction,
    ),
    "no ownership check": Breakage(
        "revoked partitions stay in the transaction and nothing is checked before the commit",
        DOUBLED,
        Cell("join", "worker", "classic-4.4.0", 1),
        _no_ownership_check,
        _LONG_INTERVAL,
        faults=6,
        work_ms=_BUSY_MS,
    ),
    "a revoked partition's offsets committed": Breakage(
        "the revocation is not recorded: the partition's records and offsets stay in the transaction",
        DOUBLED,
        Cell("join", "worker", "classic-4.4.0", 1),
        _revocation_not_recorded,
        _LONG_INTERVAL,
        faults=6,
        work_ms=_BUSY_MS,
    ),
    "rewind missing": Breakage(
        "after an abort the consumer goes on where it is",
        LOST,
        Cell("kill", "worker", "classic-4.4.0", 1),
        _rewind_missing,
        _SHORT_INTERVAL,
        requests=_a_refused_commit,
        faults=5,
    ),
    "rewind to the committed offset": Breakage(
        "a rewind goes to the offset committed when the partition was assigned, not to the transaction's start",
        DOUBLED,
        Cell("kill", "worker", "classic-4.4.0", 1),
        _rewind_to_the_committed_offset_of_the_assignment,
        _SHORT_INTERVAL,
        requests=_a_refused_commit,
        faults=5,
    ),
    "stale group metadata": Breakage(
        "offsets are sent with group metadata from before the member joined, which the broker does not check",
        DOUBLED | OFFSET_REGRESSION,
        Cell("pause at flush", "worker", "classic-4.4.0", 1),
        _stale_group_metadata,
        _LONG_TIMEOUT,
    ),
    "replacement off": Breakage(
        "the producer is kept after a retried EndTxn and after aborts",
        DOUBLED,
        Cell("kill", "worker", "classic-4.4.0", 1),
        keep_producers,
        _SHORT_INTERVAL,
        requests=_a_late_end_of_transaction,
    ),
    "outputs before the function returned": Breakage(
        "each output goes out as the function yields it; a function that fails half way is run again",
        DOUBLED,
        Cell("stop", "worker", "classic-4.4.0", 1),
        _outputs_before_the_function_returned,
    ),
    "an output topic outside the transaction": Breakage(
        "the outputs to one of two topics are sent by a producer without transactions",
        LOST | TORN,
        Cell("kill at committed", "worker", "classic-4.4.0", 1),
        _an_output_topic_outside_the_transaction,
        faults=1,
    ),
    "state of an aborted transaction": Breakage(
        "functions keep their state of an aborted transaction's records, which are handed out again",
        frozenset({"state"}),
        Cell("kill", "worker", "classic-4.4.0", 1, state=True),
        _state_of_an_abort_kept,
        _SHORT_INTERVAL,
        requests=_a_refused_commit,
        faults=5,
    ),
    "random transactional.id": Breakage(
        "a worker that starts again cannot end what its predecessor left open: readers stand before it",
        LOST | {"stable_end"},
        Cell("kill at flushed", "worker", "classic-4.4.0", 1),
        _random_transactional_id,
        _LONG_TIMEOUT,
        faults=1,
    ),
}
