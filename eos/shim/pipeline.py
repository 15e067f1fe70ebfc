"""Define the interface of a job, and run frames through the jobs that want them.

The pipeline owns the list of jobs per (API, version). A frame that no job wants is forwarded as bytes. Requests pass
the jobs from the client's side to the broker's side, and responses pass them in the opposite order. It must never do
I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from eos.shim.addresses.book import Endpoint
from eos.shim.errors import ProtocolError
from eos.shim.settings import CONTROL_BYTES
from eos.shim.wire import api
from eos.shim.wire.frames import UNCHANGED, Handling, Piece, Stream

# Later versions are not cached: none exist, and a client may send any number.
_VERSIONS_CACHED = 32


class Control(Protocol):
    """Define the operations on a connection that a job may use (link.Link)."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def can_send_requests(self) -> bool:
        """Return whether a request sent now can still reach the broker."""
        ...

    def reset(self) -> None: ...

    def reset_before(self, exchange: Exchange) -> None: ...


class Connection:
    """Describe a client connection to jobs. `number` counts from 1 over the shim's life.

    `held_bytes` counts the bytes held by streams of its requests and for requests until their responses arrive.
    `own_response_bytes` counts responses by jobs that wait for the broker's responses to earlier requests.
    """

    __slots__ = ("broker", "client", "held_bytes", "link", "node_id", "number", "own_response_bytes")

    link: Control

    def __init__(self, number: int, client: str, broker: str, node_id: int | None) -> None:
        self.number, self.client, self.broker, self.node_id = number, client, broker, node_id
        self.held_bytes = self.own_response_bytes = 0


class Exchange:
    """Hold one request and its response. `version` is the client's, even if a job sends another one upstream.

    `expects_response` is true if the client expects a response (not with acks=0).
    """

    __slots__ = (
        "_answer",
        "api_key",
        "connection",
        "correlation_id",
        "counted_bytes",
        "expects_response",
        "notes",
        "started",
        "version",
    )

    def __init__(self, connection: Connection, api_key: int, version: int, correlation_id: int) -> None:
        self.connection = connection
        self.api_key, self.version, self.correlation_id = api_key, version, correlation_id
        self.started = time.monotonic()
        self.expects_response = False
        self._answer: bytes | None = None
        self.notes: dict[Job, Any] = {}  # data of jobs, kept until the response arrives
        self.counted_bytes = 0  # bytes of the notes and of this object

    def count_bytes(self, count: int) -> None:
        """Count more bytes that are held until the response arrives."""
        self.counted_bytes += count
        self.connection.held_bytes += count

    def release_bytes(self) -> None:
        self.count_bytes(-self.counted_bytes)

    @property
    def answer(self) -> bytes | None:
        """Return the response from a job that replaces the broker's."""
        return self._answer

    @answer.setter
    def answer(self, answer: bytes | None) -> None:
        if self.expects_response:
            self.connection.own_response_bytes += len(answer or b"") - len(self._answer or b"")
        self._answer = answer


class Job:
    """Inspect or change requests and responses. A hook is called only if its `wants_…` method returned True.

    A hook that raises ProtocolError ends the connection, and nothing of the frame is forwarded.
    """

    def wants_request(self, api_key: int, version: int) -> bool:
        return False

    def wants_response(self, api_key: int, version: int) -> bool:
        return False

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        """Handle a whole request and return the frame to forward. To answer it, set `exchange.answer` and return b"".

        The job nearest to the broker may return a `send_queue.HeldFrame`. For a response, the job nearest to the client
        may do so.
        """
        return frame

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        """Handle a whole response and return the frame to forward."""
        return frame

    def request_stream(self, exchange: Exchange, size: int) -> Stream | None:
        """Return a stream that sees this request (`size` bytes) in pieces, or None to get it whole in `request`.

        A stream that answers the request sets `exchange.answer` with the last piece and forwards nothing.
        """
        return None

    def response_stream(self, exchange: Exchange, size: int) -> Stream | None:
        return None

    def on_broker_versions(self, newest: Mapping[str, Mapping[int, int] | None]) -> None:
        """Take the newest version of each API that each broker offers, or None for a broker that does not answer.

        Called before clients are served, and again while `wants_versions_again` is true. The job may want other frames
        afterwards.
        """

    @property
    def wants_versions_again(self) -> bool:
        """Return whether the brokers do not offer enough yet, so that `on_broker_versions` must be called again."""
        return False

    @property
    def not_ready_reason(self) -> str | None:
        """Return why a new client would not be served, or None."""
        return None

    def connection_closed(self, connection: Connection) -> None:
        """Forget a closed connection and its unanswered requests."""

    def shim_stopped(self) -> None:
        """Clean up after the shim and all connections have ended."""


