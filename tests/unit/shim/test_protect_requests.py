"""Requests of the transaction protocol from any client: only the necessary fields change, and none fails."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.shim.errors import ProtocolError
from eos.shim.pipeline import Connection, Exchange
from eos.shim.protect import Journal, ProtectJob, translate
from eos.shim.protect.machine import Identity
from eos.shim.wire import api, messages
from tests.unit.shim.messages import requests
from tests.unit.shim.test_protect_frames import CASES, NEW, OLD, encoded
from tests.unit.shim.test_protect_frames import requests as request

pytestmark = pytest.mark.takes(38)

CLASSES = messages.REQUESTS


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal")
    yield journal
    journal.close()


def protecting(journal: Journal, *known: str) -> ProtectJob:
    job = ProtectJob(journal=journal)
    job.on_broker_versions({"broker 1": {api.END_TXN: translate.END_TXN_VERSION}})
    for name in known:
        job.machine.note_init(name, Identity(1, 1), 1)
    return job


@pytest.mark.parametrize(("key", "version"), CASES)
def test_random_request_changes_only_its_identity(key: int, version: int) -> None:
    examined = 0

    @given(requests(CLASSES[key], version))
    def check(frame: bytes) -> None:
        nonlocal examined
        found = translate.read_transactional_request(frame, key, version)
        if found.at < 0:
            return
        examined += 1
        made = translate.replace_identity(frame, found.at, NEW)
        assert translate.read_transactional_request(made, key, version).identity == NEW
        assert translate.replace_identity(made, found.at, found.identity) == frame
        assert (made[: found.at], made[found.at + 10 :]) == (frame[: found.at], frame[found.at + 10 :])

    check()
    assert examined or (key, version < 3) == (api.INIT_PRODUCER_ID, True)


@pytest.mark.parametrize(("key", "version"), CASES)
def test_damaged_request_never_breaks_protection(key: int, version: int, journal: Journal) -> None:
    @given(requests(CLASSES[key], version), st.data())
    def check(frame: bytes, data: st.DataObject) -> None:
        damaged = bytearray(frame[: data.draw(st.integers(12, len(frame)))])
        for _ in range(data.draw(st.integers(0, 3))):
            damaged[data.draw(st.integers(8, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        try:
            name = translate.read_transactional_request(bytes(damaged), key, version).name
            job = protecting(journal, *([name] if name else []))
            exchange = Exchange(Connection(1, "c", "b", 0), key, version, 77)
            made = job.request(exchange, bytes(damaged))
        except ProtocolError:
            return
        assert bool(made) != (exchange.answer is not None)

    check()


@pytest.mark.parametrize(("key", "version"), [case for case in CASES if case[0] in (api.INIT_PRODUCER_ID, api.END_TXN)])
def test_damaged_response_never_breaks_protection(key: int, version: int, journal: Journal) -> None:
    """EndTxn goes upstream as v5, and its response returns in the client's version."""
    answered = messages.RESPONSES[key]
    upstream = translate.END_TXN_VERSION if key == api.END_TXN else version
    intact = set[bool]()

    @given(st.integers(-1, 100), st.integers(-1, 2**63 - 1), st.integers(-1, 2**15 - 1), st.data())
    def check(error: int, producer_id: int, epoch: int, data: st.DataObject) -> None:
        job = protecting(journal)
        job.machine.note_init("t", OLD, 1)
        exchange = Exchange(Connection(1, "c", "b", 0), key, version, 77)
        assert job.request(exchange, encoded(request(key, version)))
        body = struct.pack(">iihqh", 77, 0, error, producer_id, epoch)
        if api.is_flexible(key, upstream):
            body = body[:4] + b"\0" + body[4:] + (struct.pack(">qh", *translate.NONE) if upstream == 6 else b"") + b"\0"
        damaged = bytearray(len(body).to_bytes(4, "big") + body)
        damages = data.draw(st.integers(0, 3))
        for _ in range(damages):
            damaged[data.draw(st.integers(8, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, 6))
        intact.add(not damages and not cut)
        try:
            made = job.response(exchange, bytes(damaged[: len(damaged) - cut]))
        except ProtocolError:
            assert damages or cut
            return
        if key == api.INIT_PRODUCER_ID:
            assert made == damaged[: len(damaged) - cut]
            return
        response = answered.decode(made, version=min(version, answered.max_version), header=True, framed=True)
        if not damages and not cut:
            expected = 47 if error == 90 and version < 2 else error
            assert (response.error_code, response.throttle_time_ms) == (expected, 0)

    check()
    assert intact == {True, False}


@given(st.binary(max_size=40))
def test_transactional_id_that_is_not_text_is_protected(raw: bytes) -> None:
    """Brokers accept any bytes as a transactional.id."""
    body = len(raw).to_bytes(2, "big") + raw + (1).to_bytes(8, "big") + (1).to_bytes(2, "big") + b"\1"
    payload = api.END_TXN.to_bytes(2, "big") + b"\0\1" + bytes(4) + b"\xff\xff" + body
    frame = len(payload).to_bytes(4, "big") + payload
    found = translate.read_transactional_request(frame, api.END_TXN, 1)
    assert found.name is not None
    made = translate.end_txn_v5(frame, 1, found.name, NEW, found.committed)
    assert (len(raw) + 1).to_bytes(1, "big") + raw + NEW[0].to_bytes(8, "big") in made


def test_journal_skips_ids_that_are_not_text(tmp_path: Path) -> None:
    """Found by fuzzing: each response closed the connection of such a client."""
    name = b"t-\xff\xfe".decode("utf-8", "surrogateescape")
    journal = Journal(tmp_path / "journal")
    job = protecting(journal, name, "text")
    for known in (name, "text"):
        pair = job.machine.pair(known)
        assert pair is not None
        journal.write_pair(pair)
    journal.write_opened(name)
    journal.close()
    again = Journal(tmp_path / "journal")
    assert [restored.name for restored in again.restored_pairs] == ["text"]
    again.close()
