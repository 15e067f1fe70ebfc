"""Positions of fetched, taken and committed records: none skipped, none repeated, in order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eos.session.consumer.positions import Positions, TopicPartition


class R(NamedTuple):
    topic: str
    partition: int
    offset: int


A, B = ("a", 0), ("b", 1)


def records(partition: TopicPartition, *offsets: int) -> list[R]:
    return [R(*partition, offset) for offset in offsets]


def positions(*fetched: R, **starts: int) -> Positions[R]:
    made: Positions[R] = Positions()
    made.assign({A: starts.get("a", 0), B: starts.get("b", 0)})
    made.add_fetched(list(fetched))
    return made


def commit(known: Positions[R]) -> None:
    known.commit(known.offsets())


# ---- examples ----------------------------------------------------------------------------------------------


def test_records_are_handed_out_in_the_order_they_were_fetched() -> None:
    known = positions(*records(A, 0, 1), *records(B, 7), *records(A, 2))
    assert known.take(3) == [R("a", 0, 0), R("a", 0, 1), R("b", 1, 7)]
    assert known.take(3) == [R("a", 0, 2)]
    assert known.take(3) == []


def test_only_taken_records_are_committed() -> None:
    known = positions(*records(A, 0, 1, 2))
    known.take(2)
    assert (len(known), known.taken, known.offsets()) == (1, 2, {A: 2})
    commit(known)
    assert (len(known), known.taken, known.offsets(), known.committed[A]) == (1, 0, {}, 2)
    assert known.take(5) == records(A, 2)


def test_committed_offset_follows_the_last_record_across_gaps() -> None:
    known = positions(*records(A, 3, 9), *records(B, 100))
    known.take(3)
    assert known.offsets() == {A: 10, B: 101}


def test_repeated_deliveries_are_dropped_and_counted() -> None:
    known = positions(*records(A, 5, 6, 6, 7, 5), *records(B, 2, 3), *records(A, 7, 8), a=5, b=3)
    assert known.take(9) == [*records(A, 5, 6, 7), *records(B, 3), *records(A, 8)]
    known.add_fetched(records(A, 4, 8))
    assert (len(known), known.offsets(), known.repeated) == (0, {A: 9, B: 4}, 6)
    assert known.rewind() == {A: 5, B: 3}
    known.add_fetched(records(A, 4, 5, 6))
    assert known.take(9) == records(A, 5, 6), "records fetched again after a rewind do not count as repeated"


def test_rewind_returns_to_the_transactions_start_in_each_partition() -> None:
    known = positions(*records(A, 4, 5), *records(B, 7), *records(A, 9))
    known.take(2)
    known.take(1)
    assert known.rewind() == {A: 4, B: 7}
    assert (len(known), known.taken, known.offsets()) == (0, 0, {}), (
        "waiting records of A are dropped: they are fetched again"
    )


def test_rewind_does_not_move_partitions_without_taken_records() -> None:
    known = positions(*records(A, 4), *records(B, 7), *records(A, 5), *records(B, 8))
    known.reach_end(B, 9)
    known.take(1)
    assert known.rewind() == {A: 4}
    assert known.take(9) == records(B, 7, 8)
    assert known.offsets() == {B: 9}


def test_rewind_returns_to_the_first_record_not_the_last_commit() -> None:
    """A partition can start at "the beginning", which is not an offset to which a consumer can seek."""
    known = positions(*records(A, 40, 41), a=0)
    known.take(2)
    assert known.rewind() == {A: 40}


def test_rewind_after_a_commit_returns_to_the_next_transactions_start() -> None:
    known = positions(*records(A, 0, 1, 2))
    known.take(1)
    commit(known)
    known.take(2)
    assert known.rewind() == {A: 1}


def test_known_end_is_not_committed_after_a_rewind() -> None:
    known = positions(*records(A, 0, 1))
    known.reach_end(A, 5)
    known.take(2)
    known.rewind()
    assert known.offsets() == {}


def test_known_end_is_kept_if_all_taken_records_are_given_back() -> None:
    known = positions(*records(A, 0))
    known.reach_end(A, 5)
    known.take(1)
    known.give_back(1)
    assert known.rewind() == {}
    known.take(1)
    assert known.offsets() == {A: 5}


def test_only_records_of_the_last_batch_can_be_given_back() -> None:
    known = positions(*records(A, 0, 1, 2))
    known.take(2)
    known.take(1)
    with pytest.raises(ValueError, match="taken last"):
        known.give_back(2)
    known.give_back(1)
    assert (known.take(9), known.offsets()) == (records(A, 2), {A: 3})


def test_last_batch_can_be_given_back_after_an_empty_take() -> None:
    known = positions(*records(A, 0, 1))
    known.take(2)
    assert known.take(1) == []
    known.give_back(2)
    assert known.offsets() == {}


def test_last_taken_record_is_remembered_until_the_commit() -> None:
    known = positions(*records(A, 0, 1, 2))
    assert known.last_taken is None
    known.take(2)
    assert known.last_taken == R("a", 0, 1)
    known.give_back(1)
    assert known.last_taken == R("a", 0, 0)
    commit(known)
    assert known.last_taken is None


def test_clearing_a_taken_batch_changes_no_offset() -> None:
    known = positions(*records(A, 0, 1))
    known.take(2).clear()
    assert (known.taken, known.offsets()) == (2, {A: 2})


def test_records_given_back_are_excluded_and_taken_next() -> None:
    known = positions(*records(A, 0, 1, 2))
    known.take(3)
    known.give_back(2)
    assert known.offsets() == {A: 1}
    commit(known)
    assert known.take(3) == records(A, 1, 2)


def test_partition_given_back_completely_has_no_offset() -> None:
    known = positions(*records(A, 0), *records(B, 0))
    known.take(2)
    known.give_back(1)
    assert known.offsets() == {A: 1}


@pytest.mark.parametrize("count", [-1, 3])
def test_giving_back_an_invalid_count_is_refused(count: int) -> None:
    known = positions(*records(A, 0, 1, 2))
    known.take(2)
    with pytest.raises(ValueError, match="taken last"):
        known.give_back(count)
    assert known.taken == 2


def test_end_after_all_records_is_committed_with_the_last_one() -> None:
    known = positions(*records(A, 0, 1))
    known.reach_end(A, 5)  # after aborted records and a marker
    known.take(1)
    assert known.offsets() == {A: 1}
    known.take(1)
    assert known.offsets() == {A: 5}


def test_partition_end_without_records_is_committed_once() -> None:
    known = positions(a=3)
    known.reach_end(A, 5)
    assert known.offsets() == {A: 5}
    commit(known)
    assert known.offsets() == {}


def test_committed_end_is_not_committed_again() -> None:
    known = positions(a=5)
    known.reach_end(A, 5)
    assert known.offsets() == {}


def test_old_end_does_not_lower_the_offset_of_later_records() -> None:
    known = positions(*records(A, 0))
    known.reach_end(A, 2)
    known.add_fetched(records(A, 2, 3))
    known.take(2)
    assert known.offsets() == {A: 3}
    known.take(1)
    assert known.offsets() == {A: 4}


def test_lost_partition_is_forgotten_and_others_stay() -> None:
    known = positions(*records(A, 0), *records(B, 0), *records(A, 1))
    known.reach_end(A, 9)
    assert not known.forget([A]), "the open transaction has no record of it"
    assert known.take(9) == records(B, 0)
    assert known.offsets() == {B: 1}
    assert A not in known.committed


def test_lost_partition_with_taken_records_requires_an_abort() -> None:
    known = positions(*records(A, 0, 1), *records(B, 0, 1))
    known.take(3)
    assert known.forget([A])
    assert known.committed == {B: 0}
    assert known.rewind() == {B: 0}
    assert len(known) == 0


def test_given_back_records_of_a_lost_partition_are_dropped() -> None:
    known = positions(*records(A, 0, 1), *records(B, 0))
    known.take(3)
    known.forget([A])
    known.give_back(2)
    assert known.rewind() == {}, "A is not assigned, and no record of B was handled"
    assert known.take(9) == records(B, 0)


def test_lost_partition_that_returns_delivers_each_record_once() -> None:
    known = positions(*records(A, 0, 1))
    known.take(2)
    known.forget([A])
    known.assign({A: 0})
    known.add_fetched(records(A, 0, 1, 2))
    assert known.rewind() == {}
    assert known.take(9) == records(A, 0, 1, 2)


def test_resolving_an_unknown_commit_ignores_lost_partitions() -> None:
    known = positions(*records(A, 0), *records(B, 0, 1))
    known.take(3)
    known.forget([A])
    assert known.resolve({A: 1, B: 1}) == {B: 1}
    assert known.committed == {B: 1}


def test_returning_partition_starts_without_old_records() -> None:
    known = positions(*records(A, 0, 1))
    known.reach_end(A, 2)
    known.assign({A: 2})
    assert (len(known), known.committed[A], known.offsets()) == (0, 2, {})


def test_unknown_outcome_of_a_succeeded_commit_continues_after_it() -> None:
    known = positions(*records(A, 0, 1, 2))
    known.take(2)
    assert known.resolve({A: 2}) == {A: 2}
    assert (known.taken, known.committed[A]) == (0, 2)


def test_unknown_outcome_of_an_aborted_commit_rewinds_to_the_start() -> None:
    known = positions(*records(A, 6, 7), a=4)
    known.take(2)
    assert known.resolve({A: 4}) == {A: 6}


def test_unknown_outcome_without_a_committed_offset_rewinds_to_the_start() -> None:
    known = positions(*records(A, 4, 5), a=4)
    known.take(1)
    assert (known.resolve({A: None}), known.committed[A]) == ({A: 4}, 4)


def test_offset_moved_back_does_not_repeat_committed_records() -> None:
    known = positions(*records(A, 0, 1, 2, 3))
    known.take(2)
    commit(known)
    known.take(2)
    assert (known.resolve({A: 1}), known.committed[A]) == ({A: 2}, 2)


def test_unknown_commit_is_resolved_for_each_partition() -> None:
    known = positions(*records(A, 0, 1), *records(B, 0, 1))
    known.take(4)
    assert known.resolve({A: 2, B: 0}) == {A: 2, B: 0}


def test_partition_revoked_during_its_commit_is_not_updated() -> None:
    known = positions(*records(A, 3), *records(B, 7))
    known.take(2)
    offsets = known.offsets()
    assert known.forget([A])
    known.commit(offsets)
    assert known.committed == {B: 8}


def test_partition_revoked_during_a_failed_commit_is_not_rewound() -> None:
    known = positions(*records(A, 3), *records(B, 7))
    known.take(2)
    known.forget([A])
    assert known.resolve({A: 4, B: 0}) == {B: 7}
    assert A not in known.committed


# ---- the model ---------------------------------------------------------------------------------------------

PARTITIONS = [("a", 0), ("a", 1), ("b", 0)]
partitions = st.sampled_from(PARTITIONS)


class PositionsAgainstModel(RuleBasedStateMachine):
    """Compare Positions with a model of one list per partition. The order between partitions is not modelled."""

    def __init__(self) -> None:
        super().__init__()
        self.code: Positions[R] = Positions()
        self.owned: set[TopicPartition] = set()
        self.waiting: dict[TopicPartition, list[int]] = defaultdict(list)
        self.taken: list[R] = []
        self.repeated = 0
        self.last = 0  # number of taken records in the last batch
        self.lost: set[TopicPartition] = set()  # lost partitions with taken records
        self.ends: dict[TopicPartition, int] = {}
        self.group: dict[TopicPartition, int] = {}  # offsets committed by the group; they survive a reassignment
        self.started: dict[TopicPartition, int] = {}
        self.fetch_at: dict[TopicPartition, int] = {}
        self.log: dict[TopicPartition, list[int]] = defaultdict(list)  # readable offsets, fetched again after a rewind

    @initialize(starts=st.lists(st.integers(0, 5), min_size=3, max_size=3))
    def all_are_assigned(self, starts: list[int]) -> None:
        for partition, start in zip(PARTITIONS, starts, strict=True):
            self._assign(partition, start)

    def _assign(self, partition: TopicPartition, start: int) -> None:
        self.code.assign({partition: start})
        self.owned.add(partition)
        self.waiting[partition] = []
        self.ends.pop(partition, None)
        self.started[partition] = self.fetch_at[partition] = start

    def _floor(self, partition: TopicPartition) -> int:
        """Return the offset at which the partition's next transaction starts if no record is taken."""
        return max(self.group.get(partition, 0), self.started[partition])

    def _expected_offsets(self) -> dict[TopicPartition, int]:
        expected = {}
        for partition in self.owned:
            mine = [r.offset for r in self.taken if (r.topic, r.partition) == partition]
            reached = mine[-1] + 1 if mine else self._floor(partition)
            if not self.waiting[partition]:
                reached = max(reached, self.ends.get(partition, 0))
            if mine or reached > self._floor(partition):
                expected[partition] = reached
        return expected

    @rule(data=st.lists(st.tuples(partitions, st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
    def fetch(self, data: list[tuple[TopicPartition, int, int]]) -> None:
        """Fetch a batch of random partitions, with gaps for markers and aborted records, and with records that
        were delivered before."""
        batch = []
        for partition, gap, repeats in data:
            if partition in self.owned:
                log = self.log[partition]
                if repeats:
                    before = [offset for offset in log if offset < self.fetch_at[partition]][-repeats:]
                    batch += [R(*partition, offset) for offset in before]
                    self.repeated += len(before)
                again = [offset for offset in log if offset >= self.fetch_at[partition]]
                offset = again[0] if again else self.fetch_at[partition] + gap
                if not again:
                    log.append(offset)
                self.fetch_at[partition] = offset + 1
                self.waiting[partition].append(offset)
                batch.append(R(*partition, offset))
        self.code.add_fetched(batch)
        assert self.code.repeated == self.repeated

    @rule(partition=partitions, gap=st.integers(0, 3))
    def reach_the_end(self, partition: TopicPartition, gap: int) -> None:
        if partition in self.owned and not any(o >= self.fetch_at[partition] for o in self.log[partition]):
            self.fetch_at[partition] += gap
            self.ends[partition] = self.fetch_at[partition]
            self.code.reach_end(partition, self.fetch_at[partition])

    @precondition(lambda self: not self.lost)  # after a loss the session hands out no records
    @rule(most=st.integers(1, 9))
    def take(self, most: int) -> None:
        available = sum(map(len, self.waiting.values()))
        got = self.code.take(most)
        assert len(got) == min(most, available)
        for record in got:
            partition = (record.topic, record.partition)
            assert partition in self.owned
            assert record.offset >= self.group.get(partition, 0), "a committed record was handed out again"
            assert record.offset == self.waiting[partition].pop(0), "a record is out of order or was skipped"
        self.taken += got
        self.last = len(got) or self.last

    @precondition(lambda self: self.last)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        count = data.draw(st.integers(1, self.last))
        self.code.give_back(count)
        self.last -= count
        for _ in range(count):
            record = self.taken.pop()
            if (record.topic, record.partition) not in self.lost:
                self.waiting[record.topic, record.partition].insert(0, record.offset)

    @rule()
    def rewind(self) -> None:
        self._go_back(self.code.rewind(), {})

    def _go_back(self, targets: dict[TopicPartition, int], floors: dict[TopicPartition, int]) -> None:
        """Seek as the session does: the consumer fetches these partitions again from these offsets."""
        expected = {}
        for record in self.taken:
            partition = (record.topic, record.partition)
            if partition not in self.lost:
                expected.setdefault(partition, max(record.offset, floors.get(partition, 0)))
        assert targets == expected
        for partition, offset in targets.items():
            self.waiting[partition] = []
            self.ends.pop(partition, None)
            self.fetch_at[partition] = offset
        self.taken, self.last, self.lost = [], 0, set()

    @precondition(lambda self: not self.lost)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        """Commit. Partitions revoked while the commit runs do not prevent it."""
        offsets = self.code.offsets()
        for _ in range(data.draw(st.integers(0, len(self.owned)))):
            self.forget(data)
        self.code.commit(offsets)
        self.group |= offsets
        self.taken, self.last, self.lost = [], 0, set()

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        partition = data.draw(st.sampled_from(sorted(self.owned)))
        touched = any((r.topic, r.partition) == partition for r in self.taken)
        assert self.code.forget([partition]) == touched
        if touched:
            self.lost.add(partition)
        self.owned.discard(partition)
        self.waiting[partition] = []
        self.ends.pop(partition, None)

    @precondition(lambda self: len(self.owned) < len(PARTITIONS))
    @rule(data=st.data())
    def get_assigned(self, data: Any) -> None:
        partition = data.draw(st.sampled_from([p for p in PARTITIONS if p not in self.owned]))
        self._assign(partition, self.group.get(partition, self.started[partition]))

    @rule(data=st.data())
    def resolve(self, data: Any) -> None:
        """Resolve with any stable offset the group can have: an earlier one, this transaction's, or none."""
        stable = {}
        for partition in sorted({(r.topic, r.partition) for r in self.taken}):
            after = max(r.offset for r in self.taken if (r.topic, r.partition) == partition) + 1
            if partition in self.owned and partition in self.lost:
                # The partition was lost and assigned again within this transaction, which therefore cannot commit.
                after = self.started[partition]
            offsets = st.integers(0, after)
            stable[partition] = data.draw(offsets if partition in self.group else st.none() | offsets)
        for partition, offset in stable.items():
            if offset is not None and (partition in self.owned or partition not in self.lost):
                self.group[partition] = max(offset, self.group.get(partition, 0), self.started[partition])
        floors = {p: self._floor(p) for p in self.owned}
        self._go_back(self.code.resolve(stable), floors)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.code) == sum(map(len, self.waiting.values()))
        assert self.code.taken == len(self.taken)

    @invariant()
    def offsets_are_next_after_taken(self) -> None:
        offsets = {p: offset for p, offset in self.code.offsets().items() if p not in self.lost}
        expected = self._expected_offsets()
        assert offsets == {p: offset for p, offset in expected.items() if p not in self.lost}
        for partition, offset in offsets.items():
            waiting = self.waiting[partition]
            assert not waiting or offset <= waiting[0], "this commit would skip a record"

    @invariant()
    def committed_is_never_below_what_the_group_has(self) -> None:
        assert {p: self.code.committed[p] for p in self.owned} == {p: self._floor(p) for p in self.owned}


TestPositionsAgainstModel = PositionsAgainstModel.TestCase
TestPositionsAgainstModel.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
