"""Judges a consume-transform-produce run: did every input record take effect exactly once?

Owns the rules and the sentences about violations. It must never call Kafka (eos/testing/history.py reads the topics),
and never accept an empty history: a rule that examined nothing does not hold. It judges what a read_committed reader
finds after the run has come to rest. While markers are still being written, one output topic may show a transaction
before another does, and `atomic` would report that.

Known limits, because the arrays cannot show them: if compaction or retention removed inputs after they were handled,
their outputs look like outputs without an input, and removed outputs look like losses. Check topics that keep their
records.

For speed, an input record becomes a slot number (its offset counted from the first one of its partition, all partitions
laid end to end), and each expected copy of it becomes a cell. Then every rule counts cells; only `order` sorts, by a
small integer. For sparse offsets a binary search replaces the table of slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.table import Table

TopicPartition = tuple[str, int]
Position = tuple[str, int, int]  # topic, partition, offset
Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

EXAMPLES = 5  # examples per verdict; the count of violations is always complete
_TABLE_SLOTS_PER_RECORD = 8  # the maximum number of table slots per record; a larger range uses binary search
_SMALL_TABLE_SLOTS = 1 << 20


class Ends(NamedTuple):
    """Holds last stable offsets and log end offsets, each by (topic, partition)."""

    stable: Mapping[TopicPartition, int]
    log_end: Mapping[TopicPartition, int]


@dataclass(frozen=True, eq=False, kw_only=True)
class Records:
    """Holds the positions of n records: one array element per record, in any order unless a rule requires one.

    `topic` (n,) int32 is an index into `topics`; `partition` (n,) int32; `offset` (n,) int64. Accepts anything that
    numpy can convert to these without loss. Raises ValueError for unequal lengths or an impossible position.
    """

    topics: tuple[str, ...]
    topic: Int32s
    partition: Int32s
    offset: Int64s

    _lowest_offset: ClassVar[int] = 0
    _columns: ClassVar[dict[str, type[np.int32 | np.int64]]] = {
        "topic": np.int32,
        "partition": np.int32,
        "offset": np.int64,
    }

    def __post_init__(self) -> None:
        for name, dtype in self._columns.items():
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, _to_column(name, values, dtype))
        lengths = {name: len(getattr(self, name)) for name in self._columns if getattr(self, name) is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"columns of unequal length: {lengths}")
        if len(self) == 0:
            return
        if self.topic.min() < 0 or self.topic.max() >= len(self.topics):
            raise ValueError(f"topic indexes must be within 0..{len(self.topics) - 1}, the topics are {self.topics}")
        if self.partition.min() < 0 or self.offset.min() < self._lowest_offset:
            raise ValueError(f"partitions must not be below 0, offsets not below {self._lowest_offset}")

    def __len__(self) -> int:
        return len(self.offset)

    def position(self, i: int) -> Position:
        return self.topics[self.topic[i]], int(self.partition[i]), int(self.offset[i])

    def name(self, i: int) -> str:
        return _format_position(self.topics, self.topic[i], self.partition[i], self.offset[i])

    def take(self, order: Int64s) -> Self:
        """Return the same records in another order."""
        columns = {name: getattr(self, name) for name in self._columns}
        return replace(self, **{name: column[order] for name, column in columns.items() if column is not None})


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs(Records):
    """Holds the input records that a read_committed reader finds; each must be given only once.

    `transaction` (n,) int64, optional: a number for the transaction that handled the record last, -1 if unknown.
    """

    transaction: Int64s | None = None

    _columns = Records._columns | {"transaction": np.int64}


@dataclass(frozen=True, eq=False, kw_only=True)
class Outputs(Records):
    """Holds the visible output records, with the input of each.

    `source_topic` (n,) int32 is an index into the *inputs'* topics; `source_partition` (n,) int32; `source_offset` (n,)
    int64; `copy` (n,) int32, 0..fan_out-1. Sources may be any number: a nonexistent source violates
    `no_unexpected_outputs` and is not an error.
    """

    source_topic: Int32s
    source_partition: Int32s
    source_offset: Int64s
    copy: Int32s

    _columns = Records._columns | {
        "source_topic": np.int32,
        "source_partition": np.int32,
        "source_offset": np.int64,
        "copy": np.int32,
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class CommitSeries(Records):
    """Holds observed committed offsets of a group, in the order of observation; -1 stands for "none committed"."""

    _lowest_offset = -1


@dataclass(frozen=True, eq=False, kw_only=True)
class Counts:
    """Holds the outputs and the final state of a function that counts the records of each key.

    `keys` and `reported` (n,): each output's key, and the count that it reports, its own record included. `final`: the
    final counts in all of the function's changelogs, by (index of the source topic, partition, key).
    """

    keys: Sequence[bytes | None]
    reported: Int64s
    final: Mapping[tuple[int, int, bytes | None], int]


@dataclass(frozen=True)
class Verdict:
    """Holds the result of one rule; `examples` are one line each, for at most `EXAMPLES` of the `violations`.

    `about`: the inputs of the first example, for rules whose inputs cannot be found by counting outputs.
    """

    rule: str
    holds: bool
    examined: int
    violations: int
    sentence: str
    examples: tuple[str, ...] = ()
    about: tuple[Position, ...] = ()


class Violated(AssertionError):
    """Reports that the records in Kafka are not exactly once; unlike a timeout, no retry can correct this."""


@dataclass(frozen=True)
class Report:
    """Holds the verdicts of one check, in the order of the rules."""

    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        """Return whether every rule holds, and there was at least one."""
        return bool(self.verdicts) and all(v.holds for v in self.verdicts)

    @property
    def violated(self) -> tuple[str, ...]:
        """Return the names of the rules that do not hold."""
        return tuple(v.rule for v in self.verdicts if not v.holds)

    def __getitem__(self, rule: str) -> Verdict:
        for verdict in self.verdicts:
            if verdict.rule == rule:
                return verdict
        raise KeyError(f"{rule} was not checked; checked: {', '.join(v.rule for v in self.verdicts)}")

    def __str__(self) -> str:
        return "\n".join(f"{'ok ' if v.holds else 'RED'} {v.rule}: {v.sentence}" for v in self.verdicts)

    def table(self) -> Table:
        """Return the verdicts as a table to print with rich."""
        table = Table("rule", "", "examined", "violations", "what was found")
        for column in (2, 3):
            table.columns[column].justify = "right"
        for v in self.verdicts:
            mark = "[green]holds[/]" if v.holds else "[bold red]violated[/]"
            # rich reads square brackets as markup, and every position contains some
            sentence = v.sentence.replace("[", r"\[")
            table.add_row(v.rule, mark, f"{v.examined:,}", f"{v.violations:,}", sentence)
        return table

    def raise_if_violated(self) -> None:
        """Raise Violated with the first violated rule's sentence; the other violated rules are only named."""
        if self.ok:
            return
        first, *others = [f"{v.rule}: {v.sentence}" for v in self.verdicts if not v.holds] or ["nothing was checked"]
        also = f" (also violated: {', '.join(self.violated[1:])})" if others else ""
        raise Violated(first + also)


