"""`eos doctor` without a cluster: its output for an unfit and for an unreachable cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eos.cli import doctor
from eos.errors import EosError, NotAuthorised, Unavailable
from eos.kafka.admin import preflight
from eos.kafka.admin.facts import Facts, Topic
from eos.kafka.admin.preflight import REQUIRED_APIS
from eos.kafka.admin.transactions import OpenTransaction, Verdict
from eos.kafka.client.cluster import OFFSETS_LOG, TRANSACTION_LOG, OpenProducer

THERE, GONE, HIDDEN = Topic(True, 1, 1, in_sync=1), Topic(False), Topic(None)
HANGING = OpenTransaction(
    OpenProducer(("in", 0), 7, 3, 100, 1_372_939_200_000, 0), "id", "Empty", Verdict.HANGING, "it is done", 4
)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return an App from `in` to `out`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docapp.py").write_text(
        "from eos import App\napp = App('app')\n@app.process('in', to='out')\ndef f(value: bytes) -> None: ...\n"
    )
    return "docapp.py:app"


class Cluster:
    """A cluster with these topics and a hanging transaction in `in`; queries for the topics in `refuses` fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: Iterable[str] = (), **topics: Topic) -> None:
        self.asked: list[list[str] | None] = []
        self._refuses = frozenset(refuses)
        known = {"in": THERE, "out": THERE, TRANSACTION_LOG: THERE, OFFSETS_LOG: THERE} | topics
        facts = Facts("b:9092", 1, 2, frozenset(REQUIRED_APIS), {}, known)
        monkeypatch.setattr(preflight, "gather_facts", lambda *_: facts)
        monkeypatch.setattr(doctor, "ClusterAdmin", lambda _: self)
        monkeypatch.setattr(doctor, "find_open", self._find_open)

    def __enter__(self) -> SimpleNamespace:
        return SimpleNamespace()

    def __exit__(self, *_: object) -> None: ...

    def _find_open(self, admin: object, topics: list[str] | None) -> list[OpenTransaction]:
        self.asked.append(topics)
        if refused := self._refuses & set(topics or ()):
            raise NotAuthorised(f"topic {min(refused)}: not authorised to DESCRIBE it")
        return [HANGING] if topics is None or "in" in topics else []


def examined(target: str | None, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    code = doctor.doctor(target, instance="one", json=True)
    return code, json.loads(capsys.readouterr().out)


def test_failed_check_does_not_hide_hanging_transactions(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, out=GONE)
    code, rows = examined(target, capsys)
    assert [(row["check"], row["exit_code"]) for row in rows if row["level"] == "failed"] == [
        ("topics", 69),
        ("transactions", 69),
    ]
    assert code == 69
    assert cluster.asked == [["in"], [OFFSETS_LOG]], "a missing topic would make the others unknown"


def test_doctor_skips_missing_offsets_log_and_reports_hidden_one(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = Cluster(monkeypatch, **{OFFSETS_LOG: GONE, TRANSACTION_LOG: GONE})
    examined(target, capsys)
    assert fresh.asked == [["in", "out"]]
    Cluster(monkeypatch, [OFFSETS_LOG], **{OFFSETS_LOG: HIDDEN})
    _, rows = examined(target, capsys)
    assert [row["level"] for row in rows if row["check"] == "transactions"] == ["failed", "not known"]


def test_doctor_without_app_searches_every_topic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch)
    code, _ = examined(None, capsys)
    assert (code, cluster.asked) == (69, [None])


@pytest.mark.parametrize(
    ("error", "check", "code"),
    [
        (Unavailable("b:9092 cannot be reached: no", remedy="check it"), "brokers", 69),
        (NotAuthorised("the login at b:9092 was refused: no", remedy="check it"), "authorised", 77),
    ],
)
def test_unavailable_cluster_is_a_finding_with_remedy(
    error: EosError,
    check: str,
    code: int,
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def look(*_: object) -> None:
        raise error

    monkeypatch.setattr(preflight, "gather_facts", look)
    found = {"check": check, "level": "failed", "found": error.args[0], "change": "check it", "exit_code": code}
    assert examined(target, capsys) == (code, [found])
    assert doctor.doctor(target, instance="one") == code
    table = capsys.readouterr().out
    assert error.args[0] in table
    assert "check it" in table
