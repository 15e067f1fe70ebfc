"""Run requests and responses through the protection machine, and warn if protection is unavailable.

The job owns the data kept between a request and its response. A request that it cannot read ends the connection,
because a forwarded one would be unprotected without anyone knowing.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import NamedTuple

from eos.codes import error_name
from eos.shim import events
from eos.shim.errors import Malformed
from eos.shim.pipeline import Connection, Exchange, Job
from eos.shim.protect import translate
from eos.shim.protect.journal import Journal
from eos.shim.protect.machine import (
    CONCURRENT_TRANSACTIONS,
    INVALID_PRODUCER_EPOCH,
    LOAD_IN_PROGRESS,
    NOT_ENOUGH_REPLICAS,
    Authority,
    End,
    Identity,
    Machine,
    Partition,
    Refused,
    State,
)
from eos.shim.wire import api, messages
from eos.shim.wire.frames import Piece, Stream
from eos.shim.wire.headers import LONGEST_HEAD_BYTES


class _Init(NamedTuple):
    name: str
    bumped: Identity | None


class _PendingEnd(NamedTuple):
    name: str
    end: End
    number: int | None
    opened: bool  # whether the transaction was open before EndTxn was sent
    # Changes the machine's state after the response, for a request that must not change it earlier.
    act: Callable[[], object] | None


class _Pending(NamedTuple):
    """Hold a connection's request that the broker has not accepted yet. It is applied after a successful response.

    `act` applies the request. It gets the partitions for which the response was successful, which may be only some of
    them.
    """

    name: str
    number: int | None
    act: Callable[[set[Partition]], object]
    size: int = 1


class _Renewal(NamedTuple):
    """Hold a request for the next identity until the broker has accepted its connection."""

    name: str
    virtual: Identity


class ProtectJob(Job):
    """Protect transactions as soon as at least one broker answers and all that answer support EndTxn v5.

    Until then all bytes are forwarded unchanged. If protection is `required`, transactional requests get a retriable
    error instead. Once protection has started it stays on.
    """

    def __init__(self, machine: Machine | None = None, journal: Journal | None = None, required: bool = False) -> None:
        self.machine = machine or Machine()
        self._journal, self._required = journal, required
        self._unavailable_reason: str | None = None  # why protection is not active, as logged last
        self._old_brokers: set[str] = set()  # brokers that lacked EndTxn v5 in their last response
        # True if clients may have started before protection did. Protection does not know their transactional.ids, and
        # forwards requests with such an id unchanged.
        self._started_late = False
        for pair in journal.restored_pairs if journal else ():
            self.machine.restore(pair)
        self.active = False
        self.counts = {"transactions": 0, "challenged": 0, "fenced": 0, "renewed": 0}
        self._renewing = set[int]()  # connections whose client requests a new identity itself after an abort
        # By connection: the transactional.ids for which the broker has accepted a request on it.
        self._accepted: dict[int, OrderedDict[str, None]] = {}
        self._pending: dict[int, int] = {}  # by connection: the number of batches and requests kept for responses

    def on_broker_versions(self, newest: Mapping[str, Mapping[int, int] | None]) -> None:
        if self.active:
            return
        versions = {broker: offered.get(api.END_TXN, 0) for broker, offered in newest.items() if offered is not None}
        # An old broker that does not answer now may still be old when it returns.
        self._old_brokers = {name for name in self._old_brokers if name in newest and name not in versions}
        self._old_brokers |= {broker for broker, version in versions.items() if version < translate.END_TXN_VERSION}
        silent = sorted(newest.keys() - versions.keys())
        if not versions or self._old_brokers:
            self._log_unavailable(", ".join(sorted(self._old_brokers) or silent), bool(self._old_brokers))
            return
        if self._unavailable_reason is not None and not self._required:
            self._started_late, self.machine = True, Machine()
        self.active = True
        events.info(
            "protection started",
            brokers=len(versions),
            **({"clients": "those that initialise from now on"} if self._started_late else {}),
        )
        if silent:
            events.warning(
                "protection assumes EndTxn v5",
                brokers=", ".join(silent),
                reason="they did not answer, and the others support it",
            )

    def _log_unavailable(self, brokers: str, old: bool) -> None:
        reason = "they do not support EndTxn v5 (Kafka 4.0 and later do)" if old else "no broker answered"
        if self._unavailable_reason != (unavailable_reason := f"{brokers}: {reason}"):
            self._unavailable_reason = unavailable_reason
            effect = (
                "transactional requests wait for it (--require-protection)"
                if self._required
                else "late requests can still change the next transaction"
            )
            events.warning("protection unavailable", effect=effect, brokers=brokers, reason=reason)

    @property
    def wants_versions_again(self) -> bool:
        return not self.active

    @property
    def not_ready_reason(self) -> str | None:
        if self.active or not self._required:
            return None
        reason = self._unavailable_reason or "no broker was queried yet"
        return f"protection is unavailable (--require-protection): {reason}"

    def wants_request(self, api_key: int, version: int) -> bool:
        if api_key == api.API_VERSIONS:
            return version >= translate.NAMED_SINCE  # the client's name is needed if protection starts later
        return (self.active or self._required) and version in translate.VERSIONS.get(api_key, ())

    def wants_response(self, api_key: int, version: int) -> bool:
        if api_key == api.DESCRIBE_TRANSACTIONS:
            return self.active and version == translate.DESCRIBED_VERSION
        return api_key != api.API_VERSIONS and self.wants_request(api_key, version)

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        key, version = exchange.api_key, exchange.version
        if key == api.API_VERSIONS:
            if translate.renews_after_abort(frame, version):
                self._renewing.add(exchange.connection.number)
            return frame
        request = translate.read_transactional_request(frame, key, version)
        if request.name is None:
            return frame  # an idempotent producer's InitProducerId
        if not self.active:
            exchange.answer = translate.refusal_response(
                frame, key, version, exchange.correlation_id, _RETRIABLE_ERRORS[key]
            )
            return b""
        if self._is_unprotected(request.name):
            if key == api.INIT_PRODUCER_ID:
                exchange.notes[self] = _Init(request.name, None)
            return frame
        before = self.machine.state(request.name)
        try:
            made = self._replace_identity(exchange, frame, request.name, request)
            if self._is_accepted(exchange, request.name):
                self._write_journal(request.name, before)
            return made
        except Refused as refused:
            self._log_refusal(exchange, request.name, refused)
            exchange.answer = translate.refusal_response(frame, key, version, exchange.correlation_id, refused.code)
            return b""

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        if exchange.api_key == api.DESCRIBE_TRANSACTIONS:
            return translate.replace_described_identities(frame, self._identity_to_show)
        note = exchange.notes.pop(self, None)
        if isinstance(note, _Pending):
            self._apply_after_response(exchange, frame, note)
        elif isinstance(note, _Renewal):
            return self._finish_renewal(exchange, frame, note)
        elif isinstance(note, _Init):
            error, identity = translate.read_init_response(frame, exchange.version)
            if not error:
                self._accept(exchange, note.name)
                connection = exchange.connection.number
                before = self.machine.state(note.name)
                self.machine.note_init(note.name, identity, connection, connection in self._renewing, note.bumped)
                self._write_journal(note.name, before)
        elif isinstance(note, _PendingEnd):
            throttle_ms, error, following = translate.read_end_txn_response(frame)
            if error == _NOT_AUTHORIZED:
                self._accepted.get(exchange.connection.number, OrderedDict()).pop(note.name, None)
            if error == _INVALID_TXN_STATE and note.opened:
                # The broker has ended the transaction at its timeout. It answers only EndTxn v5 with this error, which
                # is fatal to clients (KAFKA-20785).
                error = INVALID_PRODUCER_EPOCH
            if not error:
                self.counts["transactions"] += 1
                self._accept(exchange, note.name)
                before = self.machine.state(note.name)
                if note.act is not None:
                    self._act(note.name, note.number, note.act)
                if self.machine.note_end(note.name, note.end, following):
                    error = api.ABORTED_UNKNOWN_PRODUCER_ID
                self._write_journal(note.name, before)
            return translate.end_txn_response(exchange.correlation_id, exchange.version, throttle_ms, error)
        return frame

    def connection_closed(self, connection: Connection) -> None:
        number = connection.number
        self._renewing.discard(number)
        self._accepted.pop(number, None)
        self._pending.pop(number, None)
        self.machine.forget_connection(number)

    def request_stream(self, exchange: Exchange, size: int) -> Stream | None:
        return _ProduceStream(self, exchange, size) if exchange.api_key == api.PRODUCE else None

    def response_stream(self, exchange: Exchange, size: int) -> Stream | None:
        if exchange.api_key == api.DESCRIBE_TRANSACTIONS or self in exchange.notes:
            return None
        return _UNCHANGED_STREAM

    def decide_produce(
        self, exchange: Exchange, request: translate.Produce
    ) -> tuple[Identity, dict[Partition, int]] | bytes | None:
        """Return the identity and base sequences of a Produce, an error response, or None to forward it unchanged."""
        if request.name is None:
            return None
        if not self.active:
            return self._refuse(exchange, request, _RETRIABLE_ERRORS[api.PRODUCE])
        if not request.batches or self._is_unprotected(request.name):
            return None
        try:
            virtual, *others = request.identities
            if others:
                raise Refused(INVALID_PRODUCER_EPOCH, "batches of more than one identity")
            name, connection, broker, written = (
                request.name,
                exchange.connection.number,
                _broker(exchange),
                request.written,
            )
            if self._is_accepted(exchange, name):
                return self.machine.check_produce(name, virtual, connection, broker, written)
            if not request.transactional:
                # Brokers do not check the right to the transactional.id for batches outside of a transaction, so an
                # accepted batch proves nothing.
                raise Refused(_INVALID_TXN_STATE, "records outside of the transaction")
            if (pending := self._pending.get(connection, 0)) and pending + len(written) > _MOST_PENDING:
                raise Refused(NOT_ENOUGH_REPLICAS, "too many batches before the broker accepted this connection")
            change = self.machine.check_produce(name, virtual, connection, broker, written, Authority.UNKNOWN)

            def act(done: set[Partition]) -> object:
                appended = [batch for batch in written if batch.partition in done]
                return self.machine.check_produce(name, virtual, connection, broker, appended, Authority.ANSWERED)

            self._apply_later(exchange, name, act, len(written))
            exchange.count_bytes(sum(_WRITTEN_BYTES + len(batch.partition[0]) for batch in written))
            return change
        except Refused as refused:
            self._log_refusal(exchange, request.name, refused)
            return self._refuse(exchange, request, refused.code)

    def _refuse(self, exchange: Exchange, request: translate.Produce, code: int) -> bytes:
        return messages.refusal_response(
            api.PRODUCE, exchange.version, exchange.correlation_id, code, request.partitions
        )

    def _replace_identity(
        self, exchange: Exchange, frame: bytes, name: str, request: translate.TransactionalRequest
    ) -> bytes:
        """Return the request with its real identity. Raises Refused."""
        key, connection, virtual = exchange.api_key, exchange.connection.number, request.identity
        if key == api.INIT_PRODUCER_ID:
            return self._prepare_init(exchange, frame, name, request)
        mark = (key, hashlib.blake2b(request.body, digest_size=16).digest())
        accepted = self._is_accepted(exchange, name)
        authority = Authority.ACCEPTED if accepted else Authority.UNKNOWN
        if key == api.END_TXN:
            ends = partial(self.machine.check_end, name, virtual, connection, request.committed, mark)
            number, opened = (
                self.machine.transaction_number(name),
                self.machine.state(name) in (State.OPEN, State.ENDING),
            )
            end = ends(authority)
            act_when_answered = None if accepted else partial(ends, Authority.ANSWERED)
            exchange.notes[self] = _PendingEnd(name, end, number, opened, act_when_answered)
            return translate.end_txn_v5(frame, exchange.version, name, end.identity, end.committed)
        act: Callable[[Authority], Identity]
        if key == api.TXN_OFFSET_COMMIT:
            commits = self.machine.check_offset_commit
            act = partial(commits, name, virtual, connection, request.group, _broker(exchange), mark)
        else:
            act = partial(self.machine.check_open, name, virtual, connection, mark)
        real = act(authority)
        if not accepted:
            self._apply_later(exchange, name, lambda _: act(Authority.ANSWERED))
        return translate.replace_identity(frame, request.at, real)

    # Connections and transactional.ids that the broker has accepted.

    def _is_accepted(self, exchange: Exchange, name: str) -> bool:
        return name in self._accepted.get(exchange.connection.number, ())

    def _accept(self, exchange: Exchange, name: str) -> None:
        names = self._accepted.setdefault(exchange.connection.number, OrderedDict())
        names[name] = None
        names.move_to_end(name)
        if len(names) > _MOST_ACCEPTED:
            names.popitem(last=False)

    def _apply_later(
        self, exchange: Exchange, name: str, act: Callable[[set[Partition]], object], size: int = 1
    ) -> None:
        if exchange.expects_response:
            number = exchange.connection.number
            self._pending[number] = self._pending.get(number, 0) + size
            exchange.notes[self] = _Pending(name, self.machine.transaction_number(name), act, size)

    def _apply_after_response(self, exchange: Exchange, frame: bytes, note: _Pending) -> None:
        self._pending[exchange.connection.number] -= note.size
        key, done = exchange.api_key, set[Partition]()
        if key == api.ADD_OFFSETS_TO_TXN:
            accepted = translate.read_add_offsets_error(frame, exchange.version) == 0
        else:
            results = translate.read_partition_errors(frame, key, exchange.version)
            done = {partition for partition, code in results if code in (0, _DUPLICATE_SEQUENCE_NUMBER)}
            # A broker accepts all partitions of an AddPartitionsToTxn or none. Of records or offsets it may accept a
            # part.
            accepted = len(done) == len(results) > 0 if key == api.ADD_PARTITIONS_TO_TXN else bool(done)
        if accepted:
            self._accept(exchange, note.name)
            before = self.machine.state(note.name)
            self._act(note.name, note.number, partial(note.act, done))
            self._write_journal(note.name, before)

    def _act(self, name: str, number: int | None, act: Callable[[], object]) -> None:
        """Apply an accepted request, unless another one has ended its transaction meanwhile."""
        if self.machine.transaction_number(name) != number:
            return
        try:
            act()
        except Refused as refused:
            events.debug("request outdated", transactional_id=name, reason=refused.reason)

    def _finish_renewal(self, exchange: Exchange, frame: bytes, note: _Renewal) -> bytes:
        _, error, _ = translate.read_end_txn_response(frame)
        if error not in _OWNER_ERRORS:
            return translate.init_response(exchange.correlation_id, exchange.version, translate.NONE, error)
        self._accept(exchange, note.name)
        before = self.machine.state(note.name)
        following = self.machine.renew(note.name, note.virtual, exchange.connection.number)
        if following is None:  # another request got the next identity first, so the client must retry this request
            return translate.init_response(
                exchange.correlation_id, exchange.version, translate.NONE, CONCURRENT_TRANSACTIONS
            )
        self.counts["renewed"] += 1
        self._write_journal(note.name, before)
        return translate.init_response(exchange.correlation_id, exchange.version, following)

    def _prepare_init(
        self, exchange: Exchange, frame: bytes, name: str, request: translate.TransactionalRequest
    ) -> bytes:
        virtual = request.identity
        if virtual == translate.NONE:
            exchange.notes[self] = _Init(name, None)
            return frame
        if self.machine.can_renew(name, virtual) and not self._is_accepted(exchange, name):
            # Only the broker knows whether this connection may have the next identity. An InitProducerId would bump the
            # epoch once more and abort an open transaction. This EndTxn ends nothing, because the broker checks the
            # right to the transactional.id before the identity.
            exchange.notes[self] = _Renewal(name, virtual)
            return translate.end_txn_v5(frame, exchange.version, name, translate.NONE, False, api.INIT_PRODUCER_ID)
        following = self.machine.renew(name, virtual, exchange.connection.number)
        if following is not None:
            self.counts["renewed"] += 1
            exchange.answer = translate.init_response(exchange.correlation_id, exchange.version, following)
            return b""
        try:
            real = self.machine.identity_to_bump(name, virtual)
        except Refused:
            if exchange.version < _V2_CLIENT_VERSION:
                raise
            # The client supports part 2 of KIP-890. The broker issued its identity with a response to EndTxn, so the
            # shim does not know that identity.
            exchange.notes[self] = _Init(name, None)
            return frame
        exchange.notes[self] = _Init(name, virtual)
        return translate.replace_identity(frame, request.at, real)

    def _is_unprotected(self, name: str) -> bool:
        return self._started_late and self.machine.state(name) is None

    def _identity_to_show(self, name: str, seen: Identity, state: str) -> Identity:
        return seen if self._is_unprotected(name) else self.machine.identity_to_show(name, seen, state)

    def _write_journal(self, name: str, before: State | None) -> None:
        """Write the change to the journal before the client or the broker sees it."""
        if self._journal is None:
            return
        under_way = (State.OPEN, State.ENDING)
        pair = self.machine.pair(name)
        if pair is not None:
            self._journal.write_pair(pair)
        elif before not in under_way:
            self._journal.write_opened(name)

    def _log_refusal(self, exchange: Exchange, name: str, refused: Refused) -> None:
        self.counts["fenced" if refused.code == INVALID_PRODUCER_EPOCH else "challenged"] += 1
        events.debug(
            "request refused",
            transactional_id=name,
            api=api.api_name(exchange.api_key),
            error=error_name(refused.code),
            reason=refused.reason,
            connection=exchange.connection.number,
        )


class _UnchangedStream:
    """Forward the pieces of a response unchanged."""

    def feed(self, piece: Piece) -> Piece:
        return piece


_UNCHANGED_STREAM = _UnchangedStream()


class _ProduceStream:
    """Forward a stream of one Produce of `size` bytes, changed as soon as enough of its head has arrived.

    A refused request is discarded and answered after the client has sent all of it, because clients read no response
    before that.
    """

    def __init__(self, job: ProtectJob, exchange: Exchange, size: int) -> None:
        self._job, self._exchange, self._size = job, exchange, size
        self._seen = 0
        self._held = bytearray()  # bytes kept until the decision
        self._retry_at = 0  # the number of bytes at which the head is read again
        self._is_decided = False
        self._refusal: bytes | None = None

    def feed(self, piece: Piece) -> Piece:
        self._seen += len(piece)
        if not self._is_decided:
            piece = self._decide(piece)
        if self._refusal is not None:
            if self._seen == self._size:
                self._exchange.answer = self._refusal
            return b""
        return piece

    def _decide(self, piece: Piece) -> Piece:
        """Return the bytes to forward now."""
        connection = self._exchange.connection
        if self._held:
            self._held += piece
            connection.held_bytes += len(piece)
            if self._seen < self._retry_at:
                return b""
            piece = memoryview(self._held)
        request = self._read(piece)
        if request is None:
            if self._held:
                assert isinstance(piece, memoryview)
                piece.release()  # a bytearray with a view cannot grow
            else:
                self._held += piece
                connection.held_bytes += len(piece)
            return b""
        self._is_decided = True
        connection.held_bytes -= len(self._held)
        self._held = bytearray()  # free the memory now: the stream exists until the next request begins
        result = self._job.decide_produce(self._exchange, request)
        if isinstance(result, bytes):
            self._refusal = result
            return b""
        return piece if result is None else translate.rewrite_produce(piece, request, *result)

    def _read(self, piece: Piece) -> translate.Produce | None:
        try:
            return translate.read_produce(piece, self._exchange.version, self._size)
        except Malformed:
            if self._seen == self._size:
                raise
            # The reader needs more bytes, or the request is invalid, which only the complete request shows. Read the
            # head again when twice as many bytes have arrived, so that a client that sends single bytes causes few
            # reads.
            self._retry_at = self._size if self._seen > LONGEST_HEAD_BYTES else min(2 * self._seen, self._size)
            return None


_V2_CLIENT_VERSION = 5  # InitProducerId
_NOT_AUTHORIZED = 53  # TRANSACTIONAL_ID_AUTHORIZATION_FAILED
_INVALID_TXN_STATE = 48
_DUPLICATE_SEQUENCE_NUMBER = 46  # the records are appended: clients treat it as an acknowledgement
# The errors for an EndTxn without a valid identity from a client with the right to the transactional.id:
# INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED.
_OWNER_ERRORS = (INVALID_PRODUCER_EPOCH, 49, 90)
_MOST_ACCEPTED = 100  # maximum number of transactional.ids per connection; a forgotten one must be accepted again
_WRITTEN_BYTES = 300  # the size of a batch with its partition and list entries
_MOST_PENDING = 1_000  # maximum number of batches and requests per connection; a single request may have more

# The retriable errors while required protection is unavailable. A live client sends the request again.
_RETRIABLE_ERRORS = {
    api.PRODUCE: NOT_ENOUGH_REPLICAS,
    api.INIT_PRODUCER_ID: CONCURRENT_TRANSACTIONS,
    api.ADD_PARTITIONS_TO_TXN: CONCURRENT_TRANSACTIONS,
    api.ADD_OFFSETS_TO_TXN: CONCURRENT_TRANSACTIONS,
    api.END_TXN: CONCURRENT_TRANSACTIONS,
    api.TXN_OFFSET_COMMIT: LOAD_IN_PROGRESS,
}


def _broker(exchange: Exchange) -> Hashable:
    connection = exchange.connection
    return connection.broker if connection.node_id is None else connection.node_id