@dataclass(frozen=True, eq=False)
class Joined:
    """Holds inputs and outputs, joined once for all rules.

    `inputs` are sorted by topic, partition, offset. Input row r owns the cells starts[r]..starts[r+1]-1, one per
    expected copy. `row` and `cell` (one per output) are -1 for an output without an input. `times` (one per cell)
    counts how often the copy is visible.
    """

    inputs: Inputs
    outputs: Outputs
    fan_out: Int64s
    starts: Int64s
    row: Int64s
    cell: Int64s
    times: Int64s

    def visible_copies(self) -> Int64s:
        """Return the number of different visible copies of each input."""
        return self._per_input(self.times > 0)

    def _per_input(self, of_cells: Bools) -> Int64s:
        sums = np.zeros(len(of_cells) + 1, np.int64)
        np.cumsum(of_cells, out=sums[1:])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def copy_name(self, cell: int) -> str:
        row = int(np.searchsorted(self.starts, cell, side="right")) - 1
        return f"copy {cell - int(self.starts[row])} of {self.inputs.name(row)}"

    def positions_of(self, cell: int) -> str:
        found = np.flatnonzero(self.cell == cell)
        return " and ".join(self.outputs.name(int(i)) for i in found[:3]) + (" and more" if len(found) > 3 else "")

    def first_output_name(self, row: int) -> str:
        """Return the position of an input's first visible output."""
        return self.outputs.name(int(np.flatnonzero(self.row == row)[0]))

    def output_name(self, i: int) -> str:
        return f"{self.outputs.name(i)} (copy {self.outputs.copy[i]} of {self.source_name(i)})"

    def source_name(self, i: int) -> str:
        o = self.outputs
        return _format_position(self.inputs.topics, o.source_topic[i], o.source_partition[i], o.source_offset[i])


