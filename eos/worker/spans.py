"""Creates an OpenTelemetry span for each transaction, linked to the traces of its input, if `eos.otel.spans` is set.

Owns the contents of a span. It sets up no provider and no exporter: the process's own configuration receives the spans
(`opentelemetry-instrument eos run ...`, or the user's module). It must never decide anything about a transaction.

A span begins when the transaction's first records are handled. It is the current span while functions run, so their
spans become its children. It ends when the session reports the outcome of the transaction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eos.errors import ConfigurationError
from eos.records import Record, readable_headers
from eos.session.outcomes import Outcome

_LINKS = 32  # maximum number of links of one span, each to another trace
_TRACE = "traceparent", "tracestate"


@dataclass
class _Open:
    span: Any
    traces: set[str]
    records: int = 0


class Spans:
    """Creates the spans of one worker."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.context import Context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigurationError(
                "eos.otel.spans=true needs OpenTelemetry", remedy="pip install 'eos-kafka[otel]'"
            ) from error
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self._nothing = Context()  # a link must point to the record's span, never to the current one
        self._tracer = trace.get_tracer("eos")
        self._attributes = {"messaging.system": "kafka", "messaging.operation.type": "process", **attributes}
        self._open: _Open | None = None

    @contextlib.contextmanager
    def handling(self) -> Iterator[None]:
        """Begin the span of a transaction, which is the current span inside the block."""
        span = self._tracer.start_span(
            "eos.transaction", kind=self._trace.SpanKind.CONSUMER, attributes=self._attributes
        )
        self._open = _Open(span, set())
        with self._trace.use_span(span, end_on_exit=False):
            yield

    def took(self, records: Sequence[Record]) -> None:
        """Record that the open transaction handles these records."""
        opened = self._open
        assert opened is not None
        opened.records += len(records)
        for record in records:
            if readable_headers(record.headers) and len(opened.traces) < _LINKS:
                self._link(opened, record)

    def _link(self, opened: _Open, record: Record) -> None:
        carrier = {
            name: value.decode("latin-1")
            for name, value in readable_headers(record.headers)
            if name in _TRACE and value
        }
        if (parent := carrier.get("traceparent")) is None or parent in opened.traces:
            return
        context = self._trace.get_current_span(
            self._propagator.extract(carrier, context=self._nothing)
        ).get_span_context()
        if context.is_valid:
            opened.traces.add(parent)
            opened.span.add_link(context)

    def close(self) -> None:
        """End the span of a transaction whose outcome is unknown because of an interrupt."""
        self.ended(Outcome.UNKNOWN)

    def ended(self, outcome: Outcome) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return  # a transaction that only committed offsets has no span
        opened.span.set_attribute("messaging.batch.message_count", opened.records)
        opened.span.set_attribute("eos.outcome", outcome.value)
        if outcome is Outcome.ABORTED:
            opened.span.set_status(self._trace.StatusCode.ERROR, "its records are handed out again")
        opened.span.end()
