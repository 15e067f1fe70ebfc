"""Verifies a live cluster with the checker: does each committed input have its outputs?

Owns the order of reading: committed offsets first, then the outputs up to a later end, then the beginnings of the
partitions, because retention continues during the reads. It also owns the rules that lineage adds to the checker's. It
must never report an undecided rule as held, and never report records as lost that may have been removed. Outputs
without lineage, partitions that were committed without counts, and records that retention or compaction may have
removed become notes, not verdicts. `judge` is pure.

Known limits: it cannot see that a topic was compacted before but is not now. It does not find a second copy of an
output that was removed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eos.encoding import lineage
from eos.encoding.lineage import Tally
from eos.errors import Unavailable
from eos.testing import checker, history
from eos.testing.checker import EXAMPLES, Inputs, Outputs, Report, Verdict

Partition = tuple[str, int]
Progress = Callable[[str, int, int], None]
_POLL_S = 0.2
_MAX_NAMED = 3  # positions named in a note
_SILENT_WAIT_S = 1.0  # how long to wait for an open transaction before the wait is reported
_MARK = np.dtype([("partition", "<i4"), ("offset", "<i8"), ("i", "<i4"), ("n", "<i4"), ("number", "<i8")])
assert _MARK.itemsize == lineage.FORMAT.size, "the bulk reader and the writer must agree on the header's width"


@dataclass(frozen=True)
class Committed:
    """Holds a group's committed progress in one partition: all before `offset`; `tally` None: without lineage."""

    offset: int
    tally: Tally | None


@dataclass(frozen=True, eq=False)
class Marks:
    """Holds the sources of n outputs: arrays (n,); `topic` is an index into `topics`, `outputs` are the records."""

    topics: tuple[str, ...]
    topic: NDArray[np.int32]
    fields: NDArray[Any]
    outputs: Outputs

    def where(self, keep: NDArray[np.bool_]) -> Marks:
        return Marks(
            self.topics, self.topic[keep], self.fields[keep], self.outputs.take(np.flatnonzero(keep).astype(np.int64))
        )

    def __len__(self) -> int:
        return len(self.topic)


@dataclass(frozen=True)
class Verification:
    """Holds the result of `verify`.

    `report` has the verdicts, none if nothing could be decided. `notes` name what could not be decided, and why.
    `inputs` and `outputs` count the records that could be examined.
    """

    report: Report
    notes: tuple[str, ...]
    inputs: int
    outputs: int


@dataclass
class _Findings:
    examined: int = 0
    violations: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, count: int, examples: Iterator[str]) -> None:
        self.violations += count
        while count and len(self.examples) < EXAMPLES and (example := next(examples, None)) is not None:
            self.examples.append(example)

    def verdict(self, rule: str, what: str, good: str) -> Verdict:
        return checker.verdict(rule, self.examined, what, self.violations, self.examples, good)


def verify(
    bootstrap: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    group: str,
    config: Mapping[str, Any] | None = None,
    progress: Progress = lambda what, done, total: None,
    timeout_s: float = 60.0,
    on_wait: Callable[[str], None] = lambda sentence: None,
) -> Verification:
    """Verify the topics as they are now; workers may continue to run.

    Raises Unavailable for an unreachable cluster, a missing topic, or outputs that an open transaction keeps unreadable
    for `timeout_s`; `on_wait` is called with a sentence when that wait begins.
    """
    committed = {
        topic_partition: Committed(offset, lineage.tally_of(metadata))
        for topic_partition, (offset, metadata) in history.committed_with_metadata(
            bootstrap, group, inputs, config
        ).items()
    }
    # Query the ends after the offsets: the outputs of the covered inputs were written earlier, perhaps without their
    # markers yet.
    ends = _readable_ends(bootstrap, outputs, config, timeout_s, on_wait)
    read = history.read_topic(
        bootstrap,
        inputs,
        config=config,
        contents=False,
        upto={topic_partition: at.offset for topic_partition, at in committed.items()},
        progress=lambda done, total: progress("inputs", done, total),
    )
    written = history.read_topic(
        bootstrap,
        outputs,
        config=config,
        header=lineage.HEADER,
        contents=False,
        upto=ends,
        progress=lambda done, total: progress("outputs", done, total),
    )
    # Query the beginnings after both reads: records that retention removed between this query and a read would look
    # like a loss.
    begins = history.beginnings(bootstrap, inputs, config)
    output_begins = history.beginnings(bootstrap, outputs, config)
    policies = history.cleanup_policies(bootstrap, [*inputs, *outputs], config)
    compacted = [topic for topic, policy in policies.items() if policy is not None and "compact" in policy]
    marks, unmarked = extract_marks(written)
    found = judge(read.inputs(), marks, committed, begins, output_begins, compacted)
    notes = [
        f"the cleanup.policy of {topic} cannot be read: {topic} is treated as not compacted"
        for topic, policy in policies.items()
        if policy is None
    ]
    if len(unmarked):
        found = _without_unexpected_outputs(found)
        notes.append(_unmarked_note(written, unmarked))
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def _without_unexpected_outputs(found: Verification) -> Verification:
    """Drop a positive verdict of no_unexpected_outputs, because outputs without lineage have unknown sources.

    A violation stays."""
    kept = tuple(v for v in found.report.verdicts if v.rule != "no_unexpected_outputs" or not v.holds)
    return dataclasses.replace(found, report=Report(kept))


