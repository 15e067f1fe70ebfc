"""Lineage and `eos verify`: a filtered input is not a lost output, and each kind of damage is reported."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eos.app.definition import App
from eos.app.lineage import Ledger, check_route, with_lineage
from eos.app.routes import feed_from
from eos.cli.verify import NothingToExamine, _print_result
from eos.encoding.lineage import HEADER, Source, Tally, decode, encode, tally_of
from eos.engine.handling import Collector
from eos.errors import ConfigurationError
from eos.records import FeedResult, Out, Record
from eos.testing import verify as verifying
from eos.testing.checker import Ends
from eos.testing.history import Log
from eos.testing.verify import Committed, Verification, extract_marks, judge, verify

# ---- formats ---------------------------------------------------------------------------------------------------


@given(
    st.builds(
        Source,
        st.text(min_size=1, max_size=20),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**63 - 1),
    )
)
def test_source_round_trips_through_header(source: Source) -> None:
    assert decode(encode(source)) == source


@pytest.mark.parametrize("header", [b"", b"x" * 28])
def test_foreign_header_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="cannot name a source"):
        decode(header)


@pytest.mark.parametrize(
    "metadata", [None, "", "x", "[]", "{}", '{"lineage": 5}', '{"lineage": [1, 2]}', '{"lineage": ["1", 2, 3]}']
)
def test_foreign_metadata_is_ignored(metadata: str | None) -> None:
    assert tally_of(metadata) is None


def test_metadata_of_later_format_is_ignored() -> None:
    assert tally_of('{"lineage": [1, 2, 3]}') == tally_of('{"v": 1, "news": 0, "lineage": [1, 2, 3]}') == Tally(1, 2, 3)
    assert tally_of('{"v": 2, "lineage": [1, 2, 3]}') is None


# ---- counting --------------------------------------------------------------------------------------------------

A = ("a", 0)


def written(ledger: Ledger) -> str:
    return json.dumps({"instance": "x", **ledger.offset_metadata(A)})


def test_counts_continue_after_the_last_commit() -> None:
    first = Ledger()
    first.begin(A, 7, None)
    assert [first.count(A, n) for n in (2, 0, 3)] == [0, 2, 2]
    metadata = written(first)
    first.committed()
    second = Ledger()
    second.begin(A, 10, metadata)
    assert second.count(A, 1) == 5
    assert second.tally(A) == Tally(7, 4, 6)


def test_counts_restart_after_commit_of_another_client() -> None:
    """confluent-kafka returns offset metadata of Kafka Streams with the memory after its end, which is not UTF-8."""

    class ReadTooFar:
        offset = 7

        @property
        def metadata(self) -> str:
            return b"AgAAAaIVOt3w\xfc".decode()

    ledger = Ledger()
    assert ledger.restore({A: ReadTooFar()}, ()) == {A}
    assert ledger.tally(A) == Tally(7)


def test_aborted_counts_are_counted_again() -> None:
    ledger = Ledger()
    ledger.begin(A, 0, None)
    ledger.count(A, 1)
    ledger.committed()
    ledger.count(A, 5)
    ledger.aborted()
    assert (ledger.count(A, 1), ledger.tally(A)) == (1, Tally(0, 2, 2))


def test_partition_that_begins_again_drops_uncommitted_counts() -> None:
    ledger = Ledger()
    ledger.begin(A, 0, None)
    ledger.count(A, 5)
    ledger.begin(A, 3, '{"lineage": [0, 3, 4]}')
    assert ledger.tally(A) == Tally(0, 3, 4)


# ---- the feed --------------------------------------------------------------------------------------------------


def feed(function: Callable[[Record], Any], records: list[Record]) -> tuple[list[Any], FeedResult, Ledger]:
    app, ledger, kept = App("app"), Ledger(), Collector()
    app.process("a", to="out")(function)
    ledger.begin(A, 0, None)
    fed = feed_from(with_lineage(app.routes["a"].each, ledger))(records, kept)
    return kept.sends, fed, ledger


RECORDS = [Record("a", 0, offset, 5, b"k", b"v") for offset in (3, 4, 8)]


def test_each_output_names_its_input_and_keeps_its_headers() -> None:
    results = {3: [Out(b"x", headers=[("h", b"1")]), b"y"], 4: None, 8: b"z"}
    put, fed, ledger = feed(lambda record: results[record.offset], RECORDS)
    assert [send[1] for send in put] == [b"x", b"y", b"z"]
    assert put[0][5][0] == ("h", b"1")
    assert [send[5][-1][0] for send in put] == [HEADER] * 3
    assert [decode(send[5][-1][1]) for send in put] == [
        Source("a", 0, 3, 0, 2, 0),
        Source("a", 0, 3, 1, 2, 1),
        Source("a", 0, 8, 0, 1, 2),
    ]
    assert (fed, ledger.tally(A)) == (FeedResult(3, 3, None), Tally(0, 3, 3))


def test_failing_record_is_not_counted() -> None:
    put, fed, ledger = feed(lambda record: b"x" if record.offset < 8 else 1 // 0, RECORDS)
    assert (len(put), fed.sent, fed.handled, type(fed.error)) == (2, 2, 2, ZeroDivisionError)
    assert ledger.tally(A) == Tally(0, 2, 2)


def test_lineage_refuses_batch_function() -> None:
    app = App("app")
    app.process_batch("a", to="out")(lambda records: [])
    with pytest.raises(ConfigurationError, match="which record an output came from"):
        check_route(app.routes["a"])


# ---- judging ---------------------------------------------------------------------------------------------------

PER_INPUT = (1, 0, 2, 1, 0, 0, 3)  # number of outputs of each input of a partition, repeated
COUNT = 21


class History:
    """A correct history: two input partitions of 21 records each, some filtered, and two output partitions."""

    def __init__(self) -> None:
        self.inputs = [(p, o) for p in range(2) for o in range(COUNT)]
        self.sources: list[Source] = []
        for p in range(2):
            number = 0
            for o in range(COUNT):
                n = PER_INPUT[o % len(PER_INPUT)]
                self.sources += [Source("in", p, o, i, n, number + i) for i in range(n)]
                number += n
        outputs = sum(PER_INPUT) * COUNT // len(PER_INPUT)
        self.committed = {("in", p): Committed(COUNT, Tally(0, COUNT, outputs)) for p in range(2)}
        self.begins = {("in", 0): 0, ("in", 1): 0}
        self.output_begins = {("out", 0): 0, ("out", 1): 0}
        self.compacted: tuple[str, ...] = ()
        self.output_partition: Callable[[Source], int] = lambda source: source.partition
        self.unmarked = 0

    def judged(self) -> Verification:
        inputs = log_of("in", self.inputs).inputs()
        headers: list[bytes | None] = [encode(source) for source in self.sources]
        headers += [None] * self.unmarked
        output_partitions = [self.output_partition(source) for source in self.sources] + [0] * self.unmarked
        marks, unmarked = extract_marks(
            log_of("out", list(zip(output_partitions, range(len(output_partitions)), strict=True)), headers)
        )
        assert len(unmarked) == self.unmarked
        return judge(inputs, marks, self.committed, self.begins, self.output_begins, self.compacted)

    def cut(self, output_partition: int, count: int) -> list[Source]:
        """Remove the oldest outputs of an output partition, as retention does, and return them."""
        gone = [source for source in self.sources if self.output_partition(source) == output_partition][:count]
        self.sources = [source for source in self.sources if source not in gone]
        self.output_begins["out", output_partition] = count
        return gone

    def index(self, partition: int, offset: int, i: int) -> int:
        return next(k for k, s in enumerate(self.sources) if (s.partition, s.offset, s.i) == (partition, offset, i))

    def drop(self, partition: int, offset: int, *which: int) -> None:
        for i in which:
            del self.sources[self.index(partition, offset, i)]


@pytest.fixture
def history() -> History:
    return History()


def log_of(topic: str, positions: list[tuple[int, int]], headers: list[bytes | None] | None = None) -> Log:
    columns = np.array(positions, np.int64).reshape(-1, 2)
    return Log(
        topics=(topic,),
        topic=np.zeros(len(columns), np.int32),
        partition=columns[:, 0].astype(np.int32),
        offset=columns[:, 1],
        timestamp=np.zeros(len(columns), np.int64),
        keys=[],
        values=[],
        headers=headers,
    )


def test_verify_passes_a_history_with_filtered_inputs() -> None:
    found = History().judged()
    assert found.report.ok, str(found.report)
    assert (found.inputs, found.outputs, found.notes) == (42, 42, ())
    assert {v.rule for v in found.report.verdicts} == {
        "all_inputs_counted", "no_losses", "no_duplicates", "no_unexpected_outputs", "order", "atomic"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ((0, 2, [0]), "it is output 0 of in[0]@2"),
        ((0, 2, [1]), "it is output 1 of in[0]@2"),
        ((1, 6, [1]), "it is output 1 of in[1]@6"),
        ((0, 0, [0]), "it is of one of the 2 inputs in in[0]@0..1"),
        ((0, 3, [0]), "it is of one of the 3 inputs in in[0]@3..5"),
        ((1, 20, [0, 1, 2]), "it is of one of the 3 inputs in in[1]@18..20"),
    ],
)
def test_lost_output_is_identified_by_its_neighbours(
    history: History, lost: tuple[int, int, list[int]], named: str
) -> None:
    partition, offset, which = lost
    history.drop(partition, offset, *which)
    report = history.judged().report
    assert "no_losses" in report.violated
    assert report["no_losses"].violations == len(which)
    assert any(named in example for example in report["no_losses"].examples), report["no_losses"].examples


def test_input_with_some_outputs_lost_is_incomplete(history: History) -> None:
    history.drop(0, 6, 1)
    report = history.judged().report
    assert report.violated == ("no_losses", "atomic")
    assert "in[0]@6 is incomplete: copy 1 is missing" in report["atomic"].sentence


def test_report_names_the_duplicate_output(history: History) -> None:
    history.sources.append(history.sources[history.index(1, 2, 0)])
    report = history.judged().report
    assert "no_duplicates" in report.violated
    assert "in[1]@2" in report["no_duplicates"].sentence
    assert report["no_losses"].holds


def test_filtered_inputs_are_no_loss_but_missing_outputs_are(history: History) -> None:
    kept = [s for s in history.sources if s.offset % 2 == 0]
    recounted: dict[int, int] = {0: 0, 1: 0}
    filtered = []
    for source in kept:
        filtered.append(source._replace(number=recounted[source.partition]))
        recounted[source.partition] += 1
    lost = History()
    lost.sources = kept
    assert not lost.judged().report["no_losses"].holds
    history.sources = filtered
    history.committed = {("in", p): Committed(COUNT, Tally(0, COUNT, recounted[p])) for p in range(2)}
    assert history.judged().report.ok


def test_verify_passes_if_all_inputs_were_filtered(history: History) -> None:
    history.sources = []
    history.committed = {place: Committed(COUNT, Tally(0, COUNT, 0)) for place in history.committed}
    found = history.judged()
    assert (found.report.ok, found.inputs, found.outputs) == (True, 42, 0)


def test_unhandled_input_is_a_violation(history: History) -> None:
    history.committed["in", 0] = Committed(COUNT, Tally(0, COUNT - 1, history.committed["in", 0].tally.outputs))  # type: ignore[union-attr]
    report = history.judged().report
    assert report.violated == ("all_inputs_counted",)
    assert "in[0] holds 21 inputs in 0..20, 20 were handled" in report["all_inputs_counted"].sentence


def test_output_of_missing_input_is_unexpected(history: History) -> None:
    history.inputs.remove((0, 3))
    assert "no_unexpected_outputs" in history.judged().report.violated


def test_report_names_outputs_that_are_out_of_order(history: History) -> None:
    a, b = history.index(0, 0, 0), history.index(0, 2, 0)
    history.sources[a], history.sources[b] = history.sources[b], history.sources[a]
    assert history.judged().report.violated == ("order",)


def test_undecidable_parts_are_reported_as_notes(history: History) -> None:
    history.unmarked = 3
    history.committed["in", 1] = Committed(COUNT, None)
    found = history.judged()
    assert found.report.ok
    assert found.inputs == COUNT
    assert "in[1] is committed at 21 without lineage: not decided" in found.notes
    assert any("21 outputs belong to inputs that are not committed yet" in note for note in found.notes)


def test_inputs_removed_by_retention_are_reported_as_a_note(history: History) -> None:
    history.inputs = [(p, o) for p, o in history.inputs if p or o >= 5]
    history.begins["in", 0] = 5
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert any("in[0]: inputs before 5 were removed by retention" in note for note in found.notes)


def test_verify_examines_outputs_if_all_inputs_were_removed(history: History) -> None:
    history.inputs = []
    history.begins = {("in", 0): COUNT, ("in", 1): COUNT}
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert [v.rule for v in found.report.verdicts] == ["no_losses"]
    assert (found.inputs, found.outputs) == (0, 42)


def test_check_of_a_group_without_lineage_fails(history: History) -> None:
    history.committed = {}
    found = history.judged()
    assert (found.inputs, found.report.ok) == (0, False)


# ---- what retention and compaction remove ----------------------------------------------------------------------------


def by_copy(source: Source) -> int:
    """Return the output partition by copy, so that the outputs of one input are in different partitions."""
    return source.i % 2


def test_outputs_removed_by_retention_are_reported_as_a_note(history: History) -> None:
    history.cut(0, 5)
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert found.outputs == 42 - 5
    assert found.report["no_losses"].examined == 42 - 5
    assert found.notes == (
        "in[0]: 5 of its output numbers are not visible, and out[0] no longer begins at 0 but at 5: not decided",
    )


def test_verify_finds_a_loss_after_outputs_removed_by_retention(history: History) -> None:
    history.cut(0, 5)
    history.drop(0, 9, 1)
    report = history.judged().report
    assert report.violated == ("no_losses", "atomic")
    assert report["no_losses"].violations == 1
    assert "it is output 1 of in[0]@9" in report["no_losses"].sentence


def test_verify_does_not_judge_losses_in_a_truncated_partition(history: History) -> None:
    history.cut(0, 5)
    history.drop(1, 9, 1)  # out[0] shows no output of in[1], so it may have held this one
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert any(note.startswith("in[1]: 1 of its output numbers are not visible") for note in found.notes)


def test_input_with_one_copy_removed_by_retention_is_not_incomplete(history: History) -> None:
    history.output_partition = by_copy
    history.cut(0, 10)
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert found.report["atomic"].examined < 12
    history.drop(1, 20, 1)  # far after the cut
    assert history.judged().report.violated == ("no_losses", "atomic")


def test_empty_truncated_partition_cannot_be_decided(history: History) -> None:
    history.output_partition = by_copy
    assert history.cut(1, 100)
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert found.outputs == 0
    assert {v.rule for v in found.report.verdicts} == {
        "all_inputs_counted",
        "no_duplicates",
        "no_unexpected_outputs",
        "order",
    }
    assert len(found.notes) == 2
    assert all("out[1] no longer begins at 0 but at 100: not decided" in note for note in found.notes)


def test_all_outputs_removed_by_retention_are_not_a_violation(history: History) -> None:
    history.cut(0, 100)
    history.cut(1, 100)
    found = history.judged()
    assert (found.report.violated, found.outputs) == ((), 0)
    assert [v.rule for v in found.report.verdicts] == ["all_inputs_counted"]
    history.output_begins = dict.fromkeys(history.output_begins, 0)
    assert "no_losses" in history.judged().report.violated


@pytest.mark.parametrize("cuts", [(6, 14), (20, 3)])
def test_output_partition_truncated_most_limits_the_check(history: History, cuts: tuple[int, int]) -> None:
    history.output_partition = lambda source: source.number % 2
    for output_partition, count in enumerate(cuts):
        history.cut(output_partition, count)
    assert history.judged().report.ok
    kept = [
        [s.number for s in history.sources if (s.partition, s.number % 2) == (1, output_partition)]
        for output_partition in range(2)
    ]
    assert history.judged().outputs == 21 - max(numbers[0] for numbers in kept)


def test_verify_finds_a_loss_despite_truncation_elsewhere(history: History) -> None:
    history.output_partition = by_copy
    history.output_begins["out", 1] = 5
    history.drop(0, 9, 1)
    found = history.judged()
    assert (found.report.violated, found.outputs) == (("no_losses", "atomic"), 42)


def test_history_that_cannot_be_judged_gets_no_verdict(history: History) -> None:
    history.cut(0, 100)
    history.cut(1, 100)
    history.inputs = [(p, o) for p, o in history.inputs if o >= 5]
    history.begins = {("in", 0): 5, ("in", 1): 5}
    found = history.judged()
    assert (found.report.verdicts, len(found.notes)) == ((), 4)
    with pytest.raises(NothingToExamine):
        _print_result(found, "group", ["out"], None)


def test_inputs_missing_without_retention_are_a_violation(history: History) -> None:
    history.inputs = []
    assert "all_inputs_counted" in history.judged().report.violated


def test_truncation_of_an_unrelated_partition_changes_no_verdict(history: History) -> None:
    history.output_begins["out", 2] = 7
    assert history.judged() == History().judged()


def test_visible_uncounted_outputs_prove_counted_outputs_were_kept(history: History) -> None:
    history.committed["in", 0] = Committed(COUNT, Tally(7, COUNT - 7, 14))
    history.sources = [s if s.partition or s.offset < 7 else s._replace(number=s.number - 7) for s in history.sources]
    history.cut(0, 2)
    assert history.judged().report.ok
    history.drop(0, 7, 0)  # the first counted output
    assert "no_losses" in history.judged().report.violated


def test_note_names_a_few_of_many_truncated_partitions(history: History) -> None:
    history.cut(0, 1)
    history.output_begins |= {("out", partition): 9 for partition in range(2, 6)}
    (note, *_) = history.judged().notes
    assert "out[0] no longer begins at 0 but at 1, out[2] " in note
    assert note.endswith(" and 2 more: not decided")


def test_verify_does_not_judge_outputs_in_a_compacted_topic(history: History) -> None:
    history.output_partition = by_copy
    history.compacted = ("out",)
    assert history.judged() == History().judged()  # nothing is missing
    history.drop(0, 9, 1)
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert found.outputs == 21  # outputs of the other input partition
    assert found.notes == ("in[0]: 1 of its output numbers are not visible, and out is compacted: not decided",)


def test_outputs_of_compacted_inputs_are_not_unexpected(history: History) -> None:
    history.inputs.remove((0, 9))
    assert history.judged().report.violated == ("all_inputs_counted", "no_unexpected_outputs")
    history.compacted = ("in",)
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert (found.report["all_inputs_counted"].examined, found.outputs) == (COUNT, 42)
    assert found.notes == (
        "in[0]: 1 of 21 inputs are missing, and the topic is compacted; "
        "their outputs and the number of inputs cannot be checked",
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw a correct history: the outputs of two input partitions, mixed in three output partitions."""
    history = History()
    output_partitions: dict[Source, int] = {}
    queues: list[list[Source]] = []
    for p in range(2):
        made = draw(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=8))
        queues.append([])
        for o, outputs in enumerate(made):
            for i, output_partition in enumerate(outputs):
                source = Source("in", p, o, i, len(outputs), len(queues[p]))
                output_partitions[source] = output_partition
                queues[p].append(source)
        history.committed["in", p] = Committed(len(made), Tally(0, len(made), len(queues[p])))
    history.inputs = [(p, o) for p in range(2) for o in range(history.committed["in", p].offset)]
    turns = draw(st.permutations([p for p, queue in enumerate(queues) for _ in queue]))
    history.sources = [queues[p].pop(0) for p in turns]
    history.output_partition = output_partitions.__getitem__
    history.output_begins = {("out", output_partition): 0 for output_partition in range(3)}
    return history


