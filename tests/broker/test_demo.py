"""Check that the demo proves what it prints, leaves nothing behind, and would report a lost or duplicate record."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from eos.demo import proof, topics
from eos.demo.contrast import Contrast
from eos.demo.data import Expectation
from eos.demo.proof import Found, Row
from eos.testing.checker import Ends
from eos.testing.history import Log
from tests.support.reading import create_topic, wait_until

FLIGHTS = 20_000


def start_demo(temporary: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `eos demo` with its own directory for temporary files."""
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "eos", "demo", "--flights", str(FLIGHTS), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary), "EOS_TRANSACTION_INTERVAL_MS": "not for the demo's workers"},
        preexec_fn=interruptible,
    )


def interruptible() -> None:
    """Restore SIGINT, which a shell ignores in the processes that it starts in the background and in their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_using(directory: Path) -> list[str]:
    """Return the command lines of processes whose working directory is below `directory`."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if (process.info["cwd"] or "").startswith(str(directory)):
            found.append(" ".join(process.info["cmdline"] or ["?"])[-200:])
    return found


def rows_of(printed: str) -> dict[str, list[str]]:
    """Return the printed table: check -> expected, seen, verdict."""
    lines = [line.strip("│").split("│") for line in printed.splitlines() if line.startswith("│")]
    return {check.strip(): [cell.strip() for cell in cells] for check, *cells in lines}


@pytest.mark.takes(150)
def test_demo_hits_open_transactions_and_proves_exact_results(tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "t")
    printed, _ = demo.communicate(timeout=280)

    assert demo.returncode == 0, printed
    rows = rows_of(printed)
    verdicts = {check: cells[-1] for check, cells in rows.items()}
    assert len(rows) == 15, printed
    assert set(verdicts.values()) == {"ok"}
    assert rows["records in flight-delays"] == ["20,000", "20,000", "ok"]
    assert re.fullmatch(r"0 of 2\d,\d{3}", rows["records lost"][1])
    assert int(rows["aborted records a read_uncommitted reader gets"][1].replace(",", "")) > 0
    assert "Exactly once" in printed
    assert "\x1b" not in printed, "escape sequences in an output that is not a terminal"
    assert not list((tmp_path / "t").iterdir()), "temporary files were left behind"
    assert processes_using(tmp_path) == []


@pytest.mark.long
def test_demo_deletes_its_topics_from_an_existing_cluster(kafka: LocalKafka, tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "t", "--bootstrap-servers", kafka.bootstrap_servers)
    printed, _ = demo.communicate(timeout=280)

    assert demo.returncode == 0, printed
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    wait_until("its topics are deleted", lambda: not set(topics.TOPICS) & set(admin.list_topics(timeout=10).topics))
    groups = {group.group_id for group in admin.list_consumer_groups().result(10).valid}
    assert not groups & {topics.GROUP, topics.CONTRAST_GROUP}


def test_demo_refuses_a_cluster_that_has_its_topics(kafka: LocalKafka, tmp_path: Path) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    create_topic(kafka.bootstrap_servers, topics.LATE)
    try:
        demo = start_demo(tmp_path / "t", "--bootstrap-servers", kafka.bootstrap_servers)
        printed, _ = demo.communicate(timeout=60)

        assert demo.returncode == 78, printed
        assert "late-flights already" in printed
        assert "Traceback" not in printed
        assert set(topics.TOPICS) & set(admin.list_topics(timeout=10).topics) == {topics.LATE}
    finally:
        admin.delete_topics([topics.LATE])[topics.LATE].result(10)


def test_demo_exits_with_69_without_a_cluster(tmp_path: Path) -> None:
    demo = start_demo(tmp_path / "t", "--bootstrap-servers", "127.0.0.1:1")
    printed, _ = demo.communicate(timeout=60)

    assert demo.returncode == 69, printed
    assert "eos: 127.0.0.1:1 cannot be reached" in printed


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupted_demo_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    demo = start_demo(tmp_path / "t")
    wait_until("both workers run", lambda: sum("--instance" in c for c in processes_using(tmp_path)) >= 2, 60)

    demo.send_signal(number)
    printed, _ = demo.communicate(timeout=30)

    assert demo.returncode != 0, printed
    assert "Traceback" not in printed
    wait_until("all its processes have ended", lambda: processes_using(tmp_path) == [])
    assert not list((tmp_path / "t").iterdir())


# ---- the proof, on a made-up history: 6 flights on 2 partitions, two of them late -------------------------------


