"""Connect one client connection to the upstream connection made for it.

The module owns both transports and the order of the bytes between them. Back-pressure comes from the sockets: when one
side cannot write, the other is not read. A client is also not read while it does not read its responses, or while it
has too many unanswered requests. The end of one direction is forwarded as such, and the remaining bytes of one side
are delivered before the other side is closed. The client's first request opens the upstream connection. A link must
never hold a byte that its memory account does not count, and never work for one connection while others wait.

All connections of a shim read into one shared buffer. Its bytes are handled, changed in place where necessary, and
written to the other side before the next read. Forwarding a megabyte neither copies nor allocates it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Protocol

from eos.shim.addresses.book import Endpoint
from eos.shim.errors import Malformed, ProtocolError
from eos.shim.memory import MemoryBudget
from eos.shim.pipeline import Connection, Exchange, Pipeline
from eos.shim.send_queue import SendQueue
from eos.shim.wire import api
from eos.shim.wire.frames import FrameSplitter, Handling, Piece
from eos.shim.wire.headers import REQUEST_HEAD, RESPONSE_HEAD, AcksReader, implausible_reason, request_head

# The time to deliver the last bytes to a side that reads slowly, after the other side has closed.
LINGER_S = 30.0
# A reset waits this long for the responses to earlier requests: a JoinGroup may stay unanswered for minutes.
RESET_WAIT_S = 2.0
# APIs that brokers answer without a login. A broker that requires a login closes the connection at any other request
# before it.
_BEFORE_A_LOGIN = frozenset({api.API_VERSIONS, api.SASL_HANDSHAKE, api.SASL_AUTHENTICATE})
# Limits of one connection: unanswered requests, and bytes of responses by jobs that wait for the broker's responses to
# earlier requests. Brokers handle one request of a connection at a time, so pausing the client costs nothing.
MOST_UNANSWERED = 1_024
MOST_OWN_RESPONSE_BYTES = 1024 * 1024
# SO_LINGER on, for 0 seconds: closing sends a reset.
_NO_LINGER = struct.pack("ii", 1, 0)
# A side with more unsent bytes than this is full. The limit is small because the sockets' own buffers hold megabytes
# and are not empty when reading resumes.
_WRITE_BUFFER_BYTES = 32 * 1024
# The smallest safe read size: when a TLS connection ends, asyncio reads its two 256 KiB buffers once and drops the
# rest.
_READ_BYTES = 512 * 1024
# The read size while memory is tight, because a paused side holds the bytes of its last read. TLS connections keep
# _READ_BYTES as the smallest safe size.
_TIGHT_READ_BYTES = 16 * 1024
# The size in memory of a request that waits for its response.
_EXCHANGE_BYTES = 320
_JOINED_BYTES = 64 * 1024  # up to this size a copy costs less than another system call or a new read buffer


class LinkObserver(Protocol):
    """Receive the events of a link."""

    def link_opened(self, link: Link) -> None:
        """Record that the client has connected, after its TLS handshake if it uses TLS."""

    def link_needs_broker(self, link: Link) -> None:
        """Connect to the broker: the client's first request has begun."""

    def link_logged_in(self, link: Link) -> None:
        """Record that the broker answered a request that needs a login, if the broker requires logins."""

    def link_failed(self, link: Link, sender: str, error: Exception) -> None:
        """Report invalid bytes that end the link. `sender` is "client" or the broker's name."""

    def link_closed(self, link: Link) -> None:
        """Record that both sides are closed."""


