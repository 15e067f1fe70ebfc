"""Tests of the session that need no Kafka."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from eos import App, Record, Settings
from eos.errors import Action, CallFailed, ConfigurationError, Temporary
from eos.kafka.client.settings import FUNCTION_OPTIONS, OPTIONS
from eos.records import FeedResult
from eos.session.outcomes import Commit, Listener
from eos.session.recovery import MOST_REBUILDS, FailedTransaction
from eos.session.session import TransactSession
from eos.session.transaction import Transaction
from eos.worker.worker import Worker
from tests.support.sessions import give_producer


@pytest.mark.parametrize("name", FUNCTION_OPTIONS)
def test_options_for_functions_are_refused_in_a_session(name: str) -> None:
    servers, given = {"bootstrap.servers": "127.0.0.1:9"}, {name: str(OPTIONS[name].default)}
    settings = servers | given | {"group.id": "g", "transactional.id": "t"}
    with pytest.raises(ConfigurationError, match=f"{name} is about an App's functions"):
        TransactSession(settings, ["in"])
    app = App("app")
    app.process("in")(print)
    Worker(app, Settings(servers | given))


def rebuild(session: TransactSession, times: int) -> None:
    for _ in range(times):
        failure = CallFailed("commit", Action.SETTLE, RuntimeError("timed out"))
        session._loop._recovery._count_rebuild(FailedTransaction(failure, 0, None, {}))


def commit_one(session: TransactSession, taken: int = 0) -> None:
    sent = Transaction(session, 0.0, 1.0, -1)
    sent.start_commit()
    session._parts.outcomes.begun(sent)
    job: Any = SimpleNamespace(result=2.0, error=None)
    offsets = session._parts.positions.offsets()
    session._loop._succeeded(Commit(sent, offsets, taken, 1.0, job))


def test_rebuilds_without_a_commit_are_limited() -> None:
    session = TransactSession({"group.id": "g", "transactional.id": "t"}, ["in"])
    session._parts.fetcher._group_consumer = SimpleNamespace(start_offsets=SimpleNamespace(committed=lambda: None))  # type: ignore[assignment]
    rebuild(session, MOST_REBUILDS)
    commit_one(session)
    rebuild(session, MOST_REBUILDS)
    with pytest.raises(Temporary, match=rf"^{MOST_REBUILDS + 1} rebuilds without one commit, .*timed out.*--instance"):
        rebuild(session, 1)
    assert session.counters.rebuilds_by_cause == {"timeout": 2 * MOST_REBUILDS + 1}


def test_feed_after_a_failed_send_is_ignored() -> None:
    """The worker derives from the sent count since when the broker has known the transaction."""
    session = TransactSession({"group.id": "g", "transactional.id": "t"}, ["in"])
    failed = CallFailed("produce", Action.REBUILD, RuntimeError("timed out"))
    producer: Any = SimpleNamespace(feed=lambda feed, records: FeedResult(2, 2, failed))
    group_consumer: Any = SimpleNamespace(lost_reason=None)
    session._parts.fetcher._group_consumer = group_consumer
    give_producer(session, producer)
    given, feed = [Record("in", 0, offset) for offset in range(3)], lambda records, sink: FeedResult(0, 0, None)
    assert session._loop.feed(feed, given) == FeedResult(2, 3, None)
    assert session._loop.feed(feed, given) == FeedResult(0, 3, None)


@pytest.mark.parametrize("refused_at", [0, 99, 100, 199])
def test_refused_record_is_found_by_halving(refused_at: int) -> None:
    """Each abort replaces a producer, which takes half a second or more."""
    found: list[int] = []

    class Finds(Listener):
        def on_refused(self, record: Record, failure: CallFailed) -> None:
            found.append(record.offset)

    settings = {"group.id": "g", "transactional.id": "t", "eos.places.topic": ""}
    session = TransactSession(settings, ["in"], listener=Finds())
    producer: Any = SimpleNamespace(abort=lambda: None, who=dict, replacements={})
    give_producer(session, producer)
    group_consumer: Any = SimpleNamespace(
        seek=lambda targets: None, start_offsets=SimpleNamespace(committed=lambda: None)
    )
    session._parts.fetcher._group_consumer = group_consumer
    refusal = CallFailed("delivery", Action.POISON, RuntimeError("too large"))
    session._parts.positions.assign({("in", 0): 0})
    at, aborts = 0, 0
    while not found:
        session._parts.positions.add_fetched([Record("in", 0, offset) for offset in range(at, 200)])
        taken = len(session._parts.positions.take(session._parts.pacing.limit))
        if at <= refused_at < at + taken:
            session._loop._carry_out(refusal, {}, None)
            aborts += 1
        else:
            commit_one(session, taken)
            session._parts.positions.assign({("in", 0): at + taken})
            at += taken
    assert found == [refused_at]
    assert aborts <= 9
    commit_one(session)
    assert session._parts.pacing.limit == 2, "transactions grow again afterwards"


def test_rebalance_abort_is_logged_as_info_until_it_repeats(caplog: pytest.LogCaptureFixture) -> None:
    session = TransactSession({"group.id": "g", "transactional.id": "t"}, ["in"])
    producer: Any = SimpleNamespace(abort=lambda: None, who=dict)
    group_consumer: Any = SimpleNamespace(seek=lambda targets: None)
    session._parts.fetcher._group_consumer = group_consumer
    give_producer(session, producer)
    raw = KafkaError(KafkaError.ILLEGAL_GENERATION, "in((null))[3](Broker: Specified group generation id is not valid)")
    asked = CallFailed("abort", Action.ABORT, RuntimeError("asked by the application"))
    with caplog.at_level("INFO", "eos"):
        for failure in (*[CallFailed("send_offsets", Action.ABORT, raw)] * 3, asked):
            session._loop._carry_out(failure, {}, None)
    logged = [(one.levelname, one.getMessage()) for one in caplog.records]
    usual = "transaction aborted reason=the group is rebalancing"
    assert logged[:3] == [("INFO", usual), ("INFO", usual), ("WARNING", usual)]
    assert logged[3] == ("WARNING", f"transaction aborted reason={asked}")
    assert session.counters.aborts_by_cause == {"rebalance": 3, "application": 1}
