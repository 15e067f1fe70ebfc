"""The rules of docs/explanation/protect.md, one by one, tested on the state machine alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.shim.protect.machine import (
    CONCURRENT_TRANSACTIONS,
    INVALID_PRODUCER_EPOCH,
    LOAD_IN_PROGRESS,
    NOT_ENOUGH_REPLICAS,
    Authority,
    End,
    Identity,
    Machine,
    Refused,
    State,
    Written,
)

A, B, C = 1, 2, 3  # connections
V = Identity(4000, 7)
P0, P1 = ("out", 0), ("out", 1)


def real(epoch: int) -> Identity:
    return Identity(4000, epoch)


class Client:
    """A client with the transactional.id "t", initialised over connection A at epoch 7; short calls with defaults."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.machine.note_init("t", V, A)
        self.epoch = 7

    def add(self, connection: int = A, virtual: Identity = V, mark: str = "add") -> Identity:
        return self.machine.check_open("t", virtual, connection, mark)

    def write(self, first: int, connection: int = A, records: int = 1, broker: int = 0, partition=P0) -> int:  # type: ignore[no-untyped-def]
        """Return the upstream sequence."""
        written = [Written(partition, first, records)]
        identity, bases = self.machine.check_produce("t", V, connection, broker, written)
        assert identity == self.machine.real("t")
        return (first - bases[partition]) % 2**31

    def offsets(self, connection: int = A, mark: str = "offsets") -> Identity:
        return self.machine.check_offset_commit("t", V, connection, "g", 0, mark)

    def ask_end(self, committed: bool, connection: int = A) -> End:
        return self.machine.check_end("t", V, connection, committed, f"end {committed}")

    def end(self, committed: bool, connection: int = A) -> None:
        self.answered(self.ask_end(committed, connection))

    def answered(self, end: End) -> None:
        self.machine.note_end("t", end, real(end.identity.epoch + 1))

    def transaction(self, *sequences: int, committed: bool = True) -> None:
        self.add()
        for sequence in sequences:
            self.write(sequence)
        self.end(committed)


@pytest.fixture
def client() -> Client:
    return Client()