def join(inputs: Inputs, outputs: Outputs, fan_out: int | ArrayLike = 1) -> Joined:
    """Find the input of every output.

    `fan_out` is the number of outputs each input must have: one for all, or (n,) integers, one per given input (0: the
    function sends nothing for it). Raises ValueError for an input that is given twice, or a negative fan-out.
    """
    index = _Index(inputs)
    per_input = np.broadcast_to(np.asarray(fan_out), (len(inputs),)).astype(np.int64)
    if len(per_input) and per_input.min() < 0:
        raise ValueError("fan_out must not be negative")
    if index.order is not None:
        inputs, per_input = inputs.take(index.order), per_input[index.order]
    starts = np.zeros(len(inputs) + 1, np.int64)
    np.cumsum(per_input, out=starts[1:])
    row = index.rows(outputs.source_topic, outputs.source_partition, outputs.source_offset)
    if len(inputs):
        expected = (row >= 0) & (outputs.copy >= 0) & (outputs.copy < per_input[row])
        cell = np.where(expected, starts[row] + outputs.copy, -1)
    else:
        cell = np.full(len(outputs), -1, np.int64)
    # Count outputs without an input in an extra first cell, and cut that cell off. This avoids a second pass.
    times = np.bincount(cell + 1, minlength=int(starts[-1]) + 1)[1:]
    return Joined(inputs, outputs, per_input, starts, row, cell, times)


def no_duplicates(joined: Joined) -> Verdict:
    """Check that no (source, copy) is visible twice, including outputs without an input."""
    repeated = np.flatnonzero(joined.times > 1)
    extra = int((joined.times[repeated] - 1).sum())
    examples = [
        f"{joined.copy_name(c)} is visible {joined.times[c]} times: at {joined.positions_of(c)}"
        for c in repeated[:EXAMPLES]
    ]
    for first, second in _repeated_unexpected(joined):
        extra += 1
        names = f"{joined.outputs.name(first)} and {joined.outputs.name(second)}"
        examples.append(f"copy {joined.outputs.copy[first]} of {joined.source_name(first)} is visible at {names}")
    return verdict("no_duplicates", len(joined.outputs), "outputs", extra, examples, "none is visible twice")


def _repeated_unexpected(joined: Joined) -> list[tuple[int, int]]:
    """Return pairs of outputs that name the same source and copy, where no input exists to count them."""
    o = joined.outputs
    unexpected = np.flatnonzero(joined.cell < 0)
    columns = np.stack([o.copy[unexpected], o.source_offset[unexpected], o.source_partition[unexpected]])
    columns = np.vstack([columns, o.source_topic[unexpected]])
    order = np.lexsort(columns)
    same = np.flatnonzero((columns[:, order[1:]] == columns[:, order[:-1]]).all(axis=0))
    return [(int(unexpected[order[i]]), int(unexpected[order[i + 1]])) for i in same]


def no_losses(joined: Joined, committed: Mapping[TopicPartition, int] | None = None, complete: bool = False) -> Verdict:
    """Check that every input below its committed offset (with `complete`: every input) has all its copies."""
    due = np.ones(len(joined.inputs), np.bool_) if complete else _is_below_committed(joined.inputs, committed or {})
    due_cells = np.repeat(due, joined.fan_out)
    missing = np.flatnonzero(due_cells & (joined.times == 0))
    examples = [f"{joined.copy_name(c)} is not visible" for c in missing[:EXAMPLES]]
    examined = int(np.count_nonzero(due_cells))
    return verdict("no_losses", examined, "expected outputs", len(missing), examples, "all are visible")


