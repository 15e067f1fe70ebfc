"""Hold Kafka requests in a TCP proxy in front of one broker, so that tests control the wire.

The proxy frames requests, pairs each response with its request by correlation id, and does to the n-th request that
fits a rule what a bad network would do. It keeps the request or its response, cuts the connection before or after the
broker acted, or delivers a copy long after the client's timeout. The broker's second listener advertises the proxy's
port (`LocalKafka(proxied_port=...)`), so all addresses that clients learn lead back here, and the proxy rewrites no
response. It must never change a byte, and must never delay a request without a rule.

All state lives on one asyncio loop in its own thread. The methods that tests call are synchronous and run there.

    with HoldingProxy.before(kafka) as proxy:
        late = proxy.on(ApiKey.EndTxn, Fault.LATE_COPY, transactional_id=name)
        producer.commit_transaction()            # its first EndTxn is kept, the client's retry succeeds
        producer.begin_transaction()
        ...
        assert late.deliver_late().error == 0    # the kept copy arrives inside the next transaction
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from enum import Enum
from types import TracebackType
from typing import Any, TypeVar

from kafka.protocol import consumer as consumer_protocol
from kafka.protocol import producer as producer_protocol
from kafka.protocol.api_key import ApiKey

from eos.broker import LocalKafka
from tests.support.reading import TooSlow
from tests.support.wire import decoded

__all__ = ["Answer", "ApiKey", "Fault", "HoldingProxy", "Request", "Rule", "proxied_port", "read_frame"]

T = TypeVar("T")

# How long a cut waits for the responses to earlier requests on the same connection, so that a rule about EndTxn does
# not also lose the acknowledgement of a Produce. Limited, because a JoinGroup may have no response for minutes.
DRAIN_S = 2.0
# A healthy broker answers within this time. After it the test should fail instead of hanging.
EXCHANGE_S = 15.0

_REQUEST_CLASSES = {
    cls.API_KEY: cls
    for module in (producer_protocol, consumer_protocol)
    for name, cls in vars(module).items()
    if name.endswith("Request")
}


class Fault(Enum):
    """Name what happens to the request that a rule catches."""

    HOLD_REQUEST = "kept before the broker sees it, and later requests of its connection behind it"
    HOLD_RESPONSE = "the broker acts, its answer is kept, and later answers of the connection behind it"
    CUT_BEFORE = "the client's connection is closed, the broker never sees the request"
    CUT_AFTER = "the broker acts and answers, then the client's connection is closed without that answer"
    LATE_COPY = "as CUT_BEFORE, but the bytes are kept for `deliver_late`"
    BLACKHOLE = "swallowed: no answer ever comes, the connection stays"


@dataclasses.dataclass(frozen=True)
class Request:
    """Hold one request as it arrived; `connection` counts client connections from 1, `seen_at` is monotonic."""

    api_key: int
    api_version: int
    correlation_id: int
    connection: int
    seen_at: float
    frame: bytes = dataclasses.field(repr=False)

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """Return the decoded body with names in snake case; {} except for requests of producers and consumers."""
        request_class = _REQUEST_CLASSES.get(self.api_key)
        if request_class is None:
            return {}
        decoded = request_class.decode(self.frame, version=self.api_version, header=True, framed=True)
        return decoded.to_dict()  # type: ignore[no-any-return]

    @property
    def transactional_id(self) -> str | None:
        name = self.fields.get("transactional_id", self.fields.get("v3_and_below_transactional_id"))
        return name if name is None else str(name)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Hold the broker's response to a caught request, unchanged."""

    request: Request
    frame: bytes = dataclasses.field(repr=False)

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        return decoded(self.request.api_key, self.request.api_version, self.frame).to_dict()  # type: ignore[no-any-return]

    @property
    def errors(self) -> list[int]:
        """Return every error code in the response, in order: one for the request, or one per partition."""
        return list(error_codes(self.fields))

    @property
    def error(self) -> int:
        """Return the first error code that is not 0, else 0; raise AssertionError if the response has no error code."""
        codes = self.errors
        assert codes, f"the response to {self.request} has no error code: {self.fields}"
        return next((code for code in codes if code), 0)


