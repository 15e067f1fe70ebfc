"""Claims: a partition is granted once per epoch, to those who know the key, and never for an epoch that is over."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import pytest

from spark_connector.claims import Claims, ClaimServer
from spark_connector.recordbatch import Identity

ONE, TWO = Identity(5, 1), Identity(5, 2)


@pytest.fixture
def server() -> Iterator[ClaimServer]:
    server = ClaimServer("127.0.0.1", "127.0.0.1")
    yield server
    server.close()


def test_a_second_claim_poisons_the_epoch_and_the_next_one_is_clean() -> None:
    claims = Claims()
    claims.begin(ONE)
    assert claims.claim(ONE, 0, "a") is None
    assert claims.claim(ONE, 1, "b") is None
    assert "claimed by a and again by c" in str(claims.claim(ONE, 0, "c"))
    assert "given up" in str(claims.claim(ONE, 2, "d"))
    granted, poison = claims.end()
    assert granted == {0, 1}
    assert poison is not None
    claims.begin(TWO)
    assert claims.poison is None
    assert claims.claim(TWO, 0, "a") is None
    assert claims.end() == (frozenset({0}), None)


def test_a_straggler_of_another_epoch_gets_nothing_and_harms_nothing() -> None:
    claims = Claims()
    assert "is over" in str(claims.claim(ONE, 0, "early"))
    claims.begin(TWO)
    assert "is over" in str(claims.claim(ONE, 0, "late"))
    assert claims.end() == (frozenset(), None)
    assert "is over" in str(claims.claim(TWO, 0, "late"))


def test_of_many_at_once_one_is_granted(server: ClaimServer) -> None:
    server.claims.begin(ONE)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: server.office.claim(ONE, i % 4, f"task {i}"), range(40)))
    assert len(answers) == 40
    assert answers.count(None) <= 4
    assert server.claims.poison is not None


def test_who_does_not_know_the_key_is_not_answered(server: ClaimServer) -> None:
    server.claims.begin(ONE)
    stranger = dataclasses.replace(server.office, key=b"guessed")
    with pytest.raises(AuthenticationError):
        stranger.claim(ONE, 0, "stranger")
    assert server.claims.end() == (frozenset(), None)


def test_a_silent_caller_holds_up_nobody(server: ClaimServer) -> None:
    server.claims.begin(ONE)
    with socket.create_connection((server.office.host, server.office.port)):
        answered: list[str | None] = []
        asking = threading.Thread(target=lambda: answered.append(server.office.claim(ONE, 0, "a")), daemon=True)
        asking.start()
        asking.join(20)
        assert answered == [None]
