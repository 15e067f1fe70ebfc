"""What a job of the shim is, and which frames are looked at because of it.

Owns the plan per (API, version): a frame no job asked for is moved as bytes. Requests run through the jobs from the
client's side to the broker's, responses the other way. It must never do I/O.
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
from eos.shim.wire.frames import PASSING, Passage, Piece, Stream

# Of later versions nothing is remembered: there are none, and a client may name any number.
_VERSIONS_REMEMBERED = 32


class Control(Protocol):
    """What a job may do to a connection (link.Link)."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def takes_requests(self) -> bool:
        """Whether a request that leaves now still reaches the broker."""
        ...

    def reset(self) -> None: ...

    def reset_before(self, exchange: Exchange) -> None: ...


class Connection:
    """What a job may know of the connection a frame is on; `number` counts from 1 over the shim's life.

    `kept` are the bytes that streams of its requests hold and that are remembered of requests until their answers;
    `owed` those of answers that jobs gave and that wait for the broker's answers before them.
    """

    __slots__ = ("broker", "client", "kept", "link", "node_id", "number", "owed")

    link: Control

    def __init__(self, number: int, client: str, broker: str, node_id: int | None) -> None:
        self.number, self.client, self.broker, self.node_id = number, client, broker, node_id
        self.kept = self.owed = 0


class Exchange:
    """One request and its answer; `version` is the client's, whatever a job made of it upstream.

    `awaited` says that the client waits for an answer (not with acks=0).
    """

    __slots__ = (
        "_answer",
        "api_key",
        "awaited",
        "connection",
        "correlation_id",
        "notes",
        "remembered",
        "started",
        "version",
    )

    def __init__(self, connection: Connection, api_key: int, version: int, correlation_id: int) -> None:
        self.connection = connection
        self.api_key, self.version, self.correlation_id = api_key, version, correlation_id
        self.started = time.monotonic()
        self.awaited = False
        self._answer: bytes | None = None
        self.notes: dict[Job, Any] = {}  # what a job wants to remember until the answer comes
        self.remembered = 0  # bytes of it and of this

    def remember(self, count: int) -> None:
        """So many bytes more are held until it is answered."""
        self.remembered += count
        self.connection.kept += count

    def forget(self) -> None:
        self.remember(-self.remembered)

    @property
    def answer(self) -> bytes | None:
        """What a job answers in the broker's place."""
        return self._answer

    @answer.setter
    def answer(self, answer: bytes | None) -> None:
        if self.awaited:
            self.connection.owed += len(answer or b"") - len(self._answer or b"")
        self._answer = answer


class Job:
    """Does something to requests and responses. Each hook is called only for what the `wants_…` method said yes to.

    A hook that raises ProtocolError ends the connection; nothing of the frame goes on.
    """

    def wants_request(self, api_key: int, version: int) -> bool:
        return False

    def wants_response(self, api_key: int, version: int) -> bool:
        return False

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        """A whole request, in and out. To answer it here set `exchange.answer` and return b"".

        The job nearest to the broker may return a `lane.Held`; so may, for responses, the one nearest to the client.
        """
        return frame

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        """A whole response, in and out."""
        return frame

    def request_stream(self, exchange: Exchange, size: int) -> Stream | None:
        """How to see this request (`size` bytes) while it passes; None: collect it and call `request`.

        A stream that answers it sets `exchange.answer` with the last piece, and gives nothing of the frame out.
        """
        return None

    def response_stream(self, exchange: Exchange, size: int) -> Stream | None:
        return None

    def upstream(self, newest: Mapping[str, Mapping[int, int] | None]) -> None:
        """Called before clients are served: per broker the newest version of each API it offers, None if it does not
        answer. And again while it `asks_again`; what it wants may be different after that.
        """

    @property
    def asks_again(self) -> bool:
        """Whether what the brokers offer was not enough, and `upstream` is to be called again."""
        return False

    @property
    def not_ready(self) -> str | None:
        """Why a client that comes now would not be served, or None."""
        return None

    def closed(self, connection: Connection) -> None:
        """The connection is gone, and with it the requests that were not answered."""

    def stopped(self) -> None:
        """The shim has ended, and all connections with it."""


