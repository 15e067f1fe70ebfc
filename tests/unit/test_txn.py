"""`eos txn abort` without a cluster: its report for people and as JSON."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace

import pytest

from eos.cli import txn
from eos.errors import Temporary, Unavailable, UsageError
from eos.kafka.admin.transactions import STATES, OpenTransaction, Verdict
from eos.kafka.client.cluster import ListedTransaction, OpenProducer, TransactionalIdState


class Admin(SimpleNamespace):
    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def admin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(txn, "ClusterAdmin", lambda _: Admin())


def hanging(producer_id: int) -> OpenTransaction:
    seen = OpenProducer(("t", 3), producer_id, 5, 100, 1_372_939_200_000, 0)
    return OpenTransaction(seen, None, None, Verdict.HANGING, "nobody knows it", 4)


def test_json_rows_keep_their_fields() -> None:
    told = txn._open_json(hanging(7))
    assert told["last_timestamp_ms"] == 1_372_939_200_000
    assert " ".join(told) == (
        "verdict topic partition producer_id epoch start_offset last_timestamp_ms coordinator_epoch held_back "
        "transactional_id state reason"
    )


def listed(state: str, since_s: float | None = 200.0) -> ListedTransaction:
    start_ms = -1 if since_s is None else int((time.time() - since_s) * 1000)
    return ListedTransaction(f"app-{state}", 7, 3, state, 1, start_ms, 10_000, frozenset())


@pytest.mark.parametrize("state", sorted(STATES))
def test_open_time_is_shown_only_for_open_transactions(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin = Admin(transactions=lambda: [listed(state)], describe_transactions=lambda _: [listed(state)])
    monkeypatch.setattr(txn, "ClusterAdmin", lambda _: admin)
    txn.list_()
    txn.describe(f"app-{state}")
    told = capsys.readouterr().out
    ages = re.findall(r"20\d\.\d s", told)
    assert len(ages) == (0 if state in ("Empty", "CompleteCommit", "CompleteAbort", "Dead") else 2), told
    assert told.count(state) >= 2


def test_state_option_ignores_case_and_lists_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [listed("Ongoing"), listed("CompleteCommit"), listed("Empty", None)]
    monkeypatch.setattr(txn, "ClusterAdmin", lambda _: Admin(transactions=lambda: rows))
    txn.list_(state=["ongoing", "EMPTY"], json=True)
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["Ongoing", "Empty"]
    txn.list_(state=["dead"], prefix="app")
    assert capsys.readouterr().out == "no transactional.id with prefix app in state Dead\n"
    with pytest.raises(UsageError) as raised:
        txn.list_(state=["Ongoing", "Foo"])
    assert raised.value.exit_code == 64
    assert str(raised.value).startswith("--state Foo: must be one of CompleteAbort, CompleteCommit,")


def test_abort_of_an_id_prints_its_state_before_and_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = (TransactionalIdState("Ongoing", 7, 3), TransactionalIdState("CompleteAbort", 7, 4))
    monkeypatch.setattr(txn, "abort_open_transaction", lambda *_: known)
    txn.abort("app-one", yes=True)
    sentence = "app-one: was Ongoing (producer id 7, epoch 3), is CompleteAbort; its former owner is fenced\n"
    assert capsys.readouterr().out == sentence
    txn.abort("app-one", yes=True, json=True)
    before = {"state": "Ongoing", "producer_id": 7, "epoch": 3}
    after = {"state": "CompleteAbort", "producer_id": 7, "epoch": 4}
    told = [{"transactional_id": "app-one", "before": before, "after": after}]
    assert json.loads(capsys.readouterr().out) == told
    monkeypatch.setattr(txn, "abort_open_transaction", lambda *_: (known[0], None))
    txn.abort("app-one", yes=True, json=True)
    assert json.loads(capsys.readouterr().out)[0]["after"] is None


def test_abort_of_hanging_transactions_continues_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(_: object, found: OpenTransaction) -> None:
        if found.producer.producer_id == 8:
            raise Temporary("it ended")

    monkeypatch.setattr(txn, "abort_hanging", end)
    monkeypatch.setattr(txn, "find_open", lambda *_: [hanging(7), hanging(8)])
    with pytest.raises(Temporary):
        txn.abort(topic="t", partition=3, yes=True, json=True)
    before = {"state": "hanging", "producer_id": 7, "epoch": 5}
    told = [{"topic": "t", "partition": 3, "before": before, "after": before | {"state": "aborted"}}]
    assert json.loads(capsys.readouterr().out) == told
    monkeypatch.setattr(txn, "find_open", lambda *_: [hanging(7)])
    txn.abort(topic="t", partition=3, yes=True)
    assert capsys.readouterr().out == "t[3]: aborted the transaction of producer id 7, epoch 5\n"


def test_abort_without_hanging_transaction_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(txn, "find_open", lambda *_: [])
    with pytest.raises(Unavailable, match=r"no hanging transaction on t\[3\]"):
        txn.abort(topic="t", partition=3, yes=True, json=True)
    assert capsys.readouterr().out == ""
