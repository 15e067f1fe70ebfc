"""Tests of the group consumer that need no Kafka."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from eos import log
from eos.errors import Action, CallFailed, ConfigurationError, NotAuthorised, Unavailable
from eos.kafka.admin import facts, group_history
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.records import Record
from eos.session.consumer import group_consumer as membership_module
from eos.session.consumer.group_consumer import GroupConsumer
from eos.session.consumer.positions import Positions
from eos.session.consumer.queries import Stopped
from eos.session.outcomes import Listener
from eos.session.parts import Parts

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t"}


class _Message:
    """Stands for confluent-kafka's Message, which only a consumer can create; has what a poll reads."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def __getattr__(self, name: str) -> Any:
        known = {"topic": "in", "partition": 0, "offset": self._offset, "timestamp": (1, 7)}
        return lambda: known.get(name)


def test_records_fetched_before_a_callback_error_are_kept() -> None:
    """The consumer does not fetch them again: if dropped, a later commit would skip them."""
    positions: Positions[Record] = Positions()
    group_consumer = GroupConsumer(Settings(SETTINGS), ["in"], positions, Watcher(Settings(SETTINGS)), with_ends=False)
    real = group_consumer.consumer

    def consume(most: int, timeout_s: float) -> list[Any]:
        group_consumer._take_statistics("no JSON")  # librdkafka calls this during a poll
        return [_Message(5), _Message(6)]

    group_consumer.consumer = SimpleNamespace(consume=consume)  # type: ignore[assignment]
    try:
        with pytest.raises(Exception, match="JSON"):
            group_consumer.poll(10, 0.0)
    finally:
        group_consumer.consumer = real
        group_consumer.close(leave=False)
    assert [record.offset for record in positions.take(10)] == [5, 6]


def test_consumer_with_a_hung_close_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka can wait for ever in close, and a stopped or fenced worker must end nevertheless."""
    monkeypatch.setattr(membership_module, "_CLOSE_S", 0.2)
    never = threading.Event()
    one = GroupConsumer(Settings(SETTINGS), ["in"], Positions(), Watcher(Settings(SETTINGS)), with_ends=False)
    real, one.consumer = one.consumer, SimpleNamespace(close=never.wait)  # type: ignore[assignment]
    try:
        one.close(leave=False)
    finally:
        never.set()
        real.close()


class _SecondBrokerKnows:
    """Brokers of which only the second one queried knows the topic `in`; none knows any other topic."""

    def __init__(self) -> None:
        self._known = False

    def list_topics(self, timeout: float) -> Any:
        known, self._known = self._known, True
        return SimpleNamespace(brokers={}, topics={"in": SimpleNamespace(error=None)} if known else {})


def test_topic_unknown_to_one_broker_is_queried_again() -> None:
    facts.check_topics(_SecondBrokerKnows(), "servers", ["in"], time.monotonic() + 30)


def test_error_names_the_topic_unknown_to_all_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "NEW_TOPIC_S", 0.2)
    with pytest.raises(Unavailable, match="topic no does not exist at servers"):
        facts.check_topics(_SecondBrokerKnows(), "servers", ["in", "no"], time.monotonic() + 30)


class _Cluster:
    """A consumer whose first queries are answered with `errors`; the topic `in` has two partitions."""

    def __init__(self, *errors: int) -> None:
        self._errors = list(errors)

    def list_topics(self, topic: str, timeout: float) -> Any:
        if self._errors:
            raise KafkaException(KafkaError(self._errors.pop(0)))
        return SimpleNamespace(brokers={}, topics={topic: SimpleNamespace(partitions={0: None, 1: None})})

    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int]:
        return 0, 5

    def committed(self, partitions: list[Any], timeout: float) -> list[Any]:
        for partition in partitions:
            partition.offset = 3 if partition.partition == 0 else -1001
        return partitions


def _of(cluster: _Cluster, **more: Any) -> GroupConsumer:
    world = World(consumer=lambda configuration: cluster)  # type: ignore[arg-type, return-value]
    return GroupConsumer(
        Settings(SETTINGS | more), ["in"], Positions(), Watcher(Settings(SETTINGS), world), with_ends=False, world=world
    )


class _UnavailableCoordinator:
    def committed_topics(self, group: str) -> set[str]:
        raise Unavailable(f"the coordinator of {group}")


AWAY = (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)


def test_end_offsets_are_queried_until_a_broker_answers() -> None:
    """A broker may be unavailable at the start of --until-end."""
    assert _of(_Cluster(*AWAY)).queries.stable_ends() == {("in", 0): 5, ("in", 1): 5}


def test_stop_ends_the_wait_for_a_partition_without_a_leader() -> None:
    waiting = _of(_Cluster(*AWAY * 1_000))
    waiting.queries._stopping = lambda: next(asked)
    for query in (waiting.queries.stable_ends, lambda: waiting.queries.topics_with_commits(_UnavailableCoordinator())):  # type: ignore[arg-type]
        asked = iter([False, False, True])
        with pytest.raises(Stopped):
            query()


def test_unknown_start_does_not_block_polling() -> None:
    """`latest` needs the end offset: the partition may have no leader, or unstable group offsets."""
    latest = _of(_Cluster(*AWAY), **{"auto.offset.reset": "latest", "eos.places.topic": ""})
    latest.assignment.assign([("in", 1)])
    for _ in AWAY:
        latest.start_offsets.restart_wait()
        latest.start_offsets.locate(latest.assignment)
        assert latest.assignment.unlocated == {("in", 1)}
    starts = latest.start_offsets.find([("in", 1)])
    assert starts["in", 1].offset == -2, "the group knows this topic: a new partition counts from its start"


def test_consumer_waits_for_unreadable_notes(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the notes it is unknown whether the group has committed before."""
    monkeypatch.setattr(group_history, "_REQUEST_TIMEOUT_S", 0.2)
    waiting = _of(_Cluster())
    waiting.assignment.assign([("in", 1)])
    waiting.start_offsets._waits = log.Reminder(waiting._world.now, 0.0)
    with caplog.at_level("INFO", "eos"):
        waiting.start_offsets.locate(waiting.assignment)
    assert waiting.assignment.unlocated == {("in", 1)}
    assert (
        "waiting for the list of partitions that this group has committed: 127.0.0.1:9 cannot be reached" in caplog.text
    )