def refused(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code == code


# Rule 1: identities and sequences.


def test_machine_gives_every_transaction_a_real_epoch(client: Client) -> None:
    for epoch in range(7, 12):
        assert client.add() == real(epoch)
        assert client.offsets() == real(epoch)
        client.end(True)
    assert client.machine.real("t") == real(12)


def test_sequences_begin_at_zero_in_every_transaction(client: Client) -> None:
    client.add()
    assert [client.write(0, records=5), client.write(5)] == [0, 5]
    client.end(True)
    client.add()
    assert [client.write(6), client.write(7)] == [0, 1]
    assert client.write(0, partition=P1) == 0


# Rule 2: EndTxn.


def test_repeated_end_keeps_the_identity_of_its_transaction(client: Client) -> None:
    client.add()
    first = client.ask_end(True)
    assert first == client.ask_end(True) == End(1, real(7), True)
    client.answered(first)
    assert client.machine.state("t") is State.ENDED
    again = client.ask_end(True)
    assert again == first
    client.answered(again)
    assert client.machine.real("t") == real(8)


def test_repeated_end_response_changes_nothing(client: Client) -> None:
    client.add()
    end = client.ask_end(True)
    client.answered(end)
    client.add()
    client.machine.note_end("t", end, real(8))
    assert client.machine.state("t") is State.OPEN
    client.end(False)
    client.machine.note_end("t", end, real(8))
    assert client.machine.real("t") == real(9)


def test_abort_after_unknown_commit_is_left_to_the_broker(client: Client) -> None:
    client.add()
    client.ask_end(True)
    assert client.ask_end(False) == End(1, real(7), False)


def test_exhausted_epoch_is_followed_by_a_new_producer_id(client: Client) -> None:
    client.add()
    client.machine.note_end("t", client.ask_end(True), Identity(5000, 0))
    assert client.add() == Identity(5000, 0)


# Rule 3: the challenge.


def test_late_end_on_new_connections_is_always_refused(client: Client) -> None:
    client.transaction()
    client.add()
    for connection in range(10, 15):
        refused(CONCURRENT_TRANSACTIONS, lambda number=connection: client.ask_end(True, number))  # type: ignore[misc]
    assert client.machine.state("t") is State.OPEN


def test_repeated_request_on_a_new_connection_is_trusted(client: Client) -> None:
    client.add()
    refused(CONCURRENT_TRANSACTIONS, lambda: client.ask_end(True, B))
    client.end(True, B)
    assert client.add(B) == real(8)
    refused(CONCURRENT_TRANSACTIONS, lambda: client.ask_end(True, A))


def test_different_request_does_not_make_its_connection_trusted(client: Client) -> None:
    refused(CONCURRENT_TRANSACTIONS, lambda: client.add(B, mark="one"))
    refused(CONCURRENT_TRANSACTIONS, lambda: client.add(B, mark="another"))
    assert client.add(B, mark="one") == real(7)


def test_challenge_ends_with_its_transaction(client: Client) -> None:
    client.add()
    refused(CONCURRENT_TRANSACTIONS, lambda: client.ask_end(True, B))
    client.end(True)
    refused(CONCURRENT_TRANSACTIONS, lambda: client.ask_end(True, B))
    assert client.machine.state("t") is State.ENDED


def test_first_write_to_each_broker_after_an_abort_is_refused_once(client: Client) -> None:
    client.add()
    client.write(0, broker=0)
    client.offsets()
    client.end(False)
    client.add()
    for broker in (0, 1):
        refused(NOT_ENOUGH_REPLICAS, lambda number=broker: client.write(0, broker=number))  # type: ignore[misc]
        assert client.write(0, broker=broker) == 0
    refused(LOAD_IN_PROGRESS, client.offsets)
    assert client.offsets() == real(8)


def test_first_write_to_a_broker_is_not_refused(client: Client) -> None:
    client.transaction(0)
    client.add()
    assert client.write(0, broker=1, connection=C, partition=P1) == 0


@pytest.mark.parametrize("end", [None, True, False])
def test_write_without_open_transaction_is_always_refused(client: Client, end: bool | None) -> None:
    if end is not None:
        client.transaction(0, committed=end)
    for _ in range(3):
        refused(NOT_ENOUGH_REPLICAS, lambda: client.write(1))
        refused(LOAD_IN_PROGRESS, client.offsets)


def test_requests_during_an_end_are_refused(client: Client) -> None:
    client.add()
    client.ask_end(True)
    refused(CONCURRENT_TRANSACTIONS, client.add)
    refused(NOT_ENOUGH_REPLICAS, lambda: client.write(0))
    refused(LOAD_IN_PROGRESS, client.offsets)


# Rule 4: base sequences.


def test_late_write_of_committed_transaction_is_refused(client: Client) -> None:
    client.transaction(0, 1, 2)
    client.add()
    refused(NOT_ENOUGH_REPLICAS, lambda: client.write(2))
    assert client.write(3) == 0


def test_base_sequence_after_an_abort_is_the_smallest_received(client: Client) -> None:
    client.transaction(0, 1, 2, committed=False)
    client.add()
    for sequence in (1, 2, 3):
        refused(NOT_ENOUGH_REPLICAS, lambda first=sequence: client.write(first))  # type: ignore[misc]
    assert [client.write(sequence) for sequence in (2, 1, 3)] == [1, 0, 2]
    client.end(True)
    client.add()
    assert client.write(4) == 0


def test_late_write_does_not_lower_the_base_sequence(client: Client) -> None:
    client.transaction(0, 1, committed=False)
    client.add()
    refused(NOT_ENOUGH_REPLICAS, lambda: client.write(0, connection=B))  # the late copy
    refused(NOT_ENOUGH_REPLICAS, lambda: client.write(1))
    assert client.write(1) == 0
    refused(NOT_ENOUGH_REPLICAS, lambda: client.write(0, connection=C))


def test_base_sequence_of_a_new_partition_is_its_first_sequence(client: Client) -> None:
    client.transaction(0, committed=False)
    client.add()
    refused(NOT_ENOUGH_REPLICAS, lambda: client.write(1))
    client.write(1)
    assert [client.write(30, partition=P1), client.write(31, partition=P1)] == [0, 1]


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=30), st.integers(0, 2**31 - 1))
def test_sequences_wrap_around(records: list[int], start: int) -> None:
    client = Client()
    client.transaction(committed=False)
    client.add()
    refused(NOT_ENOUGH_REPLICAS, lambda: client.write(start, records=1))
    expected = 0
    for count in records:
        assert client.write(start, records=count) == expected
        start, expected = (start + count) % 2**31, expected + count
    client.end(True)
    client.add()
    assert client.write(start) == 0


