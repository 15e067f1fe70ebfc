"""One client connection and the upstream connection made for it.

Owns both transports and the order of what passes between them. Back-pressure is the sockets' own: when one side cannot
write, the other is not read. An end of one direction is passed on as such; what one side can still send is delivered
before the other is closed. It must never buffer more than asyncio's write buffer and one collected frame per direction.

What is read lies in one buffer that all connections of a shim share: it is dealt with, changed in place where that is
needed, and written to the other side before the next read. A megabyte that passes is neither copied nor allocated here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from eos.shim import events
from eos.shim.addresses.book import Endpoint
from eos.shim.errors import Malformed, ProtocolError
from eos.shim.lane import Lane
from eos.shim.pipeline import Connection, Exchange, Pipeline
from eos.shim.wire import api
from eos.shim.wire.frames import FrameSplitter, Passage, Piece
from eos.shim.wire.headers import REQUEST_HEAD, RESPONSE_HEAD, implausible, produce_acks, request_head

# How long the last bytes may take to a side that reads slowly once the other side is gone.
LINGER_S = 30.0
# How long a reset waits for the answers of earlier requests: a JoinGroup may stay unanswered for minutes.
RESET_WAIT_S = 2.0
# Linger on, for 0 seconds: closing sends a reset.
_NO_LINGER = struct.pack("ii", 1, 0)
_WRITE_BUFFER_BYTES = 1024 * 1024
# Not less: at the end of a TLS connection asyncio reads out what it holds once, up to twice its 256 KiB, and drops the
# rest.
_READ_BYTES = 512 * 1024
_JOINED_BYTES = 64 * 1024  # up to here a copy costs less than another system call, or than other memory to read into


class Link:
    """`began` is called when the client is there (with TLS: after its handshake), `ended` when both sides are gone."""

    def __init__(
        self,
        number: int,
        endpoint: Endpoint,
        pipeline: Pipeline,
        largest_frame: int,
        began: Callable[[Link], None],
        ended: Callable[[Link], None],
        buffer: ReadBuffer,
    ) -> None:
        self.number, self.endpoint, self._pipeline, self._largest = number, endpoint, pipeline, largest_frame
        self.began, self._ended = began, ended
        self.connection = Connection(number, "", endpoint.name, endpoint.node_id)
        self.client = _Side(self, self._from_client, buffer)
        self.upstream = _Side(self, self._from_upstream, buffer)
        self.client.other, self.upstream.other = self.upstream, self.client
        self.connection.link = self
        self._up, self._down = Lane(self.upstream.write), Lane(self.client.write)
        self._reset_before: Exchange | None = None
        self._requests = FrameSplitter(REQUEST_HEAD.size, largest_frame, self._open_request)
        self._responses = FrameSplitter(RESPONSE_HEAD.size, largest_frame, self._open_response)
        self._pending: deque[Exchange] = deque()
        self._requests_seen = 0
        self._draining = False
        self._over = False
        self.connecting: asyncio.Task[None] | None = None

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
            self.client.resume_reading()
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

    def _from_client(self, data: Piece) -> None:
        if self._draining:
            data = data[: self._requests.left]
        pieces = self._requests.feed(data)
        if pieces:
            self._up.pass_on(pieces)
        self._send_own_answers()
        if self._draining:
            self._stop_reading_between_requests()
            self._close_if_drained()

    def _stop_reading_between_requests(self) -> None:
        if not self._requests.left:
            self.client.stop_reading()

    def _open_request(self, data: Piece, pos: int) -> Passage | None:
        head = request_head(data, pos)
        if not self._requests_seen:
            reason = implausible(head, self._largest)
            if reason is not None:
                raise Malformed(f"this is no Kafka client: {reason}")
        no_answer = False
        if head.api_key == api.PRODUCE:
            acks = produce_acks(data, pos, head.version)
            if acks is None:
                return None
            no_answer = acks == 0
        elif head.api_key == api.SASL_HANDSHAKE and head.version == 0:
            # After it come tokens without any header, and from then on nothing in the stream could be told apart.
            raise ProtocolError("SaslHandshake v0 is not supported: the client must use v1 (Kafka 1.0 and later)")
        self._requests_seen += 1
        exchange = Exchange(self.connection, head.api_key, head.version, head.correlation_id)
        passage = self._pipeline.request(exchange, head.size + 4)
        if not no_answer:
            self._pending.append(exchange)
        return passage

    # From the broker to the client.

    def _from_upstream(self, data: Piece) -> None:
        pieces = self._responses.feed(data)
        if pieces:
            self._down.pass_on(pieces)
        self._send_own_answers()
        if self._reset_before is not None:
            self._reset_if_due()
        if self._draining:
            self._close_if_drained()

    def _open_response(self, data: Piece, pos: int) -> Passage | None:
        size, correlation_id = RESPONSE_HEAD.unpack_from(data, pos)
        pending = self._pending
        while pending and pending[0].answer is not None:
            self._responses.insert(pending.popleft().answer or b"")
        if not pending or pending[0].correlation_id != correlation_id:
            raise Malformed(f"the broker answers request {correlation_id}, which is not the next one")
        return self._pipeline.response(pending.popleft(), size + 4)

    def _send_own_answers(self) -> None:
        """Answers a job gave, as soon as all requests before them are answered."""
        pending = self._pending
        while pending and pending[0].answer is not None and self._responses.between_frames:
            self._down.pass_on([pending.popleft().answer or b""])

    # Ends.

    def failed(self, side: _Side, error: Exception) -> None:
        """Fails closed: nothing more goes to the client."""
        whose = "client" if side is self.client else self.endpoint.name
        events.warning(
            "connection closed", connection=self.number, client=self.connection.client, by=whose, reason=error
        )
        self.abort()

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
            self._pipeline.closed(self.connection)
            self._ended(self)
            # They lead back here. Without them the memory is free now, not when the collector comes.
            del self.connection, self._requests, self._responses


class ReadBuffer:
    """Where the connections of one shim are read into, one after the other."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_READ_BYTES))

    def keep(self) -> None:
        """Somebody still needs what was read: the next read gets other memory."""
        self.view = memoryview(bytearray(_READ_BYTES))