def log(topic_names: tuple[str, ...], records: list[tuple[int, int, int, bytes, bytes]]) -> Log:
    """Build a Log from tuples of topic index, partition, offset, key and value."""
    topic, partition, offset, keys, values = zip(*records, strict=True)
    return Log(
        topics=topic_names,
        topic=np.array(topic, np.int32),
        partition=np.array(partition, np.int32),
        offset=np.array(offset, np.int64),
        timestamp=np.zeros(len(records), np.int64),
        keys=list(keys),
        values=list(values),
    )


DELAYS = [(0, i % 2, i // 2, b"flight %d" % i, b'{"carrier":"UA","minutes":%d}' % (10 * i)) for i in range(6)]
LATES = [(1, i % 2, i // 2, *DELAYS[i][3:]) for i in (4, 5)]


def found(outputs: list[tuple[int, int, int, bytes, bytes]], uncommitted: int = 9) -> Found:
    inputs = [(0, i % 2, i // 2, b"flight %d" % i, b"{}") for i in range(6)]
    ends = {("flights", 0): 3, ("flights", 1): 3}
    return Found(log(("flights",), inputs), log(topics.OUTPUTS, outputs), uncommitted, ends, Ends(ends, ends))


def expected() -> Expectation:
    keys = [b"flight %d" % i for i in range(6)]
    expectation = Expectation(keys, {keys[4], keys[5]})
    expectation.minutes["UA"] = 150
    return expectation


def wrong(rows: list[Row]) -> set[str]:
    assert len(rows) >= 4
    assert all(row.why for row in rows if not row.passed), "a failed row has no reason"
    return {row.check for row in rows if not row.passed}


def judged(outputs: list[tuple[int, int, int, bytes, bytes]]) -> set[str]:
    return wrong(proof.exactly_once_rows(expected(), found(outputs)))


def test_proof_holds_for_an_exact_history() -> None:
    assert judged(DELAYS + LATES) == set()


def test_proof_finds_a_lost_record() -> None:
    assert judged(DELAYS[1:] + LATES) == {
        "records in flight-delays", "records lost", "offsets that disagree with the output"
    }  # fmt: skip


def test_proof_finds_a_duplicate_record() -> None:
    again = (0, 1, 3, *DELAYS[5][3:])
    assert judged([*DELAYS, again, *LATES]) == {
        "records in flight-delays", "records duplicated", "minutes of delay, all 1 airlines equal"
    }  # fmt: skip


def test_proof_finds_a_record_that_replaced_another() -> None:
    """Replace a record and keep the count, so that only keys and lineage show the difference."""
    foreign_record = (0, 0, 0, b"flight 99", DELAYS[0][4])
    assert judged([foreign_record, *DELAYS[1:], *LATES]) >= {
        "records in flight-delays",
        "records lost",
        "records without an input",
    }


def test_proof_finds_a_transaction_visible_in_one_topic_only() -> None:
    assert judged([*DELAYS, LATES[0]]) >= {"records lost", "flights in only one of two topics"}


def test_proof_finds_a_changed_value() -> None:
    changed = (*DELAYS[3][:4], b'{"carrier":"UA","minutes":31}')
    assert judged([*DELAYS[:3], changed, *DELAYS[4:], *LATES]) == {"minutes of delay, all 1 airlines equal"}


def test_proof_finds_swapped_records() -> None:
    swapped = [(*DELAYS[0][:3], *DELAYS[2][3:]), (*DELAYS[2][:3], *DELAYS[0][3:])]
    assert judged([swapped[0], DELAYS[1], swapped[1], *DELAYS[3:], *LATES]) == {"records out of order"}


def test_proof_fails_if_a_fault_had_no_effect() -> None:
    exact, effective = found(DELAYS + LATES), Contrast(flights=6, records=7, doubled=1, kills=1)
    assert wrong(proof.fault_rows(exact, 1, 1, effective)) == set()
    assert len(wrong(proof.fault_rows(exact, 0, 1, effective))) == 1
    assert len(wrong(proof.fault_rows(exact, 1, 0, effective))) == 1
    assert len(wrong(proof.fault_rows(found(DELAYS + LATES, uncommitted=8), 1, 1, effective))) == 1
    assert len(wrong(proof.fault_rows(exact, 1, 1, dataclasses.replace(effective, doubled=0)))) == 1


def test_expected_records_are_read_without_pandas() -> None:
    program = (
        "import sys; from eos.demo.data import *; e = expectation(FLIGHTS); "
        "print(len(e.keys), len(e.late), e.minutes.total(), len(e.minutes), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["336776", "70774", "4152200", "16", "False"]