def _unmarked_note(written: history.Log, unmarked: NDArray[np.int64]) -> str:
    positions = [
        f"{written.topics[written.topic[i]]}[{written.partition[i]}]@{written.offset[i]}" for i in unmarked[:_MAX_NAMED]
    ]
    more = ", ..." if len(unmarked) > _MAX_NAMED else ""
    cause = "another program wrote them, or a worker before lineage was enabled"
    count = "1 output carries" if len(unmarked) == 1 else f"{len(unmarked):,} outputs carry"
    return f"{count} no lineage ({', '.join(positions)}{more}): {cause}; whether they have an input is not decided"


def _readable_ends(
    bootstrap: str,
    topics: Sequence[str],
    config: Mapping[str, Any] | None,
    timeout_s: float,
    on_wait: Callable[[str], None],
) -> dict[Partition, int]:
    """Return the current log ends, once a read_committed reader can read up to them."""
    ends = history.end_offsets(bootstrap, topics, config)
    report_at, deadline = time.monotonic() + _SILENT_WAIT_S, time.monotonic() + timeout_s
    stable = ends.stable
    while unreadable := {
        topic_partition: end for topic_partition, end in ends.log_end.items() if stable[topic_partition] < end
    }:
        (topic, partition), end = next(iter(unreadable.items()))
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{topic}[{partition}] is readable only up to {stable[topic, partition]}, but its log ended at {end} "
                f"{timeout_s:g} s ago: a transaction is open there"
            )
        if time.monotonic() > report_at:
            on_wait(f"a transaction is open on {topic}[{partition}]: waiting up to {timeout_s:g} s for its end")
            report_at = deadline
        time.sleep(_POLL_S)
        stable = history.end_offsets(bootstrap, topics, config).stable
    return dict(ends.log_end)


def extract_marks(written: history.Log) -> tuple[Marks, NDArray[np.int64]]:
    """Return the outputs that carry lineage, and the rows of those that do not."""
    headers = written.headers or []
    width = lineage.FORMAT.size
    marked = np.array([header is not None and len(header) > width for header in headers], np.bool_)
    found = [header for header in headers if header is not None and len(header) > width]
    fields = np.frombuffer(b"".join([header[:width] for header in found]), _MARK)
    names = [header[width:] for header in found]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    topic = np.array([numbers[name] for name in names], np.int32)
    rows = np.flatnonzero(marked)
    outputs = Outputs(
        topics=written.topics,
        topic=written.topic[rows],
        partition=written.partition[rows],
        offset=written.offset[rows],
        source_topic=topic,
        source_partition=fields["partition"],
        source_offset=fields["offset"],
        copy=fields["i"],
    )
    topics = tuple(name.decode(errors="replace") for name in numbers)
    return Marks(topics, topic, fields, outputs), np.flatnonzero(~marked).astype(np.int64)