def no_unexpected_outputs(joined: Joined) -> Verdict:
    """Check that every output comes from an existing input, and is one of the copies that the input must have."""
    unexpected = np.flatnonzero(joined.cell < 0)
    examples = []
    for i in unexpected[:EXAMPLES]:
        source, row = joined.source_name(i), joined.row[i]
        what = f"{joined.outputs.name(i)} claims to be copy {joined.outputs.copy[i]} of {source}"
        if row < 0:
            examples.append(f"{what}, which is not an input")
        else:
            examples.append(f"{what}, which must have {joined.fan_out[row]}, numbered from 0")
    return verdict(
        "no_unexpected_outputs", len(joined.outputs), "outputs", len(unexpected), examples, "each has its input"
    )


def order(joined: Joined) -> Verdict:
    """Check that each output partition has the outputs of a source partition in source offset order, then copy order.

    A second appearance of a copy belongs to no_duplicates and is ignored here: a replay is not a reordering.
    """
    o = joined.outputs
    parts, count = _number_partitions(o)
    source_parts, source_count = _number_partitions(joined.inputs)
    known = np.flatnonzero(joined.cell >= 0) if (joined.cell < 0).any() else slice(None)
    pair = parts[known].astype(np.int64) * source_count + source_parts[joined.row[known]]
    by_pair = _stable_argsort(pair, count * source_count)
    pair, offset, cell = pair[by_pair], o.offset[known][by_pair], joined.cell[known][by_pair]
    position = np.arange(len(o))[known][by_pair]
    if _descents(offset, pair).size:
        again = np.lexsort((offset, pair))
        pair, cell, position = pair[again], cell[again], position[again]
    if (joined.times > 1).any():
        first = _first_appearances(pair, cell)
        pair, cell, position = pair[first], cell[first], position[first]
    wrong = _descents(cell, pair)
    examples = [
        f"{joined.output_name(position[i])} comes after {joined.output_name(position[i - 1])}" for i in wrong[:EXAMPLES]
    ]
    about = [joined.inputs.position(joined.row[position[i - back]]) for i in wrong[:1] for back in (0, 1)]
    return verdict("order", len(o), "outputs", len(wrong), examples, "all are in the order of their sources", about)


def atomic(joined: Joined) -> Verdict:
    """Check that each input has either all of its copies or none, across all output topics.

    Only inputs with several outputs are examined.
    """
    visible = joined.visible_copies()
    incomplete = np.flatnonzero((visible > 0) & (visible < joined.fan_out))
    examples = []
    for row in incomplete[:EXAMPLES]:
        times = joined.times[joined.starts[row] : joined.starts[row + 1]]
        missing = ", ".join(str(copy) for copy in np.flatnonzero(times == 0))
        examples.append(
            f"{joined.inputs.name(row)} is incomplete: copy {missing} is missing, but "
            f"{joined.first_output_name(row)} is visible"
        )
    examined = int(np.count_nonzero(joined.fan_out > 1))
    return verdict(
        "atomic",
        examined,
        "inputs with several outputs",
        len(incomplete),
        examples,
        "each is completely visible or not at all",
    )


def atomic_transactions(joined: Joined) -> Verdict:
    """Check that either all outputs of each transaction in `Inputs.transaction` are visible, or none of them."""
    transaction = joined.inputs.transaction
    if transaction is None:
        raise ValueError("the inputs do not name the transactions that handled them")
    numbered = np.flatnonzero(transaction >= 0)
    numbers, group = np.unique(transaction[numbered], return_inverse=True)
    expected = np.bincount(group, weights=joined.fan_out[numbered]).astype(np.int64)
    visible = np.bincount(group, weights=joined.visible_copies()[numbered]).astype(np.int64)
    incomplete = np.flatnonzero((visible > 0) & (visible < expected))
    examples = []
    for t in incomplete[:EXAMPLES]:
        cells = np.repeat(transaction == numbers[t], joined.fan_out)
        lost = joined.copy_name(int(np.flatnonzero(cells & (joined.times == 0))[0]))
        examples.append(
            f"transaction {numbers[t]} is incomplete: {visible[t]} of its {expected[t]} outputs are visible, "
            f"{lost} is not"
        )
    examined = int(np.count_nonzero(expected))
    return verdict(
        "atomic_transactions",
        examined,
        "transactions",
        len(incomplete),
        examples,
        "each is completely visible or not at all",
    )


