"""Keep the state of each transactional.id and decide which requests are forwarded (docs/explanation/protect.md).

The module owns identities, transaction numbers, base sequences and trust. It knows no bytes, no sockets and no clock,
and must never let a request of one transaction act in another. A client keeps one virtual identity (producer id, epoch)
from its init to the next. Upstream every transaction has a real identity, as KIP-890 part 2 requires.

    EMPTY ──opens──► OPEN ──ends──► ENDING ──ended──► ENDED ──opens──► OPEN
      └──────────────ends─────────────►▲ │ ◄────────ends──┘       (initialised, renewed: EMPTY, from anywhere)
                                         └─aborted─► SPENT

After an abort, a client that `renews` (librdkafka) gets UNKNOWN_PRODUCER_ID. It then requests the next identity itself
(KIP-360), inside the same call, so its abandoned requests carry an expired identity. For other clients a challenge
separates live requests from late ones: it refuses a request on a new connection once, so that only a live client
repeats the request.

Any client may send any name and identity. So a request changes no state until the broker has accepted a request for
that transactional.id on that connection (`Authority`). Until then requests are forwarded, and take effect after their
responses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

# The errors of refused requests. The first three are retriable: a live client retries, a late copy does not.
LOAD_IN_PROGRESS = 14
NOT_ENOUGH_REPLICAS = 19
CONCURRENT_TRANSACTIONS = 51
INVALID_PRODUCER_EPOCH = 47

# Sequences wrap at 2**31: `a` is earlier than `b` if (a - b) % 2**31 is at least half of that.
_SEQUENCES = 1 << 31
_EARLIER = 1 << 30


_LAST_EPOCH = (1 << 15) - 1
# The states that the coordinator reports after EndTxn, for a commit (True) and for an abort (False).
_END = {True: ("PrepareCommit", "CompleteCommit"), False: ("PrepareAbort", "CompleteAbort")}


class Identity(NamedTuple):
    producer_id: int
    epoch: int


class State(Enum):
    EMPTY = "the identity is new and has no requests"
    OPEN = "a request that opens the transaction was forwarded"
    ENDING = "its EndTxn was forwarded and has no response yet"
    ENDED = "it has ended, and the next transaction is not open"
    SPENT = "it was aborted, and its client must request the next identity"


class Event(Enum):
    OPENS = "AddPartitionsToTxn, AddOffsetsToTxn"
    WRITES = "Produce, TxnOffsetCommit"
    ENDS = "EndTxn"
    ENDED = "a response to EndTxn without an error"
    ABORTED = "the same for an abort by a client that renews its identity"


# Requests without an entry are refused and change nothing.
MOVES: Mapping[tuple[State, Event], State] = {
    (State.EMPTY, Event.OPENS): State.OPEN,
    (State.OPEN, Event.OPENS): State.OPEN,
    (State.ENDED, Event.OPENS): State.OPEN,
    (State.OPEN, Event.WRITES): State.OPEN,
    (State.EMPTY, Event.ENDS): State.ENDING,
    (State.OPEN, Event.ENDS): State.ENDING,
    (State.ENDING, Event.ENDS): State.ENDING,
    (State.ENDED, Event.ENDS): State.ENDING,
    (State.ENDING, Event.ENDED): State.ENDED,
    (State.ENDING, Event.ABORTED): State.SPENT,
}

Partition = tuple[str, int]


class Written(NamedTuple):
    """Describe one batch of a Produce with the client's sequences [first, first + records)."""

    partition: Partition
    first: int
    records: int


class End(NamedTuple):
    """Describe a forwarded EndTxn: its transaction, its real identity, and whether it commits."""

    number: int
    identity: Identity
    committed: bool


class Pair(NamedTuple):
    """Hold the state of a client between two transactions. `sequences` are per partition, or None if unknown."""

    name: str
    virtual: Identity
    real: Identity
    renews: bool
    before: Identity | None
    end: End | None
    sequences: list[tuple[str, int, int]] | None


