"""The checker passes every correct history, and each kind of damage violates its rule and names the offset.

A correct history is generated per seed: two input and two output topics, offset gaps, fan-out 2 (copy 0 goes to the
first output topic, copy 1 to the second), transactions that mix partitions. Mutations then break one thing at a time.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eos.testing.checker import (
    CommitSeries,
    Counts,
    Ends,
    Inputs,
    Outputs,
    Report,
    Verdict,
    atomic,
    atomic_transactions,
    check,
    join,
    no_aborted_seen,
    no_duplicates,
    no_losses,
    no_rewind,
    no_unexpected_outputs,
    offsets_match_outputs,
    order,
    stable_end,
)

IN, OUT = ("flights", "weather"), ("late", "audit")
PARTITIONS = 3
COLUMNS = ("topic", "partition", "offset", "source_topic", "source_partition", "source_offset", "copy")


@dataclass
class History:
    """The arguments of `check` as plain arrays, which a test can damage before the check."""

    inputs: Inputs
    outputs: Outputs
    committed: dict[tuple[str, int], int]
    ends: Ends
    seen: Outputs
    commits: CommitSeries
    fan_out: Any = 2

    def check(self, **other: Any) -> Report:
        scope: dict[str, Any] = {"committed": self.committed, "ends": self.ends, "seen": self.seen}
        scope |= {"commits": self.commits, "counts": counts(self.outputs)}
        return check(self.inputs, self.outputs, fan_out=self.fan_out, **(scope | {"complete": True} | other))

    def alone(self, **scope: Any) -> Report:
        """Check only the rules that compare inputs and outputs, without offsets, ends and readers."""
        return check(self.inputs, self.outputs, fan_out=self.fan_out, **scope)


def counts(outputs: Outputs) -> Counts:
    """Return the state that a function would have for these outputs: three keys, by the source's offset."""
    keys: list[bytes | None] = [b"key %d" % (offset % 3) for offset in outputs.source_offset]
    places = list(zip(outputs.source_topic, outputs.source_partition, outputs.source_offset, strict=True))
    kept: Counter[tuple[int, int, bytes | None]] = Counter()
    told = {}
    for topic, partition, offset in sorted(set(places)):
        cell = int(topic), int(partition), b"key %d" % (offset % 3)
        kept[cell] += 1
        told[topic, partition, offset] = kept[cell]
    return Counts(keys=keys, reported=np.array([told[place] for place in places]), final=kept)


def without(outputs: Outputs, gone: Any) -> Outputs:
    keep = np.ones(len(outputs), bool)
    keep[gone] = False
    return outputs.take(np.flatnonzero(keep))


def changed(outputs: Outputs, **columns: Any) -> Outputs:
    return replace(outputs, **columns)


def appended(outputs: Outputs, **record: int) -> Outputs:
    return replace(outputs, **{c: np.append(getattr(outputs, c), record[c]) for c in COLUMNS})