def offsets_match_outputs(
    joined: Joined, committed: Mapping[TopicPartition, int], log_end: Mapping[TopicPartition, int] | None = None
) -> Verdict:
    """Check that all inputs below the committed offset have a visible output, and that no input at or above it has one.

    A partition without a committed offset counts as committed at its beginning. With `log_end` it also checks that no
    committed offset exceeds the end of its input partition, where the group would skip future records.
    """
    below, visible = _is_below_committed(joined.inputs, committed), joined.visible_copies() > 0
    expected = joined.fan_out > 0
    ahead = np.flatnonzero(below & ~visible & expected)
    behind = np.flatnonzero(~below & visible)
    examples = []
    for row in behind[:EXAMPLES]:
        examples.append(
            f"{joined.inputs.name(row)} has the visible output {joined.first_output_name(row)}, but its partition is "
            f"{_describe_commit(joined.inputs, row, committed)}: a restart would handle it again"
        )
    for row in ahead[:EXAMPLES]:
        examples.append(
            f"{joined.inputs.name(row)} has no visible output, but its partition is "
            f"{_describe_commit(joined.inputs, row, committed)}: no worker will handle it"
        )
    beyond = {at: end for at, end in (log_end or {}).items() if committed.get(at, -1) > end}
    for (topic, partition), end in list(beyond.items())[:EXAMPLES]:
        examples.append(f"{topic}[{partition}] is committed at {committed[topic, partition]}, after its end at {end}")
    examined, violations = int(np.count_nonzero(expected)), len(ahead) + len(behind) + len(beyond)
    about = [joined.inputs.position(row) for row in [*behind[:1], *ahead[:1]][:1]]
    return verdict(
        "offsets_match_outputs", examined, "inputs", violations, examples, "outputs and committed offsets match", about
    )


def no_aborted_seen(seen: Outputs, outputs: Outputs, sources: tuple[str, ...] = ()) -> Verdict:
    """Check that records which a read_committed reader got during the run still exist, and came once and in order.

    `seen` is in the order of delivery; `outputs` is the final read of the same topics. A record that was seen and no
    longer exists was aborted (or truncated) after a reader used it; one that now has another source was replaced.
    `sources`: the topics of the inputs, to name the sources.
    """
    if seen.topics != outputs.topics:
        raise ValueError(f"the concurrent reader read {seen.topics}, but the final one read {outputs.topics}")
    index = _Index(outputs)
    final = index.rows(seen.topic, seen.partition, seen.offset)
    if index.order is not None and len(outputs):
        final = np.where(final >= 0, index.order[final], -1)
    missing = np.flatnonzero(final < 0)
    examples = [f"{seen.name(i)} was delivered but no longer exists: it was aborted" for i in missing[:EXAMPLES]]
    found = np.flatnonzero(final >= 0)
    changed = np.zeros(len(found), np.bool_)
    for column in ("source_topic", "source_partition", "source_offset", "copy"):
        changed |= getattr(seen, column)[found] != getattr(outputs, column)[final[found]]
    replaced = found[changed]
    examples += [
        f"{seen.name(i)} was delivered with a different source from its present one" for i in replaced[:EXAMPLES]
    ]
    parts, count = _number_partitions(seen)
    by_part = _stable_argsort(parts, count)
    back = _descents(seen.offset[by_part], parts[by_part], or_equal=True)
    examples += [
        f"{seen.name(by_part[i])} was delivered after {seen.name(by_part[i - 1])} of the same partition"
        for i in back[:EXAMPLES]
    ]
    violations = len(missing) + len(replaced) + len(back)
    about = []
    for i in [*missing[:1], *replaced[:1], *by_part[back[:1]]][:1]:
        if 0 <= seen.source_topic[i] < len(sources):
            about.append((sources[seen.source_topic[i]], int(seen.source_partition[i]), int(seen.source_offset[i])))
    good = "all still exist, once and in order"
    return verdict("no_aborted_seen", len(seen), "delivered records", violations, examples, good, about)


def stable_end(ends: Ends) -> Verdict:
    """Check that every partition is readable to its end after all producers have stopped. A hanging transaction
    prevents that."""
    partitions = sorted({*ends.stable, *ends.log_end})
    examples = []
    for topic, partition in partitions:
        stable, end = ends.stable.get((topic, partition)), ends.log_end.get((topic, partition))
        if stable is None or end is None:
            examples.append(f"{topic}[{partition}] has only one of its two ends: stable {stable}, log end {end}")
        elif stable != end:
            examples.append(
                f"{topic}[{partition}] is readable only up to {stable}, its log ends at {end}: a transaction is open"
            )
    return verdict(
        "stable_end", len(partitions), "partitions", len(examples), examples, "each is readable to the end of its log"
    )