class Link:
    def __init__(
        self,
        number: int,
        endpoint: Endpoint,
        pipeline: Pipeline,
        largest_frame: int,
        shim: LinkObserver,
        buffer: ReadBuffer,
        memory: MemoryBudget,
    ) -> None:
        self.number, self.endpoint, self._pipeline, self._largest = number, endpoint, pipeline, largest_frame
        self.shim = shim
        self.connection = Connection(number, "", endpoint.name, endpoint.node_id)
        self.client = _Side(self, self._from_client, buffer)
        self.upstream = _Side(self, self._from_upstream, buffer)
        self.client.other, self.upstream.other = self.upstream, self.client
        self.connection.link = self
        self._up, self._down = SendQueue(self.upstream.write), SendQueue(self.client.write)
        self._reset_before: Exchange | None = None
        self._requests = FrameSplitter(REQUEST_HEAD.size, largest_frame, self._open_request)
        self._responses = FrameSplitter(RESPONSE_HEAD.size, largest_frame, self._open_response)
        self._acks: AcksReader | None = None  # reads a Produce whose head is not complete yet
        self._pending: deque[Exchange] = deque()
        self.has_request = False  # true once the first request has begun
        self.is_logged_in = False
        # Monotonic times at which the link opened, and at which it last read from the client or the broker.
        self.opened_at = self.last_read_at = 0.0
        self._draining = False
        self._is_closed = False
        self.memory = memory
        self._account = memory.open(self._held_bytes, self._evict)
        self.connecting: asyncio.Task[None] | None = None
        self.timeout_check: asyncio.TimerHandle | None = None  # ends an idle link

    # Called by the server.

    async def connect(self, context: ssl.SSLContext | None, timeout_s: float) -> OSError | None:
        """Open the upstream connection. On an error close the client's connection and return the error."""
        host, port = self.endpoint.upstream
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: self.upstream, host, port, ssl=context, server_hostname=host if context else None
                )
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors
            self.close()
            return error
        if self._is_closed:
            self.upstream.abort()
        else:
            self.client.clear_pause(PauseReason.CONNECTING)
        return None

    def drain(self) -> None:
        """Read only the rest of the current request, and close when all requests are answered."""
        self._draining = True
        self._stop_reading_between_requests()
        self._close_if_drained()

    def close(self) -> None:
        """Close both sides after the written bytes have been sent."""
        self.client.close()
        self.upstream.close()
        self._finish_if_closed()

    def abort(self) -> None:
        self.client.abort()
        self.upstream.abort()
        self._finish_if_closed()

    # From the client to the broker.

    def _from_client(self, data: Piece) -> Piece | None:
        """Forward requests. Return the bytes left for the next turn, if any."""
        requests = self._requests
        if self._draining:
            data = data[: requests.bytes_left]
        pieces = requests.feed(data)
        if pieces:
            self._up.send(pieces)
        self._send_own_answers()
        if len(self._pending) >= MOST_UNANSWERED or self.connection.own_response_bytes >= MOST_OWN_RESPONSE_BYTES:
            self.client.pause_for(PauseReason.UNANSWERED)
        if self._draining:
            self._stop_reading_between_requests()
            self._close_if_drained()
        return requests.rest

    def _stop_reading_between_requests(self) -> None:
        if not self._requests.bytes_left:
            self.client.pause_for(PauseReason.STOPPED)

    def _open_request(self, data: Piece, pos: int) -> Handling | None:
        head = request_head(data, pos)
        reason = implausible_reason(head, self._largest)
        if reason is not None:
            raise Malformed(f"not a Kafka client: {reason}")
        expects_response = True
        if head.api_key == api.PRODUCE:
            reader = self._acks or AcksReader(head.version)
            acks = reader.read(data, pos)
            self._acks = reader if acks is None else None
            if acks is None:
                return None
            expects_response = acks != 0
        elif head.api_key == api.SASL_HANDSHAKE and head.version == 0:
            # After SaslHandshake v0 the client sends tokens without headers, and the shim could no longer split the
            # stream into frames.
            raise ProtocolError("SaslHandshake v0 is not supported: the client must use v1 (Kafka 1.0 and later)")
        if not self.has_request:
            self._request_broker()
        exchange = Exchange(self.connection, head.api_key, head.version, head.correlation_id)
        exchange.expects_response = expects_response
        handling = self._pipeline.request(exchange, head.size + 4)
        self._account.start_request()
        if expects_response:
            # Jobs may keep the fields that they read from a request, but not records.
            read = head.size if callable(handling) and head.api_key != api.PRODUCE else 0
            exchange.count_bytes(_EXCHANGE_BYTES + read)
            self._pending.append(exchange)
        return handling

    def _request_broker(self) -> None:
        self.has_request = True
        if self.upstream.never_connected:
            self.client.pause_for(PauseReason.CONNECTING)
        self.shim.link_needs_broker(self)

    # From the broker to the client.

    def _from_upstream(self, data: Piece) -> Piece | None:
        responses = self._responses
        pieces = responses.feed(data)
        if pieces:
            self._down.send(pieces)
        self._send_own_answers()
        if len(self._pending) < MOST_UNANSWERED and self.connection.own_response_bytes < MOST_OWN_RESPONSE_BYTES:
            self.client.clear_pause(PauseReason.UNANSWERED)
        if self._reset_before is not None:
            self._reset_if_due()
        if self._draining:
            self._close_if_drained()
        return responses.rest

    def _open_response(self, data: Piece, pos: int) -> Handling | None:
        size, correlation_id = RESPONSE_HEAD.unpack_from(data, pos)
        pending = self._pending
        while pending and pending[0].answer is not None:
            self._responses.insert(self._next_own_answer())
        if not pending or pending[0].correlation_id != correlation_id:
            raise Malformed(f"the broker answered request {correlation_id} out of order")
        exchange = self._next_answered()
        if not self.is_logged_in and exchange.api_key not in _BEFORE_A_LOGIN:
            self.is_logged_in = True
            self.shim.link_logged_in(self)
        return self._pipeline.response(exchange, size + 4)

    def _send_own_answers(self) -> None:
        """Send the responses that jobs gave, as soon as all earlier requests are answered."""
        pending = self._pending
        while pending and pending[0].answer is not None and self._responses.between_frames:
            self._down.send([self._next_own_answer()])

    def _next_own_answer(self) -> bytes:
        answer = self._next_answered().answer or b""
        self.connection.own_response_bytes -= len(answer)
        return answer

    def _next_answered(self) -> Exchange:
        exchange = self._pending.popleft()
        exchange.release_bytes()
        return exchange

    # Memory.

    def count(self) -> None:
        self._account.count()

    def _held_bytes(self) -> int:
        ways = self._requests, self._responses, self._up, self._down, self.client, self.upstream
        return sum(way.held_bytes for way in ways) + self.connection.held_bytes + self.connection.own_response_bytes

    # Closing.

    def failed(self, side: _Side, error: Exception) -> None:
        """Close both sides at once: after an error nothing more is sent to the client."""
        self.shim.link_failed(self, "client" if side is self.client else self.endpoint.name, error)
        self._account.close()
        self.abort()

    def _evict(self) -> None:
        reason = f"connections have used up their memory, and this one has held its {self._held_bytes()} bytes longest"
        self.failed(self.client, ProtocolError(reason))

    @property
    def is_waiting_for_broker(self) -> bool:
        """Return whether the broker has a complete request that it has not answered."""
        whole = len(self._pending) - (1 if self._requests.bytes_left else 0)
        return any(exchange.answer is None for exchange in islice(self._pending, whole))

    def close_early(self, after: str) -> None:
        """Close a link whose time limit has passed, or one that must make room for a new connection."""
        if not self.has_request:
            reason = "the client sent no request"
        elif self.is_logged_in:
            reason = "the connection is idle"
        else:
            reason = "the client did not complete its login"
        self.failed(self.client, ProtocolError(f"{reason} ({after})"))

    def side_closed(self, side: _Side) -> None:
        other = self.upstream if side is self.client else self.client
        other.close()
        self._finish_if_closed()

    def _close_if_drained(self) -> None:
        if self._up.is_blocked or self._down.is_blocked:
            self.abort()  # a job holds a frame for an unknown time
        elif not self._pending and not self._requests.bytes_left and self._responses.between_frames:
            self.close()

    # Called by jobs (pipeline.Control).

    @property
    def can_send_requests(self) -> bool:
        return self.upstream.is_writable

    def reset(self) -> None:
        """Break the client's connection as a network would, and drop all bytes in transit."""
        self._up.clear()
        self._down.clear()
        self.client.reset()
        self.upstream.abort()
        self._finish_if_closed()

    def reset_before(self, exchange: Exchange) -> None:
        """Reset the connection once the requests before `exchange` are answered, so that they do not fail too."""
        self._reset_before = exchange
        asyncio.get_running_loop().call_later(RESET_WAIT_S, self._reset_if_late)
        self._reset_if_due()

    def _reset_if_due(self) -> None:
        # A response leaves the pending ones when its first byte arrives; the rest may still be in transit.
        is_next = not self._pending or self._pending[0] is self._reset_before
        if is_next and self._responses.between_frames and not self._down.is_blocked:
            self.reset()

    def _reset_if_late(self) -> None:
        if not self._is_closed:
            self.reset()

    def _finish_if_closed(self) -> None:
        if not self._is_closed and self.client.is_closed and (self.upstream.is_closed or self.upstream.never_connected):
            self._is_closed = True
            if self.connecting is not None:
                self.connecting.cancel()
            if self.timeout_check is not None:
                self.timeout_check.cancel()
            self._account.close()
            self._pipeline.connection_closed(self.connection)
            self.shim.link_closed(self)
            # These objects refer back to the link. Deleting them breaks the reference cycle, so that the link's memory
            # is freed now and not by the garbage collector.
            del self.connection, self._requests, self._responses, self._account, self.timeout_check