def test_unauthorised_partitions_are_reported_as_missing_topic_permission() -> None:
    with pytest.raises(NotAuthorised, match="topic in: not authorised to READ it"):
        _of(_Cluster(KafkaError.TOPIC_AUTHORIZATION_FAILED)).queries.stable_ends()


class _Group:
    """A cluster with a group whose instance `one` subscribed to these topics (None: there is no metadata)."""

    def __init__(self, topics: list[str] | None, strategy: str = "cooperative-sticky", instance: str = "other") -> None:
        metadata: Any = b"" if topics is None else {"topics": topics}
        self._members = [
            {"group_instance_id": name, "client_id": "rdkafka", "member_metadata": metadata}
            for name in (instance, "one")
        ]
        self._strategy = strategy
        self.removed: list[str] = []

    def classic_group(self, group: str) -> dict[str, Any]:
        return {"members": self._members, "protocol_data": self._strategy}

    def remove_member(self, group: str, instance: str) -> None:
        self.removed.append(instance)


@pytest.mark.parametrize(
    ("before", "leaves"), [(["in"], False), (["in", "x"], True), ([], True), (["x"], True), (None, False)]
)
def test_predecessor_with_other_topics_is_removed_first(before: list[str] | None, leaves: bool) -> None:
    """A returning static member gets its former partitions, whatever it subscribes to."""
    for settings, names in (({"group.instance.id": "one"}, ["one"]), ({"group.protocol": "consumer"}, [])):
        group: Any = _Group(before)
        _of(_Cluster(), **settings).member.remove_predecessor(group, ["in"])
        assert group.removed == (names if leaves else [])


@pytest.mark.parametrize(
    ("before", "now", "leaves"),
    [
        ("cooperative-sticky", {}, False),
        ("roundrobin", {}, True),
        ("cooperative-sticky", {"partition.assignment.strategy": "roundrobin"}, True),
        ("roundrobin", {"partition.assignment.strategy": "range,roundrobin"}, False),
    ],
)
def test_predecessor_with_another_strategy_is_removed_first(before: str, now: dict[str, str], leaves: bool) -> None:
    group: Any = _Group(["in"], before)
    _of(_Cluster(), **{"group.instance.id": "one"}, **now).member.remove_predecessor(group, ["in"])
    assert group.removed == (["one"] if leaves else [])


def test_group_with_a_foreign_member_is_not_joined() -> None:
    group: Any = _Group(["in"], "roundrobin", instance="")
    strategy = {"partition.assignment.strategy": "roundrobin"}
    with pytest.raises(ConfigurationError, match=r"not workers of this App \(client.id rdkafka\): stop those"):
        _of(_Cluster(), **{"group.instance.id": "one"}, **strategy).member.remove_predecessor(group, ["in"])