def error_codes(node: Any) -> list[int]:
    """Yield every error code in the fields of a response, in order."""
    if isinstance(node, list):
        return [code for item in node for code in error_codes(item)]
    if not isinstance(node, dict):
        return []
    return [
        code
        for name, value in node.items()
        for code in ([value] if name.endswith("error_code") else error_codes(value))
    ]


def proxied_port(kafka: LocalKafka) -> int:
    """Return the port on which a proxy in front of `kafka` must listen."""
    return int(kafka.proxied_servers.rpartition(":")[2])


class Rule:
    """Control one fault; the rule is done once its request was caught and treated.

    "Caught" means done as far as the rule alone can do it: the rule holds the request or its response, or the
    connection is closed. A rule fires once; after that, the client's retries pass.
    """

    def __init__(
        self, proxy: HoldingProxy, description: str, fault: Fault, nth: int, fits: Callable[[Request], bool]
    ) -> None:
        self.fault = fault
        self._proxy, self._description, self._fits = proxy, description, fits
        self._nth, self._fitting = nth, 0
        self._caught = threading.Event()
        self._request: Request | None = None
        self._released = asyncio.Event()
        self._answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

    def __repr__(self) -> str:
        return self._description

    @property
    def hit(self) -> bool:
        return self._caught.is_set()

    @property
    def request(self) -> Request:
        """Return the caught request; raise AssertionError if there is none."""
        assert self._request is not None, f"{self} has not caught a request yet"
        return self._request

    def wait(self, timeout: float = 10.0) -> Request:
        """Block until the request is caught, and return it; raise TooSlow after the timeout."""
        if not self._caught.wait(timeout):
            raise TooSlow(f"{self} never fired within {timeout} s; the proxy saw {self._proxy.summary()}")
        return self.request

    def release(self) -> None:
        """Let the held request or response pass; the request of a closed client passes on a new connection."""
        assert self.fault in (Fault.HOLD_REQUEST, Fault.HOLD_RESPONSE), f"{self} holds nothing to release"
        self.wait(0)
        self._proxy._call(self._released.set)

    def answer(self, timeout: float = EXCHANGE_S) -> Answer:
        """Return the broker's response to the caught request once it was forwarded, whether or not the client got
        it."""
        try:
            return self._answer.result(timeout)
        except TimeoutError:
            raise TooSlow(f"{self} had no response from the broker within {timeout} s") from None

    def deliver_late(self) -> Answer:
        """Send the caught bytes to the broker now, on a new connection, and return its response.

        After LATE_COPY or CUT_BEFORE, this is the copy that was on its way all the time; after the other faults, it is
        a duplicate that a network could deliver. Each call sends another copy.
        """
        self.wait(0)
        return self._proxy._run(self._proxy._exchange(self.request))

    # The methods below run on the proxy's loop only.

    def _due(self, request: Request) -> bool:
        """Count the request if it fits, and return True if it is the one to catch."""
        if self._request is not None or not self._fits(request):
            return False
        self._fitting += 1
        return self._fitting >= self._nth

    def _answered(self, answer: Answer) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)


