"""Record a step for each request and response of the transaction protocol.

The job owns the pairing of request and response. It forwards frames that it cannot read, with one warning per API and
version: tracing must never make a request fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from eos.shim import events
from eos.shim.pipeline import Connection, Exchange, Job
from eos.shim.trace import decode
from eos.shim.trace.model import NO_ANSWER, History, Step
from eos.shim.wire import api
from eos.shim.wire.batches import Batch, ProduceHead, Topic, fetch_response, produce_request
from eos.shim.wire.frames import Piece, Stream
from eos.shim.wire.walk import Layout, Walk

_NEWEST_FETCH, _OLDEST_FETCH = 18, 4
_TOPIC_IDS_SINCE = 10  # Metadata
# A partition of a Produce has about twelve fields with its batch. Larger requests are not traced.
_MOST_FIELDS = 200_000


class TraceJob(Job):
    """Call each of `sinks` with every finished step, and add the steps to `history` by transaction."""

    def __init__(self, history: History, *sinks: Callable[[Step], None]) -> None:
        self.history, self._sinks = history, sinks
        self._waiting: dict[Connection, dict[Exchange, list[Step]]] = {}
        self._topic_names: dict[bytes, str] = {}
        self._warned: set[tuple[int, int]] = set()
        self._clock_offset = time.time() - time.monotonic()

    def wants_request(self, api_key: int, version: int) -> bool:
        return decode.can_decode(api_key, version)

    def wants_response(self, api_key: int, version: int) -> bool:
        if api_key == api.METADATA:
            return _TOPIC_IDS_SINCE <= version <= 13
        if api_key == api.FETCH:
            return _OLDEST_FETCH <= version <= _NEWEST_FETCH
        return decode.can_decode(api_key, version)

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        try:
            steps = decode.request_steps(exchange.api_key, exchange.version, frame, self._when(exchange))
        except Exception as error:  # noqa: BLE001 - tracing must not reject a request
            self._warn_once(exchange, error)
        else:
            self._begin(exchange, steps)
        return frame

    def request_stream(self, exchange: Exchange, size: int) -> Stream | None:
        if exchange.api_key != api.PRODUCE:
            return None
        layout = _Produce(self, exchange).layout()
        return _Observer(layout, lambda error: self._warn_once(exchange, error), _MOST_FIELDS)

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        try:
            if exchange.api_key == api.METADATA:
                self._topic_names |= decode.topic_names(exchange.version, frame)
                return frame
            steps = self._waiting.get(exchange.connection, {}).pop(exchange, [])
            if steps:
                decode.add_response(steps, exchange.api_key, exchange.version, frame, self.topic_name)
                self._finish(exchange, steps)
        except Exception as error:  # noqa: BLE001 - tracing must not reject a response
            self._warn_once(exchange, error)
        return frame

    def response_stream(self, exchange: Exchange, size: int) -> Stream | None:
        if exchange.api_key != api.FETCH:
            return None
        layout = fetch_response(exchange.version, lambda batch: self._fetched(exchange, batch))
        return _Observer(layout, lambda error: self._warn_once(exchange, error))

    def connection_closed(self, connection: Connection) -> None:
        for exchange, steps in self._waiting.pop(connection, {}).items():
            for step in steps:
                step.errors = [NO_ANSWER]
            self._finish(exchange, steps)

    def topic_name(self, topic: Topic) -> str:
        if isinstance(topic, str):
            return topic
        return self._topic_names.get(topic, topic.hex()[:8])

    def begin_produce(self, exchange: Exchange, step: Step) -> None:
        self._begin(exchange, [step])

    def _when(self, exchange: Exchange) -> float:
        return exchange.started + self._clock_offset

    def _begin(self, exchange: Exchange, steps: list[Step]) -> None:
        for step in steps:
            step.time = self._when(exchange)
            step.version, step.connection = exchange.version, exchange.connection.number
            step.client, step.broker = exchange.connection.client, _broker(exchange.connection)
        if steps:
            self._waiting.setdefault(exchange.connection, {})[exchange] = steps

    def _finish(self, exchange: Exchange, steps: list[Step]) -> None:
        for step in steps:
            step.ms = round((time.monotonic() - exchange.started) * 1000, 2)
            self._notify(self.history.add(step))

    def _fetched(self, exchange: Exchange, batch: Batch) -> None:
        if batch.marker is None:
            return
        partition = f"{self.topic_name(batch.topic)}-{batch.partition}"
        step = Step("", "Marker", time.time(), exchange.version, exchange.connection.number)
        step.broker, step.producer_id, step.epoch = _broker(exchange.connection), batch.producer_id, batch.epoch
        step.partitions, step.offsets = [partition], {partition: batch.base_offset}
        step.outcome = batch.marker.lower()
        if self.history.add_marker(step):
            self._notify(step)

    def _notify(self, step: Step) -> None:
        for sink in self._sinks:
            sink(step)

    def _warn_once(self, exchange: Exchange, error: Exception) -> None:
        key = (exchange.api_key, exchange.version)
        if key not in self._warned:
            self._warned.add(key)
            name = f"{api.api_name(key[0])} v{key[1]}"
            events.warning("frame not traced", api=name, reason=f"{type(error).__name__}: {error}")


class _Produce:
    """Collect one Produce request into one step while it is forwarded."""

    def __init__(self, job: TraceJob, exchange: Exchange) -> None:
        self._job, self._exchange = job, exchange
        self._step: Step | None = None

    def layout(self) -> Callable[[Walk], Layout]:
        return produce_request(self._exchange.version, self._head, self._batch)

    def _head(self, head: ProduceHead) -> None:
        if head.transactional_id is not None:
            self._step = Step(head.transactional_id, "Produce", 0.0, records=0, bytes=0)
            self._job.begin_produce(self._exchange, self._step)

    def _batch(self, batch: Batch) -> None:
        step = self._step
        if step is None:
            return
        partition = f"{self._job.topic_name(batch.topic)}-{batch.partition}"
        if partition not in step.partitions:
            step.partitions.append(partition)
        step.producer_id, step.epoch = batch.producer_id, batch.epoch
        if step.first_sequence is None:
            step.first_sequence = batch.base_sequence
        step.records = (step.records or 0) + batch.records
        step.bytes = (step.bytes or 0) + batch.size


class _Observer:
    """Read a stream of one frame without changing it, and stop reading after an error."""

    def __init__(
        self,
        layout: Callable[[Walk], Layout],
        failed: Callable[[Exception], None],
        most_fields: int | None = None,
    ) -> None:
        self._failed = failed
        self._walk: Walk | None = Walk(layout, most_fields)

    def feed(self, piece: Piece) -> Piece:
        if self._walk is not None:
            try:
                self._walk.feed(piece)
            except Exception as error:  # noqa: BLE001 - tracing must not stop a frame
                self._walk = None
                self._failed(error)
        return piece


def _broker(connection: Connection) -> str:
    return connection.broker if connection.node_id is None else f"broker {connection.node_id}"
