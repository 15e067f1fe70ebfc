"""Claims: a partition is granted once per epoch, only to a task with the key, and never for a past epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

from eos.errors import ConfigurationError
from eos.kafka.admin.ownership import Identity
from spark_connector import claims as claims_module
from spark_connector.claims import ClaimClient, Claims, ClaimServer, driver_addresses
from spark_connector.wire import Unreachable

ONE, TWO = Identity(5, 1), Identity(5, 2)


@pytest.fixture
def server() -> Iterator[ClaimServer]:
    server = ClaimServer("127.0.0.1", "127.0.0.1")
    yield server
    server.close()


def test_second_claim_poisons_only_its_epoch() -> None:
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


def test_late_task_of_another_epoch_is_refused_without_effect() -> None:
    claims = Claims()
    assert "is over" in str(claims.claim(ONE, 0, "early"))
    claims.begin(TWO)
    assert "is over" in str(claims.claim(ONE, 0, "late"))
    assert claims.end() == (frozenset(), None)
    assert "is over" in str(claims.claim(TWO, 0, "late"))


def test_repeated_claim_keeps_its_grant_and_another_call_is_refused() -> None:
    claims = Claims()
    claims.begin(ONE)
    assert [claims.claim(ONE, 0, "a", "its call") for _ in range(3)] == [None] * 3
    assert "claimed by a and again by a" in str(claims.claim(ONE, 0, "a", "another call"))
    assert "given up" in str(claims.claim(ONE, 0, "a", "its call"))
    claims.begin(TWO)
    assert claims.claim(TWO, 0, "a") is None
    assert "again by a" in str(claims.claim(TWO, 0, "a")), "a call without a name is a new call"


def test_only_one_of_many_concurrent_claims_is_granted(server: ClaimServer) -> None:
    server.claims.begin(ONE)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: server.claims_client.claim(ONE, i % 4, f"task {i}"), range(40)))
    assert len(answers) == 40
    assert 1 <= answers.count(None) <= 4
    assert server.claims.poison is not None


def test_all_tasks_of_a_large_cluster_can_claim_at_once(server: ClaimServer) -> None:
    """More tasks than the server serves at once, and than a short accept queue of the kernel holds."""
    server.claims.begin(ONE)
    tasks = 6 * claims_module._MOST
    together = threading.Barrier(tasks)

    def ask(share: int) -> str | None:
        together.wait(60)
        return server.claims_client.claim(ONE, share, f"task {share}", deadline_s=30)

    with ThreadPoolExecutor(tasks) as pool:
        assert list(pool.map(ask, range(tasks))) == [None] * tasks
    assert server.claims.end() == (frozenset(range(tasks)), None)


def test_task_repeats_its_claim_after_a_lost_answer(server: ClaimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.claims.begin(ONE)
    claim, asked = server.claims.claim, []

    def lose_first_answers(*question: Any) -> str | None:
        answer = claim(*question)
        asked.append(question)
        if len(asked) < 3:
            raise ConnectionResetError("the answer is lost")
        return answer

    monkeypatch.setattr(server.claims, "claim", lose_first_answers)
    assert server.claims_client.claim(ONE, 0, "a") is None
    assert len(asked) == 3
    assert "claimed by a and again by a" in str(server.claims_client.claim(ONE, 0, "a")), "a second call is refused"


def test_caller_without_the_key_gets_no_answer(server: ClaimServer) -> None:
    server.claims.begin(ONE)
    unauthenticated = dataclasses.replace(server.claims_client, key=b"guessed")
    with pytest.raises(Unreachable):
        unauthenticated.claim(ONE, 0, "task", deadline_s=0.5)
    assert server.claims.end() == (frozenset(), None)


def test_response_from_another_program_is_refused() -> None:
    """Another program that has reused the port cannot grant a claim."""
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
            ClaimClient("127.0.0.1", other.getsockname()[1], b"key").claim(ONE, 0, "a")
        serving.join()


def claimed(server: ClaimServer, share: int) -> str | None:
    return server.claims_client.claim(ONE, share, f"task {share}")


def test_silent_callers_do_not_block_others_and_are_disconnected(
    server: ClaimServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "_PATIENCE_S", 0.3)
    answer, serving, at_once = server._answer, set(), []

    async def counted(connection: socket.socket) -> None:
        serving.add(connection)
        at_once.append(len(serving))
        try:
            await answer(connection)
        finally:
            serving.remove(connection)

    monkeypatch.setattr(server, "_answer", counted)
    server.claims.begin(ONE)
    with contextlib.ExitStack() as silent:
        callers = [
            silent.enter_context(socket.create_connection((server.claims_client.host, server.claims_client.port), 20))
            for _ in range(3 * claims_module._MOST)
        ]
        assert claimed(server, 0) is None
        for caller in callers:
            while caller.recv(64):  # TimeoutError: its connection was not closed
                pass
    assert max(at_once) == claims_module._MOST
    assert threading.active_count() < claims_module._MOST, "connections have no thread of their own"


def test_server_recovers_from_too_many_open_files() -> None:
    """Run in another process, because other threads of this one need files."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another:
        another.submit(claim_without_files).result(60)


def claim_without_files() -> None:
    """Check that the server accepts connections again after a failed accept."""
    warned = threading.Event()
    pytest.MonkeyPatch().setattr("spark_connector.claims.log.warning", lambda *_, **__: warned.set())
    server = ClaimServer("127.0.0.1", "127.0.0.1")
    server.claims.begin(ONE)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))  # one for the caller's socket, none to accept it
        asking = pool.submit(claimed, server, 0)
        assert warned.wait(30), "no warning was logged"
        assert not asking.done()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert asking.result(timeout=30) is None


def test_unreachable_driver_ends_the_claim_with_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match=rf"no answer at 127\.0\.0\.1:{port} within 0 s .*eos\.spark\.claims\.port"):
        ClaimClient("127.0.0.1", port, b"key").claim(ONE, 0, "a", deadline_s=0.3)


def test_server_listens_on_the_configured_port_or_a_later_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = ClaimServer("127.0.0.1", "127.0.0.1", port)
        server.close()
        assert port < server.claims_client.port <= port + 16


def test_error_for_a_foreign_bind_address_names_the_setting() -> None:
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
def test_claim_server_listens_where_the_driver_listens(settings: dict[str, str], place: tuple[str, str]) -> None:
    assert driver_addresses(settings.get) == place
