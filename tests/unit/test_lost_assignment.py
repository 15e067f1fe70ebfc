"""When a member must rejoin because its client missed an assignment of the group, with a scripted clock."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from eos.errors import NotAuthorised, Unavailable
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.session.consumer import lost_assignment as unheard
from eos.session.consumer.lag import decode_statistics
from eos.session.consumer.lost_assignment import LostAssignment, ReportedAssignment
from eos.session.consumer.positions import TopicPartition

P = unheard._PATIENCE_S


class Member:
    """A member: its client's assignment, the coordinator's last answer, and a clock."""

    def __init__(self, protocol: str = "consumer") -> None:
        self.now_s = 1000.0
        self.late = 0
        self.client: set[TopicPartition] = set()
        self.asks: list[Callable[[], None]] = []
        world = World(now=lambda: self.now_s, background=lambda name, run: self.asks.append(run))
        settings = Settings({"bootstrap.servers": "x", "group.protocol": protocol})
        self.lost_assignment = LostAssignment(settings, "group", Watcher(settings, world), world)

    def late_answer(self) -> None:
        self.late += 1
        self.lost_assignment.note(
            decode_statistics(b'{"brokers": {"GroupCoordinator": {"req_timeouts": %d}}}' % self.late).timed_out_requests
        )

    def after(self, seconds: float) -> None:
        self.now_s += seconds

    def given(self, *partitions: int) -> None:
        """Set the assignment that the coordinator reports now, without a poll."""
        self.lost_assignment._unchecked_report = ReportedAssignment(
            self.now_s, frozenset(("in", number) for number in partitions)
        )

    def rebalanced_to(self, *partitions: int) -> None:
        """Run a rebalance callback: these are all partitions of the client now."""
        self.client = {("in", number) for number in partitions}
        self.lost_assignment.reset()

    def poll(self) -> list[int]:
        return sorted(number for _, number in self.lost_assignment.find_missing(lambda: "me", lambda: self.client))


@pytest.fixture
def member() -> Member:
    member = Member()
    member.rebalanced_to(0, 1)
    return member


def test_partition_counts_as_missing_after_the_client_ignored_it_long(member: Member) -> None:
    member.late_answer()
    for pause, found in ((0.0, []), (P - 1, []), (1.0, [2])):
        member.after(pause)
        member.given(0, 1, 2)
        assert member.poll() == found


def test_coordinator_is_not_queried_without_a_late_answer(member: Member) -> None:
    member.given(0, 1, 2)
    assert member.poll() == []
    assert member.asks == []


def test_classic_group_is_not_queried() -> None:
    member = Member("classic")
    member.late_answer()
    assert member.poll() == []
    assert member.asks == []


def test_query_before_the_last_late_answer_does_not_count(member: Member) -> None:
    """The member waits for a coordinator that stays slow."""
    for _ in range(10):
        member.late_answer()
        member.given(0, 1, 2)
        member.after(P / 2)
        assert member.poll() == []


def test_answer_to_a_query_of_an_earlier_check_does_not_count(member: Member) -> None:
    member.late_answer()
    member.after(P)
    member.given(0, 1)
    assert member.poll() == []
    member.given(0, 1)  # the answer to a query that was still running
    member.rebalanced_to(0)
    member.after(3600)
    member.late_answer()
    assert member.poll() == []
    member.given(0, 2)
    assert member.poll() == []


def test_callback_in_a_slow_poll_leaves_no_partition_missing(member: Member) -> None:
    member.late_answer()
    for has in ((0, 1, 2), (0, 1), (0,), (0, 3), (0, 3, 4)):
        member.given(*has)
        member.after(2 * P)
        member.rebalanced_to(*has)  # the poll runs the callback before it compares
        assert member.poll() == []


def test_answer_from_before_a_callback_is_ignored(member: Member) -> None:
    member.late_answer()
    member.given(0, 1)
    member.after(1)
    member.rebalanced_to(0)
    assert member.poll() == []
    member.after(P)
    member.given(0, 1)  # assigned again a moment ago
    assert member.poll() == []


def test_check_waits_for_each_of_several_changing_partitions(member: Member) -> None:
    member.late_answer()
    for number in range(2, 8):
        member.given(0, 1, number)
        assert member.poll() == []
        member.after(P)


def test_missing_partition_is_found_even_with_rare_polls(member: Member) -> None:
    member.late_answer()
    assert member.poll() == []
    found: list[int] = []
    for _ in range(3):
        member.after(10 * P)
        member.given(0, 1, 2)
        found = member.poll()
    assert found == [2]


def test_check_ends_after_all_partitions_are_known_long_enough(member: Member) -> None:
    member.late_answer()
    member.poll()
    member.after(P - 1)
    member.given(0, 1)
    member.poll()
    assert member.lost_assignment._looking
    member.after(1)
    member.given(0, 1)
    member.poll()
    assert not member.lost_assignment._looking


@pytest.mark.parametrize(
    ("error", "pause_s"), [(Unavailable("away"), 5.0), (KeyError("group"), 5.0), (NotAuthorised("no"), None)]
)
def test_failed_query_is_repeated_unless_it_was_refused(
    error: Exception, pause_s: float | None, member: Member
) -> None:
    member.late_answer()
    member.poll()
    assert len(member.asks) == 1, "the watcher's thread"
    assert member.lost_assignment._on_error(error) == pause_s
    member.lost_assignment._member_id = ""
    member.poll()
    assert bool(member.lost_assignment._member_id) == (pause_s is not None)


def test_query_stops_after_the_check(member: Member) -> None:
    admin: Any = SimpleNamespace(assigned_partitions=lambda group, member_id: frozenset({("in", 0), ("in", 1)}))
    member.late_answer()
    member.poll()
    assert member.lost_assignment._query(admin) == 5.0
    member.after(P)
    assert member.lost_assignment._query(admin) == 5.0
    member.poll()
    assert (member.lost_assignment._query(admin), member.lost_assignment._member_id) == (None, "")