def remove_prefixes(history: History, draw: st.DrawFn) -> None:
    for output_partition in range(3):
        here = sum(history.output_partition(source) == output_partition for source in history.sources)
        # Mostly cut a few outputs only: some must remain in all three partitions for a decision.
        history.cut(output_partition, draw(st.integers(0, min(here, 2)) | st.integers(0, here)))
    for place, at in history.committed.items():
        begin = history.begins[place] = draw(st.integers(0, at.offset))
        history.inputs = [(p, o) for p, o in history.inputs if p != place[1] or o >= begin]


@settings(deadline=None)
@given(st.data())
def test_retention_alone_is_never_a_violation(data: st.DataObject) -> None:
    history = data.draw(histories())
    remove_prefixes(history, data.draw)
    found = history.judged()
    assert not found.report.violated, str(found.report)


@settings(deadline=None)
@given(st.data())
def test_verify_always_reports_an_unexplained_loss(data: st.DataObject) -> None:
    history = data.draw(histories())
    remove_prefixes(history, data.draw)
    # A victim has an earlier output of its input partition in each truncated output partition.
    ahead = {p: [next((s for s in history.sources if s.partition == p and history.output_partition(s) == to), None)
                 for (_, to), begin in history.output_begins.items() if begin] for p in range(2)}  # fmt: skip
    victims = [s for s in history.sources if all(first and first.number < s.number for first in ahead[s.partition])]
    assume(victims)
    victim = data.draw(st.sampled_from(victims))
    history.sources.remove(victim)
    assert "no_losses" in history.judged().report.violated


