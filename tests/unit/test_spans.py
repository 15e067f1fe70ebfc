"""OpenTelemetry spans, one per transaction: attributes, links and end. Needs the extra `otel`."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from eos import App, Record, Settings
from eos.engine.handling import Collector, Handler
from eos.engine.hooks import Hooks
from eos.errors import ConfigurationError
from eos.session.outcomes import Outcome
from eos.worker.spans import Spans
from eos.worker.worker import Worker

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "eos.instance": "one", "eos.otel.spans": "true"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01".encode()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the spans ended until now."""
    trace = pytest.importorskip("opentelemetry.trace", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def records(*headers: Any, first: int = 0) -> list[Record]:
    return [Record("in", 0, first + number, value=b"v", headers=given) for number, given in enumerate(headers)]


def test_committed_transaction_is_a_span_with_links(exported: Any) -> None:
    spans = Spans({"eos.transactional_id": "app-one"})
    with spans.handling():
        traced = [("traceparent", PARENT), ("tracestate", b"v=1")]
        spans.took(records((), traced, traced, [("traceparent", b"nonsense")], [("traceparent", None)]))
        spans.took(records([("traceparent", PARENT.replace(b"-b7", b"-c8"))], first=5))
    assert exported() == ()
    spans.ended(Outcome.COMMITTED)
    (span,) = exported()
    assert (span.name, span.kind.name) == ("eos.transaction", "CONSUMER")
    assert span.attributes["messaging.batch.message_count"] == 6
    assert span.attributes["eos.outcome"] == "committed"
    assert span.attributes["eos.transactional_id"] == "app-one"
    assert [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links] == [
        f"{TRACE}-b7ad6b7169203331",
        f"{TRACE}-c8ad6b7169203331",
    ]
    assert span.links[0].context.is_remote


def test_number_of_links_is_bounded(exported: Any) -> None:
    spans = Spans({})
    with spans.handling():
        spans.took(records(*[[("traceparent", b"00-%032x-%016x-01" % (n, n))] for n in range(1, 1_000)]))
    spans.ended(Outcome.COMMITTED)
    assert len(exported()[0].links) == 32


def test_function_span_is_child_of_its_transactions_span(exported: Any) -> None:
    from opentelemetry import trace

    spans = Spans({})
    with spans.handling(), trace.get_tracer("user").start_as_current_span("query"):
        pass
    spans.ended(Outcome.COMMITTED)
    query, transaction = exported()
    assert query.parent.span_id == transaction.context.span_id


def test_coroutine_spans_have_no_earlier_transaction_as_parent(exported: Any) -> None:
    from opentelemetry import trace

    async def queries(record: Record) -> None:
        with trace.get_tracer("user").start_as_current_span("query"):
            pass

    app = App("app")
    app.process("in")(queries)
    hooks, handler, spans = Hooks(app), Handler(app), Spans({})
    hooks.start()
    for _ in range(2):
        with spans.handling():
            handler.handle(Collector(), records(()))
        spans.ended(Outcome.COMMITTED)
    hooks.stop(failed=False)
    assert [span.parent for span in exported() if span.name == "query"] == [None, None]


@pytest.mark.parametrize("outcome", Outcome)
def test_span_has_the_outcome_of_its_transaction(outcome: Outcome, exported: Any) -> None:
    spans = Spans({})
    spans.ended(outcome)  # a transaction that only committed offsets has no span
    with spans.handling():
        spans.took(records((), ()))
    spans.ended(outcome)
    (span,) = exported()
    assert span.attributes["eos.outcome"] == outcome.value
    assert span.status.is_ok is (outcome is not Outcome.ABORTED)
    with spans.handling():
        spans.took(records((), ()))
    spans.close()
    assert [one.attributes["eos.outcome"] for one in exported()] == [outcome.value, "unknown"]


def app_of() -> App:
    app = App("app")
    app.process("in", to="out")(lambda record: b"x")
    return app


def test_worker_creates_no_spans_by_default() -> None:
    assert Worker(app_of(), Settings(SETTINGS | {"eos.otel.spans": "false"}))._spans is None


def test_spans_without_opentelemetry_raise_error_that_names_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'eos-kafka\[otel\]'"):
        Worker(app_of(), Settings(SETTINGS))