# Rules 5 and 6.


def test_abort_of_an_unopened_transaction_is_forwarded(client: Client) -> None:
    assert client.ask_end(False) == End(1, real(7), False)
    client.answered(client.ask_end(False))
    client.transaction()
    assert client.ask_end(False) == End(3, real(9), False)


@pytest.mark.parametrize("identity", [Identity(4000, 6), Identity(4000, 8), Identity(1, 7)])
def test_unknown_identity_is_fenced(client: Client, identity: Identity) -> None:
    for call in (
        lambda: client.machine.check_open("t", identity, A, "m"),
        lambda: client.machine.check_offset_commit("t", identity, A, "g", 0, "m"),
        lambda: client.machine.check_produce("t", identity, A, 0, [Written(P0, 0, 1)]),
        lambda: client.machine.check_end("t", identity, A, True, "m"),
        lambda: client.machine.identity_to_bump("t", identity),
        lambda: client.machine.check_open("unknown", V, A, "m"),
    ):
        refused(INVALID_PRODUCER_EPOCH, call)


def test_new_init_fences_the_earlier_client(client: Client) -> None:
    client.transaction(0, committed=False)
    client.machine.note_init("t", Identity(4000, 9), B)
    refused(INVALID_PRODUCER_EPOCH, client.add)
    assert client.machine.check_open("t", Identity(4000, 9), B, "m") == real(9)
    identity, bases = client.machine.check_produce("t", Identity(4000, 9), C, 0, [Written(P0, 0, 1)])
    assert (identity, bases) == (real(9), {P0: 0})


def test_outdated_init_response_is_ignored(client: Client) -> None:
    client.machine.note_init("t", Identity(4000, 9), B)
    client.machine.note_init("t", Identity(4000, 8), C)
    assert client.machine.real("t") == real(9)


# A client that requests its next identity (KIP-360).


def test_epoch_bump_in_a_transaction_uses_the_real_identity(client: Client) -> None:
    client.transaction(0)
    client.add()
    assert client.machine.renew("t", V, A) is None
    assert client.machine.identity_to_bump("t", V) == real(8)
    client.machine.note_init("t", Identity(4000, 9), A, bumped=V)
    assert client.machine.check_open("t", Identity(4000, 9), A, "m") == real(9)
    refused(INVALID_PRODUCER_EPOCH, client.add)


@pytest.mark.parametrize("committed", [True, False])
def test_epoch_bump_between_transactions_returns_unused_identity(client: Client, committed: bool) -> None:
    client.transaction(0, committed=committed)
    assert client.machine.renew("t", V, A) == real(8)
    refused(INVALID_PRODUCER_EPOCH, client.add)
    assert client.add(virtual=real(8)) == real(8)
    assert client.machine.check_produce("t", real(8), A, 0, [Written(P0, 0, 1)]) == (real(8), {P0: 0})