def test_group_that_cannot_be_described_is_joined() -> None:
    def classic_group(group: str) -> None:
        raise Unavailable("no coordinator yet")

    admin: Any = SimpleNamespace(classic_group=classic_group)
    _of(_Cluster(), **{"group.instance.id": "one"}).member.remove_predecessor(admin, ["in"])


def test_topic_read_from_its_beginning_ignores_latest() -> None:
    group = _Cluster()
    group_consumer = _of(group, **{"auto.offset.reset": "latest", "eos.places.topic": ""})
    group.committed = lambda partitions, timeout: partitions  # type: ignore[method-assign]
    assert [tp.offset for tp in group_consumer.start_offsets.find([("in", 0)]).values()] == [5]
    group_consumer.start_offsets._from_beginning = {"in"}
    assert [tp.offset for tp in group_consumer.start_offsets.find([("in", 0)]).values()] == [-2]


def test_auto_offset_reset_latest_reads_own_topics_from_the_start() -> None:
    """Every consumer of the session does so, including a replacement."""
    group = _Cluster()
    group.committed = lambda partitions, timeout: partitions  # type: ignore[method-assign]
    there = dict.fromkeys("abc", SimpleNamespace(error=None, partitions={0: None}))
    group.list_topics = lambda *_, timeout: SimpleNamespace(brokers={}, topics=there)  # type: ignore[method-assign, misc]
    world = World(consumer=lambda _: group, background=lambda name, run: None)  # type: ignore[arg-type, return-value]
    settings = Settings({**SETTINGS, "auto.offset.reset": "latest", "eos.places.topic": ""})
    parts = Parts(
        settings,
        ["a", "b"],
        [],
        Listener(),
        until_end=False,
        handled_at_once=1,
        with_ends=False,
        stopping=bool,
        world=world,
    )
    parts.fetcher.connect(["b", "c"], world.now())
    for _ in range(2):
        begin = parts.fetcher.group_consumer.start_offsets.find([("a", 0), ("b", 0)])
        assert [tp.offset for tp in begin.values()] == [5, OFFSET_BEGINNING]
        parts.fetcher.replace_consumer()


def test_uncommitted_start_is_kept_despite_other_commits_of_the_topic() -> None:
    """Another member's commits do not make the partition new."""
    group_consumer = _of(_Cluster(), **{"auto.offset.reset": "latest", "eos.places.topic": ""})
    group_consumer.start_offsets._earlier_starts = {("in", 1): 4}
    assert [tp.offset for tp in group_consumer.start_offsets.find([("in", 1)]).values()] == [4]
    group_consumer.start_offsets._earlier_starts = {}
    assert [tp.offset for tp in group_consumer.start_offsets.find([("in", 1)]).values()] == [-2]


def test_eager_assignment_of_a_later_partition_keeps_other_positions() -> None:
    """`range` and `roundrobin` replace the assignment: partitions already read are assigned at their position."""
    cluster = _Cluster()
    given: list[list[tuple[int, int]]] = []
    cluster.memberid = lambda: "one"  # type: ignore[attr-defined]
    cluster.assign = lambda partitions: given.append([(p.partition, p.offset) for p in partitions])  # type: ignore[attr-defined]
    group_consumer = _of(cluster, **{"partition.assignment.strategy": "roundrobin"})
    starts = {("in", number): TopicPartition("in", number, -2 if number else 3) for number in range(3)}
    group_consumer.assignment.assign(starts)
    group_consumer.assignment.locate(starts)
    group_consumer.start([("in", 0), ("in", 1)])
    group_consumer._positions.add_fetched([Record("in", 0, offset, 0, None, b"") for offset in (3, 4)])
    group_consumer.start([("in", 2)])
    assert given == [[(0, 3), (1, -2)], [(0, 5), (1, -2), (2, -2)]]
    assert group_consumer.assignment.reading == {("in", 0), ("in", 1), ("in", 2)}


def test_offset_of_an_unassigned_partition_is_not_committed() -> None:
    cluster: Any = _Cluster()
    cluster.memberid, cluster.consumer_group_metadata = lambda: "one", lambda: "metadata"
    group_consumer = _of(cluster)
    group_consumer.member.note_first_assignment()
    group_consumer.assignment.assign([("in", 0)])
    group_consumer.assignment.locate({("in", 0): TopicPartition("in", 0, 3)})
    assert group_consumer.group_metadata({("in", 0): 5}) == "metadata"
    with pytest.raises(CallFailed, match="no longer assigned to this member") as failed:
        group_consumer.group_metadata({("in", 0): 5, ("in", 1): 5})
    assert failed.value.action is Action.ABORT