# ---- reading ---------------------------------------------------------------------------------------------------------


class Cluster:
    """Stands for eos.testing.history: topics of one partition, with retention that removes records during reading."""

    def __init__(self) -> None:
        self.positions = {"in": [(0, o) for o in range(9)], "out": [(0, o) for o in range(9)]}
        self.policies: dict[str, str | None] = {"in": "delete", "out": "delete"}
        self.removed_before_reading = 0
        self.unmarked = 0  # outputs without lineage, after the others

    def committed_with_metadata(self, *_: Any) -> Mapping[tuple[str, int], tuple[int, str]]:
        return {("in", 0): (9, '{"lineage": [0, 9, 9]}')}

    def beginnings(self, _: str, topics: list[str], config: Any) -> dict[tuple[str, int], int]:
        return {(topic, 0): self.positions[topic][0][1] for topic in topics}

    def end_offsets(self, *_: Any) -> Ends:
        return Ends({("out", 0): 9}, {("out", 0): 9})

    def cleanup_policies(self, _: str, topics: list[str], config: Any) -> dict[str, str | None]:
        return {topic: self.policies[topic] for topic in topics}

    def read_topic(self, _: str, topics: list[str], **__: Any) -> Log:
        self.positions[topics[0]] = self.positions[topics[0]][self.removed_before_reading :]
        positions = self.positions[topics[0]]
        headers: list[bytes | None] = [encode(Source("in", 0, o, 0, 1, o)) for _, o in positions]
        if topics == ["out"]:
            positions = [*positions, *((0, 9 + number) for number in range(self.unmarked))]
            headers += [None] * self.unmarked
        return log_of(topics[0], positions, headers)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(verifying, "history", found)
    return found