class ReadBuffer:
    """Hold the buffer that the connections of one shim read into, one after the other."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))

    def keep(self) -> None:
        """Use new memory for the next read, because the current buffer is still needed."""
        self.view = memoryview(bytearray(_READ_BYTES))


class PauseReason:
    """List the reasons to pause reading from a side, one bit each. An `enum` would cost a microsecond per response."""

    CONNECTING = 1  # the other side is not connected yet
    FULL = 2  # the other side's write buffer is full
    UNREAD = 4  # this side's own write buffer is full
    # Too many unanswered requests, or too many responses of jobs queued behind earlier responses of the broker.
    UNANSWERED = 8
    STOPPED = 16  # the shim is draining


class _Side(asyncio.BufferedProtocol):
    """Handle one of the two sockets of a link.

    `received` returns the bytes that it did not handle. They are handled after the other connections have had their
    turn, and nothing is read before that.
    """

    other: _Side

    def __init__(self, link: Link, received: Callable[[Piece], Piece | None], buffer: ReadBuffer) -> None:
        self._link, self._received, self._buffer = link, received, buffer
        self._transport: asyncio.Transport | None = None
        # The transport of the TCP socket, if the connection uses TLS.
        self._raw_transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._keeps_buffer = False  # unsent bytes may be a view of a read buffer
        self._has_ended_writing = False  # true after `write_eof`
        self._pause_reasons = 0
        self._unhandled: Piece | None = None  # bytes read and not handled yet
        self._turn: asyncio.Handle | None = None  # the callback that handles `_unhandled`
        self._is_reading = True  # false once the shim has closed this side
        self._has_disconnected = False  # the connection has ended, and `_unhandled` is not handled yet
        self.is_closed = False

    @property
    def never_connected(self) -> bool:
        return self._transport is None and not self.is_closed

    @property
    def held_bytes(self) -> int:
        rest = 0 if self._unhandled is None else len(self._unhandled)
        if self._transport is None:
            return rest + sum(map(len, self._unsent))
        unsent = self._transport.get_write_buffer_size()
        if self._raw_transport is not None:
            unsent += self._raw_transport.get_write_buffer_size()
        if not unsent:
            self._keeps_buffer = False
        return rest + max(unsent, _READ_BYTES * self._keeps_buffer)

    @property
    def is_writable(self) -> bool:
        """Return whether bytes written now can still be sent, as far as this side knows."""
        transport = self._transport
        closed = self.is_closed if transport is None else transport.is_closing()
        return not closed and not self._has_ended_writing

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # The size of the TLS transport's buffer excludes the bytes it has encrypted. No public attribute leads to them.
        self._raw_transport = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if self is self._link.client:
            self._link.connection.client = _peer(transport)
            self._link.shim.link_opened(self._link)
            return
        if self._unsent:
            transport.writelines(self._unsent)
            self._unsent = []
        if self._has_ended_writing:
            self.write_eof()

    def get_buffer(self, sizehint: int) -> memoryview:
        view = self._buffer.view
        return view[:_TIGHT_READ_BYTES] if self._link.memory.is_tight and self._raw_transport is None else view

    def buffer_updated(self, count: int) -> None:
        read = self._buffer.view[:count]
        if self._unhandled is not None:  # a paused transport may still deliver bytes it has read
            self._unhandled = memoryview(bytearray().join((self._unhandled, read)))
        elif (rest := self._handle(read)) is not None:
            self._unhandled = memoryview(bytearray(rest))
            self._pause()
            self._continue()
        self._link.count()
        self._link.last_read_at = time.monotonic()

    def _handle(self, data: Piece) -> Piece | None:
        try:
            rest = self._received(data)
        except ProtocolError as error:
            self._link.failed(self, error)
            return None
        except Exception as error:
            # Close the connection after a defect in a job, because it may have sent half of a frame.
            self._link.failed(self, error)
            raise
        return rest if self._is_reading else None

    def _continue(self) -> None:
        """Handle the remaining bytes in this side's next turn, or resume reading if there are none."""
        if self._pause_reasons:
            return
        if self._unhandled is None:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        elif self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._handle_rest)

    def _handle_rest(self) -> None:
        self._turn = None
        if self._unhandled is not None and not self._pause_reasons:
            self._unhandled = self._handle(self._unhandled)
            self._link.count()
            if self._unhandled is None and self._has_disconnected:
                self._finish()
            else:
                self._continue()

    def pause_writing(self) -> None:
        self.other.pause_for(PauseReason.FULL)
        if self is self._link.client:
            # Requests answered by jobs would fill memory with unread responses. The broker's side must not be paused:
            # a broker reads no request before its response is read, so both would wait for each other.
            self.pause_for(PauseReason.UNREAD)

    def resume_writing(self) -> None:
        self._link.count()
        self.other.clear_pause(PauseReason.FULL)
        self.clear_pause(PauseReason.UNREAD)

    def eof_received(self) -> bool:
        if self._unhandled is not None:
            return False  # only with TLS, which closes now; `connection_lost` handles the rest
        if self is self._link.upstream or not self._link.has_request:
            # A broker ends both directions at once: asyncio closes this side, and the link then closes the client's
            # side.
            return False
        self.other.write_eof()
        # A client that has stopped sending may still read. TLS has no such state.
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        if self._unhandled is not None and (error is None or self is self._link.upstream):
            # Handle the bytes that arrived before the end, a turn at a time.
            self._has_disconnected = True
            self.clear_pause(PauseReason.UNREAD)
            self._continue()
            return
        self._unhandled = None
        self._finish()

    def _finish(self) -> None:
        self._has_disconnected, self.is_closed = False, True
        link = self._link
        # Neither asyncio nor the link needs these any more. Deleting them breaks the reference cycle: a TLS transport
        # holds a read buffer of 256 KiB, and the link may stay alive with its other side.
        self._transport = self._raw_transport = None
        del self._link, self._received, self.other
        link.side_closed(self)

    # Called by the link.

    def write(self, pieces: Sequence[Piece]) -> None:
        transport = self._transport
        if transport is None:
            if self.is_writable:
                self._unsent += map(bytes, pieces)  # these bytes arrived before reading could be paused
            return
        if self._has_ended_writing:
            return
        if len(pieces) > 1 and sum(map(len, pieces)) <= _JOINED_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            if transport.is_closing():  # the previous write may have failed; asyncio warns about further ones
                return
            if len(piece) <= _JOINED_BYTES or transport.get_write_buffer_size():
                transport.write(bytes(piece))
                continue
            transport.write(piece)
            if isinstance(piece, memoryview) and transport.get_write_buffer_size():
                # Since Python 3.12 a transport does not copy unsent bytes. A side has at most one such buffer, because
                # later pieces are copied above.
                self._buffer.keep()
                self._keeps_buffer = True

    def write_eof(self) -> None:
        """End this direction at once, even while frames are held: no later event would report the client's end.

        Nothing is written after it. A fault that releases a held request then sends it on a separate connection.
        """
        self._has_ended_writing = True
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()  # TLS has no half-closed connections

    def pause_for(self, why: int) -> None:
        """Pause reading until `clear_pause` has been called for each reason."""
        self._pause_reasons |= why
        self._pause()

    def clear_pause(self, why: int) -> None:
        if self._pause_reasons & why:
            self._pause_reasons &= ~why
            self._continue()

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _stop_reading(self) -> None:
        self._is_reading, self._unhandled = False, None
        if self._has_disconnected:
            self._has_disconnected = False
            asyncio.get_running_loop().call_soon(self._finish)

    def close(self) -> None:
        self._stop_reading()
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(LINGER_S, self.abort)  # the transport may be closed by then

    def abort(self) -> None:
        self._stop_reading()
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        self._stop_reading()
        if self._transport is not None:
            if not self._transport.get_write_buffer_size():
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                self._transport.abort()
            else:
                self._transport.close()  # earlier responses are sent first


def _peer(transport: asyncio.BaseTransport) -> str:
    address: Any = transport.get_extra_info("peername")
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