class Authority(Enum):
    """List whether the broker has accepted a connection for a transactional.id.

    A request with UNKNOWN is repeated with ANSWERED after its response.
    """

    ACCEPTED = "the broker accepted an earlier request, so this one takes effect at once"
    UNKNOWN = "the broker has not answered yet, so this request is checked and changes nothing"
    ANSWERED = "the broker accepted this forwarded request, so it takes effect"


class Refused(Exception):
    """Refuse a request. `code` is the error for the client."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


COORDINATOR = "coordinator"


@dataclass
class _SequenceBase:
    """Hold the client's sequence number that the broker sees as 0, and the number of records sent since."""

    sequence: int
    sent: int = 0


@dataclass
class _Transactional:
    virtual: Identity
    real: Identity
    number: int = 1
    state: State = State.EMPTY
    end: End | None = None  # the EndTxn of a transaction that is ENDING or ENDED
    bases: dict[Partition, _SequenceBase] = field(default_factory=dict)
    # Sequences of a new epoch begin at 0. After an abort the client's next sequence is unknown.
    bases_known: bool = True
    trusted: dict[Hashable, int] = field(default_factory=dict)  # class of requests -> connection
    trust_revoked: bool = False  # true: a request must be challenged if its class has no trusted connection
    renews: bool = False  # the client requests its next identity after every abort
    before: Identity | None = None  # the virtual identity that a KIP-360 bump replaced

    def move(self, event: Event) -> None:
        self.state = MOVES[self.state, event]


# The challenged requests of one connection, by transactional.id, transaction and class of requests. The machine forgets
# them with the connection, because clients that the broker never accepts must not fill the memory.
_Challenged = OrderedDict[tuple[str, int, Hashable], set[Hashable]]
_MOST_CHALLENGES = 64  # maximum number of challenges per connection; a forgotten request is challenged again
_MOST_MARKS = 300  # maximum number of marks per connection, over all challenges
_MOST_MARKS_ACCEPTED = 10_000