def no_rewind(commits: CommitSeries) -> Verdict:
    """Check that a partition's committed offset never goes back.

    It examines the steps between two observations of a partition. `about` has the last input record before each of the
    two commits.
    """
    parts, count = _number_partitions(commits)
    by_part = _stable_argsort(parts, count)
    parts, offset = parts[by_part], commits.offset[by_part]
    back = _descents(offset, parts)
    examples: list[str] = []
    about: list[Position] = []
    for i in back[:EXAMPLES]:
        topic, partition, now = commits.position(by_part[i])
        before = int(offset[i - 1])
        examples.append(f"{topic}[{partition}] went back from {before} to {now} (observation {by_part[i]})")
        about = about or [(topic, partition, end - 1) for end in (before, now) if end > 0]
    steps = int(np.count_nonzero(parts[1:] == parts[:-1]))
    return verdict(
        "no_rewind", steps, "steps of committed offsets", len(back), examples, "no committed offset went back", about
    )


def state(outputs: Outputs, counts: Counts, sources: tuple[str, ...]) -> Verdict:
    """Check that a function's count for each key matches its visible outputs, at each output and at the end.

    A change that survived its aborted transaction shows in the next output of its key, as does a lost change.
    `sources`: the topics of the inputs.
    """
    names, key = np.unique(np.array([repr(k) for k in counts.keys], object), return_inverse=True)
    by_key = np.lexsort((outputs.source_offset, key, outputs.source_partition, outputs.source_topic))
    columns = np.stack([outputs.source_topic, outputs.source_partition, key, outputs.source_offset])[:, by_key]
    differs = np.ones((4, len(outputs)), np.bool_)
    differs[:, 1:] = columns[:, 1:] != columns[:, :-1]
    new_key = differs[:3].any(axis=0)
    seen = np.cumsum(differs.any(axis=0))  # copies, and outputs that are visible twice, count once
    begins = np.flatnonzero(new_key)
    expected_counts: Int64s = seen - np.repeat(seen[begins] - 1, np.diff([*begins, len(outputs)]))
    reported = np.asarray(counts.reported, np.int64)[by_key]
    wrong = np.flatnonzero(reported != expected_counts)
    examples: list[str] = []
    about: list[Position] = []
    for i in wrong[:EXAMPLES]:
        row = by_key[i]
        topic, partition, offset = (int(columns[c, i]) for c in (0, 1, 3))
        source = _format_position(sources, topic, partition, offset)
        examples.append(
            f"{outputs.name(row)}, of {source}, counts {reported[i]} of {names[key[row]]}, but "
            f"{expected_counts[i]} are visible"
        )
        about += [(sources[topic], partition, offset)] if 0 <= topic < len(sources) and not about else []
    ends = [*(begins[1:] - 1), len(outputs) - 1] if len(outputs) else []
    last = {(*map(int, columns[:2, i]), counts.keys[by_key[i]]): int(expected_counts[i]) for i in ends}
    stale = [at for at in {**last, **counts.final} if last.get(at) != counts.final.get(at)]
    for topic, partition, name in stale[:EXAMPLES]:
        at = topic, partition, name
        left, there = counts.final.get(at, "nothing"), last.get(at, "none")
        position = f"{sources[topic] if 0 <= topic < len(sources) else topic}[{partition}]"
        examples.append(f"the changelog holds {left} for {name!r} in {position}, but {there} are visible")
    examined = len(outputs) + len(last.keys() | counts.final.keys())
    violations, good = len(wrong) + len(stale), "each equals the number of its key's records"
    return verdict("state", examined, "counts", violations, examples, good, about)


