"""A sink writes a micro-batch once, even if it is called twice."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from eos.errors import ConfigurationError
from eos.kafka.admin.ownership import Identity
from eos.kafka.client.cluster import TransactionalIdState
from spark_connector import query, sink
from spark_connector.marker import Decision, Marker, WrongProgress, sink_key
from spark_connector.query import Query

QUERY = Query("the-query", "the-run", "digest", None)


def micro_batch(run: str = "the-run") -> sink._MicroBatch:
    return sink._MicroBatch(b"key", 7, Query("the-query", run, "digest", None), None, ("out",))


def written(by: sink._MicroBatch) -> Marker:
    """Return the marker of this micro-batch as read back from Kafka."""
    return Marker.decode(by.marker(None, Decision.WRITE, 10).encode())


@pytest.mark.parametrize("servers", [("a:1,b:1", "a:1,b:1"), ("a:1,b:1", "b:1, a:1")], ids=["the same", "reordered"])
def test_second_thread_in_one_micro_batch_is_refused(
    servers: tuple[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Both threads check for a marker before either has written."""
    monkeypatch.setattr(query, "current", lambda df, batch: QUERY)
    monkeypatch.setattr(query, "is_stop", lambda df, error: False)
    monkeypatch.setattr(sink, "to_spark_metrics", lambda *_: None)
    delivering, delivered, refused = threading.Event(), [], []

    def deliver(self: Any, df: Any, batch: Any) -> Any:
        delivering.wait(0.2)  # lets the other thread check
        delivered.append(df)
        return SimpleNamespace(rows=1)

    monkeypatch.setattr(sink._Sink, "deliver", deliver)

    def call(server: str, df: str) -> None:
        write = sink.exactly_once_sink(topic="out", transactional_id=request.node.name, bootstrap_servers=server)
        try:
            write(df, 7)  # type: ignore[arg-type]
        except ConfigurationError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=call, args=each) for each in zip(servers, ("one", "two"), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(delivered) == 1
    assert len(refused) == 1
    assert "would lose its rows" in refused[0]


def test_marker_of_another_call_in_the_same_run_is_refused() -> None:
    """The other call may use another sink object, process or broker address: the marker in Kafka reveals it."""
    mine, other = micro_batch(), micro_batch()
    assert mine.decide(written(mine)) is Decision.ALREADY  # an earlier attempt whose answer was lost
    with pytest.raises(WrongProgress, match="would lose its rows"):
        mine.decide(written(other))
    assert micro_batch("a restart").decide(written(other)) is Decision.ALREADY


def test_marker_without_a_call_is_accepted() -> None:
    old = Marker("the-query", 7, 10, "digest", None, ("out",), "the-run")
    assert micro_batch().decide(old) is Decision.ALREADY


def test_old_batch_ids_are_forgotten_only_with_remember_days() -> None:
    old = {sink_key("id", "long ago"): 0, sink_key("id"): 0}
    asked = sink._Write(sink_key("id", "new"), "new", ("out",), remember_days=30)
    assert asked.obsolete_keys(old) == [sink_key("id", "long ago")]
    assert sink._Write(asked.key, "new", ("out",), remember_days=None).obsolete_keys(old) == []


@pytest.mark.parametrize(
    ("mine", "coordinator", "replaced"),
    [
        (None, [], True),  # this run has fenced no other run
        (Identity(7, 3), [TransactionalIdState("CompleteCommit", 7, 4)], True),
        (
            Identity(7, 3),
            [TransactionalIdState("CompleteCommit", 7, 3), TransactionalIdState("Empty", 7, 4)],
            True,
        ),  # replaced while this run waits
        (
            Identity(7, 3),
            [TransactionalIdState("CompleteCommit", 7, 3)] * 3,
            False,
        ),  # this run has fenced the other one
        (Identity(7, 3), [None] * 3, False),
    ],
)
def test_run_is_replaced_if_another_run_continues(
    mine: Identity | None,
    coordinator: list[TransactionalIdState | None],
    replaced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If both runs gave way to each other, none would continue."""
    answers = iter(coordinator)
    now = iter(range(100))
    monkeypatch.setattr(sink, "ClusterAdmin", lambda _: nullcontext(SimpleNamespace(describe=lambda _: next(answers))))
    monkeypatch.setattr(sink, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    monkeypatch.setattr(sink._Sink, "identity", mine)
    stream = sink.exactly_once_sink(topic="out", transactional_id="id", bootstrap_servers="a:1")
    assert stream.is_replaced(patience_s=3) is replaced
    assert next(answers, "no answer left") == "no answer left"
