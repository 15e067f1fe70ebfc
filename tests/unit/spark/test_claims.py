"""Claims: a partition is granted once per epoch, to those who know the key, and never for an epoch that is over."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from eos.errors import ConfigurationError
from spark_connector import claims as claims_module
from spark_connector.claims import ClaimOffice, Claims, ClaimServer, place_of
from spark_connector.recordbatch import Identity
from spark_connector.wire import Unreachable

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
    with pytest.raises(Unreachable):
        stranger.claim(ONE, 0, "stranger", deadline_s=0.5)
    assert server.claims.end() == (frozenset(), None)


def test_an_answer_of_somebody_else_is_none() -> None:
    """A port that another program has by now must not grant anything."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(1 << 16)
                connection.sendall((4).to_bytes(4) + bytes(32) + b"null")

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(Unreachable, match="is not this query's driver"):
            ClaimOffice("127.0.0.1", other.getsockname()[1], b"key").claim(ONE, 0, "a")
        serving.join()


def claimed(server: ClaimServer, share: int) -> str | None:
    return server.office.claim(ONE, share, f"task {share}")


def test_silent_callers_hold_up_nobody_and_are_given_up(server: ClaimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "_PATIENCE_S", 0.3)
    server.claims.begin(ONE)
    with contextlib.ExitStack() as silent:
        callers = [
            silent.enter_context(socket.create_connection((server.office.host, server.office.port), 20))
            for _ in range(3 * claims_module._MOST)
        ]
        assert claimed(server, 0) is None
        for caller in callers:
            while caller.recv(64):  # TimeoutError: its connection was not closed
                pass
    assert threading.active_count() < claims_module._MOST, "nobody has a thread of his own"


def test_a_process_without_files_left_answers_when_it_has_some_again(server: ClaimServer) -> None:
    """One failed accept must not be the last."""
    server.claims.begin(ONE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # one for the caller's socket, none to accept it
        try:
            asking = pool.submit(claimed, server, 0)
            with pytest.raises(TimeoutError):
                asking.result(timeout=1.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert asking.result(timeout=20) is None


def test_a_driver_that_is_not_there_ends_the_claim_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"no answer at 127\.0\.0\.1:{port} within 0 s .*eos\.spark\.claims\.port"):
        ClaimOffice("127.0.0.1", port, b"key").claim(ONE, 0, "a", deadline_s=0.3)


def test_the_port_that_was_asked_for_is_listened_on_or_one_behind_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ClaimServer("127.0.0.1", "127.0.0.1", port)
        server.close()
        assert port < server.office.port <= port + 16


def test_an_address_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"at 192\.0\.2\.1:\d+: .*spark\.driver\.bindAddress"):
        ClaimServer("driver", "192.0.2.1")


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"spark.master": "local[2]", "spark.driver.host": "10.0.0.5"}, ("127.0.0.1", "127.0.0.1")),
        ({"spark.master": "local-cluster[2,1,1024]", "spark.driver.host": "10.0.0.5"}, ("10.0.0.5", "10.0.0.5")),
        ({"spark.master": "spark://m:7077", "spark.driver.host": "10.0.0.5"}, ("10.0.0.5", "10.0.0.5")),
        (
            {"spark.master": "k8s://x", "spark.driver.host": "svc", "spark.driver.bindAddress": "0.0.0.0"},
            ("svc", "0.0.0.0"),
        ),
    ],
)
def test_claims_are_listened_for_where_sparks_driver_listens(settings: dict[str, str], place: tuple[str, str]) -> None:
    assert place_of(settings.get) == place