class Traffic:
    """Frames and bytes by API key, as they came; what a job refused or a fault kept is in it too."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[int, int]] = {}
        self.answers: dict[int, tuple[int, int]] = {}


class Pipeline:
    """`whole_limit` bounds what is collected of answers and of Produce requests, `control_limit` all other requests."""

    def __init__(self, jobs: Sequence[Job], whole_limit: int, control_limit: int = CONTROL_BYTES) -> None:
        self.traffic = Traffic()
        self.jobs, self._whole_limit, self._control_limit = tuple(jobs), whole_limit, min(control_limit, whole_limit)
        self._for_request: dict[tuple[int, int], tuple[Job, ...]] = {}
        self._for_response: dict[tuple[int, int], tuple[Job, ...]] = {}

    @property
    def wants_upstream(self) -> bool:
        """Whether a job wants to know what the brokers offer."""
        return any(type(job).upstream is not Job.upstream for job in self.jobs)

    @property
    def asks_again(self) -> bool:
        return any(job.asks_again for job in self.jobs)

    @property
    def not_ready(self) -> str | None:
        return next((reason for job in self.jobs if (reason := job.not_ready) is not None), None)

    def request(self, exchange: Exchange, size: int) -> Passage:
        """How a request of `size` bytes passes."""
        _count(self.traffic.requests, exchange, size)
        key = (exchange.api_key, exchange.version)
        jobs = self._for_request.get(key)
        if jobs is None:
            jobs = tuple(job for job in self.jobs if job.wants_request(*key))
            if _is_remembered(key):
                self._for_request[key] = jobs
        if not jobs:
            return PASSING
        streams = [job.request_stream(exchange, size) for job in jobs]
        limit = self._whole_limit if exchange.api_key == api.PRODUCE else self._control_limit
        return self._passage(exchange, jobs, streams, size, limit, [job.request for job in jobs])

    def response(self, exchange: Exchange, size: int) -> Passage:
        """How the response to `exchange`, `size` bytes long, passes."""
        _count(self.traffic.answers, exchange, size)
        key = (exchange.api_key, exchange.version)
        jobs = self._for_response.get(key)
        if jobs is None:
            jobs = tuple(job for job in reversed(self.jobs) if job.wants_response(*key))
            if _is_remembered(key):
                self._for_response[key] = jobs
        if not jobs:
            return PASSING
        streams = [job.response_stream(exchange, size) for job in jobs]
        return self._passage(exchange, jobs, streams, size, self._whole_limit, [job.response for job in jobs])

    def upstream(self, newest: Mapping[str, Mapping[int, int] | None]) -> None:
        for job in self.jobs:
            job.upstream(newest)
        self._for_request.clear()
        self._for_response.clear()

    def _shown(self, exchange: Exchange, answer: bytes, by: Job) -> bytes:
        """An answer that a job gave, after the jobs on the client's side of it saw it as any other."""
        for job in reversed(self.jobs[: self.jobs.index(by)]):
            if job.wants_response(exchange.api_key, exchange.version):
                stream = job.response_stream(exchange, len(answer))
                answer = job.response(exchange, answer) if stream is None else _whole(stream, answer)
        return answer

    def closed(self, connection: Connection) -> None:
        for job in self.jobs:
            job.closed(connection)

    def stopped(self) -> None:
        for job in self.jobs:
            job.stopped()

    def _passage(
        self,
        exchange: Exchange,
        jobs: Sequence[Job],
        streams: Sequence[Stream | None],
        size: int,
        limit: int,
        whole: Sequence[Callable[[Exchange, bytes], bytes]],
    ) -> Passage:
        streaming = None not in streams
        if streaming and len(jobs) == 1 and jobs[0] is self.jobs[0]:
            assert streams[0] is not None
            return streams[0]  # nobody is behind it, and nobody in front whom its answer is to be shown to
        steps = [
            partial(hook, exchange) if stream is None else stream.feed if streaming else partial(_whole, stream)
            for hook, stream in zip(whole, streams, strict=True)
        ]

        def run(piece: Any) -> Any:
            for job, step in zip(jobs, steps, strict=True):
                piece = step(piece)
                if not piece:
                    if exchange.answer is not None:
                        exchange.answer = self._shown(exchange, exchange.answer, job)
                    break
            return piece

        if streaming:
            return _Streamed(run)
        if size > limit:
            what = f"{api.api_name(exchange.api_key)} v{exchange.version}"
            raise ProtocolError(f"a {what} of {size} bytes is over the limit of {limit} for what is read whole")
        return run


def _count(traffic: dict[int, tuple[int, int]], exchange: Exchange, size: int) -> None:
    key = exchange.api_key if exchange.api_key <= api.NEWEST_KNOWN else api.UNKNOWN
    frames, in_all = traffic.get(key, (0, 0))
    traffic[key] = frames + 1, in_all + size


def _is_remembered(key: tuple[int, int]) -> bool:
    return key[0] <= api.NEWEST_KNOWN and key[1] < _VERSIONS_REMEMBERED


def _whole(stream: Stream, frame: bytes) -> bytes:
    return bytes(stream.feed(frame))


class _Streamed:
    """The streams of a frame, one behind the other."""

    def __init__(self, feed: Callable[[Piece], Piece]) -> None:
        self.feed = feed