class _Side(asyncio.BufferedProtocol):
    """One of the two sockets of a link."""

    other: _Side

    def __init__(self, link: Link, received: Callable[[Piece], None], buffer: ReadBuffer) -> None:
        self._link, self._received, self._buffer = link, received, buffer
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._ended = False  # `write_end` was the last word
        self._stopped = False
        self.gone = False

    @property
    def never_connected(self) -> bool:
        return self._transport is None and not self.gone

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
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        if self is self._link.client:
            self._link.connection.client = _peer(transport)
            # Until the upstream connection is there. Not at once: older Pythons (3.11.2, Debian's) begin to read after
            # this call whatever it did, and what came then was lost here.
            asyncio.get_running_loop().call_soon(self._pause_until_connected)
            self._link.began(self._link)
            return
        if self._unsent:
            transport.writelines(self._unsent)
            self._unsent = []
        if self._ended:
            self.write_end()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.view

    def buffer_updated(self, count: int) -> None:
        try:
            self._received(self._buffer.view[:count])
        except ProtocolError as error:
            self._link.failed(self, error)
        except Exception as error:
            # A defect of a job must not leave a connection open whose bytes went half.
            self._link.failed(self, error)
            raise

    def pause_writing(self) -> None:
        self.other.pause_reading()

    def resume_writing(self) -> None:
        self.other.resume_reading()

    def eof_received(self) -> bool:
        if self is self._link.upstream:
            return False  # a broker ends both directions at once: asyncio closes this side, and that the client's
        self.other.write_end()
        # A client may still be read to after it said its last; TLS has no such state.
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        link = self._link
        # asyncio is done with this side, and nothing the link may still call needs them: no circle is left. A transport
        # of TLS leads to 256 KiB to read into, and the link may live on with its other side.
        self._transport = None
        del self._link, self._received, self.other
        link.side_closed(self)

    # The link calls these.

    def write(self, pieces: Sequence[Piece]) -> None:
        transport = self._transport
        if transport is None:
            if self.takes_more:
                self._unsent += map(bytes, pieces)  # what came before reading could be paused
            return
        if self._ended or transport.is_closing():
            return
        if len(pieces) > 1 and sum(map(len, pieces)) <= _JOINED_BYTES:
            pieces = [b"".join(pieces)]
        for piece in pieces:
            if len(piece) <= _JOINED_BYTES or transport.get_write_buffer_size():
                transport.write(bytes(piece))
                continue
            transport.write(piece)
            if isinstance(piece, memoryview) and transport.get_write_buffer_size():
                # Since Python 3.12 a transport does not copy what it could not send yet. A side that does not read has
                # one such buffer at most: what comes behind it is copied above.
                self._buffer.keep()

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

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._stopped:
            self._transport.resume_reading()

    def _pause_until_connected(self) -> None:
        if self.other.never_connected:
            self.pause_reading()

    def stop_reading(self) -> None:
        self._stopped = True
        self.pause_reading()

    def close(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(LINGER_S, self.abort)  # the transport itself may be gone by then

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        if self._transport is not None:
            if not self._transport.get_write_buffer_size():
                self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                self._transport.abort()
            else:
                self._transport.close()  # earlier answers go out first


def _peer(transport: asyncio.BaseTransport) -> str:
    address: Any = transport.get_extra_info("peername")
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