def check(
    inputs: Inputs,
    outputs: Outputs,
    *,
    fan_out: int | ArrayLike = 1,
    committed: Mapping[TopicPartition, int] | None = None,
    complete: bool = False,
    ends: Ends | None = None,
    seen: Outputs | None = None,
    commits: CommitSeries | None = None,
    counts: Counts | None = None,
) -> Report:
    """Run every rule for which there is something to examine.

    `committed`: the group's stable committed offsets by (topic, partition), partitions without one left out.
    `complete`: the run should have handled every input. Without `committed` and `complete`, a loss looks like
    unfinished work, so `no_losses` is left out. `ends`: of inputs, outputs, or both. `seen`: the records of a
    concurrent reader. `commits`: observed committed offsets. `counts`: of a function with state. Raises ValueError for
    arrays that do not describe a history (an input read twice).
    """
    joined = join(inputs, outputs, fan_out)
    verdicts = [no_duplicates(joined)]
    if complete or committed is not None:
        verdicts.append(no_losses(joined, committed, complete))
    verdicts += [no_unexpected_outputs(joined), order(joined)]
    if (joined.fan_out > 1).any():
        verdicts.append(atomic(joined))
    if inputs.transaction is not None:
        verdicts.append(atomic_transactions(joined))
    if committed is not None:
        verdicts.append(offsets_match_outputs(joined, committed, ends.log_end if ends else None))
    if seen is not None:
        verdicts.append(no_aborted_seen(seen, outputs, inputs.topics))
    if ends is not None:
        verdicts.append(stable_end(ends))
    if commits is not None:
        verdicts.append(no_rewind(commits))
    if counts is not None:
        verdicts.append(state(outputs, counts, inputs.topics))
    return Report(tuple(verdicts))


class _Index:
    """Indexes records by (topic, partition, offset). Raises ValueError if one of them appears twice.

    `order` sorts the records by position, or is None if they are sorted already; `rows` refers to the sorted order.
    """

    def __init__(self, records: Records) -> None:
        parts, self._part_count = _number_partitions(records)
        self._partitions = self._part_count // max(len(records.topics), 1)
        self.order = None
        offset = records.offset
        if len(records) and (_is_ascending(parts, offset) is False):
            self.order = _stable_argsort(parts, self._part_count)
            if _descents(offset[self.order], parts[self.order]).size:
                self.order = np.lexsort((offset, parts))
            parts, offset = parts[self.order], offset[self.order]
        repeated = np.flatnonzero((parts[1:] == parts[:-1]) & (offset[1:] == offset[:-1]))
        if repeated.size:
            i = repeated[0] if self.order is None else self.order[repeated[0]]
            raise ValueError(f"{records.name(int(i))} was read twice")
        edges = np.searchsorted(parts, np.arange(self._part_count + 1))
        filled = edges[1:] > edges[:-1]
        self._firsts = np.zeros(self._part_count, np.int64)
        self._lasts = np.full(self._part_count, -1, np.int64)  # -1: the partition has no record
        self._firsts[filled], self._lasts[filled] = offset[edges[:-1][filled]], offset[edges[1:][filled] - 1]
        spans = self._lasts - self._firsts + 1
        if float(spans.sum(dtype=np.float64)) > 2.0**62:
            raise ValueError("the offset ranges are too large for the checker: more than 2**62 offsets")
        self._shift = np.cumsum(spans) - spans - self._firsts
        slots = offset + self._shift[parts]
        total = int(spans.sum())
        self._sorted: Int64s | None = None
        if total <= max(_TABLE_SLOTS_PER_RECORD * len(records), _SMALL_TABLE_SLOTS):
            # Use 32 bits if they suffice. Lookups wait for memory, and 32 bits halve it.
            dtype = np.int32 if len(records) < 1 << 31 else np.int64
            self._table = np.full(total, -1, dtype)
            self._table[slots] = np.arange(len(slots), dtype=dtype)
        else:
            self._sorted = slots

    def rows(self, topic: Int32s, partition: Int32s, offset: Int64s) -> Int64s:
        """Return the row of each record in sorted order, or -1 if the record does not exist."""
        if not self._part_count or not self._lasts.max(initial=-1) >= 0:
            return np.full(len(offset), -1, np.int64)
        # Compare the numbers before the multiplication, so that a nonexistent partition cannot become another topic's
        # number.
        known = (topic >= 0) & (topic < self._part_count // self._partitions)
        known &= (partition >= 0) & (partition < self._partitions)
        part = topic * np.int32(self._partitions) + partition
        if not known.all():
            part[~known] = 0
        known &= (offset >= self._firsts[part]) & (offset <= self._lasts[part])
        slot = offset + self._shift[part]
        if not known.all():
            slot[~known] = 0
        if self._sorted is None:
            return np.where(known, self._table[slot], np.int64(-1))
        row = np.minimum(np.searchsorted(self._sorted, slot), len(self._sorted) - 1)
        return np.where(known & (self._sorted[row] == slot), row, -1)


def _to_column(name: str, values: ArrayLike, dtype: type[np.int32 | np.int64]) -> NDArray[Any]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not {array.ndim}")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, not {array.dtype}")
    converted = np.ascontiguousarray(array, dtype)
    if array.dtype.itemsize > converted.dtype.itemsize and not np.array_equal(array, converted):
        raise ValueError(f"{name} holds numbers that do not fit {converted.dtype}")
    return converted