def test_removal_before_reading_is_not_a_violation(cluster: Cluster) -> None:
    cluster.removed_before_reading = 4
    found = verify("servers", ["in"], ["out"], "group")
    assert found.report.ok, str(found.report)
    assert (found.inputs, found.outputs, len(found.notes)) == (5, 5, 2)


def test_output_without_lineage_leaves_unexpected_outputs_undecided(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def rules() -> set[str]:
        return {v.rule for v in verify("servers", ["in"], ["out"], "group").report.verdicts}

    alone = rules()
    cluster.unmarked = 1
    assert alone - rules() == {"no_unexpected_outputs"}
    found = verify("servers", ["in"], ["out"], "group")
    assert found.report.ok
    (note,) = found.notes
    assert note.startswith("1 output carries no lineage (out[0]@9): another program wrote them")
    assert note.endswith("whether they have an input is not decided")
    assert _print_result(found, "group", ["out"], None) == 0
    assert "holds; some checks are undecided" in " ".join(capsys.readouterr().out.split())
    cluster.unmarked = 7
    assert "(out[0]@9, out[0]@10, out[0]@11, ...)" in verify("servers", ["in"], ["out"], "group").notes[0]


def test_verify_uses_the_cleanup_policy_of_the_topic(cluster: Cluster) -> None:
    del cluster.positions["out"][4], cluster.positions["in"][6]
    assert verify("servers", ["in"], ["out"], "group").report.violated == (
        "all_inputs_counted",
        "no_losses",
        "no_unexpected_outputs",
    )
    cluster.policies = {"in": "compact", "out": "compact,delete"}
    assert not verify("servers", ["in"], ["out"], "group").report.violated


def test_unreadable_cleanup_policy_is_reported_as_a_note(cluster: Cluster) -> None:
    cluster.policies["out"] = None
    found = verify("servers", ["in"], ["out"], "group")
    assert (found.report.ok, found.notes) == (
        True, ("the cleanup.policy of out cannot be read: out is treated as not compacted",)
    )  # fmt: skip


# ---- the progress bar ------------------------------------------------------------------------------------------

SLOW = """
import sys
from eos.kafka.admin import facts
from eos.cli import invoke
from eos.testing import verify as verifying
from eos.testing.checker import Report, Verdict

def slow(*_, progress, on_wait):
    progress("inputs", 300, 400)
    sys.stdin.readline()
    return verifying.Verification(Report((Verdict("no_losses", True, 4, 0, "all are visible"),)), (), 400, 4)

facts.connect = lambda *_: None
verifying.verify = slow
sys.exit(invoke("verify --input a --output b --group g --bootstrap-servers 127.0.0.1:1".split()))
"""


def test_progress_bar_is_shown_on_terminal_only() -> None:
    ours, theirs = pty.openpty()
    shown = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        env=os.environ | {"COLUMNS": "120", "TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    seen, deadline = "", time.monotonic() + 60
    try:
        while not re.search(r"reading inputs.* 75%", seen):
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 65_536).decode()
        output, _ = shown.communicate("\n", 60)
        assert shown.returncode == 0
        assert "400 inputs and 4 outputs of group g examined: holds" in output
        assert "reading" not in output, "the progress bar is for the terminal only"
    finally:
        shown.kill()
        shown.wait()
        os.close(ours)


def test_wait_for_open_transaction_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reported = [0.0], list[str]()
    held, free = Ends({("out", 0): 5}, {("out", 0): 9}), Ends({("out", 0): 9}, {("out", 0): 9})
    answers = [held] * 9

    def sleep(_: float) -> None:
        now[0] += 0.3

    monkeypatch.setattr("eos.testing.history.end_offsets", lambda *_: answers.pop() if answers else free)
    monkeypatch.setattr("eos.testing.verify.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert verifying._readable_ends("", ["out"], None, 60.0, reported.append) == {("out", 0): 9}
    assert reported == ["a transaction is open on out[0]: waiting up to 60 s for its end"]
