"""Test the explanation of violations: the coordinators' log is decoded and joined with the workers' step logs."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eos.testing.checker import CommitSeries, Inputs, Outputs, check
from tests.containers.matrix.explain import count_in_transaction, explain
from tests.containers.matrix.faults import Fault
from tests.containers.matrix.stage_worker import ENTRY, STEPS
from tests.containers.matrix.transaction_log import Written, decode, fenced_state

KEY = struct.pack(">hh", 0, 5) + b"g-one"
T0_MS = 1_795_000_000_000


def value(version: int) -> bytes:
    """Return the record of producer 1001, epoch 7, PrepareCommit, on out[0], out[2] and __consumer_offsets[3]."""
    head = struct.pack(">hqhib", version, 1001, 7, 10_000, 2)
    tail = struct.pack(">qq", T0_MS + 50, T0_MS)
    if version == 0:
        topics = struct.pack(">ih3siii", 2, 3, b"out", 2, 0, 2)
        return head + topics + struct.pack(">h18sii", 18, b"__consumer_offsets", 1, 3) + tail
    topics = struct.pack(">BB3sBiiB", 3, 4, b"out", 3, 0, 2, 0)
    # At the end one tagged field with the client's transaction version, as brokers write it from 4.0 on.
    return head + topics + struct.pack(">B18sBiB", 19, b"__consumer_offsets", 2, 3, 0) + tail + bytes([1, 2, 2, 0, 2])


@pytest.mark.parametrize("version", [0, 1])
def test_both_versions_of_coordinator_records_are_read(version: int) -> None:
    partitions = ("out[0]", "out[2]", "__consumer_offsets[3]")
    expected = Written(T0_MS + 50, "g-one", 1001, 7, "PrepareCommit", T0_MS, partitions, "there")
    assert decode(KEY, value(version), "there") == expected


def test_transactional_id_without_a_transaction_has_no_partitions() -> None:
    empty = struct.pack(">hqhibBqqB", 1, 1001, 0, 10_000, 0, 0, T0_MS, -1, 0)
    assert decode(KEY, empty, "there") == Written(T0_MS, "g-one", 1001, 0, "Empty", -1, (), "there")


def test_state_without_offsets_in_its_transaction_is_a_violation() -> None:
    def committed(*partitions: str, state: str = "PrepareCommit") -> Written:
        return Written(T0_MS, "g-one", 1001, 7, state, T0_MS, partitions, "there")

    offsets, state = "__consumer_offsets[3]", "g-count-changelog[1]"
    good = [committed("out[0]", offsets, state), committed("out[0]"), committed(state, state="PrepareAbort")]
    assert (fenced_state(good).holds, fenced_state(good).examined) == (True, 1)
    assert not fenced_state([*good, committed("out[0]", state)]).holds
    assert not fenced_state([committed("out[0]", offsets)]).holds, (
        "the rule must count the transactions that it examined"
    )


def test_unknown_record_version_is_refused() -> None:
    with pytest.raises(ValueError, match="a value of version 2"):
        decode(KEY, b"\0\2" + value(1)[2:], "there")


def write_step_log(directory: Path) -> None:
    """Write a log: transaction 4 takes 500 ms and commits, transaction 5 handles offset 11 and ends at its flush."""
    entries = []
    for number, began_ms, steps in ((4, 1_000, STEPS), (5, 2_000, STEPS[:3])):
        for at, step in enumerate(steps):
            entries.append(((T0_MS + began_ms + 100 * at) * 1_000_000, number, STEPS.index(step), -1, -1))
        entries.append(((T0_MS + began_ms + 150) * 1_000_000, number, -1, 0, 6 + number))
    entries.sort()
    (directory / "stage-0-one-7.steps").write_bytes(b"".join(ENTRY.pack(*entry) for entry in entries))


def test_fault_counts_only_during_a_transaction_it_can_hit(tmp_path: Path) -> None:
    write_step_log(tmp_path)

    def hits(at_ms: int, process: str | None = None) -> int:
        return count_in_transaction(tmp_path, [Fault(0.0, (T0_MS + at_ms) * 1_000_000, "kill", process)])

    assert [hits(at) for at in (900, 1_050, 1_150, 1_450, 1_600, 2_150)] == [0, 0, 1, 1, 0, 1]
    assert hits(1_150, "stage-0-one-7") == 1
    assert hits(1_150, "stage-0-two-8") == 0


def test_explanation_names_offset_transaction_and_outcome(tmp_path: Path) -> None:
    write_step_log(tmp_path)
    inputs = Inputs(topics=("in",), topic=[0, 0], partition=[0, 0], offset=[10, 11])
    outputs = Outputs(
        topics=("out",),
        topic=[0],
        partition=[0],
        offset=[0],
        source_topic=[0],
        source_partition=[0],
        source_offset=[10],
        copy=[0],
    )
    log = [
        Written(T0_MS + after, "g-one", 1001, epoch, state, T0_MS + began, (), "there")
        for after, epoch, state, began in (
            (1_200, 7, "Ongoing", 1_200),
            (1_400, 7, "PrepareCommit", 1_200),
            (2_140, 7, "Ongoing", 2_140),
            (12_140, 8, "PrepareAbort", 2_140),
            (12_200, 8, "CompleteAbort", 2_140),
        )
    ]
    explained = explain(inputs, outputs, 1, tmp_path, log, ["g"])
    first, handled, decided = explained.splitlines()
    assert first == "in[0]@11: its outputs are visible 0 times; it was handled in"
    assert handled.strip().startswith("transaction 5 of stage-0-one-7 (begin ")
    assert handled.endswith("its last step was 'flush'")
    assert "PrepareCommit" not in decided
    states = [state.split()[0] for state in decided.partition("epoch 7: ")[2].split(", ")]
    assert states == ["Ongoing", "PrepareAbort", "CompleteAbort"]
    still_open = explain(inputs, outputs, 1, tmp_path, log[:3], ["g"]).splitlines()[-1]
    assert still_open.startswith("still open: ")
    assert "g-one producer 1001 epoch 7: Ongoing" in still_open


def history(first: int, second: int) -> tuple[Inputs, Outputs]:
    """Return a history of inputs 10 and 11 with one output each, at these offsets."""
    inputs = Inputs(topics=("in",), topic=[0, 0], partition=[0, 0], offset=[10, 11])
    outputs = Outputs(
        topics=("out",), topic=[0, 0], partition=[0, 0], offset=[first, second],
        source_topic=[0, 0], source_partition=[0, 0], source_offset=[10, 11], copy=[0, 0],
    )  # fmt: skip
    return inputs, outputs


def commits(topic: str, *offsets: int) -> CommitSeries:
    zeros = [0] * len(offsets)
    return CommitSeries(
        topics=("in", "middle"), topic=[("in", "middle").index(topic)] * len(offsets), partition=zeros, offset=offsets
    )


def test_reordered_outputs_are_explained_by_both_transactions(tmp_path: Path) -> None:
    write_step_log(tmp_path)
    inputs, outputs = history(1, 0)
    explained = explain(inputs, outputs, 1, tmp_path, [], ["g"], check(inputs, outputs)).splitlines()
    assert explained[0] == "order: out[0]@1 (copy 0 of in[0]@10) comes after out[0]@0 (copy 0 of in[0]@11)"
    assert explained[1] == "in[0]@10 was handled in"
    assert explained[2].strip().startswith("transaction 4 of stage-0-one-7 (begin ")
    assert explained[2].endswith(": committed")
    assert explained[3] == "in[0]@11 was handled in"
    assert explained[4].endswith("its last step was 'flush'")
    assert len(explained) == 5


def test_visible_aborted_record_is_explained_by_its_transaction(tmp_path: Path) -> None:
    write_step_log(tmp_path)
    inputs, outputs = history(0, 2)
    seen = replace(outputs, offset=np.array([0, 1]))
    log = [Written(T0_MS + 9_000, "g-one", 1001, 8, "CompleteAbort", T0_MS + 2_140, (), "there")]
    report = check(inputs, outputs, seen=seen)
    explained = explain(inputs, outputs, 1, tmp_path, log, ["g"], report).splitlines()
    assert explained[0] == "no_aborted_seen: out[0]@1 was delivered but no longer exists: it was aborted"
    assert explained[1] == "in[0]@11 was handled in"
    assert explained[2].strip().startswith("transaction 5 of stage-0-one-7")
    assert "epoch 8: CompleteAbort" in explained[3]
    assert len(explained) == 4


def test_rewound_offset_is_explained_by_both_transactions(tmp_path: Path) -> None:
    write_step_log(tmp_path)
    inputs, outputs = history(0, 1)
    report = check(inputs, outputs, commits=commits("in", 12, 11))
    explained = explain(inputs, outputs, 1, tmp_path, [], ["g"], report).splitlines()
    assert explained[0] == "no_rewind: in[0] went back from 12 to 11 (observation 1)"
    assert [line.partition(" of stage")[0].strip() for line in explained[1:]] == [
        "in[0]@11 was handled in",
        "transaction 5",
        "in[0]@10 was handled in",
        "transaction 4",
    ]


def test_intermediate_record_is_explained_by_its_input(tmp_path: Path) -> None:
    write_step_log(tmp_path)
    inputs, outputs = history(0, 1)
    report = check(inputs, outputs, commits=commits("middle", 70, 60))
    origins = {("middle", 0, 69): ("in", 0, 11)}
    explained = explain(inputs, outputs, 1, tmp_path, [], ["g"], report, origins.get).splitlines()
    assert explained[1] == "middle[0]@69, made of in[0]@11, was handled in"
    assert explained[2].strip().startswith("transaction 5 of stage-0-one-7")
    assert explained[3] == "middle[0]@59: the input that it comes from is unknown"
    assert len(explained) == 4