def gaps(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return offsets with gaps like those of control markers, aborted records and compaction."""
    return np.cumsum(rng.choice([1, 1, 1, 2, 5], count)) - 1 + rng.integers(0, 4)


def history(seed: int = 1, per_partition: int = 40, sparse: int = 1, shuffle: bool = False) -> History:
    rng = np.random.default_rng(seed)
    lanes = [(t, p) for t in range(2) for p in range(PARTITIONS)]
    offsets = [gaps(rng, int(rng.integers(2, per_partition))) * sparse for _ in lanes]
    # The order of handling: partitions interleaved at random, each in offset order.
    turns = rng.permutation(np.repeat(np.arange(len(lanes)), [len(o) for o in offsets]))
    queues = [list(o) for o in offsets]
    handled = np.array([(*lanes[lane], queues[lane].pop(0)) for lane in turns])
    inputs = Inputs(
        topics=IN,
        topic=handled[:, 0],
        partition=handled[:, 1],
        offset=handled[:, 2],
        transaction=np.arange(len(handled)) // 7,
    )
    next_offset = {(t, p): int(rng.integers(0, 9)) for t in range(2) for p in range(PARTITIONS)}
    rows = []
    for topic, partition, offset in handled:
        to = (int(partition) + int(topic)) % PARTITIONS
        for copy in range(2):
            next_offset[copy, to] += int(rng.choice([1, 1, 2]))
            rows.append((copy, to, next_offset[copy, to] - 1, topic, partition, offset, copy))
    table = np.array(rows)
    outputs = Outputs(topics=OUT, **{name: table[:, i] for i, name in enumerate(COLUMNS)})
    committed = {(IN[t], p): int(o[-1]) + 1 for (t, p), o in zip(lanes, offsets, strict=True)}
    end = {at: offset + 1 for at, offset in committed.items()}
    end |= {(OUT[t], p): offset + 1 for (t, p), offset in next_offset.items()}
    commits = CommitSeries(topics=IN, topic=handled[:, 0], partition=handled[:, 1], offset=handled[:, 2] + 1)
    seen = outputs.take(np.arange(len(outputs) * 2 // 3))
    if shuffle:
        inputs = inputs.take(rng.permutation(len(inputs)))
        outputs = outputs.take(rng.permutation(len(outputs)))
    return History(inputs, outputs, committed, Ends(dict(end), dict(end)), seen, commits)


def output_at(h: History, topic: int, partition: int, nth: int = 0) -> int:
    """Return the row of the nth output of an output partition."""
    return int(np.flatnonzero((h.outputs.topic == topic) & (h.outputs.partition == partition))[nth])


def source(o: Outputs, i: int) -> str:
    return f"{IN[o.source_topic[i]]}[{o.source_partition[i]}]@{o.source_offset[i]}"


def describe(place: tuple[str, int, int]) -> str:
    return "{}[{}]@{}".format(*place)


def of_same_source(o: Outputs, i: int) -> np.ndarray:
    same = (o.source_topic == o.source_topic[i]) & (o.source_partition == o.source_partition[i])
    return np.flatnonzero(same & (o.source_offset == o.source_offset[i]))


def assert_only(report: Report, rules: str, *said: str) -> None:
    """Assert that exactly these rules are violated, and that the first explanation names the offset."""
    assert report.violated == tuple(rules.split()), str(report)
    with pytest.raises(AssertionError) as raised:
        report.raise_if_violated()
    for words in said:
        assert words in str(raised.value)
        assert words in report[rules.split()[0]].sentence


@given(st.integers(0, 2**32), st.sampled_from([2, 5, 60]), st.sampled_from([1, 1_000_003, 10**12]), st.booleans())
def test_correct_history_passes_in_any_order(seed, size, sparse, shuffle):
    h = history(seed, max(size, 3), sparse, shuffle)
    report = h.check()
    assert report.ok, str(report)
    report.raise_if_violated()
    assert all(v.examined > 0 and v.violations == 0 and not v.examples for v in report.verdicts)
    of_outputs = ["no_duplicates", "no_losses", "no_unexpected_outputs", "order", "atomic", "atomic_transactions"]
    beside_them = ["offsets_match_outputs", "no_aborted_seen", "stable_end", "no_rewind", "state"]
    assert [v.rule for v in report.verdicts] == of_outputs + beside_them
    assert report["no_duplicates"].examined == len(h.outputs)
    assert report["no_losses"].examined == 2 * len(h.inputs)


@given(st.integers(0, 2**32), st.sampled_from([1, 10**12]))
def test_partial_run_passes_up_to_committed_offsets(seed, sparse):
    h = history(seed, sparse=sparse)
    stop = np.random.default_rng(seed).integers(1, len(h.inputs))
    later = h.inputs.take(np.arange(stop, len(h.inputs)))
    h.outputs = h.outputs.take(np.arange(2 * stop))
    for t, topic in enumerate(IN):
        for p in range(PARTITIONS):
            waiting = later.offset[(later.topic == t) & (later.partition == p)]
            if waiting.size:
                h.committed[topic, p] = int(waiting[0])
    h.inputs = replace(h.inputs, transaction=np.where(np.arange(len(h.inputs)) < stop, h.inputs.transaction, -1))
    report = h.check(complete=False, seen=None)
    assert report.ok, str(report)
    assert report["no_losses"].examined == 2 * stop
    assert not h.check(complete=True, seen=None)["no_losses"].holds


# --- one mutation per rule: only this rule is violated


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("by", [-1, 1])
def test_state_rule_finds_wrong_count_in_next_output(shuffle, by):
    h = history(12, shuffle=shuffle)
    good = counts(h.outputs)
    o, i = h.outputs, int(np.flatnonzero(h.outputs.copy == 0)[0])
    same_key = np.array([key == good.keys[i] for key in good.keys])
    lane = (o.source_topic == o.source_topic[i]) & (o.source_partition == o.source_partition[i]) & same_key
    later = np.flatnonzero(lane & (o.source_offset > np.median(o.source_offset[lane])))
    told = good.reported.copy()
    told[later] += by
    cell = int(o.source_topic[i]), int(o.source_partition[i]), good.keys[i]
    kept = good.final | {cell: good.final[cell] + by}
    first = later[np.argmin(o.source_offset[later])]
    said = f"{o.name(int(first))}, of {source(o, int(first))}, counts {told[first]} of {good.keys[i]!r}, but"
    report = h.check(counts=replace(good, reported=told, final=kept))
    assert report.violated == ("state",), str(report)
    assert report["state"].violations == len(later) + 1
    assert said in report["state"].examples[0]
    assert report["state"].about[0] == (IN[o.source_topic[first]], int(cell[1]), int(o.source_offset[first]))


@pytest.mark.parametrize("wrong", [None, 1, 10**6])
def test_state_rule_finds_wrong_changelog(wrong):
    h = history(13)
    good = counts(h.outputs)
    cell = max(good.final, key=lambda at: good.final[at])
    kept = {at: count for at, count in good.final.items() if at != cell} | ({} if wrong is None else {cell: wrong})
    where = f"for {cell[2]!r} in {IN[cell[0]]}[{cell[1]}], but {good.final[cell]} are visible"
    said = f"the changelog holds {'nothing' if wrong is None else wrong} {where}"
    assert_only(h.check(counts=replace(good, final=kept)), "state", said)
    kept = {**good.final, (0, 1, b"never seen"): 3}
    assert_only(h.check(counts=replace(good, final=kept)), "state", "holds 3 for b'never seen' in ")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sparse", [1, 10**9])
def test_duplicate_output_names_both_positions(shuffle, sparse):
    h = history(2, sparse=sparse, shuffle=shuffle)
    i = output_at(h, 0, 1)
    h.outputs = appended(h.outputs, **{c: getattr(h.outputs, c)[i] for c in COLUMNS} | {"offset": 10**6})
    first = f"copy 0 of {source(h.outputs, i)}", f"late[1]@{h.outputs.offset[i]}", "late[1]@1000000"
    assert_only(h.check(), "no_duplicates", *first, "2 times")


def test_replayed_transaction_is_reported_as_duplicates_not_disorder():
    h = history(3)
    lane = np.flatnonzero((h.outputs.topic == 1) & (h.outputs.partition == 2))
    again = replace(h.outputs.take(lane), offset=h.outputs.offset[lane] + 10**6)
    h.outputs = replace(h.outputs, **{c: np.concatenate([getattr(h.outputs, c), getattr(again, c)]) for c in COLUMNS})
    report = h.check()
    assert_only(report, "no_duplicates", "audit[2]@")
    assert report["no_duplicates"].violations == len(lane)


@pytest.mark.parametrize("sparse", [1, 10**9])
def test_input_without_output_is_a_loss(sparse):
    h = history(4, sparse=sparse)
    i = output_at(h, 0, 2, 1)
    lost = source(h.outputs, i)
    h.outputs = without(h.outputs, of_same_source(h.outputs, i))
    h.inputs = replace(h.inputs, transaction=None)
    assert_only(h.alone(complete=True), "no_losses", f"copy 0 of {lost} is not visible")
    assert h.alone(complete=True)["no_losses"].violations == 2
    assert_only(h.check(seen=None), "no_losses offsets_match_outputs", lost)
    assert lost in h.check(seen=None)["offsets_match_outputs"].sentence


def test_missing_output_above_committed_offset_is_not_a_loss():
    h = history(4)
    i = len(h.outputs) - 1
    place = IN[h.outputs.source_topic[i]], int(h.outputs.source_partition[i])
    h.committed[place] = int(h.outputs.source_offset[i])
    h.outputs = without(h.outputs, of_same_source(h.outputs, i))
    h.inputs = replace(h.inputs, transaction=None)
    assert h.check(complete=False).ok
    assert not h.check(complete=True)["no_losses"].holds


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("source_offset", 10**15, "flights[0]@1000000000000000, which is not an input"),
        ("source_offset", -1, "flights[0]@-1, which is not an input"),
        ("source_offset", -(2**63), "which is not an input"),
        ("source_partition", PARTITIONS, "flights[3]@"),
        ("source_partition", -1, "flights[-1]@"),
        ("source_partition", 2**31 - 1, "flights[2147483647]@"),
        ("source_topic", 2, "topic #2[0]@"),
        ("source_topic", -(2**31), "topic #-2147483648[0]@"),
        ("copy", 2, "which must have 2, numbered from 0"),
        ("copy", -1, "copy -1 of flights[0]@"),
    ],
)
@pytest.mark.parametrize("sparse", [1, 10**9])
def test_output_without_input_is_unexpected(column, value, said, sparse):
    h = history(5, sparse=sparse)
    stranger = {"topic": 0, "partition": 1, "offset": 777_777, "source_topic": 0, "source_partition": 0}
    stranger |= {"source_offset": int(h.inputs.offset[(h.inputs.topic == 0) & (h.inputs.partition == 0)][0]), "copy": 0}
    h.outputs = appended(h.outputs, **stranger | {column: value})
    assert_only(h.check(), "no_unexpected_outputs", "late[1]@777777", said)


@pytest.mark.parametrize("sparse", [1, 10**9])
def test_source_in_offset_gap_is_unexpected(sparse):
    h = history(6, sparse=sparse)
    mine = h.inputs.offset[(h.inputs.topic == 1) & (h.inputs.partition == 0)]
    hole = next(int(o) for o in range(mine[0], mine[-1]) if o not in mine)
    h.outputs = appended(h.outputs, **dict(zip(COLUMNS, (0, 0, 10**6, 1, 0, hole, 0), strict=True)))
    assert_only(h.check(), "no_unexpected_outputs", f"weather[0]@{hole}", "late[0]@1000000")


def test_repeated_unexpected_output_is_also_a_duplicate():
    h = history(6)
    for offset in (10**6, 10**6 + 1):
        h.outputs = appended(h.outputs, **dict(zip(COLUMNS, (0, 0, offset, 1, 0, 10**7, 0), strict=True)))
    assert_only(
        h.check(), "no_duplicates no_unexpected_outputs", "weather[0]@10000000", "late[0]@1000000 and late[0]@1000001"
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_swapped_outputs_of_one_source_partition_are_out_of_order(shuffle):
    h = history(7, shuffle=shuffle)
    o = h.outputs
    lane = (o.topic == 0) & (o.partition == 0) & (o.source_topic == 0)
    i, j = np.flatnonzero(lane)[np.argsort(o.offset[lane])][1:3]
    offset = o.offset.copy()
    offset[[i, j]] = offset[[j, i]]
    h.outputs = changed(o, offset=offset)
    report = h.check(seen=None)
    assert_only(report, "order", source(o, i), source(o, j), f"late[0]@{o.offset[j]}", f"late[0]@{o.offset[i]}")
    assert report["order"].violations == 1
    assert [describe(place) for place in report["order"].about] == [source(o, i), source(o, j)]


def test_outputs_of_different_partitions_may_have_any_order():
    h = history(7)
    o = h.outputs
    by_source = np.lexsort((np.arange(len(o)), o.source_partition, o.source_topic))
    offset = np.empty_like(o.offset)
    offset[by_source] = np.arange(len(o))  # one source partition after the other, each in its order
    h.outputs = changed(o, offset=offset)
    assert h.check(seen=None).ok


def test_copies_out_of_order_in_one_partition_violate_order():
    places = {"topic": [0, 0], "partition": [0, 0]}
    inputs = Inputs(topics=("in",), topic=[0], partition=[0], offset=[5])
    outputs = Outputs(
        topics=("out",), **places, offset=[1, 2], source_topic=[0, 0], source_partition=[0, 0],
        source_offset=[5, 5], copy=[1, 0],
    )  # fmt: skip
    assert_only(check(inputs, outputs, fan_out=2), "order", "out[0]@2 (copy 0 of in[0]@5)", "out[0]@1 (copy 1")


def test_input_with_one_of_two_copies_is_incomplete():
    h = history(8)
    i = output_at(h, 1, 1, 3)
    torn, other = source(h.outputs, i), (set(of_same_source(h.outputs, i)) - {i}).pop()
    still = h.outputs.name(other)
    h.outputs = without(h.outputs, i)
    whole = replace(h.inputs, transaction=None)
    h.inputs, numbered = whole, h.inputs
    assert_only(h.alone(), "atomic", f"{torn} is incomplete: copy 1 is missing", f"{still} is visible")
    h.inputs = numbered
    assert_only(h.check(seen=None), "no_losses atomic atomic_transactions", torn)


def test_transaction_with_half_its_inputs_is_incomplete():
    h = history(9)
    half = np.flatnonzero(h.inputs.transaction == 3)[:4]  # whole inputs vanish, so none is incomplete by itself
    gone = np.concatenate([2 * half, 2 * half + 1])
    topic, partition, offset = min(
        zip(h.inputs.topic[half], h.inputs.partition[half], h.inputs.offset[half], strict=True)
    )
    h.outputs = without(h.outputs, gone)
    first = f"copy 0 of {IN[topic]}[{partition}]@{offset} is not"
    assert_only(h.alone(), "atomic_transactions", "transaction 3 is incomplete: 6 of its 14 outputs are visible", first)


def test_vanished_transaction_is_lost_and_not_incomplete():
    h = history(9)
    rows = np.flatnonzero(h.inputs.transaction == 3)
    h.outputs = without(h.outputs, np.concatenate([2 * rows, 2 * rows + 1]))
    assert h.alone().ok
    assert_only(h.alone(complete=True), "no_losses")


def test_unknown_transaction_is_not_judged():
    h = history(9)
    h.inputs = replace(h.inputs, transaction=np.full(len(h.inputs), -1))
    verdict = atomic_transactions(join(h.inputs, h.outputs, 2))
    assert (verdict.holds, verdict.examined) == (False, 0)


def test_checker_reports_a_committed_offset_before_outputs():
    h = history(10)
    mine = h.inputs.offset[(h.inputs.topic == 0) & (h.inputs.partition == 2)]
    h.committed["flights", 2] = int(mine[-1])
    repeated = f"flights[2]@{mine[-1]}"
    assert_only(h.check(), "offsets_match_outputs", repeated, f"committed at {mine[-1]}", "handle it again")
    assert [describe(place) for place in h.check()["offsets_match_outputs"].about] == [repeated]
    del h.committed["flights", 2]
    assert_only(h.check(), "offsets_match_outputs", f"flights[2]@{mine[0]}", "not committed at all")


def test_checker_reports_a_committed_offset_after_the_log_end():
    h = history(10)
    h.committed["weather", 1] = h.ends.log_end["weather", 1] + 1
    assert_only(h.check(), "offsets_match_outputs", f"weather[1] is committed at {h.committed['weather', 1]}")


def test_committed_offset_after_missing_outputs_breaks_two_rules():
    h = history(11)
    i = len(h.outputs) - 1  # the last handled input, so only its own transaction changes
    ahead = source(h.outputs, i)
    h.outputs = without(h.outputs, of_same_source(h.outputs, i))
    h.inputs = replace(h.inputs, transaction=None)
    report = h.check(complete=False)
    assert_only(report, "no_losses offsets_match_outputs", ahead)
    assert ahead in report["offsets_match_outputs"].sentence
    assert "no worker will handle it" in report["offsets_match_outputs"].sentence
    assert [describe(place) for place in report["offsets_match_outputs"].about] == [ahead]


def test_committed_offset_may_lie_in_a_gap():
    h = history(10)
    for place, offset in h.committed.items():
        h.committed[place] = offset + 1
    assert h.check().ok


def test_delivered_record_that_vanished_is_reported_as_aborted():
    h = history(12)
    h.seen = appended(h.seen, **dict(zip(COLUMNS, (1, 0, 10**6, 0, 0, 0, 1), strict=True)))
    assert_only(h.check(), "no_aborted_seen", "audit[0]@1000000", "aborted")
    assert h.check()["no_aborted_seen"].about == (("flights", 0, 0),)


@pytest.mark.parametrize("shuffle", [False, True])
def test_delivered_record_with_new_source_is_reported_as_replaced(shuffle):
    h = history(12, shuffle=shuffle)
    changed_source = h.seen.source_offset.copy()
    changed_source[4] += 1
    h.seen = changed(h.seen, source_offset=changed_source)
    assert_only(h.check(), "no_aborted_seen", h.seen.name(4), "a different source")
    assert [describe(place) for place in h.check()["no_aborted_seen"].about] == [source(h.seen, 4)]


def test_checker_reports_a_repeated_or_late_delivery():
    h = history(12)
    h.seen = appended(h.seen, **{c: getattr(h.seen, c)[3] for c in COLUMNS})
    assert_only(h.check(), "no_aborted_seen", f"{h.seen.name(3)} was delivered after", "of the same partition")
    h = history(12)
    last = len(h.seen) - 1  # twice in a row: the offset does not go back, it stays
    h.seen = appended(h.seen, **{c: getattr(h.seen, c)[last] for c in COLUMNS})
    assert_only(h.check(), "no_aborted_seen", f"{h.seen.name(last)} was delivered after {h.seen.name(last)}")
    h = history(12)
    a, b = np.flatnonzero((h.seen.topic == 0) & (h.seen.partition == 1))[:2]
    turned = np.arange(len(h.seen))
    turned[[a, b]] = [b, a]
    early, late = h.seen.name(a), h.seen.name(b)
    h.seen = h.seen.take(turned)
    assert_only(h.check(), "no_aborted_seen", f"{early} was delivered after {late}")
    assert [describe(place) for place in h.check()["no_aborted_seen"].about] == [source(h.seen, b)]


def test_last_stable_offset_before_end_is_a_hanging_transaction():
    h = history(13)
    h.ends.stable["late", 2] -= 1
    end = h.ends.log_end["late", 2]
    assert_only(h.check(), "stable_end", f"late[2] is readable only up to {end - 1}", f"ends at {end}")


def test_partition_with_one_unknown_end_is_not_stable():
    h = history(13)
    del h.ends.stable["late", 2]  # type: ignore[attr-defined]
    assert_only(h.check(), "stable_end", "late[2] has only one of its two ends")


def test_rewound_offset_is_reported_with_old_and_new_value():
    h = history(14)
    mine = np.flatnonzero((h.commits.topic == 1) & (h.commits.partition == 0))
    offset = h.commits.offset.copy()
    offset[mine[-1]] = offset[mine[-2]] - 1
    h.commits = replace(h.commits, offset=offset)
    before, after = offset[mine[-2]], offset[mine[-1]]
    assert_only(h.check(), "no_rewind", f"weather[0] went back from {before} to {after}")
    assert h.check()["no_rewind"].about == (("weather", 0, before - 1), ("weather", 0, after - 1))


def test_vanished_offset_counts_as_a_rewind():
    commits = CommitSeries(topics=IN, topic=[0, 0], partition=[1, 1], offset=[5, -1])
    assert "flights[1] went back from 5 to -1" in no_rewind(commits).sentence
    assert no_rewind(commits).about == (("flights", 1, 4),)


# --- nothing examined, nothing proved


def empty_inputs() -> Inputs:
    return Inputs(topics=IN, topic=[], partition=[], offset=[], transaction=[])


def empty_outputs() -> Outputs:
    return Outputs(topics=OUT, **{name: [] for name in COLUMNS})


def every_rule_on_nothing() -> list[Verdict]:
    joined = join(empty_inputs(), empty_outputs(), 2)
    return [
        no_duplicates(joined),
        no_losses(joined, {}),
        no_losses(joined, complete=True),
        no_unexpected_outputs(joined),
        order(joined),
        atomic(joined),
        atomic_transactions(joined),
        offsets_match_outputs(joined, {("flights", 0): 3}, {("flights", 0): 3}),
        no_aborted_seen(empty_outputs(), empty_outputs()),
        stable_end(Ends({}, {})),
        no_rewind(CommitSeries(topics=IN, topic=[], partition=[], offset=[])),
    ]


@pytest.mark.parametrize("verdict", every_rule_on_nothing(), ids=lambda v: v.rule)
def test_rule_that_examined_no_record_does_not_pass(verdict):
    assert (verdict.holds, verdict.examined, verdict.violations) == (False, 0, 0)
    assert verdict.sentence.startswith("examined nothing: there were no")


def test_empty_check_fails_because_it_examined_nothing():
    report = check(empty_inputs(), empty_outputs(), complete=True)
    assert not report.ok
    with pytest.raises(AssertionError, match="examined nothing"):
        report.raise_if_violated()


def test_disjoint_inputs_and_outputs_are_lost_and_unexpected():
    h = history(15)
    none_out = check(h.inputs, empty_outputs(), fan_out=2, complete=True)
    assert none_out["no_losses"].violations == 2 * len(h.inputs)
    assert not none_out["no_duplicates"].holds
    none_in = check(empty_inputs(), h.outputs, fan_out=2, complete=True)
    assert none_in["no_unexpected_outputs"].violations == len(h.outputs)
    assert none_in["no_duplicates"].holds


def test_run_without_commits_proves_nothing_about_losses():
    h = history(15)
    assert "examined nothing" in no_losses(join(h.inputs, h.outputs, 2), {}).sentence


def test_reader_without_records_proves_nothing():
    assert_only(history(15).check(seen=empty_outputs()), "no_aborted_seen", "examined nothing")


def test_single_observation_proves_nothing_about_rewinds():
    commits = CommitSeries(topics=IN, topic=[0, 0, 1], partition=[0, 1, 0], offset=[5, 3, 1])
    assert_only(history(15).check(commits=commits), "no_rewind", "examined nothing")


def test_report_without_verdicts_is_not_ok():
    with pytest.raises(AssertionError, match="nothing was checked"):
        Report(()).raise_if_violated()


# --- the rest of the contract


def test_fan_out_may_differ_per_input():
    h = history(16)
    single = np.arange(len(h.inputs)) % 2 == 0
    gone = of_kind = 2 * np.flatnonzero(single) + 1
    h.outputs, h.fan_out = without(h.outputs, gone), np.where(single, 1, 2)
    assert h.check(seen=None).ok
    assert h.check(seen=None)["atomic"].examined == len(h.inputs) - len(of_kind)
    h.fan_out = np.where(single, 0, 2)
    report = h.check(seen=None)
    assert not report["no_unexpected_outputs"].holds
    assert "which must have 0" in report["no_unexpected_outputs"].sentence


def test_single_input_and_output_pass_all_rules():
    inputs = Inputs(topics=("in",), topic=[0], partition=[0], offset=[0])
    one = {name: [0] for name in COLUMNS}
    assert check(inputs, Outputs(topics=("out",), **one), committed={("in", 0): 1}).ok


def test_losses_are_checked_only_with_offsets_or_complete_inputs():
    assert "no_losses" not in [v.rule for v in history(17).alone().verdicts]
    with pytest.raises(KeyError, match="was not checked"):
        history(17).alone()["no_losses"]


def test_repeated_input_is_refused():
    with pytest.raises(ValueError, match=r"in\[2\]@7 was read twice"):
        join(Inputs(topics=("in",), topic=[0, 0, 0], partition=[2, 1, 2], offset=[7, 7, 7]), empty_outputs())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"topic": [0, 2]}, "topic indexes"),
        ({"topic": [0, -1]}, "topic indexes"),
        ({"partition": [0, -1]}, "must not be below 0"),
        ({"offset": [0, -1]}, "must not be below 0"),
        ({"offset": [0]}, "unequal length"),
        ({"offset": [0.5, 1.0]}, "must hold integers"),
        ({"offset": [[0, 1]]}, "one dimension"),
        ({"partition": [0, 2**40]}, "do not fit"),
    ],
)
def test_invalid_arrays_are_refused(broken, said):
    good = {"topic": [0, 1], "partition": [0, 0], "offset": [0, 1]}
    with pytest.raises(ValueError, match=said):
        Inputs(topics=IN, **good | broken)


def test_reader_of_other_topics_is_refused():
    h = history(17)
    with pytest.raises(ValueError, match="concurrent reader"):
        no_aborted_seen(replace(h.seen, topics=("other", "topics")), h.outputs)


def test_examples_are_few_but_count_is_complete():
    h = history(18)
    report = check(h.inputs, empty_outputs(), fan_out=2, complete=True)
    assert len(report["no_losses"].examples) == 5
    assert report["no_losses"].violations == 2 * len(h.inputs)


def test_table_shows_rule_count_and_position():
    h = history(19)
    h.ends.stable["late", 2] -= 1
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(h.check().table())
    text = console.export_text()
    assert "stable_end" in text
    assert "late[2] is readable only up to" in text
    assert str(h.check()).count("\n") + 1 == len(h.check().verdicts)