def _format_position(topics: tuple[str, ...], topic: int, partition: int, offset: int) -> str:
    name = topics[topic] if 0 <= topic < len(topics) else f"topic #{topic}"
    return f"{name}[{partition}]@{offset}"


def _number_partitions(records: Records) -> tuple[Int32s, int]:
    """Return each record's partition as one number over all topics, and how many such numbers there are."""
    partitions = int(records.partition.max(initial=-1)) + 1
    if len(records.topics) * partitions > 1 << 24:
        raise ValueError(f"{len(records.topics)} topics with {partitions} partitions are more than any cluster has")
    return records.topic * np.int32(partitions) + records.partition, len(records.topics) * partitions


def _stable_argsort(values: NDArray[np.int32 | np.int64], limit: int) -> Int64s:
    """Return the argsort of numbers in 0..limit-1, stable; 16-bit numbers get numpy's radix sort."""
    return np.argsort(values.astype(np.uint16) if limit <= 1 << 16 else values, kind="stable")


def _is_ascending(parts: Int32s, offset: Int64s) -> bool:
    same = parts[1:] == parts[:-1]
    return bool(((parts[1:] > parts[:-1]) | (same & (offset[1:] >= offset[:-1]))).all())


def _descents(values: Int64s, group: NDArray[np.int32 | np.int64], or_equal: bool = False) -> Int64s:
    """Return positions i whose value is below the previous one in the same group (contiguous in both arrays)."""
    wrong = values[1:] <= values[:-1] if or_equal else values[1:] < values[:-1]
    return np.flatnonzero(wrong & (group[1:] == group[:-1])) + 1


def _first_appearances(pair: Int64s, cell: Int64s) -> Int64s:
    """Return the positions of the first record of each (pair, cell), in their order."""
    by_cell = np.lexsort((cell, pair))  # stable: equal numbers stay in the order of the partition
    repeated = (pair[by_cell[1:]] == pair[by_cell[:-1]]) & (cell[by_cell[1:]] == cell[by_cell[:-1]])
    keep = np.ones(len(cell), np.bool_)
    keep[by_cell[1:][repeated]] = False
    return np.flatnonzero(keep)


def _is_below_committed(inputs: Inputs, committed: Mapping[TopicPartition, int]) -> Bools:
    """Return an array that is true for the inputs below the committed offset of their partition."""
    parts, count = _number_partitions(inputs)
    partitions = count // max(len(inputs.topics), 1)
    floor = np.zeros(count, np.int64)
    for (topic, partition), offset in committed.items():
        if topic in inputs.topics and 0 <= partition < partitions:
            floor[inputs.topics.index(topic) * partitions + partition] = offset
    return inputs.offset < floor[parts]


def _describe_commit(inputs: Inputs, row: int, committed: Mapping[TopicPartition, int]) -> str:
    offset = committed.get((inputs.topics[inputs.topic[row]], int(inputs.partition[row])))
    return "not committed at all" if offset is None else f"committed at {offset}"


def verdict(
    rule: str, examined: int, what: str, violations: int, examples: list[str], good: str, about: Sequence[Position] = ()
) -> Verdict:
    """Return the verdict of a rule; only this function decides that a rule holds, and never if nothing was examined."""
    if violations:
        count = "1 violation" if violations == 1 else f"{violations:,} violations"
        sentence = f"{count} in {examined:,} {what}: {examples[0]}"
    elif examined:
        sentence = f"{examined:,} {what}: {good}"
    else:
        sentence = f"examined nothing: there were no {what}"
    holds = examined > 0 and not violations
    return Verdict(rule, holds, examined, violations, sentence, tuple(examples[:EXAMPLES]), tuple(about))
