"""One client connection and the upstream connection made for it.

Owns both transports and the order of what passes between them. Back-pressure is the sockets' own: when one side cannot
write, the other is not read; nor is a client that does not take its answers, or has too many requests unanswered. An
end of one direction is passed on as such; what one side can still send is delivered before the other is closed. The
upstream connection is made with the client's first request. It must never hold a byte that its account does not count,
nor work on for one connection while others wait.

What is read lies in one buffer that all connections of a shim share: it is dealt with, changed in place where that is
needed, and written to the other side before the next read. A megabyte that passes is neither copied nor allocated here.
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
from eos.shim.lane import Lane
from eos.shim.memory import Memory
from eos.shim.pipeline import Connection, Exchange, Pipeline
from eos.shim.wire import api
from eos.shim.wire.frames import FrameSplitter, Passage, Piece
from eos.shim.wire.headers import REQUEST_HEAD, RESPONSE_HEAD, AcksReader, implausible, request_head

# How long the last bytes may take to a side that reads slowly once the other side is gone.
LINGER_S = 30.0
# How long a reset waits for the answers of earlier requests: a JoinGroup may stay unanswered for minutes.
RESET_WAIT_S = 2.0
# What brokers answer to anybody. Anything else they answer after the login, where they ask for one, and else end the
# connection.
_BEFORE_A_LOGIN = frozenset({api.API_VERSIONS, api.SASL_HANDSHAKE, api.SASL_AUTHENTICATE})
# Requests of one connection that are not answered yet, and bytes of answers given here that wait for the broker's
# before them. Brokers deal with one request of a connection at a time: a client that is not read meanwhile loses
# nothing.
MOST_UNANSWERED = 1_024
MOST_OWED_BYTES = 1024 * 1024
# Linger on, for 0 seconds: closing sends a reset.
_NO_LINGER = struct.pack("ii", 1, 0)
# With more than this unsent a side is full. Little: the sockets' own buffers hold megabytes, and are not empty when it
# goes on.
_WRITE_BUFFER_BYTES = 32 * 1024
# Not less: at the end of a TLS connection asyncio reads out what it holds once, up to twice its 256 KiB, and drops the
# rest.
_READ_BYTES = 512 * 1024
# While memory is tight: a side that is not read costs what was read for it last. Not with TLS, for the reason above.
_TIGHT_READ_BYTES = 16 * 1024
# A request that waits for its answer, as Python keeps it.
_EXCHANGE_BYTES = 320
_JOINED_BYTES = 64 * 1024  # up to here a copy costs less than another system call, or than other memory to read into


class Ends(Protocol):
    """What the shim wants to know of a link."""

    def began(self, link: Link) -> None:
        """The client is there (with TLS: after its handshake)."""

    def asks(self, link: Link) -> None:
        """Its first request begins: it needs its broker."""

    def let_in(self, link: Link) -> None:
        """Its broker answered what it answers only to clients that it lets in."""

    def failed(self, link: Link, whose: str, error: Exception) -> None:
        """It ends because of what was sent on it; `whose` is client or the broker's name."""

    def ended(self, link: Link) -> None:
        """Both sides are gone."""