def test_repeated_epoch_bump_returns_the_same_identity(client: Client) -> None:
    client.transaction(0)
    assert client.machine.renew("t", V, A) == real(8)
    client.add(virtual=real(8))
    assert client.machine.renew("t", V, B) == real(8)
    assert client.machine.state("t") is State.OPEN
    assert client.add(virtual=real(8)) == real(8)


@pytest.fixture
def renewing(client: Client) -> Client:
    client.machine.note_init("t", Identity(4000, 8), A, renews=True)
    return client


U = real(8)


def test_abort_of_a_renewing_client_ends_its_identity(renewing: Client) -> None:
    machine = renewing.machine
    renewing.add(virtual=U)
    end = machine.check_end("t", U, A, False, "end")
    assert machine.note_end("t", end, real(9))
    for call in (
        lambda: renewing.add(virtual=U),
        lambda: machine.check_produce("t", U, A, 0, [Written(P0, 0, 1)]),
        lambda: machine.check_offset_commit("t", U, A, "g", 0, "offsets"),
        lambda: machine.check_end("t", U, A, True, "late commit"),
    ):
        refused(INVALID_PRODUCER_EPOCH, call)
    assert machine.check_end("t", U, A, False, "end") == end
    assert machine.note_end("t", end, real(9)), "the first response was lost: it is sent again"
    assert machine.renew("t", U, A) == real(9)
    assert not machine.note_end("t", end, real(9)), "an outdated response"
    assert renewing.add(virtual=real(9)) == real(9)


def test_client_that_inits_only_after_aborts_keeps_its_identity(renewing: Client) -> None:
    renewing.add(virtual=U)
    assert not renewing.machine.note_end("t", renewing.machine.check_end("t", U, A, True, "end"), real(9))
    assert renewing.add(virtual=U) == real(9)


def test_write_of_a_renewing_client_is_not_challenged(renewing: Client) -> None:
    machine = renewing.machine
    renewing.add(virtual=U)
    for number, connection in enumerate((A, B, C)):
        assert machine.check_produce("t", U, connection, 0, [Written(P0, number, 1)])[1] == {P0: 0}
    machine.note_end("t", machine.check_end("t", U, A, True, "end"), real(9))
    renewing.add(virtual=U)
    refused(NOT_ENOUGH_REPLICAS, lambda: machine.check_produce("t", U, B, 0, [Written(P0, 2, 1)]))
    assert machine.check_produce("t", U, B, 0, [Written(P0, 3, 1)])[1] == {P0: 3}


@pytest.mark.parametrize("ahead", [-1, 0, 1, 2])
def test_described_identity_is_shown_in_virtual_epochs(client: Client, ahead: int) -> None:
    client.transaction(0)
    client.transaction(1, committed=False)
    for _ in range(2):
        assert client.machine.identity_to_show("t", real(9 + ahead), "Ongoing") == real(7 + ahead)
        client.add()
    assert client.machine.identity_to_show("t", Identity(5000, 9), "Ongoing") == Identity(5000, 9), (
        "another producer id"
    )
    assert client.machine.identity_to_show("u", real(9), "Ongoing") == real(-1), "an id of an unknown client"


@pytest.mark.parametrize("committed", [True, False])
def test_describe_shows_the_clients_own_epoch_during_its_end_txn(client: Client, committed: bool) -> None:
    client.add()
    end = client.ask_end(committed)
    ours, others = ("Commit", "Abort") if committed else ("Abort", "Commit")
    for step in ("Prepare", "Complete"):
        assert client.machine.identity_to_show("t", real(8), step + ours) == V
        assert client.machine.identity_to_show("t", real(8), step + others) == real(8), (
            "somebody else's: a timeout, a successor"
        )
    client.answered(end)
    assert client.machine.identity_to_show("t", real(8), f"Complete{ours}") == V


def test_describe_shows_outdated_epoch_as_lower_than_the_clients(client: Client) -> None:
    client.machine.note_init("t", Identity(4100, 0), A)
    client.machine.note_end("t", client.machine.check_end("t", Identity(4100, 0), A, True, "end"), Identity(4100, 1))
    assert client.machine.identity_to_show("t", Identity(4100, 0), "Empty") == Identity(4100, -1)