class Traffic:
    """Count received frames and bytes by API key, including those that a job refuses or a fault holds."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[int, int]] = {}
        self.answers: dict[int, tuple[int, int]] = {}


class Pipeline:
    """Run frames through jobs.

    `whole_limit` bounds collected responses and Produce requests, and `control_limit` bounds other requests; both are
    in bytes.
    """

    def __init__(self, jobs: Sequence[Job], whole_limit: int, control_limit: int = CONTROL_BYTES) -> None:
        self.traffic = Traffic()
        self.jobs, self._whole_limit, self._control_limit = tuple(jobs), whole_limit, min(control_limit, whole_limit)
        self._for_request: dict[tuple[int, int], tuple[Job, ...]] = {}
        self._for_response: dict[tuple[int, int], tuple[Job, ...]] = {}

    @property
    def wants_broker_versions(self) -> bool:
        """Return whether a job needs the API versions of the brokers."""
        return any(type(job).on_broker_versions is not Job.on_broker_versions for job in self.jobs)

    @property
    def wants_versions_again(self) -> bool:
        return any(job.wants_versions_again for job in self.jobs)

    @property
    def not_ready_reason(self) -> str | None:
        return next((reason for job in self.jobs if (reason := job.not_ready_reason) is not None), None)

    def request(self, exchange: Exchange, size: int) -> Handling:
        """Return how to forward a request of `size` bytes."""
        _count(self.traffic.requests, exchange, size)
        key = (exchange.api_key, exchange.version)
        jobs = self._for_request.get(key)
        if jobs is None:
            jobs = tuple(job for job in self.jobs if job.wants_request(*key))
            if _is_cached(key):
                self._for_request[key] = jobs
        if not jobs:
            return UNCHANGED
        streams = [job.request_stream(exchange, size) for job in jobs]
        limit = self._whole_limit if exchange.api_key == api.PRODUCE else self._control_limit
        return self._handling(exchange, jobs, streams, size, limit, [job.request for job in jobs])

    def response(self, exchange: Exchange, size: int) -> Handling:
        """Return how to forward the response to `exchange`, which has `size` bytes."""
        _count(self.traffic.answers, exchange, size)
        key = (exchange.api_key, exchange.version)
        jobs = self._for_response.get(key)
        if jobs is None:
            jobs = tuple(job for job in reversed(self.jobs) if job.wants_response(*key))
            if _is_cached(key):
                self._for_response[key] = jobs
        if not jobs:
            return UNCHANGED
        streams = [job.response_stream(exchange, size) for job in jobs]
        return self._handling(exchange, jobs, streams, size, self._whole_limit, [job.response for job in jobs])

    def on_broker_versions(self, newest: Mapping[str, Mapping[int, int] | None]) -> None:
        for job in self.jobs:
            job.on_broker_versions(newest)
        self._for_request.clear()
        self._for_response.clear()

    def _show_to_jobs(self, exchange: Exchange, answer: bytes, by: Job) -> bytes:
        """Pass a response that a job has made through the jobs between that job and the client, and return the
        result."""
        for job in reversed(self.jobs[: self.jobs.index(by)]):
            if job.wants_response(exchange.api_key, exchange.version):
                stream = job.response_stream(exchange, len(answer))
                answer = job.response(exchange, answer) if stream is None else _whole(stream, answer)
        return answer

    def connection_closed(self, connection: Connection) -> None:
        for job in self.jobs:
            job.connection_closed(connection)

    def shim_stopped(self) -> None:
        for job in self.jobs:
            job.shim_stopped()

    def _handling(
        self,
        exchange: Exchange,
        jobs: Sequence[Job],
        streams: Sequence[Stream | None],
        size: int,
        limit: int,
        whole: Sequence[Callable[[Exchange, bytes], bytes]],
    ) -> Handling:
        streaming = None not in streams
        if streaming and len(jobs) == 1 and jobs[0] is self.jobs[0]:
            assert streams[0] is not None
            return streams[0]  # no other job handles the frame, and none needs this job's response
        steps = [
            partial(hook, exchange) if stream is None else stream.feed if streaming else partial(_whole, stream)
            for hook, stream in zip(whole, streams, strict=True)
        ]

        def run(piece: Any) -> Any:
            for job, step in zip(jobs, steps, strict=True):
                piece = step(piece)
                if not piece:
                    if exchange.answer is not None:
                        exchange.answer = self._show_to_jobs(exchange, exchange.answer, job)
                    break
            return piece

        if streaming:
            return _Streamed(run)
        if size > limit:
            what = f"{api.api_name(exchange.api_key)} v{exchange.version}"
            raise ProtocolError(f"{what}: {size} bytes exceed the limit of {limit} for messages that are read whole")
        return run


def _count(traffic: dict[int, tuple[int, int]], exchange: Exchange, size: int) -> None:
    key = exchange.api_key if exchange.api_key <= api.NEWEST_KNOWN else api.UNKNOWN
    frames, in_all = traffic.get(key, (0, 0))
    traffic[key] = frames + 1, in_all + size


def _is_cached(key: tuple[int, int]) -> bool:
    return key[0] <= api.NEWEST_KNOWN and key[1] < _VERSIONS_CACHED


def _whole(stream: Stream, frame: bytes) -> bytes:
    return bytes(stream.feed(frame))


class _Streamed:
    """Feed the pieces of a frame to several streams in sequence."""

    def __init__(self, feed: Callable[[Piece], Piece]) -> None:
        self.feed = feed