class Machine:
    """Keep the state of up to `keep` transactional.ids. Forgetting the least recently used one fences its client.

    The method for a request returns how to forward it, or raises Refused and changes only the data of challenges.
    `connection` is a number that is never reused.
    """

    def __init__(self, keep: int = 100_000) -> None:
        self._known: OrderedDict[str, _Transactional] = OrderedDict()
        self._keep = keep
        self._challenged: dict[int, _Challenged] = {}  # by connection

    def forget_connection(self, connection: int) -> None:
        self._challenged.pop(connection, None)

    def transaction_number(self, name: str) -> int | None:
        """Return the number of the open or next transaction, which is unique per transactional.id."""
        known = self._known.get(name)
        return None if known is None else known.number

    def state(self, name: str) -> State | None:
        known = self._known.get(name)
        return None if known is None else known.state

    def real(self, name: str) -> Identity | None:
        known = self._known.get(name)
        return None if known is None else known.real

    def identity_to_show(self, name: str, seen: Identity, state: str) -> Identity:
        """Return the identity to show a client for the coordinator's identity `seen` (DescribeTransactions).

        A client checks whether its virtual identity is still the newest. The real identity is shown as the virtual one.
        If the coordinator is n epochs ahead of the real identity, it is shown n epochs ahead of the virtual one. For an
        unknown transactional.id (after a restart without a journal) the epoch is -1, which no newer instance can have.
        """
        known = self._known.get(name)
        if known is None:
            return Identity(seen.producer_id, -1)
        if seen.producer_id != known.real.producer_id:
            return seen
        ahead = seen.epoch - known.real.epoch
        if ahead == 1 and known.state is State.ENDING and known.end is not None and state in _END[known.end.committed]:
            ahead = 0  # the forwarded EndTxn, whose response has not arrived yet
        return Identity(known.virtual.producer_id, max(-1, min(known.virtual.epoch + ahead, _LAST_EPOCH)))

    # Between two transactions.

    def pair(self, name: str) -> Pair | None:
        known = self._known.get(name)
        if known is None or known.state in (State.OPEN, State.ENDING):
            return None
        sequences = [(*partition, base.sequence) for partition, base in known.bases.items()]
        found = sequences if known.bases_known else None
        return Pair(name, known.virtual, known.real, known.renews, known.before, known.end, found)

    def restore(self, pair: Pair) -> None:
        """Restore the state of a client, without trusted connections."""
        known = _Transactional(pair.virtual, pair.real, end=pair.end, renews=pair.renews, before=pair.before)
        known.trust_revoked = True
        known.bases_known = pair.sequences is not None
        known.bases = {(topic, index): _SequenceBase(sequence) for topic, index, sequence in pair.sequences or ()}
        if pair.end is not None:
            known.number = pair.end.number + 1
            known.state = State.SPENT if pair.renews and not pair.end.committed else State.ENDED
        self._known[pair.name] = known

    # Init.

    def can_renew(self, name: str, virtual: Identity) -> bool:
        known = self._known.get(name)
        if known is None:
            return False
        return known.before == virtual or (known.virtual == virtual and known.state in (State.ENDED, State.SPENT))

    def renew(self, name: str, virtual: Identity, connection: int) -> Identity | None:
        """Return the next identity of a client (KIP-360), or None if the shim must ask the broker for it. The shim
        knows the next identity if the last EndTxn returned one that is still unused. A repeated request gets the same
        identity again: its first response was lost, or the request is late.
        """
        known = self._known.get(name)
        if known is None or not self.can_renew(name, virtual):
            return None
        if known.before == virtual:
            return known.virtual
        self._begin(name, known.real, connection, known.renews, virtual)
        return known.real

    def identity_to_bump(self, name: str, virtual: Identity) -> Identity:
        """Return the real identity for a KIP-360 request to the broker. Raises Refused."""
        known = self._known.get(name)
        if known is None or known.virtual != virtual:
            raise Refused(INVALID_PRODUCER_EPOCH, "the shim did not issue this identity")
        return known.real

    def note_init(
        self,
        name: str,
        identity: Identity,
        connection: int,
        renews: bool = False,
        bumped: Identity | None = None,
    ) -> None:
        """Record that the broker issued `identity`. `bumped`: the virtual identity that a KIP-360 bump replaces."""
        known = self._known.get(name)
        if known is not None and known.real.producer_id == identity.producer_id:
            if identity.epoch < known.real.epoch:
                return  # an outdated response: its client is fenced
            if identity == known.virtual and known.real == identity:
                return  # the same response again
        self._begin(name, identity, connection, renews, bumped)

    def _begin(self, name: str, identity: Identity, connection: int, renews: bool, before: Identity | None) -> None:
        known = self._known.get(name)
        fresh = _Transactional(identity, identity, renews=renews, before=before)
        fresh.number = 1 if known is None else known.number + 1
        fresh.trusted[COORDINATOR] = connection
        self._known[name] = fresh
        self._known.move_to_end(name)
        if len(self._known) > self._keep:
            self._known.popitem(last=False)

    # Requests of a transaction.

    def check_open(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        mark: Hashable,
        authority: Authority = Authority.ACCEPTED,
    ) -> Identity:
        """Check AddPartitionsToTxn or AddOffsetsToTxn and return the real identity. A retry has the same `mark`."""
        known = self._require_identity(name, virtual)
        self._require_usable(known)
        self._challenge(name, known, COORDINATOR, connection, [mark], CONCURRENT_TRANSACTIONS, authority)
        self._require_move(known, Event.OPENS, CONCURRENT_TRANSACTIONS)
        if authority is not Authority.UNKNOWN:
            known.move(Event.OPENS)
        return known.real

    def check_offset_commit(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        group: str,
        broker: Hashable,
        mark: Hashable,
        authority: Authority = Authority.ACCEPTED,
    ) -> Identity:
        known = self._require_identity(name, virtual)
        self._require_usable(known)
        self._require_move(known, Event.WRITES, LOAD_IN_PROGRESS)
        self._challenge(name, known, ("group", group, broker), connection, [mark], LOAD_IN_PROGRESS, authority)
        return known.real

    def check_produce(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        broker: Hashable,
        batches: Sequence[Written],
        authority: Authority = Authority.ACCEPTED,
    ) -> tuple[Identity, dict[Partition, int]]:
        """Return the real identity, and per partition the base to subtract from the client's sequences modulo 2**31."""
        known = self._require_identity(name, virtual)
        self._require_usable(known)
        # A live client sends no Produce before the transaction is open for its partition.
        self._require_move(known, Event.WRITES, NOT_ENOUGH_REPLICAS)
        kind = ("produce", broker)
        if not known.renews:
            # A challenge refuses a request once, so that only a live client repeats it. A client that requests its next
            # identity after every abort (librdkafka) needs no challenge: its late Produce has an expired identity or
            # sequence. A challenge would even do harm. librdkafka requeues a refused record, and a record requeued
            # while abort_transaction waits for it is neither sent nor dropped until message.timeout.ms.
            marks = [(batch.partition, batch.first) for batch in batches]
            self._challenge(name, known, kind, connection, marks, NOT_ENOUGH_REPLICAS, authority)
        bases = dict[Partition, int]()
        for batch in batches:
            partition = batch.partition
            if partition not in bases:
                base = known.bases.get(partition)
                bases[partition] = (
                    base.sequence if base else self._base_sequence(name, known, kind, connection, partition, batches)
                )
        for batch in batches:
            if (batch.first - bases[batch.partition]) % _SEQUENCES >= _EARLIER:
                raise Refused(NOT_ENOUGH_REPLICAS, "the sequence belongs to an earlier transaction")
        if authority is Authority.UNKNOWN:
            return known.real, bases
        for batch in batches:
            base = known.bases.setdefault(batch.partition, _SequenceBase(bases[batch.partition]))
            base.sent = max(base.sent, (batch.first - base.sequence) % _SEQUENCES + batch.records)
        return known.real, bases

    def _base_sequence(
        self,
        name: str,
        known: _Transactional,
        kind: Hashable,
        connection: int,
        partition: Partition,
        batches: Sequence[Written],
    ) -> int:
        """Return the client's sequence that the broker sees as 0, for a partition that is new in this transaction."""
        if known.bases_known:
            return 0
        challenged = self._challenged.get(connection)
        seen = set[Hashable]() if challenged is None else challenged.get((name, known.number, kind), set())
        firsts = [batch.first for batch in batches if batch.partition == partition]
        return _earliest([*firsts, *_first_sequences(seen, partition)])

    # Ends.

    def check_end(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        committed: bool,
        mark: Hashable,
        authority: Authority = Authority.ACCEPTED,
    ) -> End:
        """Check EndTxn, even a repeated one, and return it with the identity of its transaction. Raises Refused."""
        known = self._require_identity(name, virtual)
        again = known.end is not None and known.end.committed == committed
        if known.state is State.SPENT and not again:
            self._require_usable(known)
        self._challenge(name, known, COORDINATOR, connection, [mark], CONCURRENT_TRANSACTIONS, authority)
        if known.state in (State.ENDED, State.SPENT) and known.end is not None and again:
            return known.end  # the response was lost, and the broker repeats it
        if known.state is State.ENDING and known.end is not None:
            end = known.end._replace(committed=committed)  # the broker knows its own decision
        else:
            # The transaction is perhaps not open here, for example if a client aborts after its first request was lost.
            end = End(known.number, known.real, committed)
        if authority is not Authority.UNKNOWN:
            known.end = end
            known.move(Event.ENDS)
        return end

    def note_end(self, name: str, end: End, following: Identity) -> bool:
        """Record that the broker ended the transaction and issued the `following` identity. A repeated response changes
        nothing.

        Return whether the client must request its next identity.
        """
        known = self._known.get(name)
        if known is None or known.end is None or (known.end.number, known.end.identity) != (end.number, end.identity):
            return False
        if known.state is not State.ENDING:
            return known.state is State.SPENT
        known.end = end
        spent = known.renews and not end.committed
        known.move(Event.ABORTED if spent else Event.ENDED)
        known.real = following
        known.number += 1
        if end.committed:
            # A client commits after all its records are acknowledged, and continues with the next sequence.
            for base in known.bases.values():
                base.sequence, base.sent = (base.sequence + base.sent) % _SEQUENCES, 0
            return False
        # The client abandons its unanswered Produce requests and uses their sequence numbers again. A late copy of such
        # a request could pass as a new one, so no connection stays trusted for Produce requests.
        known.bases.clear()
        known.bases_known = False
        known.trust_revoked = True
        known.trusted = {kind: number for kind, number in known.trusted.items() if kind == COORDINATOR}
        return spent

    # Rules shared by several requests.

    def _require_identity(self, name: str, virtual: Identity) -> _Transactional:
        known = self._known.get(name)
        if known is None or known.virtual != virtual:
            raise Refused(INVALID_PRODUCER_EPOCH, "the identity is outdated or was not issued by the shim")
        self._known.move_to_end(name)
        return known

    def _require_usable(self, known: _Transactional) -> None:
        if known.state is State.SPENT:
            raise Refused(
                INVALID_PRODUCER_EPOCH,
                "the client aborted the transaction of this identity and must request its next identity",
            )

    def _require_move(self, known: _Transactional, event: Event, code: int) -> None:
        if (known.state, event) not in MOVES:
            raise Refused(code, f"the transaction is {known.state.name}")

    def _challenge(
        self,
        name: str,
        known: _Transactional,
        kind: Hashable,
        connection: int,
        marks: Sequence[Hashable],
        code: int,
        authority: Authority,
    ) -> None:
        """Trust a connection if the same request came on it before in this transaction. Otherwise raise Refused."""
        trusted = known.trusted.get(kind)
        if trusted == connection:
            return
        challenges = trusted is not None or known.trust_revoked
        if challenges and authority is not Authority.ANSWERED:
            most = _MOST_MARKS if authority is Authority.UNKNOWN else _MOST_MARKS_ACCEPTED
            if not self._is_repeated((name, known.number, kind), connection, marks, most):
                raise Refused(
                    code, "the client used another connection before, so it must send this request again on the new one"
                )
        if authority is not Authority.UNKNOWN:
            known.trusted[kind] = connection

    def _is_repeated(
        self, what: tuple[str, int, Hashable], connection: int, marks: Sequence[Hashable], most: int
    ) -> bool:
        challenged = self._challenged.setdefault(connection, OrderedDict())
        seen = challenged.setdefault(what, set())
        challenged.move_to_end(what)
        again = not seen.isdisjoint(marks)
        room = most - sum(map(len, challenged.values()))
        while len(challenged) > 1 and (room < len(marks) or len(challenged) > _MOST_CHALLENGES):
            room += len(challenged.popitem(last=False)[1])
        # Keep the first marks, because a client that sent many requests at once repeats these first.
        seen.update(marks[: max(0, room)])
        return again


def _first_sequences(marks: Iterable[Hashable], partition: Partition) -> list[int]:
    return [mark[1] for mark in marks if isinstance(mark, tuple) and mark[0] == partition]


def _earliest(sequences: Sequence[int]) -> int:
    """Return the sequence that precedes all others, modulo 2**31."""
    first = sequences[0]
    for sequence in sequences[1:]:
        if (sequence - first) % _SEQUENCES >= _EARLIER:
            first = sequence
    return first