def judge(
    inputs: Inputs,
    marks: Marks,
    committed: Mapping[Partition, Committed],
    begins: Mapping[Partition, int],
    output_begins: Mapping[Partition, int],
    compacted: Collection[str] = (),
) -> Verification:
    """Judge the inputs and outputs by their lineage.

    `inputs`: the readable records below the committed offsets. `begins` and `output_begins`: the first offset that each
    partition still holds. `compacted`: the topics from which compaction may have removed any record.
    """
    tallies = {topic_partition: at.tally for topic_partition, at in committed.items() if at.tally is not None}
    notes = [
        f"{topic}[{partition}] is committed at {at.offset} without lineage: not decided"
        for (topic, partition), at in committed.items()
        if at.tally is None
    ]
    removals = {
        topic_partition: begin
        for topic_partition, begin in output_begins.items()
        if begin > 0 or topic_partition[0] in compacted
    }
    lost, handled, examined = _Findings(), _Findings(), 0
    counted, judged, complete = (np.zeros(len(marks), np.bool_) for _ in range(3))
    covered = np.zeros(len(inputs), np.bool_)
    for topic_partition, tally in sorted(tallies.items()):
        name, end = f"{topic_partition[0]}[{topic_partition[1]}]", committed[topic_partition].offset
        begin = max(tally.begin, begins.get(topic_partition, 0))
        offsets = _offsets_of(inputs, topic_partition)
        covered |= _is_input_of(inputs, topic_partition) & (inputs.offset >= begin)
        offsets = offsets[offsets >= begin]
        examined += len(offsets)
        removed_note = _removed_inputs(tally, begin, len(offsets), topic_partition[0] in compacted)
        if removed_note:
            notes.append(f"{name}: {removed_note}; their outputs and the number of inputs cannot be checked")
        else:
            handled.examined += len(offsets)
            if len(offsets) != tally.inputs:
                what = f"{name} holds {len(offsets):,} inputs in {tally.begin}..{end - 1}"
                handled.add(abs(len(offsets) - tally.inputs), iter([f"{what}, {tally.inputs:,} were handled"]))
        before_end = _is_mark_of(marks, topic_partition) & (marks.fields["offset"] < end)
        within = before_end & (marks.fields["offset"] >= tally.begin)
        counted |= within
        known = within & (marks.fields["offset"] >= begin)
        if removed_note and topic_partition[0] in compacted:
            known &= np.isin(marks.fields["offset"], offsets)
        judged |= known
        missing = np.setdiff1d(np.arange(tally.outputs), marks.fields["number"][within])
        floor = _decidable_from(marks, before_end, tally, missing, removals, compacted)
        undecided, missing = missing[missing < floor], missing[missing >= floor]
        if len(undecided):
            what = f"{name}: {len(undecided):,} of its output numbers are not visible"
            notes.append(f"{what}, and {_explain_removal(removals, compacted)}: not decided")
        lost.examined += tally.outputs - floor
        lost.add(len(missing), _missing_sentences(topic_partition, missing, marks.fields[within], offsets, end))
        complete |= known & (marks.fields["number"] - marks.fields["i"] >= floor)
    if others := int(np.count_nonzero(~counted)):
        notes.append(f"{others:,} outputs belong to inputs that are not committed yet or are in other partitions")
    verdicts = []
    if handled.examined or handled.violations:
        verdicts.append(
            handled.verdict("all_inputs_counted", "committed inputs", "their number equals the number handled")
        )
    if lost.examined:
        verdicts.append(lost.verdict("no_losses", "counted outputs", "all are visible"))
    # Without any output to judge, these rules are violated. That is right if an output is lost, not if all were
    # removed.
    if judged.any() or lost.violations:
        verdicts += _joined_verdicts(inputs, covered, marks.where(judged), complete[judged])
    return Verification(Report(tuple(verdicts)), tuple(notes), examined, lost.examined)


def _removed_inputs(tally: Tally, begin: int, found: int, compacted: bool) -> str | None:
    """Return the cause that removed handled inputs of a partition, or None if they should all exist."""
    if begin > tally.begin:
        others = ", others maybe by compaction" if compacted else ""
        return f"inputs before {begin} were removed by retention{others}"
    if compacted and found < tally.inputs:
        return f"{tally.inputs - found:,} of {tally.inputs:,} inputs are missing, and the topic is compacted"
    return None


def _decidable_from(
    marks: Marks,
    before_end: NDArray[np.bool_],
    tally: Tally,
    missing: NDArray[np.int64],
    removals: Mapping[Partition, int],
    compacted: Collection[str],
) -> int:
    """Return an output number of an input partition: from this number on, a missing output is lost.

    The result is `tally.outputs` if this cannot be decided. The numbers of one input partition ascend within each
    output partition, and retention removes the oldest, so no number after the first visible one of a partition was
    removed. A compacted partition may lack any of them.
    """
    if not removals or not len(missing):
        return 0
    first = _first_rows(marks.outputs, np.flatnonzero(before_end))
    floor = 0
    for topic_partition in removals:
        row = first.get(topic_partition)
        if row is None or topic_partition[0] in compacted:
            return tally.outputs
        # An output from before the counting precedes all counted outputs. If the topic still has it, no counted output
        # was removed.
        if marks.fields["offset"][row] >= tally.begin:
            floor = max(floor, int(marks.fields["number"][row]))
    return min(floor, tally.outputs) if missing[0] < floor else 0