class Link:
    def __init__(
        self,
        number: int,
        endpoint: Endpoint,
        pipeline: Pipeline,
        largest_frame: int,
        shim: Ends,
        buffer: ReadBuffer,
        memory: Memory,
    ) -> None:
        self.number, self.endpoint, self._pipeline, self._largest = number, endpoint, pipeline, largest_frame
        self.shim = shim
        self.connection = Connection(number, "", endpoint.name, endpoint.node_id)
        self.client = _Side(self, self._from_client, buffer)
        self.upstream = _Side(self, self._from_upstream, buffer)
        self.client.other, self.upstream.other = self.upstream, self.client
        self.connection.link = self
        self._up, self._down = Lane(self.upstream.write), Lane(self.client.write)
        self._reset_before: Exchange | None = None
        self._requests = FrameSplitter(REQUEST_HEAD.size, largest_frame, self._open_request)
        self._responses = FrameSplitter(RESPONSE_HEAD.size, largest_frame, self._open_response)
        self._acks: AcksReader | None = None  # of a Produce whose head has not come whole
        self._pending: deque[Exchange] = deque()
        self.asked = False  # its first request has begun
        self.is_let_in = False
        self.began_at = self.heard_at = 0.0  # monotonic; `heard_at` when something came last, from either side
        self._draining = False
        self._over = False
        self.memory = memory
        self._account = memory.open(self._held, self._evict)
        self.connecting: asyncio.Task[None] | None = None
        self.patience: asyncio.TimerHandle | None = None  # ends it when it is idle

    # What the server does with a link.

    async def connect(self, context: ssl.SSLContext | None, timeout_s: float) -> OSError | None:
        """Makes the upstream connection; returns why it could not, and then the client's is closed."""
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
        if self._over:
            self.upstream.abort()
        else:
            self.client.let_go(Hold.CONNECTING)
        return None

    def drain(self) -> None:
        """No further request is read but the rest of one that has begun to pass; closes when all are answered."""
        self._draining = True
        self._stop_reading_between_requests()
        self._close_if_drained()

    def close(self) -> None:
        """Both sides, after what was written has gone out."""
        self.client.close()
        self.upstream.close()
        self._end_if_over()

    def abort(self) -> None:
        self.client.abort()
        self.upstream.abort()
        self._end_if_over()

    # From the client to the broker.

    def _from_client(self, data: Piece) -> Piece | None:
        """What there was no time for yet."""
        requests = self._requests
        if self._draining:
            data = data[: requests.left]
        pieces = requests.feed(data)
        if pieces:
            self._up.pass_on(pieces)
        self._send_own_answers()
        if len(self._pending) >= MOST_UNANSWERED or self.connection.owed >= MOST_OWED_BYTES:
            self.client.hold(Hold.UNANSWERED)
        if self._draining:
            self._stop_reading_between_requests()
            self._close_if_drained()
        return requests.rest

    def _stop_reading_between_requests(self) -> None:
        if not self._requests.left:
            self.client.hold(Hold.STOPPED)

    def _open_request(self, data: Piece, pos: int) -> Passage | None:
        head = request_head(data, pos)
        reason = implausible(head, self._largest)
        if reason is not None:
            raise Malformed(f"this is no Kafka client: {reason}")
        awaited = True
        if head.api_key == api.PRODUCE:
            reader = self._acks or AcksReader(head.version)
            acks = reader.read(data, pos)
            self._acks = reader if acks is None else None
            if acks is None:
                return None
            awaited = acks != 0
        elif head.api_key == api.SASL_HANDSHAKE and head.version == 0:
            # After it come tokens without any header, and from then on nothing in the stream could be told apart.
            raise ProtocolError("SaslHandshake v0 is not supported: the client must use v1 (Kafka 1.0 and later)")
        if not self.asked:
            self._ask()
        exchange = Exchange(self.connection, head.api_key, head.version, head.correlation_id)
        exchange.awaited = awaited
        passage = self._pipeline.request(exchange, head.size + 4)
        self._account.renew()
        if awaited:
            # Jobs may remember what they read of a request, but not records.
            read = head.size if callable(passage) and head.api_key != api.PRODUCE else 0
            exchange.remember(_EXCHANGE_BYTES + read)
            self._pending.append(exchange)
        return passage

    def _ask(self) -> None:
        self.asked = True
        if self.upstream.never_connected:
            self.client.hold(Hold.CONNECTING)
        self.shim.asks(self)

    # From the broker to the client.

    def _from_upstream(self, data: Piece) -> Piece | None:
        responses = self._responses
        pieces = responses.feed(data)
        if pieces:
            self._down.pass_on(pieces)
        self._send_own_answers()
        if len(self._pending) < MOST_UNANSWERED and self.connection.owed < MOST_OWED_BYTES:
            self.client.let_go(Hold.UNANSWERED)
        if self._reset_before is not None:
            self._reset_if_due()
        if self._draining:
            self._close_if_drained()
        return responses.rest

    def _open_response(self, data: Piece, pos: int) -> Passage | None:
        size, correlation_id = RESPONSE_HEAD.unpack_from(data, pos)
        pending = self._pending
        while pending and pending[0].answer is not None:
            self._responses.insert(self._next_own_answer())
        if not pending or pending[0].correlation_id != correlation_id:
            raise Malformed(f"the broker answers request {correlation_id}, which is not the next one")
        exchange = self._next_answered()
        if not self.is_let_in and exchange.api_key not in _BEFORE_A_LOGIN:
            self.is_let_in = True
            self.shim.let_in(self)
        return self._pipeline.response(exchange, size + 4)

    def _send_own_answers(self) -> None:
        """Answers a job gave, as soon as all requests before them are answered."""
        pending = self._pending
        while pending and pending[0].answer is not None and self._responses.between_frames:
            self._down.pass_on([self._next_own_answer()])

    def _next_own_answer(self) -> bytes:
        answer = self._next_answered().answer or b""
        self.connection.owed -= len(answer)
        return answer

    def _next_answered(self) -> Exchange:
        exchange = self._pending.popleft()
        exchange.forget()
        return exchange

    # What it holds.

    def count(self) -> None:
        self._account.count()

    def _held(self) -> int:
        ways = self._requests, self._responses, self._up, self._down, self.client, self.upstream
        return sum(way.kept for way in ways) + self.connection.kept + self.connection.owed

    # Ends.

    def failed(self, side: _Side, error: Exception) -> None:
        """Fails closed: nothing more goes to the client."""
        self.shim.failed(self, "client" if side is self.client else self.endpoint.name, error)
        self._account.close()
        self.abort()

    def _evict(self) -> None:
        reason = (
            f"the memory that connections may hold is used up, and this one has held {self._held()} bytes for longest"
        )
        self.failed(self.client, ProtocolError(reason))

    @property
    def is_owed(self) -> bool:
        """Whether the broker has a whole request that it did not answer: then it is the broker that takes its time."""
        whole = len(self._pending) - (1 if self._requests.left else 0)
        return any(exchange.answer is None for exchange in islice(self._pending, whole))

    def give_up(self, after: str) -> None:
        """Its time is over, or its place is needed."""
        if not self.asked:
            reason = "no request came"
        elif self.is_let_in:
            reason = "it is idle"
        else:
            reason = "it asked for nothing but what comes before a login"
        self.failed(self.client, ProtocolError(f"{reason} ({after})"))

    def side_closed(self, side: _Side) -> None:
        other = self.upstream if side is self.client else self.client
        other.close()
        self._end_if_over()

    def _close_if_drained(self) -> None:
        if self._up.is_held or self._down.is_held:
            self.abort()  # a job keeps a frame: nobody knows for how long
        elif not self._pending and not self._requests.left and self._responses.between_frames:
            self.close()

    # What a job may do to a link (pipeline.Control).

    @property
    def takes_requests(self) -> bool:
        return self.upstream.takes_more

    def reset(self) -> None:
        """As a network does it: the client's connection is gone, and what is under way with it."""
        self._up.drop()
        self._down.drop()
        self.client.reset()
        self.upstream.abort()
        self._end_if_over()

    def reset_before(self, exchange: Exchange) -> None:
        """Resets once the requests before `exchange` are answered: a fault of one request is none of the others."""
        self._reset_before = exchange
        asyncio.get_running_loop().call_later(RESET_WAIT_S, self._reset_if_late)
        self._reset_if_due()

    def _reset_if_due(self) -> None:
        # An answer is taken from those that are awaited when it begins, and may still be on its way.
        is_next = not self._pending or self._pending[0] is self._reset_before
        if is_next and self._responses.between_frames and not self._down.is_held:
            self.reset()

    def _reset_if_late(self) -> None:
        if not self._over:
            self.reset()

    def _end_if_over(self) -> None:
        if not self._over and self.client.gone and (self.upstream.gone or self.upstream.never_connected):
            self._over = True
            if self.connecting is not None:
                self.connecting.cancel()
            if self.patience is not None:
                self.patience.cancel()
            self._account.close()
            self._pipeline.closed(self.connection)
            self.shim.ended(self)
            # They lead back here. Without them the memory is free now, not when the collector comes.
            del self.connection, self._requests, self._responses, self._account, self.patience


