"""Recreate a worker's input while a broker is down: the worker notices it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

import pytest
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from eos.errors import InputGone
from eos.kafka.admin.topic_ids import TopicIds
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.settings import Settings
from tests.support.reading import create_topic, wait_until

# A client makes a few attempts per second; without pauses between them it would make hundreds.
ATTEMPTS, ATTEMPTS_A_SECOND = 20, 10


class Refusing:
    """Close every connection to `port` immediately, and count the connections."""

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


@pytest.mark.deep
@pytest.mark.parametrize("down", range(3))
def test_recreated_topic_is_noticed_while_a_broker_is_down(
    down: int, cluster: LocalKafka, names: Callable[[str], str]
) -> None:
    servers = cluster.bootstrap_servers
    port = int(servers.split(",")[down].rpartition(":")[2])
    others = ",".join(server for i, server in enumerate(servers.split(",")) if i != down)
    topic = create_topic(servers, names("t"), copies=3)
    gone: list[InputGone] = []
    settings = Settings({"bootstrap.servers": servers})
    ids, watcher = TopicIds(settings, [topic], gone.append), Watcher(settings)
    ids.start(watcher)
    try:
        wait_until("the topic's id", lambda: topic in ids._known_ids)
        cluster.kill(down)
        began = time.monotonic()
        with Refusing(port) as refusing:
            admin = AdminClient({"bootstrap.servers": others, "log_level": 0})
            # While the broker is in the metadata, clients may query it. librdkafka's AdminClient then never stopped
            # trying.
            wait_until(
                "the cluster considers the broker down", lambda: len(admin.list_topics(timeout=10).brokers) == 2, 60
            )
            admin.delete_topics([topic])[topic].result(30)
            create_topic(others, topic)
            wait_until("the worker notices the recreated topic", lambda: gone, 60)
        assert f"topic {topic} was deleted and recreated" in str(gone[0])
        took_s = time.monotonic() - began
        assert refusing.attempts <= ATTEMPTS + ATTEMPTS_A_SECOND * took_s, f"{refusing.attempts} in {took_s:.1f} s"
    finally:
        watcher.stop()
        if not cluster.running(down):
            cluster.start(down)
            cluster.wait_in_sync()
