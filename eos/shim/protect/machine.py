"""What the shim knows of each transactional.id, and what it lets pass: the rules of docs/explanation/protect.md.

Owns identities, transaction numbers, base sequences and trust. It knows no bytes, no sockets and no clock, and must
never let a request of one transaction act in another. A client keeps one (producer id, epoch), the virtual one, from
its init to the next; upstream every transaction has its own, the real one, as KIP-890 part 2 has it.

    EMPTY ──opens──► OPEN ──ends──► ENDING ──ended──► ENDED ──opens──► OPEN
      └──────────────ends─────────────►▲ │ ◄────────ends──┘       (initialised, renewed: EMPTY, from anywhere)
                                         └─aborted─► SPENT

A client that `renews` (librdkafka) is told after an abort that its identity is not known any more. It asks for the next
one by itself (KIP-360), inside the same call: what it gave up then carries an identity that is over. For other clients
a challenge has to tell live requests from late ones.

Whoever knows names and identities may send anything: a request moves nothing before the broker has accepted one for
that transactional.id on that connection (`Authority`). Until then it goes upstream, and what it does waits for its
answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

# What is answered here. The first three are retriable: a live client asks again, a late copy does not.
LOAD_IN_PROGRESS = 14
NOT_ENOUGH_REPLICAS = 19
CONCURRENT_TRANSACTIONS = 51
INVALID_PRODUCER_EPOCH = 47

# Client sequences count modulo 2**31; a difference beyond half of that is one to an earlier number.
_SEQUENCES = 1 << 31
_EARLIER = 1 << 30


_LAST_EPOCH = (1 << 15) - 1
# How a coordinator calls a transaction that an EndTxn ends; by whether that one commits.
_END = {True: ("PrepareCommit", "CompleteCommit"), False: ("PrepareAbort", "CompleteAbort")}


class Identity(NamedTuple):
    producer_id: int
    epoch: int


class State(Enum):
    EMPTY = "a fresh identity, nothing asked for yet"
    OPEN = "a request that opens the transaction went upstream"
    ENDING = "its EndTxn went upstream, the answer is not known"
    ENDED = "its end is known, the next one is not open"
    SPENT = "it was aborted, and its client has to ask for the next identity"


class Event(Enum):
    OPENS = "AddPartitionsToTxn, AddOffsetsToTxn"
    WRITES = "Produce, TxnOffsetCommit"
    ENDS = "EndTxn"
    ENDED = "EndTxn's answer without an error"
    ABORTED = "the same, of an abort of a client that renews its identity"


# Whatever is not here is not let pass, and changes nothing.
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
    """One batch of a Produce: the client's sequences [first, first + records)."""

    partition: Partition
    first: int
    records: int


class End(NamedTuple):
    """An EndTxn on its way: of which transaction, with which real identity."""

    number: int
    identity: Identity
    committed: bool


class Pair(NamedTuple):
    """What has to be known of a client between two transactions; `sequences` per partition, None where unknown."""

    name: str
    virtual: Identity
    real: Identity
    renews: bool
    before: Identity | None
    end: End | None
    sequences: list[tuple[str, int, int]] | None


class Authority(Enum):
    """What the broker said of a connection and a transactional.id; a request of UNKNOWN comes again as ANSWERED."""

    ACCEPTED = "it accepted an earlier request: this one acts at once"
    UNKNOWN = "it said nothing yet: this one is judged, and changes nothing"
    ANSWERED = "it accepted this request, which was let pass before: it acts"


class Refused(Exception):
    """Is not sent on; `code` is what the client is told."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


COORDINATOR = "coordinator"


@dataclass
class _Base:
    """A partition in the transaction: the client's sequence that is 0 upstream, and how many were sent from there."""

    sequence: int
    sent: int = 0