def _first_rows(outputs: Outputs, rows: NDArray[np.int64]) -> dict[Partition, int]:
    """Return the first of these outputs (in offset order, as read) in each output partition."""
    topic, partition = outputs.topic[rows].astype(np.int64), outputs.partition[rows]
    width = int(partition.max(initial=0)) + 1
    lanes, at = np.unique(topic * width + partition, return_index=True)
    positions = [(outputs.topics[lane // width], lane % width) for lane in lanes.tolist()]
    return dict(zip(positions, rows[at].tolist(), strict=True))


def _explain_removal(removals: Mapping[Partition, int], compacted: Collection[str]) -> str:
    """Return why outputs may have been removed."""
    reasons = dict.fromkeys(
        f"{topic} is compacted" if topic in compacted else f"{topic}[{partition}] no longer begins at 0 but at {begin}"
        for (topic, partition), begin in sorted(removals.items())
    )
    more = f" and {len(reasons) - _MAX_NAMED} more" if len(reasons) > _MAX_NAMED else ""
    return ", ".join(list(reasons)[:_MAX_NAMED]) + more


def _joined_verdicts(
    inputs: Inputs, covered: NDArray[np.bool_], marks: Marks, complete: NDArray[np.bool_]
) -> list[Verdict]:
    """Return the verdicts of the checker's rules; the marks give each input's number of outputs.

    `complete`: for each mark, whether all outputs of its input must still exist, because none can have been removed.
    """
    kept = inputs.take(np.flatnonzero(covered).astype(np.int64))
    index = {topic: number for number, topic in enumerate(kept.topics)}
    source = np.array([index.get(topic, -1) for topic in marks.topics], np.int32)
    outputs = dataclasses.replace(
        marks.outputs, source_topic=source[marks.topic] if len(marks) else marks.topic.astype(np.int32)
    )
    rows = checker.join(kept, outputs, 0)
    fan_out = np.zeros(len(kept), np.int64)
    known = rows.row >= 0
    np.maximum.at(fan_out, rows.row[known], marks.fields["n"][known])
    joined = checker.join(rows.inputs, outputs, fan_out)
    verdicts = [checker.no_duplicates(joined), checker.no_unexpected_outputs(joined), checker.order(joined)]
    removed = known & ~complete
    if removed.any():
        # Copies of these inputs may have been removed, so `atomic` must see inputs without outputs.
        fan_out[rows.row[removed]] = 0
        joined = checker.join(rows.inputs, outputs, fan_out)
    if (fan_out > 1).any():
        verdicts.append(checker.atomic(joined))
    return verdicts


def _missing_sentences(
    topic_partition: Partition, missing: NDArray[np.int64], fields: NDArray[Any], inputs: NDArray[np.int64], end: int
) -> Iterator[str]:
    """Yield a sentence for each missing output number.

    It identifies the output as precisely as the neighbouring outputs allow.
    """
    topic, partition = topic_partition
    fields = fields[np.argsort(fields["number"], kind="stable")]
    for number in missing:
        at = int(np.searchsorted(fields["number"], number))
        before = fields[at - 1] if at > 0 else None
        after = fields[at] if at < len(fields) else None
        what = f"output number {number} of {topic}[{partition}] is not visible"
        # A neighbour of the same input identifies the output: numbers are consecutive within the outputs of one input.
        if before is not None and (i := before["i"] + number - before["number"]) < before["n"]:
            yield f"{what}: it is output {i} of {topic}[{partition}]@{before['offset']}"
        elif after is not None and (i := after["i"] - after["number"] + number) >= 0:
            yield f"{what}: it is output {i} of {topic}[{partition}]@{after['offset']}"
        else:
            low = before["offset"] + 1 if before is not None else 0
            high = after["offset"] - 1 if after is not None else end - 1
            between = inputs[(inputs >= low) & (inputs <= high)]
            if len(between) == 1:
                yield f"{what}: it is an output of {topic}[{partition}]@{between[0]}"
            else:
                yield f"{what}: it is of one of the {len(between)} inputs in {topic}[{partition}]@{low}..{high}"


def _is_mark_of(marks: Marks, topic_partition: Partition) -> NDArray[np.bool_]:
    topic, partition = topic_partition
    number = marks.topics.index(topic) if topic in marks.topics else -1
    same: NDArray[np.bool_] = (marks.topic == number) & (marks.fields["partition"] == partition)
    return same


def _is_input_of(inputs: Inputs, topic_partition: Partition) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (inputs.topic == inputs.topics.index(topic_partition[0])) & (
        inputs.partition == topic_partition[1]
    )
    return same


def _offsets_of(inputs: Inputs, topic_partition: Partition) -> NDArray[np.int64]:
    return inputs.offset[_is_input_of(inputs, topic_partition)]
