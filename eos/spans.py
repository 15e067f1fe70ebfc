"""A span of OpenTelemetry for each transaction, linked to the traces of its input: only where `eos.otel.spans` asks.

Owns what a span says. It sets up no provider and no exporter: what the process has configured takes the spans
(`opentelemetry-instrument eos run ...`, or the user's module). It must never decide anything about a transaction.

A span begins when the transaction's first records are handled, and is the current one while functions run, so that
spans of theirs lie in it. It ends with the commit, or, when there was none, at the next transaction or the stop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eos.app import Record
from eos.errors import ConfigurationError

_LINKS = 32  # of one span, to so many traces
_TRACE = "traceparent", "tracestate"


@dataclass
class _Open:
    span: Any
    traces: set[str]
    records: int = 0
    last: tuple[str, int, int] | None = None  # topic, partition, offset of a record that was handled


class Spans:
    """Of one worker. Transactions are told apart by identity."""

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
        self._nothing = Context()  # a link is the record's, never the present span's
        self._tracer = trace.get_tracer("eos")
        self._attributes = {"messaging.system": "kafka", "messaging.operation.type": "process", **attributes}
        self._open: dict[Hashable, _Open] = {}

    @contextlib.contextmanager
    def handling(self, transaction: Hashable) -> Iterator[None]:
        """Its span is the current one in the block."""
        span = self._tracer.start_span(
            "eos.transaction", kind=self._trace.SpanKind.CONSUMER, attributes=self._attributes
        )
        self._open[transaction] = _Open(span, set())
        with self._trace.use_span(span, end_on_exit=False):
            yield

    def took(self, transaction: Hashable, records: Sequence[Record]) -> None:
        """These records are handled in it."""
        opened, last = self._open[transaction], records[-1]
        opened.records += len(records)
        opened.last = last.topic, last.partition, last.offset
        for record in records:
            if record.headers and len(opened.traces) < _LINKS:
                self._link(opened, record)

    def _link(self, opened: _Open, record: Record) -> None:
        carrier = {name: value.decode("latin-1") for name, value in record.headers if name in _TRACE and value}
        if (parent := carrier.get("traceparent")) is None or parent in opened.traces:
            return
        context = self._trace.get_current_span(
            self._propagator.extract(carrier, context=self._nothing)
        ).get_span_context()
        if context.is_valid:
            opened.traces.add(parent)
            opened.span.add_link(context)

    def committed(self, transaction: Hashable) -> None:
        self._end(transaction, "committed")

    def look(self, committed: Mapping[tuple[str, int], int], on_its_way: int) -> None:
        """No transaction is open. Those without a commit ended otherwise, but for the last `on_its_way`; what is
        committed behind their records came to pass although its answer was lost."""
        pending = list(self._open)
        for transaction in pending[: len(pending) - on_its_way]:
            last = self._open[transaction].last
            known = last is not None and last[:2] in committed
            passed = known and last is not None and committed[last[:2]] > last[2]
            self._end(transaction, "committed" if passed else "aborted" if known else "unknown")

    def _end(self, transaction: Hashable, outcome: str) -> None:
        opened = self._open.pop(transaction, None)
        if opened is None:
            return  # a transaction that only moved offsets
        opened.span.set_attribute("messaging.batch.message_count", opened.records)
        opened.span.set_attribute("eos.outcome", outcome)
        if outcome == "aborted":
            opened.span.set_status(self._trace.StatusCode.ERROR, "its records come again")
        opened.span.end()