class HoldingProxy:
    """Listen on 127.0.0.1:`listen_port` for one broker whose listener at `upstream` advertises that port.

    The end of the block drops every connection and everything held. Then it fails the test (`check`) if a rule never
    fired, because a fault test without its fault proves nothing.
    """

    def __init__(self, listen_port: int, upstream: tuple[str, int]) -> None:
        self.listen_port, self.upstream = listen_port, upstream
        self._rules: list[Rule] = []
        self._log: list[Request] = []
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        self._failures: list[BaseException] = []
        self._connection_count = 0
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="holding-proxy", daemon=True)

    @classmethod
    def before(cls, kafka: LocalKafka) -> HoldingProxy:
        """Return a proxy between `kafka` and the clients of its `proxied_servers`."""
        return cls(proxied_port(kafka), kafka.proxied_upstream)

    def __enter__(self) -> HoldingProxy:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(EXCHANGE_S)
        assert not self._thread.is_alive(), "the proxy's thread did not end"
        self._loop.close()
        if error is None:
            assert not self._failures, f"the proxy itself failed: {self._failures}"
            self.check()

    def on(
        self,
        api: ApiKey,
        fault: Fault,
        *,
        nth: int = 1,
        transactional_id: str | None = None,
        match: Callable[[Request], bool] | None = None,
    ) -> Rule:
        """Do `fault` to the `nth` request from now that fits all given conditions."""
        assert nth >= 1, f"nth counts from 1, not {nth}"

        def fits(request: Request) -> bool:
            return (
                request.api_key == api
                and (transactional_id is None or request.transactional_id == transactional_id)
                and (match is None or match(request))
            )

        whose = f" transactional.id {transactional_id}" if transactional_id else ""
        rule = Rule(self, f"{fault.name} of {api.name} no. {nth}{whose}", fault, nth, fits)
        self._call(lambda: self._rules.append(rule))
        return rule

    def seen(self, api: ApiKey, transactional_id: str | None = None, since: float = 0.0) -> list[Request]:
        """Return the requests of this kind that arrived so far, including held and dropped ones, oldest first."""
        return [
            request
            for request in self._call(lambda: list(self._log))
            if request.api_key == api
            and request.seen_at >= since
            and (transactional_id is None or request.transactional_id == transactional_id)
        ]

    def summary(self) -> str:
        """Return how many requests of which kind arrived, for the message about a rule that never fired."""
        counts: dict[str, int] = {}
        for request in self._call(lambda: list(self._log)):
            name = _api_name(request.api_key)
            counts[name] = counts.get(name, 0) + 1
        return ", ".join(f"{name} x{count}" for name, count in sorted(counts.items())) or "no request"

    def cut_all(self) -> int:
        """Reset every client connection now, keep everything held, and return how many connections were open."""
        return self._call(lambda: sum(connection.reset() for connection in self._connections))

    def check(self) -> None:
        """Raise AssertionError if a rule never fired."""
        silent = [rule for rule in self._rules if not rule.hit]
        assert not silent, f"never fired: {silent}"

    # The loop's side.

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(EXCHANGE_S * 2)

    def _call(self, work: Callable[[], T]) -> T:
        """Run a function on the loop's thread, where all state lives, or directly once that thread has ended."""
        if not self._thread.is_alive():
            return work()

        async def hop() -> T:
            return work()

        return self._run(hop())

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=_bound(self.listen_port))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connection_count += 1
        connection = _Connection(self, self._connection_count, reader, writer)
        task = self._spawn(connection.serve())
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection, None))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task whose exception fails the test at the end of the block instead of only being logged."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failures.append(error)

        task = self._loop.create_task(work)
        task.add_done_callback(ended)
        return task

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._connections.values())
        for connection, task in self._connections.items():
            connection.reset()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, request: Request) -> None:
        self._log.append(request)

    def _rule_for(self, request: Request) -> Rule | None:
        # Every rule counts every request, so that "no. 2" has the same meaning with any other rules.
        due = [rule for rule in self._rules if rule._due(request)]
        if not due:
            return None
        due[0]._request = request
        return due[0]

    async def _exchange(self, request: Request) -> Answer:
        """Send one request on its own connection. On PLAINTEXT the broker needs no ApiVersions first."""
        async with asyncio.timeout(EXCHANGE_S):
            reader, writer = await asyncio.open_connection(*self.upstream)
            try:
                writer.write(request.frame)
                await writer.drain()
                return Answer(request, await read_frame(reader))
            finally:
                writer.close()


