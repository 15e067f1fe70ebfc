"""Lineage and what `eos verify` makes of it: a filtered input differs from a lost output, and each damage is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.app import App, Fed, Out, Record
from eos.errors import ConfigurationError
from eos.lineage import HEADER, Ledger, Source, Tally, check_route, decode, encode, feed_with_lineage, tally_of
from eos.testing.checker import Inputs
from eos.testing.history import Log
from eos.testing.verify import Committed, Verification, judge, marks_of

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
def test_a_source_comes_back_out_of_its_header(source: Source) -> None:
    assert decode(encode(source)) == source


@pytest.mark.parametrize("header", [b"", b"x" * 28])
def test_a_header_that_no_worker_wrote_is_refused(header: bytes) -> None:
    with pytest.raises(ValueError, match="cannot name a source"):
        decode(header)


@pytest.mark.parametrize(
    "metadata", [None, "", "x", "[]", "{}", '{"lineage": 5}', '{"lineage": [1, 2]}', '{"lineage": ["1", 2, 3]}']
)
def test_metadata_of_others_says_nothing(metadata: str | None) -> None:
    assert tally_of(metadata) is None


# ---- counting --------------------------------------------------------------------------------------------------

A = ("a", 0)


def written(ledger: Ledger) -> str:
    return json.dumps({"instance": "x", **ledger.metadata(A)})


def test_counts_go_on_where_the_last_commit_left_them_whoever_made_it() -> None:
    first = Ledger()
    first.begin(A, 7, None)
    assert [first.handled(A, n) for n in (2, 0, 3)] == [0, 2, 2]
    metadata = written(first)
    first.commit()
    second = Ledger()
    second.begin(A, 10, metadata)
    assert second.handled(A, 1) == 5
    assert second.tally(A) == Tally(7, 4, 6)


def test_what_an_aborted_transaction_counted_is_counted_again() -> None:
    ledger = Ledger()
    ledger.begin(A, 0, None)
    ledger.handled(A, 1)
    ledger.commit()
    ledger.handled(A, 5)
    ledger.rewind()
    assert (ledger.handled(A, 1), ledger.tally(A)) == (1, Tally(0, 2, 2))


def test_a_partition_that_begins_again_forgets_what_was_open() -> None:
    ledger = Ledger()
    ledger.begin(A, 0, None)
    ledger.handled(A, 5)
    ledger.begin(A, 3, '{"lineage": [0, 3, 4]}')
    assert ledger.tally(A) == Tally(0, 3, 4)


# ---- the feed --------------------------------------------------------------------------------------------------


def feed(function: Callable[[Record], Any], records: list[Record]) -> tuple[list[tuple[Any, ...]], Fed, Ledger]:
    app, ledger, put = App("app"), Ledger(), []
    app.process("a", to="out")(function)
    ledger.begin(A, 0, None)
    fed = feed_with_lineage(app.routes["a"].each, ledger)(records, lambda *send: put.append(send), lambda *_: None)
    return put, fed, ledger


RECORDS = [Record("a", 0, offset, 5, b"k", b"v") for offset in (3, 4, 8)]


def test_each_output_names_its_input_and_its_own_headers_stay() -> None:
    results = {3: [Out(b"x", headers=[("h", b"1")]), b"y"], 4: None, 8: b"z"}
    put, fed, ledger = feed(lambda record: results[record.offset], RECORDS)
    assert [send[1] for send in put] == [b"x", b"y", b"z"]
    assert put[0][7][0] == ("h", b"1")
    assert [send[7][-1][0] for send in put] == [HEADER] * 3
    assert [decode(send[7][-1][1]) for send in put] == [
        Source("a", 0, 3, 0, 2, 0),
        Source("a", 0, 3, 1, 2, 1),
        Source("a", 0, 8, 0, 1, 2),
    ]
    assert (fed, ledger.tally(A)) == (Fed(3, 3, None), Tally(0, 3, 3))


def test_a_record_that_fails_is_not_counted() -> None:
    put, fed, ledger = feed(lambda record: b"x" if record.offset < 8 else 1 // 0, RECORDS)
    assert (len(put), fed.sent, fed.handled, type(fed.error)) == (2, 2, 2, ZeroDivisionError)
    assert ledger.tally(A) == Tally(0, 2, 2)


def test_a_batch_function_cannot_tell_and_is_refused() -> None:
    app = App("app")
    app.process_batch("a", to="out")(lambda records: [])
    with pytest.raises(ConfigurationError, match="which record an output came from"):
        check_route(app.routes["a"])


# ---- judging ---------------------------------------------------------------------------------------------------

PER_INPUT = (1, 0, 2, 1, 0, 0, 3)  # outputs of inputs 0.. of each partition, and so on again
COUNT = 21


class History:
    """Two input partitions of 21 records each, some filtered, two output partitions; all of it well."""

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
        self.unmarked = 0

    def judged(self) -> Verification:
        columns = np.array(self.inputs, np.int64).reshape(-1, 2)
        inputs = Inputs(
            topics=("in",), topic=np.zeros(len(columns), np.int32), partition=columns[:, 0], offset=columns[:, 1]
        )
        headers: list[bytes | None] = [encode(source) for source in self.sources]
        headers += [None] * self.unmarked
        lanes = np.array([source.partition for source in self.sources] + [0] * self.unmarked, np.int32)
        log = Log(
            topics=("out",),
            topic=np.zeros(len(headers), np.int32),
            partition=lanes,
            offset=np.arange(len(headers), dtype=np.int64),
            timestamp=np.zeros(len(headers), np.int64),
            keys=[],
            values=[],
            headers=headers,
        )
        marks, unmarked = marks_of(log)
        assert unmarked == self.unmarked
        return judge(inputs, marks, self.committed, self.begins)

    def index(self, partition: int, offset: int, i: int) -> int:
        return next(k for k, s in enumerate(self.sources) if (s.partition, s.offset, s.i) == (partition, offset, i))

    def drop(self, partition: int, offset: int, *which: int) -> None:
        for i in which:
            del self.sources[self.index(partition, offset, i)]


def test_a_history_with_filtered_inputs_holds_and_says_how_much_was_examined() -> None:
    found = History().judged()
    assert found.report.ok, str(found.report)
    assert (found.inputs, found.outputs, found.notes) == (42, 42, ())
    assert {v.rule for v in found.report.verdicts} == {
        "all_inputs_counted", "no_losses", "no_duplicates", "no_strangers", "order", "atomic"
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
def test_a_lost_output_is_named_as_closely_as_its_neighbours_tell(lost: tuple[int, int, list[int]], named: str) -> None:
    history = History()
    partition, offset, which = lost
    history.drop(partition, offset, *which)
    report = history.judged().report
    assert "no_losses" in report.violated
    assert report["no_losses"].violations == len(which)
    assert any(named in example for example in report["no_losses"].examples), report["no_losses"].examples


def test_an_input_that_lost_a_part_of_its_outputs_is_torn_too() -> None:
    history = History()
    history.drop(0, 6, 1)
    report = history.judged().report
    assert report.violated == ("no_losses", "atomic")
    assert "in[0]@6 is torn: copy 1 is missing" in report["atomic"].sentence


def test_a_doubled_output_is_named() -> None:
    history = History()
    history.sources.append(history.sources[history.index(1, 2, 0)])
    report = history.judged().report
    assert "no_duplicates" in report.violated
    assert "in[1]@2" in report["no_duplicates"].sentence
    assert report["no_losses"].holds


def test_half_of_the_inputs_filtered_is_no_loss_but_half_of_the_outputs_lost_is() -> None:
    history = History()
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


def test_everything_filtered_holds_by_the_number_of_inputs() -> None:
    history = History()
    history.sources = []
    history.committed = {place: Committed(COUNT, Tally(0, COUNT, 0)) for place in history.committed}
    found = history.judged()
    assert (found.report.ok, found.inputs, found.outputs) == (True, 42, 0)


def test_an_input_that_was_never_handled_is_a_violation() -> None:
    history = History()
    history.committed["in", 0] = Committed(COUNT, Tally(0, COUNT - 1, history.committed["in", 0].tally.outputs))  # type: ignore[union-attr]
    report = history.judged().report
    assert report.violated == ("all_inputs_counted",)
    assert "in[0] holds 21 inputs in 0..20, 20 were handled" in report["all_inputs_counted"].sentence


def test_an_output_of_an_input_that_does_not_exist_is_a_stranger() -> None:
    history = History()
    history.inputs.remove((0, 3))
    assert "no_strangers" in history.judged().report.violated


def test_outputs_out_of_order_are_named() -> None:
    history = History()
    a, b = history.index(0, 0, 0), history.index(0, 2, 0)
    history.sources[a], history.sources[b] = history.sources[b], history.sources[a]
    assert history.judged().report.violated == ("order",)


def test_what_cannot_be_decided_is_a_note_and_no_verdict() -> None:
    history = History()
    history.unmarked = 3
    history.committed["in", 1] = Committed(COUNT, None)
    found = history.judged()
    assert found.report.ok
    assert found.inputs == COUNT
    assert "in[1] is committed at 21 without lineage: not decided" in found.notes
    assert any("21 outputs are of inputs that are not committed yet" in note for note in found.notes)


def test_inputs_that_retention_removed_are_a_note() -> None:
    history = History()
    history.inputs = [(p, o) for p, o in history.inputs if p or o >= 5]
    history.begins["in", 0] = 5
    found = history.judged()
    assert found.report.ok, str(found.report)
    assert any("in[0]: inputs before 5 were removed by retention" in note for note in found.notes)


def test_nothing_committed_with_lineage_examines_nothing_and_does_not_hold() -> None:
    history = History()
    history.committed = {}
    found = history.judged()
    assert (found.inputs, found.report.ok) == (0, False)
