"""Protect's place in the pipeline: binds frames to the machine, and says loudly where it cannot protect.

Owns what is remembered between a request and its answer. A request it cannot read ends the connection: passing it would
be a request without protection that looks like one with it.
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
from eos.shim.wire import answers, api
from eos.shim.wire.frames import Piece, Stream
from eos.shim.wire.headers import LONGEST_HEAD_BYTES


class _Init(NamedTuple):
    name: str
    bumped: Identity | None


class _Ending(NamedTuple):
    name: str
    end: End
    number: int | None
    opened: bool  # before it was sent
    act: Callable[[], object] | None  # what the answer lets happen, where the request was to change nothing


class _Waiting(NamedTuple):
    """A request on a connection that the broker has not accepted yet: what it does once it is answered without error.

    With partitions it may be answered well for some of them: they are what `act` is told.
    """

    name: str
    number: int | None
    act: Callable[[set[Partition]], object]
    size: int = 1


class _Proving(NamedTuple):
    """A question for the next identity that waits for what the broker says of its connection."""

    name: str
    virtual: Identity


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
        # By connection, the transactional.ids of which the broker accepted a request there.
        self._accepted: dict[int, OrderedDict[str, None]] = {}
        self._waiting: dict[int, int] = {}  # by connection, how much is remembered for answers

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
        return api_key != api.API_VERSIONS and self.wants_request(api_key, version)

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
            if self._is_accepted(exchange, request.name):
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
        if isinstance(noted, _Waiting):
            self._answered(exchange, frame, noted)
        elif isinstance(noted, _Proving):
            return self._proven(exchange, frame, noted)
        elif isinstance(noted, _Init):
            error, identity = translate.initialised(frame, exchange.version)
            if not error:
                self._accept(exchange, noted.name)
                connection = exchange.connection.number
                before = self.machine.state(noted.name)
                self.machine.initialised(noted.name, identity, connection, connection in self._renewing, noted.bumped)
                self._write_down(noted.name, before)
        elif isinstance(noted, _Ending):
            throttle_ms, error, following = translate.ended(frame)
            if error == _NOT_AUTHORIZED:
                self._accepted.get(exchange.connection.number, OrderedDict()).pop(noted.name, None)
            if error == _INVALID_TXN_STATE and noted.opened:
                # The broker has ended it at its timeout, and says so to part 2 only (KAFKA-20785): there it is fatal.
                error = INVALID_PRODUCER_EPOCH
            if not error:
                self.counts["transactions"] += 1
                self._accept(exchange, noted.name)
                before = self.machine.state(noted.name)
                if noted.act is not None:
                    self._act(noted.name, noted.number, noted.act)
                if self.machine.ended(noted.name, noted.end, following):
                    error = api.ABORTED_TAKE_THE_NEXT_IDENTITY
                self._write_down(noted.name, before)
            return translate.end_txn_answer(exchange.correlation_id, exchange.version, throttle_ms, error)
        return frame

    def closed(self, connection: Connection) -> None:
        number = connection.number
        self._renewing.discard(number)
        self._accepted.pop(number, None)
        self._waiting.pop(number, None)
        self.machine.closed(number)

    def request_stream(self, exchange: Exchange, size: int) -> Stream | None:
        return _PassingProduce(self, exchange, size) if exchange.api_key == api.PRODUCE else None

    def response_stream(self, exchange: Exchange, size: int) -> Stream | None:
        if exchange.api_key == api.DESCRIBE_TRANSACTIONS or self in exchange.notes:
            return None
        return _AS_IT_IS

    def produce(
        self, exchange: Exchange, request: translate.Produce
    ) -> tuple[Identity, dict[Partition, int]] | bytes | None:
        """How a Produce goes upstream, or what it is answered here; None: as it is."""
        if request.name is None:
            return None
        if not self.active:
            return self._refuse(exchange, request, _COME_AGAIN[api.PRODUCE])
        if not request.batches or self._is_from_before(request.name):
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
                return self.machine.produces(name, virtual, connection, broker, written)
            if not request.transactional:
                # Brokers ask for no right to the transactional.id then, and their answer would prove none.
                raise Refused(_INVALID_TXN_STATE, "records outside of the transaction")
            if (waiting := self._waiting.get(connection, 0)) and waiting + len(written) > _MOST_WAITING:
                raise Refused(NOT_ENOUGH_REPLICAS, "too many batches before the broker accepted this connection")
            way = self.machine.produces(name, virtual, connection, broker, written, Authority.UNKNOWN)

            def act(done: set[Partition]) -> object:
                taken = [batch for batch in written if batch.partition in done]
                return self.machine.produces(name, virtual, connection, broker, taken, Authority.ANSWERED)

            self._wait(exchange, name, act, len(written))
            exchange.remember(sum(_WRITTEN_BYTES + len(batch.partition[0]) for batch in written))
            return way
        except Refused as refused:
            self._note(exchange, request.name, refused)
            return self._refuse(exchange, request, refused.code)

    def _refuse(self, exchange: Exchange, request: translate.Produce, code: int) -> bytes:
        return answers.refusal(api.PRODUCE, exchange.version, exchange.correlation_id, code, request.partitions)

    def _identified(self, exchange: Exchange, frame: bytes, name: str, request: translate.Identified) -> bytes:
        """Raises Refused."""
        key, connection, virtual = exchange.api_key, exchange.connection.number, request.identity
        if key == api.INIT_PRODUCER_ID:
            return self._init(exchange, frame, name, request)
        mark = (key, hashlib.blake2b(request.body, digest_size=16).digest())
        accepted = self._is_accepted(exchange, name)
        authority = Authority.ACCEPTED if accepted else Authority.UNKNOWN
        if key == api.END_TXN:
            ends = partial(self.machine.ends, name, virtual, connection, request.committed, mark)
            number, opened = self.machine.number(name), self.machine.state(name) in (State.OPEN, State.ENDING)
            end = ends(authority)
            act_when_answered = None if accepted else partial(ends, Authority.ANSWERED)
            exchange.notes[self] = _Ending(name, end, number, opened, act_when_answered)
            return translate.end_txn(frame, exchange.version, name, end.identity, end.committed)
        act: Callable[[Authority], Identity]
        if key == api.TXN_OFFSET_COMMIT:
            commits = self.machine.commits_offsets
            act = partial(commits, name, virtual, connection, request.group, _broker(exchange), mark)
        else:
            act = partial(self.machine.opens, name, virtual, connection, mark)
        real = act(authority)
        if not accepted:
            self._wait(exchange, name, lambda _: act(Authority.ANSWERED))
        return translate.with_identity(frame, request.at, real)

    # What the broker has to say first.

    def _is_accepted(self, exchange: Exchange, name: str) -> bool:
        return name in self._accepted.get(exchange.connection.number, ())

    def _accept(self, exchange: Exchange, name: str) -> None:
        names = self._accepted.setdefault(exchange.connection.number, OrderedDict())
        names[name] = None
        names.move_to_end(name)
        if len(names) > _MOST_ACCEPTED:
            names.popitem(last=False)

    def _wait(self, exchange: Exchange, name: str, act: Callable[[set[Partition]], object], size: int = 1) -> None:
        if exchange.awaited:
            number = exchange.connection.number
            self._waiting[number] = self._waiting.get(number, 0) + size
            exchange.notes[self] = _Waiting(name, self.machine.number(name), act, size)

    def _answered(self, exchange: Exchange, frame: bytes, noted: _Waiting) -> None:
        self._waiting[exchange.connection.number] -= noted.size
        key, done = exchange.api_key, set[Partition]()
        if key == api.ADD_OFFSETS_TO_TXN:
            accepted = translate.added_offsets(frame, exchange.version) == 0
        else:
            results = translate.results(frame, key, exchange.version)
            done = {partition for partition, code in results if code in (0, _DUPLICATE_SEQUENCE_NUMBER)}
            # A transaction is opened for all partitions or for none; of records and offsets some may be taken.
            accepted = len(done) == len(results) > 0 if key == api.ADD_PARTITIONS_TO_TXN else bool(done)
        if accepted:
            self._accept(exchange, noted.name)
            before = self.machine.state(noted.name)
            self._act(noted.name, noted.number, partial(noted.act, done))
            self._write_down(noted.name, before)

    def _act(self, name: str, number: int | None, act: Callable[[], object]) -> None:
        """What a request was let pass for, unless another one has ended its transaction meanwhile."""
        if self.machine.number(name) != number:
            return
        try:
            act()
        except Refused as refused:
            events.debug("overtaken", transactional_id=name, reason=refused.reason)

    def _proven(self, exchange: Exchange, frame: bytes, noted: _Proving) -> bytes:
        _, error, _ = translate.ended(frame)
        if error not in _OF_AN_OWNER:
            return translate.init_answer(exchange.correlation_id, exchange.version, translate.NONE, error)
        self._accept(exchange, noted.name)
        before = self.machine.state(noted.name)
        following = self.machine.renewed(noted.name, noted.virtual, exchange.connection.number)
        if following is None:  # another request was faster: this one is judged anew when it comes again
            return translate.init_answer(
                exchange.correlation_id, exchange.version, translate.NONE, CONCURRENT_TRANSACTIONS
            )
        self.counts["renewed"] += 1
        self._write_down(noted.name, before)
        return translate.init_answer(exchange.correlation_id, exchange.version, following)

    def _init(self, exchange: Exchange, frame: bytes, name: str, request: translate.Identified) -> bytes:
        virtual = request.identity
        if virtual == translate.NONE:
            exchange.notes[self] = _Init(name, None)
            return frame
        if self.machine.can_renew(name, virtual) and not self._is_accepted(exchange, name):
            # Nobody but the broker knows whether this connection may have it. An InitProducerId would make it give out
            # one more, and abort what is open. This EndTxn ends nothing: the right is judged first, then the identity.
            exchange.notes[self] = _Proving(name, virtual)
            return translate.end_txn(frame, exchange.version, name, translate.NONE, False, api.INIT_PRODUCER_ID)
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
            error=error_name(refused.code),
            reason=refused.reason,
            connection=exchange.connection.number,
        )


class _AsItIs:
    """A `Stream` of an answer that nothing waits for."""

    def feed(self, piece: Piece) -> Piece:
        return piece


_AS_IT_IS = _AsItIs()


class _PassingProduce:
    """A `Stream` over one Produce of `size` bytes: changed and passed on as soon as its head tells how.

    What is refused is swallowed, and answered when its client has sent all of it: before that no client waits for an
    answer.
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
        connection = self._exchange.connection
        if self._held:
            self._held += piece
            connection.kept += len(piece)
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
                connection.kept += len(piece)
            return b""
        self._decided = True
        connection.kept -= len(self._held)
        self._held = bytearray()  # this stream is there until the next request begins
        way = self._job.produce(self._exchange, request)
        if isinstance(way, bytes):
            self._refusal = way
            return b""
        return piece if way is None else translate.produce_as(piece, request, *way)

    def _read(self, piece: Piece) -> translate.Produce | None:
        try:
            return translate.produce(piece, self._exchange.version, self._size)
        except Malformed:
            if self._seen == self._size:
                raise
            # More of it is needed. It is looked at again when twice as much is there: a client that sends it byte by
            # byte must not have it read so often. Or it is wrong, and judged when all of it is there.
            self._look_at = self._size if self._seen > LONGEST_HEAD_BYTES else min(2 * self._seen, self._size)
            return None


_SPOKEN_BY_V2_CLIENTS = 5  # InitProducerId
_NOT_AUTHORIZED = 53  # TRANSACTIONAL_ID_AUTHORIZATION_FAILED
_INVALID_TXN_STATE = 48
_DUPLICATE_SEQUENCE_NUMBER = 46  # the records are there: clients take it for an acknowledgement
# How an EndTxn with an identity that is none is answered to those who have the right to the transactional.id:
# INVALID_PRODUCER_EPOCH, INVALID_PRODUCER_ID_MAPPING, PRODUCER_FENCED.
_OF_AN_OWNER = (INVALID_PRODUCER_EPOCH, 49, 90)
_MOST_ACCEPTED = 100  # transactional.ids of a connection; one that is forgotten waits for an answer once more
_WRITTEN_BYTES = 300  # a batch, its partition and its place in lists
_MOST_WAITING = 1_000  # batches and requests of a connection; a single request may have more

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