def test_least_recently_used_id_is_forgotten() -> None:
    machine = Machine(keep=2)
    for name in ("a", "b"):
        machine.note_init(name, V, A)
    machine.check_open("a", V, A, "m")
    machine.note_init("c", V, A)
    assert [machine.state(name) for name in "abc"] == [State.OPEN, None, State.EMPTY]


# Rule 9: authority.


def seen(machine: Machine) -> tuple[object, ...]:
    known = machine._known["t"]
    bases = {partition: (base.sequence, base.sent) for partition, base in known.bases.items()}
    return (
        known.state,
        known.number,
        known.real,
        known.virtual,
        known.end,
        bases,
        dict(known.trusted),
        known.trust_revoked,
    )


STRANGER = 77
ASKS: dict[str, Callable[[Machine, Identity, int, Authority], object]] = {
    "opens": lambda m, v, c, a: m.check_open("t", v, c, "add", a),
    "offsets": lambda m, v, c, a: m.check_offset_commit("t", v, c, "g2", 0, "offsets", a),
    "produce": lambda m, v, c, a: m.check_produce("t", v, c, 9, [Written(P1, 40, 2)], a),
    "commit": lambda m, v, c, a: m.check_end("t", v, c, True, "commit", a),
    "abort": lambda m, v, c, a: m.check_end("t", v, c, False, "abort", a),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("stage", ["empty", "open", "ending", "committed", "aborted", "spent"])
def test_unaccepted_connection_changes_nothing(ask: str, stage: str) -> None:
    machine = Machine()
    machine.note_init("t", V, A, renews=stage == "spent")
    if stage != "empty":
        machine.check_open("t", V, A, "mine")
        machine.check_produce("t", V, A, 0, [Written(P0, 0, 3)])
    if stage not in ("empty", "open"):
        end = machine.check_end("t", V, A, stage == "committed", "end")
        if stage != "ending":
            machine.note_end("t", end, real(8))
    before = seen(machine)
    for connection in (STRANGER, STRANGER, STRANGER, STRANGER + 1):
        with contextlib.suppress(Refused):
            ASKS[ask](machine, V, connection, Authority.UNKNOWN)
        assert seen(machine) == before


@pytest.mark.parametrize("ask", ASKS)
def test_connection_accepted_after_its_response_has_the_same_effect(ask: str, client: Client) -> None:
    other = Client()
    for each in (client, other):
        each.add()
        refused(CONCURRENT_TRANSACTIONS, lambda each=each: each.machine.check_open("t", V, B, "add"))  # type: ignore[misc]
        each.machine.check_open("t", V, B, "add")
    at_once = ASKS[ask](other.machine, V, B, Authority.ACCEPTED)
    assert ASKS[ask](client.machine, V, B, Authority.UNKNOWN) == at_once
    assert ASKS[ask](client.machine, V, B, Authority.ANSWERED) == at_once
    assert seen(client.machine) == seen(other.machine)


def test_challenge_data_of_a_connection_is_bounded(client: Client) -> None:
    client.add()
    for number in range(2_000):
        refused(CONCURRENT_TRANSACTIONS, lambda n=number: client.machine.check_open("t", V, B, n, Authority.UNKNOWN))  # type: ignore[misc]
    kept = client.machine._challenged[B]
    assert 100 < sum(map(len, kept.values())) <= 300
    assert client.machine.check_open("t", V, B, 0, Authority.UNKNOWN) == real(7), (
        "the oldest ids are checked again first"
    )
    for number in range(200):
        client.machine.note_init(f"t{number}", V, A)
        call = lambda n=number: client.machine.check_open(f"t{n}", V, B, "add", Authority.UNKNOWN)  # type: ignore[misc] # noqa: E731
        refused(CONCURRENT_TRANSACTIONS, call)
    assert len(kept) <= 64
    client.machine.forget_connection(B)
    assert not client.machine._challenged
