"""Run a small part of `make sweep`: our worker is right, and the same worker without its replacement rule is not.

The sweep itself finds the two silent losses of clients without KIP-890 part 2 (H1, H2b). The checker reads the contents
of Kafka; no test reads a log or counts calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eos.broker import LocalKafka
from eos.errors import ConfigurationError
from eos.session.producer.producer import TransactionalProducer
from eos.testing.sweeping import ACTIONS, ERRORS, Case, Outcome, Sweeper, every_case, every_txn_step, table
from tests.shim.sweep import APP, KEEPING_APP, RECORDS, protocols_on, ways_on
from tests.support.users_pytest import run_pytest

pytestmark = pytest.mark.takes(364)

H1 = Case("EndTxn", "late copy, then abort")
H2B = Case("Produce", "lost acknowledgement, then abort")


@pytest.fixture(scope="module")
def own_kafka() -> Iterator[LocalKafka]:
    """Start a Kafka for the App, whose topics have fixed names and are deleted for every case."""
    with LocalKafka() as kafka:
        yield kafka


@pytest.mark.deep_for("FindCoordinator*", "TxnOffsetCommit*", "EndTxn: reset*")
@pytest.mark.parametrize(
    "case",
    [
        H1,
        H2B,
        Case("EndTxn", "reset after"),
        Case("TxnOffsetCommit", "errors", "ILLEGAL_GENERATION"),
        Case("InitProducerId", "errors", "PRODUCER_FENCED"),
        Case("FindCoordinator", "reset after"),
        Case("AddPartitionsToTxn", "late copy", protocol="consumer"),
    ],
    ids=str,
)
def test_sweep_finds_no_error_of_the_worker(own_kafka: LocalKafka, tmp_path: Path, case: Case) -> None:
    Sweeper(APP, own_kafka.bootstrap_servers, RECORDS, directory=tmp_path).run(case).raise_if_wrong()


@pytest.mark.parametrize(("case", "rule"), [(H1, "no_duplicates"), (H2B, "no_losses")], ids=["H1", "H2b"])
def test_sweep_finds_errors_of_a_worker_that_keeps_its_producer(
    own_kafka: LocalKafka, tmp_path: Path, case: Case, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process loads the App too, so its patches must be removed.
    monkeypatch.setattr(TransactionalProducer, "decide_replacement", TransactionalProducer.decide_replacement)
    # The client's reaction to a lost acknowledgement depends on when its batches left: one of three runs is enough.
    verdicts = []
    for _ in range(3):
        outcome = Sweeper(KEEPING_APP, own_kafka.bootstrap_servers, RECORDS, directory=tmp_path).run(case)
        verdicts.append(outcome.verdict)
        if outcome.verification is not None and rule in outcome.verification.report.violated:
            return
    raise AssertionError(f"{rule} held: {verdicts}")


PATTERN = """
from eos import App, Out, Record

app = App("sweep-pattern")


@app.process("^sweep-many-.*", to="sweep-out")
def both(record: Record) -> list[Out]:
    return [Out(record.value, partition=number) for number in range(2)]
"""


def test_sweep_of_pattern_app_uses_topics_with_records(own_kafka: LocalKafka, tmp_path: Path) -> None:
    app, records = tmp_path / "pattern_app.py", [b"record %d" % number for number in range(30)]
    app.write_text(PATTERN)
    given = {f"sweep-many-{number}": records for number in range(2)}
    outcome = Sweeper(f"{app}:app", own_kafka.bootstrap_servers, given, directory=tmp_path).run(
        Case("EndTxn", "reset after")
    )
    outcome.raise_if_wrong()
    with pytest.raises(ConfigurationError, match=r"has no values for \^sweep-many-\.\*"):
        Sweeper(f"{app}:app", own_kafka.bootstrap_servers, {"other": records})


USERS_OWN = f"""
import pytest
from eos.testing.sweeping import Sweeper, every_case

@pytest.mark.parametrize("case", every_case(["EndTxn"], ["duplicate", "reset after"], ["classic"]), ids=str)
def test_fault_loses_and_duplicates_nothing(case, eos_kafka):
    settings = {{"client.rack": "s3cr3t"}}
    Sweeper({APP!r}, eos_kafka.bootstrap_servers, {RECORDS!r}, settings=settings).run(case).raise_if_wrong()

def test_without_a_sweep():
    pass
"""


@pytest.mark.deep_for("one process")
@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_pytest_summary_has_the_sweep_table(own_kafka: LocalKafka, tmp_path: Path, options: tuple[str, ...]) -> None:
    code, output = run_pytest(tmp_path, USERS_OWN, f"--eos-kafka={own_kafka.bootstrap_servers}", *options)
    assert code == 0, output
    assert "3 passed" in output
    assert "eos: every fault at every step" in output
    assert "2 runs, 2 right" in output
    assert "s3cr3t" not in output, "the client's settings may contain passwords"
    rows = [line.split() for line in output.splitlines() if "exactly once" in line]
    assert sorted(" ".join(row[3:-4]) for row in rows) == ["duplicate", "reset after"], output


@pytest.mark.deep_for("one process")
def test_pytest_summary_without_a_sweep_has_no_table(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, USERS_OWN, "-k", "without_a_sweep")
    assert code == 0, output
    assert "1 passed" in output
    assert "every fault" not in output


def test_sweep_cases_are_steps_with_their_faults() -> None:
    cases = every_case()
    simple = [a for a in ACTIONS if a not in ("errors", H1.action, H2B.action)]
    # A late FindCoordinator changes nothing; H1 and H2b need one step each.
    per_protocol = len(every_txn_step) * len(simple) - 1 + 2 + sum(map(len, ERRORS.values()))
    assert len(cases) == 2 * per_protocol
    assert len(set(cases)) == len(cases)
    assert every_case(["EndTxn"], ["blackhole"], ["classic"]) == [Case("EndTxn", "blackhole")]
    for wrong in ((["EndTx"],), (["EndTxn"], ["explode"]), (["EndTxn"], ["blackhole"], ["third"])):
        with pytest.raises(ConfigurationError):
            every_case(*wrong)


def test_sweep_table_has_rows_of_faults_and_columns_of_protocols(tmp_path: Path) -> None:
    ways = ("unprotected", "protected, client side")
    cases = every_case(["EndTxn"], ["blackhole", "errors"], ["classic", "consumer"])
    wrong = Case("EndTxn", "blackhole", protocol="consumer")
    outcomes = [
        Outcome(case, way, ("lost 1",) if case == wrong and way == ways[1] else (), None, 1, 1.0, tmp_path)
        for way in ways
        for case in cases
    ]
    made = table(outcomes)
    headers = [f"{way}, {protocol}" for way in ways for protocol in ("classic", "consumer")]
    assert [column.header for column in made.columns] == ["step", "fault", *headers]
    assert made.title == f"{len(outcomes)} runs, {len(outcomes) - 1} right"
    assert made.row_count == 1 + len(ERRORS["EndTxn"])
    first = [next(iter(column.cells)) for column in made.columns]
    assert first == ["EndTxn", "blackhole", "exactly once", "exactly once", "exactly once", "lost 1"]
    assert not outcomes[0].wrong
    with pytest.raises(AssertionError, match="lost 1"):
        next(outcome for outcome in outcomes if outcome.wrong).raise_if_wrong()


def test_sweep_uses_the_protocols_of_each_kafka() -> None:
    assert (ways_on("4.4.0"), protocols_on("4.4.0")) == (["unprotected", "client"], ["classic", "consumer"])
    assert (ways_on("3.9.2"), protocols_on("3.9.2")) == (["unprotected"], ["classic"])