@dataclass
class _Transactional:
    virtual: Identity
    real: Identity
    number: int = 1
    state: State = State.EMPTY
    end: End | None = None  # of the transaction that is ENDING or ENDED
    bases: dict[Partition, _Base] = field(default_factory=dict)
    # A fresh epoch begins at 0; after an abort nobody knows what the client counted.
    bases_known: bool = True
    trusted: dict[Hashable, int] = field(default_factory=dict)  # class of requests -> connection
    revoked: bool = False  # a class without a trusted connection has to be challenged
    renews: bool = False  # asks for its next identity after every abort
    before: Identity | None = None  # the virtual identity that a KIP-360 bump replaced

    def move(self, event: Event) -> None:
        self.state = MOVES[self.state, event]


# What was challenged on one connection, by transactional.id, transaction and class of requests. All of it is forgotten
# with the connection: whose requests the broker never accepts must not fill the memory.
_Challenged = OrderedDict[tuple[str, int, Hashable], set[Hashable]]
_MOST_CHALLENGES = 64  # of a connection; the oldest is forgotten, and is challenged once more
_MOST_MARKS = 300  # of a connection, over all its challenges
_MOST_MARKS_ACCEPTED = 10_000


class Machine:
    """Remembers up to `keep` transactional.ids; the longest unused one is forgotten, which fences its client.

    Every method either says how the request goes upstream, or raises Refused and has changed nothing but what is
    remembered for the challenge. `connection` is a number that is never used twice.
    """

    def __init__(self, keep: int = 100_000) -> None:
        self._known: OrderedDict[str, _Transactional] = OrderedDict()
        self._keep = keep
        self._challenged: dict[int, _Challenged] = {}  # by connection

    def closed(self, connection: int) -> None:
        self._challenged.pop(connection, None)

    def number(self, name: str) -> int | None:
        """Of the transaction that is open, or comes next; no two of a name have the same."""
        known = self._known.get(name)
        return None if known is None else known.number

    def state(self, name: str) -> State | None:
        known = self._known.get(name)
        return None if known is None else known.state

    def real(self, name: str) -> Identity | None:
        known = self._known.get(name)
        return None if known is None else known.real

    def shown(self, name: str, seen: Identity, state: str) -> Identity:
        """What a coordinator says of the id (DescribeTransactions), as its client behind us has to read it.

        A client asks whether the identity it has, the virtual one, is still the newest: the real one is shown as that,
        and as many epochs beyond it as the coordinator is beyond the real one. Of an id whose client nobody here knows
        (a restart without a journal) no epoch can be told: -1, which is none that a newer instance could have.
        """
        known = self._known.get(name)
        if known is None:
            return Identity(seen.producer_id, -1)
        if seen.producer_id != known.real.producer_id:
            return seen
        ahead = seen.epoch - known.real.epoch
        if ahead == 1 and known.state is State.ENDING and known.end is not None and state in _END[known.end.committed]:
            ahead = 0  # our own EndTxn, whose answer is not here yet
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
        """As it was, but that no connection is trusted."""
        known = _Transactional(pair.virtual, pair.real, end=pair.end, renews=pair.renews, before=pair.before)
        known.revoked = True
        known.bases_known = pair.sequences is not None
        known.bases = {(topic, index): _Base(sequence) for topic, index, sequence in pair.sequences or ()}
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

    def renewed(self, name: str, virtual: Identity, connection: int) -> Identity | None:
        """A client asks for the next epoch (KIP-360), and nobody else has to be asked: the identity it is told.

        The end of a transaction brought one that nobody used yet. Asked a second time it is the same again: the first
        answer was lost, or the question is late.
        """
        known = self._known.get(name)
        if known is None or not self.can_renew(name, virtual):
            return None
        if known.before == virtual:
            return known.virtual
        self._begin(name, known.real, connection, known.renews, virtual)
        return known.real

    def bumps(self, name: str, virtual: Identity) -> Identity:
        """The same where the broker has to be asked: the identity to ask with."""
        known = self._known.get(name)
        if known is None or known.virtual != virtual:
            raise Refused(INVALID_PRODUCER_EPOCH, "an identity nobody here gave out")
        return known.real

    def initialised(
        self,
        name: str,
        identity: Identity,
        connection: int,
        renews: bool = False,
        bumped: Identity | None = None,
    ) -> None:
        """The broker gave out `identity`; `bumped`: the virtual one it replaces, if it is a KIP-360 bump."""
        known = self._known.get(name)
        if known is not None and known.real.producer_id == identity.producer_id:
            if identity.epoch < known.real.epoch:
                return  # an answer that was overtaken: its client is fenced
            if identity == known.virtual and known.real == identity:
                return  # the same answer again
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

    # What a transaction consists of.

    def opens(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        mark: Hashable,
        authority: Authority = Authority.ACCEPTED,
    ) -> Identity:
        """AddPartitionsToTxn or AddOffsetsToTxn; `mark` is the same for the same request again."""
        known = self._identified(name, virtual)
        self._in_use(known)
        self._challenge(name, known, COORDINATOR, connection, [mark], CONCURRENT_TRANSACTIONS, authority)
        self._allow(known, Event.OPENS, CONCURRENT_TRANSACTIONS)
        if authority is not Authority.UNKNOWN:
            known.move(Event.OPENS)
        return known.real

    def commits_offsets(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        group: str,
        broker: Hashable,
        mark: Hashable,
        authority: Authority = Authority.ACCEPTED,
    ) -> Identity:
        known = self._identified(name, virtual)
        self._in_use(known)
        self._allow(known, Event.WRITES, LOAD_IN_PROGRESS)
        self._challenge(name, known, ("group", group, broker), connection, [mark], LOAD_IN_PROGRESS, authority)
        return known.real

    def produces(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        broker: Hashable,
        batches: Sequence[Written],
        authority: Authority = Authority.ACCEPTED,
    ) -> tuple[Identity, dict[Partition, int]]:
        """The real identity, and per partition what to subtract from the client's sequences (modulo 2**31)."""
        known = self._identified(name, virtual)
        self._in_use(known)
        # No Produce of a live client comes before the transaction was opened for its partition.
        self._allow(known, Event.WRITES, NOT_ENOUGH_REPLICAS)
        kind = ("produce", broker)
        if not known.renews:
            # Of a client that does, a late one has an identity that is over or a sequence that is: the error would only
            # be in its way. librdkafka gives a record back to its queue for it, and one that comes back while
            # abort_transaction waits for it is neither sent nor given up until message.timeout.ms.
            marks = [(batch.partition, batch.first) for batch in batches]
            self._challenge(name, known, kind, connection, marks, NOT_ENOUGH_REPLICAS, authority)
        bases = dict[Partition, int]()
        for batch in batches:
            partition = batch.partition
            if partition not in bases:
                base = known.bases.get(partition)
                bases[partition] = (
                    base.sequence if base else self._begins_at(name, known, kind, connection, partition, batches)
                )
        for batch in batches:
            if (batch.first - bases[batch.partition]) % _SEQUENCES >= _EARLIER:
                raise Refused(NOT_ENOUGH_REPLICAS, "a sequence of an earlier transaction")
        if authority is Authority.UNKNOWN:
            return known.real, bases
        for batch in batches:
            base = known.bases.setdefault(batch.partition, _Base(bases[batch.partition]))
            base.sent = max(base.sent, (batch.first - base.sequence) % _SEQUENCES + batch.records)
        return known.real, bases

    def _begins_at(
        self,
        name: str,
        known: _Transactional,
        kind: Hashable,
        connection: int,
        partition: Partition,
        batches: Sequence[Written],
    ) -> int:
        """The client's sequence that is 0 upstream, of a partition that has none in this transaction yet."""
        if known.bases_known:
            return 0
        challenged = self._challenged.get(connection)
        seen = set[Hashable]() if challenged is None else challenged.get((name, known.number, kind), set())
        firsts = [batch.first for batch in batches if batch.partition == partition]
        return _earliest([*firsts, *_firsts(seen, partition)])

    # Ends.

    def ends(
        self,
        name: str,
        virtual: Identity,
        connection: int,
        committed: bool,
        mark: Hashable,
        authority: Authority = Authority.ACCEPTED,
    ) -> End:
        """EndTxn, first or again: always with the identity of the transaction it belongs to."""
        known = self._identified(name, virtual)
        again = known.end is not None and known.end.committed == committed
        if known.state is State.SPENT and not again:
            self._in_use(known)
        self._challenge(name, known, COORDINATOR, connection, [mark], CONCURRENT_TRANSACTIONS, authority)
        if known.state in (State.ENDED, State.SPENT) and known.end is not None and again:
            return known.end  # its answer was lost: the broker gives the same one again
        if known.state is State.ENDING and known.end is not None:
            end = known.end._replace(committed=committed)  # the broker knows what it did, and judges
        else:
            # Also for a transaction nobody saw open: the empty abort of a client whose first request was lost.
            end = End(known.number, known.real, committed)
        if authority is not Authority.UNKNOWN:
            known.end = end
            known.move(Event.ENDS)
        return end

    def ended(self, name: str, end: End, following: Identity) -> bool:
        """The broker ended it, and says which identity comes next; an answer that is known already changes nothing.

        Whether the client has to be told to ask for its next identity.
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
            # A client commits when all it sent is acknowledged: it goes on counting from there.
            for base in known.bases.values():
                base.sequence, base.sent = (base.sequence + base.sent) % _SEQUENCES, 0
            return False
        # What was under way is given up by the client, and its sequences are used again: none of it is trusted.
        known.bases.clear()
        known.bases_known = False
        known.revoked = True
        known.trusted = {kind: number for kind, number in known.trusted.items() if kind == COORDINATOR}
        return spent

    # Rules that more than one request has.

    def _identified(self, name: str, virtual: Identity) -> _Transactional:
        known = self._known.get(name)
        if known is None or known.virtual != virtual:
            raise Refused(INVALID_PRODUCER_EPOCH, "an identity nobody here gave out, or an earlier one")
        self._known.move_to_end(name)
        return known

    def _in_use(self, known: _Transactional) -> None:
        if known.state is State.SPENT:
            raise Refused(INVALID_PRODUCER_EPOCH, "an identity that ended with its aborted transaction")

    def _allow(self, known: _Transactional, event: Event, code: int) -> None:
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
        """Moves the trust to a connection on which the same request comes a second time in this transaction."""
        trusted = known.trusted.get(kind)
        if trusted == connection:
            return
        challenges = trusted is not None or known.revoked
        if challenges and authority is not Authority.ANSWERED:
            most = _MOST_MARKS if authority is Authority.UNKNOWN else _MOST_MARKS_ACCEPTED
            if not self._comes_again((name, known.number, kind), connection, marks, most):
                raise Refused(code, "challenged: not the connection of this client, as far as known")
        if authority is not Authority.UNKNOWN:
            known.trusted[kind] = connection

    def _comes_again(
        self, what: tuple[str, int, Hashable], connection: int, marks: Sequence[Hashable], most: int
    ) -> bool:
        challenged = self._challenged.setdefault(connection, OrderedDict())
        seen = challenged.setdefault(what, set())
        challenged.move_to_end(what)
        again = not seen.isdisjoint(marks)
        room = most - sum(map(len, challenged.values()))
        while len(challenged) > 1 and (room < len(marks) or len(challenged) > _MOST_CHALLENGES):
            room += len(challenged.popitem(last=False)[1])
        # The first ones stay: a client that sends many at once sends these again first.
        seen.update(marks[: max(0, room)])
        return again


def _firsts(marks: Iterable[Hashable], partition: Partition) -> list[int]:
    return [mark[1] for mark in marks if isinstance(mark, tuple) and mark[0] == partition]


def _earliest(sequences: Sequence[int]) -> int:
    """The one from which all the others are ahead."""
    first = sequences[0]
    for sequence in sequences[1:]:
        if (sequence - first) % _SEQUENCES >= _EARLIER:
            first = sequence
    return first