class _Connection:
    """Serve one client connection and its upstream connection.

    There are three coroutines. `_receive` reads ahead, so that the proxy notices a client that disconnects while its
    request is held. `_forward` takes requests in order and applies rules. `_pass_answers` returns the responses.
    """

    def __init__(
        self,
        proxy: HoldingProxy,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.proxy, self.number = proxy, number
        self.reader, self.writer = reader, writer
        self.inbox: asyncio.Queue[Request | None] = asyncio.Queue()
        self.pending: dict[int, tuple[Request, Rule | None]] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.client_gone = False
        self.closed_by_us = False
        self.orphaned = False

    def reset(self) -> bool:
        """Reset the client's connection, and return True if it was still open."""
        connected = not self.client_gone and not self.closed_by_us
        self.closed_by_us = True
        self.writer.transport.abort()
        return connected

    async def serve(self) -> None:
        try:
            self.upstream_reader, self.upstream_writer = await asyncio.open_connection(*self.proxy.upstream)
        except OSError:
            self.writer.close()
            return
        helpers = [self.proxy._spawn(self._receive()), self.proxy._spawn(self._pass_answers())]
        try:
            await self._forward()
        finally:
            for helper in helpers:
                helper.cancel()
            self.writer.close()
            self.upstream_writer.close()

    async def _receive(self) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                frame = await read_frame(self.reader)
                request = _parse(frame, self.number)
                self.proxy._note(request)
                self.inbox.put_nowait(request)
        self.client_gone = True
        self.inbox.put_nowait(None)

    async def _forward(self) -> None:
        while (request := await self.inbox.get()) is not None:
            rule = self.proxy._rule_for(request)
            fault = rule.fault if rule else None
            if rule and fault in (Fault.CUT_BEFORE, Fault.LATE_COPY):
                await self._cut()
                rule._caught.set()
                return
            if rule and fault is Fault.BLACKHOLE:
                rule._caught.set()
                continue
            if rule and fault is Fault.HOLD_REQUEST:
                rule._caught.set()
                await rule._released.wait()
                self.orphaned = self.orphaned or self.client_gone or self.closed_by_us
            if self.orphaned:
                await self._send_for_nobody(request, rule)
            elif not self.closed_by_us:  # after a cut, the broker never sees the request that the proxy held
                await self._send(request, rule)

    async def _send_for_nobody(self, request: Request, rule: Rule | None) -> None:
        """Deliver the request of a client that has disconnected, and the requests after it."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            answer = await self.proxy._exchange(request)
            if rule:
                rule._answered(answer)

    async def _send(self, request: Request, rule: Rule | None) -> None:
        self.pending[request.correlation_id] = (request, rule)
        self.idle.clear()
        try:
            self.upstream_writer.write(request.frame)
            await self.upstream_writer.drain()
        except ConnectionError:
            self.writer.close()

    async def _pass_answers(self) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                frame = await read_frame(self.upstream_reader)
                request, rule = self.pending.pop(_correlation_id(frame))
                if rule:
                    rule._answered(Answer(request, frame))
                if rule and rule.fault is Fault.CUT_AFTER:
                    await self._cut(drain=False)
                    rule._caught.set()
                    return
                if rule and rule.fault is Fault.HOLD_RESPONSE:
                    rule._caught.set()
                    await rule._released.wait()
                self.writer.write(frame)
                if not self.pending:
                    self.idle.set()
        self.writer.close()

    async def _cut(self, drain: bool = True) -> None:
        if drain:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), DRAIN_S)
        self.closed_by_us = True
        self.writer.close()


def _bound(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    size = await reader.readexactly(4)
    return size + await reader.readexactly(int.from_bytes(size, "big"))


def _correlation_id(frame: bytes) -> int:
    return int.from_bytes(frame[4:8], "big", signed=True)


def _parse(frame: bytes, connection: int) -> Request:
    """Parse the fields at the start of every request header."""
    api_key, api_version, correlation_id = struct.unpack_from(">hhi", frame, 4)
    return Request(api_key, api_version, correlation_id, connection, time.monotonic(), frame)


def _api_name(api_key: int) -> str:
    try:
        return str(ApiKey(api_key).name)
    except ValueError:
        return f"api {api_key}"
