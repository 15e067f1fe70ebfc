"""Protect's place in the pipeline: binds frames to the machine, and says loudly where it cannot protect.

Owns what is remembered between a request and its answer. A request it cannot read ends the connection: passing it would
be a request without protection that looks like one with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

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
    End,
    Identity,
    Machine,
    Partition,
    Refused,
    State,
)
from eos.shim.wire import api
from eos.shim.wire.frames import Piece, Stream
from eos.shim.wire.headers import LONGEST_HEAD_BYTES


class _Init(NamedTuple):
    name: str
    bumped: Identity | None


class _Ending(NamedTuple):
    name: str
    end: End


class ProtectJob(Job):
    """Off until `upstream` was told that every broker that answers takes EndTxn v5, and that one does.

    While it is off all bytes pass as they are; if it is `required`, a transactional request is told to come again
    instead. Once it is on it stays on.
    """

    def __init__(self, machine: Machine | None = None, journal: Journal | None = None, required: bool = False) -> None:
        self.machine = machine or Machine()
        self._journal, self._required = journal, required
        self._lacking: str | None = None  # why it is off, as was said
        self._old: set[str] = set()  # brokers without EndTxn v5, when they answered last
        # Clients may have identities that nobody here saw: what is not known has begun before, and passes as it did.
        self._began_late = False
        for pair in journal.restored if journal else ():
            self.machine.restore(pair)
        self.active = False
        self.counts = {"transactions": 0, "challenged": 0, "fenced": 0, "renewed": 0}
        self._renewing = set[int]()  # connections whose client renews its identity after an abort

    def upstream(self, newest: Mapping[str, Mapping[int, int] | None]) -> None:
        if self.active:
            return
        told = {broker: offered.get(api.END_TXN, 0) for broker, offered in newest.items() if offered is not None}
        # One that was old and is silent now may be old again when it is back.
        self._old = {name for name in self._old if name in newest and name not in told}
        self._old |= {broker for broker, version in told.items() if version < translate.END_TXN_VERSION}
        silent = sorted(newest.keys() - told.keys())
        if not told or self._old:
            self._tell_off(", ".join(sorted(self._old) or silent), bool(self._old))
            return
        if self._lacking is not None and not self._required:
            self._began_late, self.machine = True, Machine()
        self.active = True
        events.info(
            "transactions are protected",
            brokers=len(told),
            **({"since": "now, for clients that initialise from now on"} if self._began_late else {}),
        )
        if silent:
            events.warning(
                "taken for brokers that offer EndTxn v5 as the others do",
                brokers=", ".join(silent),
                reason="they did not answer",
            )

    def _tell_off(self, brokers: str, old: bool) -> None:
        reason = "they do not offer EndTxn v5 (Kafka 4.0 and later do)" if old else "none says what it offers"
        if self._lacking != (lacking := f"{brokers}: {reason}"):
            self._lacking = lacking
            does = (
                "transactional requests wait until there is (--require-protection)"
                if self._required
                else "late requests can still change the next transaction"
            )
            events.warning(f"NO PROTECTION: {does}", brokers=brokers, reason=reason)

    @property
    def asks_again(self) -> bool:
        return not self.active

    @property
    def not_ready(self) -> str | None:
        if self.active or not self._required:
            return None
        return f"no protection of transactions (--require-protection): {self._lacking or 'no broker was asked yet'}"

    def wants_request(self, api_key: int, version: int) -> bool:
        if api_key == api.API_VERSIONS:
            return version >= translate.NAMED_SINCE  # who a client is has to be known when protection begins later
        return (self.active or self._required) and version in translate.VERSIONS.get(api_key, ())

    def wants_response(self, api_key: int, version: int) -> bool:
        if api_key == api.DESCRIBE_TRANSACTIONS:
            return self.active and version == translate.DESCRIBED_VERSION
        return api_key in (api.INIT_PRODUCER_ID, api.END_TXN) and self.wants_request(api_key, version)

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        key, version = exchange.api_key, exchange.version
        if key == api.API_VERSIONS:
            if translate.renews(frame, version):
                self._renewing.add(exchange.connection.number)
            return frame
        request = translate.identified(frame, key, version)
        if request.name is None:
            return frame  # an idempotent producer's InitProducerId
        if not self.active:
            exchange.answer = translate.refusal(frame, key, version, exchange.correlation_id, _COME_AGAIN[key])
            return b""
        if self._is_from_before(request.name):
            if key == api.INIT_PRODUCER_ID:
                exchange.notes[self] = _Init(request.name, None)
            return frame
        before = self.machine.state(request.name)
        try:
            made = self._identified(exchange, frame, request.name, request)
            self._write_down(request.name, before)
            return made
        except Refused as refused:
            self._note(exchange, request.name, refused)
            exchange.answer = translate.refusal(frame, key, version, exchange.correlation_id, refused.code)
            return b""

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        if exchange.api_key == api.DESCRIBE_TRANSACTIONS:
            return translate.described(frame, self._shown)
        noted = exchange.notes.pop(self, None)
        if isinstance(noted, _Init):
            error, identity = translate.initialised(frame, exchange.version)
            if not error:
                connection = exchange.connection.number
                before = self.machine.state(noted.name)
                self.machine.initialised(noted.name, identity, connection, connection in self._renewing, noted.bumped)
                self._write_down(noted.name, before)
        elif isinstance(noted, _Ending):
            throttle_ms, error, following = translate.ended(frame)
            if not error:
                self.counts["transactions"] += 1
                before = self.machine.state(noted.name)
                if self.machine.ended(noted.name, noted.end, following):
                    error = api.ABORTED_TAKE_THE_NEXT_IDENTITY
                self._write_down(noted.name, before)
            return translate.end_txn_answer(exchange.correlation_id, exchange.version, throttle_ms, error)
        return frame

    def closed(self, connection: Connection) -> None:
        self._renewing.discard(connection.number)

    def request_stream(self, exchange: Exchange, size: int) -> Stream | None:
        return _PassingProduce(self, exchange, size) if exchange.api_key == api.PRODUCE else None

    def produce(
        self, exchange: Exchange, request: translate.Produce
    ) -> tuple[Identity, dict[Partition, int]] | bytes | None:
        """How a Produce goes upstream, or what it is answered here; None: as it is."""
        if request.name is None:
            return None
        if not self.active:
            return translate.produce_refusal(
                request, exchange.version, exchange.correlation_id, _COME_AGAIN[api.PRODUCE]
            )
        if not request.batches or self._is_from_before(request.name):
            return None
        try:
            virtual, *others = request.identities
            if others:
                raise Refused(INVALID_PRODUCER_EPOCH, "batches of more than one identity")
            connection, broker = exchange.connection.number, _broker(exchange)
            return self.machine.produces(request.name, virtual, connection, broker, request.written)
        except Refused as refused:
            self._note(exchange, request.name, refused)
            return translate.produce_refusal(request, exchange.version, exchange.correlation_id, refused.code)

    def _identified(self, exchange: Exchange, frame: bytes, name: str, request: translate.Identified) -> bytes:
        """Raises Refused."""
        key, connection, virtual = exchange.api_key, exchange.connection.number, request.identity
        if key == api.INIT_PRODUCER_ID:
            return self._init(exchange, frame, name, request)
        mark = (key, request.body)
        if key == api.END_TXN:
            end = self.machine.ends(name, virtual, connection, request.committed, mark)
            exchange.notes[self] = _Ending(name, end)
            exchange.sent_version = translate.END_TXN_VERSION
            return translate.end_txn(frame, exchange.version, name, end.identity, end.committed)
        if key == api.TXN_OFFSET_COMMIT:
            broker = _broker(exchange)
            real = self.machine.commits_offsets(name, virtual, connection, request.group, broker, mark)
        else:
            real = self.machine.opens(name, virtual, connection, mark)
        return translate.with_identity(frame, request.at, real)

    def _init(self, exchange: Exchange, frame: bytes, name: str, request: translate.Identified) -> bytes:
        virtual = request.identity
        if virtual == translate.NONE:
            exchange.notes[self] = _Init(name, None)
            return frame
        following = self.machine.renewed(name, virtual, exchange.connection.number)
        if following is not None:
            self.counts["renewed"] += 1
            exchange.answer = translate.init_answer(exchange.correlation_id, exchange.version, following)
            return b""
        try:
            real = self.machine.bumps(name, virtual)
        except Refused:
            if exchange.version < _SPOKEN_BY_V2_CLIENTS:
                raise
            # A client that speaks part 2 itself has identities of its transactions that nobody here saw.
            exchange.notes[self] = _Init(name, None)
            return frame
        exchange.notes[self] = _Init(name, virtual)
        return translate.with_identity(frame, request.at, real)

    def _is_from_before(self, name: str) -> bool:
        return self._began_late and self.machine.state(name) is None

    def _shown(self, name: str, seen: Identity, state: str) -> Identity:
        return seen if self._is_from_before(name) else self.machine.shown(name, seen, state)

    def _write_down(self, name: str, before: State | None) -> None:
        """Before anybody learns of it."""
        if self._journal is None:
            return
        under_way = (State.OPEN, State.ENDING)
        pair = self.machine.pair(name)
        if pair is not None:
            self._journal.pair(pair)
        elif before not in under_way:
            self._journal.opened(name)

    def _note(self, exchange: Exchange, name: str, refused: Refused) -> None:
        self.counts["fenced" if refused.code == INVALID_PRODUCER_EPOCH else "challenged"] += 1
        events.debug(
            "refused",
            transactional_id=name,
            api=api.api_name(exchange.api_key),
            error=api.error_name(refused.code),
            reason=refused.reason,
            connection=exchange.connection.number,
        )


class _PassingProduce:
    """A `Stream` over one Produce of `size` bytes: changed and passed on as soon as its head tells how.

    What is refused is swallowed, and answered when its client has sent all of it: before that no client waits for an
    answer. What is kept until it is decided counts as collected.
    """

    def __init__(self, job: ProtectJob, exchange: Exchange, size: int) -> None:
        self._job, self._exchange, self._size = job, exchange, size
        self._seen = 0
        self._held = bytearray()  # until it is decided
        self._look_at = 0  # bytes; before so many have come there is nothing new to be read
        self._decided = False
        self._refusal: bytes | None = None

    def feed(self, piece: Piece) -> Piece:
        self._seen += len(piece)
        if not self._decided:
            piece = self._decide(piece)
        if self._refusal is not None:
            if self._seen == self._size:
                self._exchange.answer = self._refusal
            return b""
        return piece

    def _decide(self, piece: Piece) -> Piece:
        """What goes on now."""
        account = self._exchange.connection.collected
        if self._held:
            self._held += piece
            if account is not None:
                account.add(len(piece))
            if self._seen < self._look_at:
                return b""
            piece = memoryview(self._held)
        request = self._read(piece)
        if request is None:
            if self._held:
                assert isinstance(piece, memoryview)
                piece.release()  # what has a view cannot grow
            else:
                self._held += piece
                if account is not None:
                    account.add(len(piece))
            return b""
        self._decided = True
        if account is not None:
            account.clear()
        way = self._job.produce(self._exchange, request)
        if isinstance(way, bytes):
            self._refusal = way
            return b""
        return piece if way is None else translate.produce_as(piece, request, *way)

    def _read(self, piece: Piece) -> translate.Produce | None:
        version = self._exchange.version
        if self._look_at < self._size:
            try:
                request = translate.produce_by_head(piece, version, self._size)
                if request is not None:
                    return request
                self._look_at = self._size
            except Malformed:
                # It ends within its head, and is looked at again when twice as much is there: a client that sends it
                # byte by byte must not have it read so often. Or it is wrong, and judged when all of it is there.
                self._look_at = self._size if self._seen > LONGEST_HEAD_BYTES else min(2 * self._seen, self._size)
        return translate.produce(piece, version) if self._seen == self._size else None


_SPOKEN_BY_V2_CLIENTS = 5  # InitProducerId

# What is told while there is no protection and it is required: a live client asks again.
_COME_AGAIN = {
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
