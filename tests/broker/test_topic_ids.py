"""A worker that looks whether its input was made anew, while the broker it asks cannot be reached."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from types import TracebackType

import pytest
from confluent_kafka.admin import AdminClient

from eos.admin.topic_ids import TopicIds
from eos.broker import LocalKafka
from eos.errors import InputGone
from eos.settings import Settings
from tests.support.proxy import HoldingProxy
from tests.support.reading import create_topic, wait_until

FAILED_LOOKS = 3
ATTEMPTS_OF_A_LOOK = 40  # 10 in the 5 s that it may take; without pauses between them hundreds


class Refusing:
    """Ends every connection to `port` at once, and counts them."""

    def __init__(self, port: int) -> None:
        self.attempts = 0
        self._socket = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._refuse, daemon=True)

    def _refuse(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.attempts += 1
                connection.close()

    def __enter__(self) -> Refusing:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)


def test_while_the_broker_refuses_it_is_asked_with_pauses_and_then_a_topic_made_anew_is_seen(
    kafka: LocalKafka, names: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="eos")
    servers, port = kafka.proxied_servers, int(kafka.proxied_servers.rpartition(":")[2])
    topic = create_topic(kafka.bootstrap_servers, names("t"))
    gone: list[InputGone] = []
    ids = TopicIds(Settings({"bootstrap.servers": servers}), [topic], gone.append)

    def failed_looks() -> int:
        return sum("cannot be had" in record.getMessage() for record in caplog.records)

    try:
        with HoldingProxy(port, kafka.proxied_upstream):
            ids.start()
            wait_until("the topic's id", lambda: topic in ids._known)
        before = failed_looks()
        with Refusing(port) as refusing:
            wait_until("looks that failed", lambda: failed_looks() >= before + FAILED_LOOKS, 120)
        assert 1 <= refusing.attempts <= FAILED_LOOKS * ATTEMPTS_OF_A_LOOK
        with HoldingProxy(port, kafka.proxied_upstream):
            admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0})
            admin.delete_topics([topic])[topic].result(30)
            create_topic(kafka.bootstrap_servers, topic)
            wait_until("the topic was made anew", lambda: gone, 60)
        assert f"topic {topic} was deleted and made anew" in str(gone[0])
    finally:
        ids.stop()
