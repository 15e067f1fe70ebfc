"""Check that the fixture `eos_run` on a real broker returns the same as `eos.testing.run` without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

import eos
from eos.broker import LocalKafka
from eos.broker.jars import maven_jars
from eos.errors import ConfigurationError
from eos.testing.history import end_offsets
from eos.testing.online import run_on
from tests.support.reading import create_topic
from tests.support.users_pytest import run_pytest

TEST = """
import eos
import eos.testing
import pytest
from eos.errors import PoisonRecord

app = eos.App("orders")
HEADERS = {"h": "1", "bytes": b"\\xff", "none": None, "empty": "", "größe": "groß", "zero": "a\\0b"}

@app.process("orders", to=["doubled", "other"], on_error=eos.retry(1, then=eos.dlq, backoff_ms=1))
def double(order: dict):
    copies = [
        eos.Out(f"copy {n}", topic="other", headers=headers)
        for n, headers in enumerate([HEADERS, [*HEADERS.items(), ("h", "2")], *({k: v} for k, v in HEADERS.items())])
    ]
    return [{"n": order["n"] * 2}, *copies]

strict = eos.App("strict")

@strict.process("orders", to="doubled")
def refuse(order: dict):
    raise ValueError("no")

RECORDS = [("orders", {"n": 1}, "key"), ("orders", "no json"), ("orders", None), ("orders", {"n": 2})]

def results(ran):
    # Partition and timestamp are the broker's.
    return sorted([(s.topic, s.value, s.key, s.headers) for s in ran.to("doubled") + ran.to("other")], key=repr)

@pytest.mark.parametrize("again", [1, 2])
def test_broker_and_offline_runs_give_equal_outputs(eos_run, again):
    online, offline = eos_run(app, RECORDS), eos.testing.run(app, RECORDS)
    assert results(online) == results(offline)
    assert online.values("doubled") == offline.values("doubled") == [b'{"n":2}', b'{"n":4}']
    assert online.values("orders.dlq") == offline.values("orders.dlq") == [b"no json", None]
    assert (online.dead_letters, online.retries, online.skipped) == (2, 0, 0)
    assert (offline.dead_letters, offline.retries, offline.skipped) == (2, 0, 0)

traced = eos.App("traced")

@traced.process("orders", to="doubled")
def same(record: eos.Record):
    return record.value

def test_trace_headers_are_passed_on(eos_run):
    headers = [("traceparent", b"00-1"), ("x", b"y"), ("tracestate", None)]
    given = [eos.Record("orders", 0, 0, value=b"v", headers=headers), eos.Record("orders", 0, 1, value=b"w")]
    for run in (eos_run, eos.testing.run):
        assert [s.headers for s in run(traced, given).to("doubled")] == [[headers[0], headers[2]], []]

def test_poison_record_is_raised(eos_run):
    for run in (eos_run, eos.testing.run):
        with pytest.raises(PoisonRecord, match="refuse failed on orders.0.@.*: ValueError: no"):
            run(strict, RECORDS[:1])

counting = eos.App("counting")

@counting.process("orders", to="between")
def pass_on(order: eos.Record):
    return order.out(order.value)

@counting.process("between", to="doubled", was={"total": "seen"})
def count(order: eos.Record, total: eos.State[int], last: eos.MapState[str, int]):
    total.set(total.get(0) + 1)
    last["n"] = total.get()
    return str(total.get())

def test_run_returns_the_final_states(eos_run):
    given = [("orders", "x", "a"), ("orders", "y", "b"), ("orders", "z", "a")]
    for run in (eos_run, eos.testing.run):
        states = run(counting, given).states
        assert states == {"count": {"total": {b"a": 2, b"b": 1}, "last": {b"a": {"n": 2}, b"b": {"n": 1}}}}
    assert eos_run(counting, [given[0]]).states["count"]["total"] == {b"a": 1}
"""


def test_fixture_runs_an_app_as_the_worker_does(kafka: LocalKafka, tmp_path: Path) -> None:
    known = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    before = set(known.list_topics(timeout=10).topics)
    code, output = run_pytest(tmp_path, TEST, "-q", f"--eos-kafka={kafka.bootstrap_servers}")
    assert code == 0, output
    assert "5 passed" in output
    of_brokers = {"__consumer_offsets", "__transaction_state"}
    assert set(known.list_topics(timeout=10).topics) - of_brokers <= before


def test_run_refuses_an_existing_topic_and_removes_the_others(kafka: LocalKafka, names: Callable[[str], str]) -> None:
    app = eos.App(names("app"))
    existing = create_topic(kafka.bootstrap_servers, names("out"))

    @app.process(names("in"), to=existing)
    def copy(value: bytes) -> bytes:
        return value

    with pytest.raises(ConfigurationError, match=f"the topic {existing} exists at "):
        run_on(kafka.bootstrap_servers, app, [(names("in"), "a")])
    known = AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(timeout=10).topics
    assert (existing in known, names("in") in known) == (True, False)
    assert end_offsets(kafka.bootstrap_servers, existing).log_end == {(existing, 0): 0}


BYTEMAN = "4.0.24"
LATE = """
RULE control records are written two seconds after the commit was answered
CLASS kafka.coordinator.transaction.TransactionMarkerChannelManager
METHOD generateRequests
AT ENTRY
IF true
DO java.lang.Thread.sleep(2000)
ENDRULE
"""


@pytest.mark.deep
def test_loaded_records_are_handled_even_if_they_become_readable_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Delay the control records, so that a worker with `--until-end` would see none of the loaded records."""
    (tmp_path / "late.btm").write_text(LATE)
    (agent,) = maven_jars("byteman", [f"org.jboss.byteman:byteman:{BYTEMAN}"], "byteman", BYTEMAN)
    app = eos.App("late")

    @app.process("words", to="loud-words")
    def louder(word: str) -> str:
        return word.upper()

    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-javaagent:{agent}=script:{tmp_path / 'late.btm'}")
    with LocalKafka() as kafka:
        ran = run_on(kafka.bootstrap_servers, app, [("words", "to"), ("words", "be")])
    assert ran.values("loud-words") == [b"TO", b"BE"]