class ReadBuffer:
    """Where the connections of one shim are read into, one after the other."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))

    def keep(self) -> None:
        """Somebody still needs what was read: the next read gets other memory."""
        self.view = memoryview(bytearray(_READ_BYTES))


class Hold:
    """Why a side is not read, a bit each. Plain numbers: those of `enum` take a microsecond for each answer."""

    CONNECTING = 1  # the other side is not there yet
    FULL = 2  # the other side does not take what comes from here
    UNREAD = 4  # this side does not take what it is sent itself
    UNANSWERED = 8  # too many requests, or answers given here, wait for the broker
    STOPPED = 16


class _Side(asyncio.BufferedProtocol):
    """One of the two sockets of a link. `received` gives back what there was no time for: it comes again when the other
    connections had their turn, and nothing is read before.
    """

    other: _Side

    def __init__(self, link: Link, received: Callable[[Piece], Piece | None], buffer: ReadBuffer) -> None:
        self._link, self._received, self._buffer = link, received, buffer
        self._transport: asyncio.Transport | None = None
        self._beneath: asyncio.Transport | None = None  # with TLS the one that writes
        self._unsent: list[bytes] = []
        self._keeps_buffer = False  # what is unsent may be a view of one that was read into
        self._ended = False  # `write_end` was the last word
        self._holds = 0
        self._rest: Piece | None = None  # of what was read
        self._turn: asyncio.Handle | None = None  # in which the rest is dealt with
        self._reads = True  # false once this side was closed from here
        self._lost = False  # the connection is over, the rest is not yet
        self.gone = False

    @property
    def never_connected(self) -> bool:
        return self._transport is None and not self.gone

    @property
    def kept(self) -> int:
        rest = 0 if self._rest is None else len(self._rest)
        if self._transport is None:
            return rest + sum(map(len, self._unsent))
        unsent = self._transport.get_write_buffer_size()
        if self._beneath is not None:
            unsent += self._beneath.get_write_buffer_size()
        if not unsent:
            self._keeps_buffer = False
        return rest + max(unsent, _READ_BYTES * self._keeps_buffer)

    @property
    def takes_more(self) -> bool:
        """Whether what is written now still goes out, as far as this side knows."""
        transport = self._transport
        closed = self.gone if transport is None else transport.is_closing()
        return not closed and not self._ended

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Its own size leaves out what it has handed on, and that may be all of it. Nothing public leads there.
        self._beneath = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if self is self._link.client:
            self._link.connection.client = _peer(transport)
            self._link.shim.began(self._link)
            return
        if self._unsent:
            transport.writelines(self._unsent)
            self._unsent = []
        if self._ended:
            self.write_end()

    def get_buffer(self, sizehint: int) -> memoryview:
        view = self._buffer.view
        return view[:_TIGHT_READ_BYTES] if self._link.memory.is_tight and self._beneath is None else view

    def buffer_updated(self, count: int) -> None:
        read = self._buffer.view[:count]
        if self._rest is not None:  # a transport may still give out what it had read before it was paused
            self._rest = memoryview(bytearray().join((self._rest, read)))
        elif (rest := self._take(read)) is not None:
            self._rest = memoryview(bytearray(rest))
            self._pause()
            self._go_on()
        self._link.count()
        self._link.heard_at = time.monotonic()

    def _take(self, data: Piece) -> Piece | None:
        try:
            rest = self._received(data)
        except ProtocolError as error:
            self._link.failed(self, error)
            return None
        except Exception as error:
            # A defect of a job must not leave a connection open whose bytes went half.
            self._link.failed(self, error)
            raise
        return rest if self._reads else None

    def _go_on(self) -> None:
        """With the rest when it is this side's turn, or with reading."""
        if self._holds:
            return
        if self._rest is None:
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        elif self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_rest)

    def _take_rest(self) -> None:
        self._turn = None
        if self._rest is not None and not self._holds:
            self._rest = self._take(self._rest)
            self._link.count()
            if self._rest is None and self._lost:
                self._lose()
            else:
                self._go_on()

    def pause_writing(self) -> None:
        self.other.hold(Hold.FULL)
        if self is self._link.client:
            # Requests that are answered here would fill memory with answers that nobody takes. Never the broker's side:
            # a broker reads no request before its answer is taken, and both would wait.
            self.hold(Hold.UNREAD)

    def resume_writing(self) -> None:
        self._link.count()
        self.other.let_go(Hold.FULL)
        self.let_go(Hold.UNREAD)

    def eof_received(self) -> bool:
        if self._rest is not None:
            return False  # only with TLS, which closes then: `connection_lost` waits for the rest
        if self is self._link.upstream or not self._link.asked:
            return False  # a broker ends both directions at once: asyncio closes this side, and that the client's
        self.other.write_end()
        # A client may still be read to after it said its last; TLS has no such state.
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest is not None and (error is None or self is self._link.upstream):
            # What it said last is still dealt with, in turns like all else.
            self._lost = True
            self.let_go(Hold.UNREAD)
            self._go_on()
            return
        self._rest = None
        self._lose()

    def _lose(self) -> None:
        self._lost, self.gone = False, True
        link = self._link
        # asyncio is done with this side, and nothing the link may still call needs them: no circle is left. A transport
        # of TLS leads to 256 KiB to read into, and the link may live on with its other side.
        self._transport = self._beneath = None
        del self._link, self._received, self.other
        link.side_closed(self)

    # The link calls these.

    def write(self, pieces: Sequence[Piece]) -> None:
        transport = self._transport
        if transport is None:
            if self.takes_more:
                self._unsent += map(bytes, pieces)  # what came before reading could be paused
            return
        if self._ended:
            return
        if len(pieces) > 1 and sum(map(len, pieces)) <= _JOINED_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            if transport.is_closing():  # the piece before may have found out; asyncio warns of who goes on
                return
            if len(piece) <= _JOINED_BYTES or transport.get_write_buffer_size():
                transport.write(bytes(piece))
                continue
            transport.write(piece)
            if isinstance(piece, memoryview) and transport.get_write_buffer_size():
                # Since Python 3.12 a transport does not copy what it could not send yet. A side that does not read has
                # one such buffer at most: what comes behind it is copied above.
                self._buffer.keep()
                self._keeps_buffer = True

    def write_end(self) -> None:
        """At once, whatever a lane holds: its client may be gone for good, and nobody would say so after this.

        Nothing is written behind it; a fault that let go of a request then sends it on a connection of its own.
        """
        self._ended = True
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()  # TLS has no half-closed connections

    def hold(self, why: int) -> None:
        """Nothing is read here until `let_go` was called for each reason."""
        self._holds |= why
        self._pause()

    def let_go(self, why: int) -> None:
        if self._holds & why:
            self._holds &= ~why
            self._go_on()

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _read_no_more(self) -> None:
        self._reads, self._rest = False, None
        if self._lost:
            self._lost = False
            asyncio.get_running_loop().call_soon(self._lose)

    def close(self) -> None:
        self._read_no_more()
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(LINGER_S, self.abort)  # the transport itself may be gone by then

    def abort(self) -> None:
        self._read_no_more()
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        self._read_no_more()
        if self._transport is not None:
            if not self._transport.get_write_buffer_size():
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                self._transport.abort()
            else:
                self._transport.close()  # earlier answers go out first


def _peer(transport: asyncio.BaseTransport) -> str:
    address: Any = transport.get_extra_info("peername")
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
