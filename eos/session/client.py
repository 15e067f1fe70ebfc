"""One confluent-kafka Producer with what is known of it, and how it is thrown away.

Owns the callbacks (statistics, deliveries), the thread that calls run on, and the end of a client that may still have a
call hanging in it. It never decides what a failed call leads to.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from eos import log
from eos.errors import (
    Call,
    ConfigurationError,
    describe_error,
)
from eos.kafka.admin.ownership import Identity
from eos.kafka.client.client_calls import call_client, guard_callbacks
from eos.kafka.client.settings import STATISTICS_INTERVAL_MS, Settings
from eos.kafka.client.watchdog import IDLE_INTERVAL_S, Watchdog
from eos.kafka.client.world import REAL, World
from eos.session.evidence import RetryEvidence, decode_statistics

ABANDONED_POLL_S = 0.5
_LOOKS_UNTIL_COLLECTED = 20


class Client:
    """One confluent-kafka Producer with what is known of it; thrown away as a whole."""

    def __init__(self, settings: Settings, transactional_id: str, reports: bool, world: World = REAL) -> None:
        self.transactional_id, self.world = transactional_id, world
        self._looking = threading.Lock()  # held to change the evidence
        self._served_at = world.now()
        self.evidence = RetryEvidence(settings.retry_backoff_ms)
        self.identity: Identity | None = None
        self.inits = 1
        """InitProducerId requests that were sent."""
        self.statistics_seen = 0
        self.delivery_error: tuple[KafkaError, str, int] | None = None  # where it was to go, bytes of key and value
        self.delivery_errors = 0
        self.callback_error: BaseException | None = None
        configuration = guard_callbacks(settings.producer(transactional_id), self._keep)
        self.user_stats = configuration.get("stats_cb")
        configuration.setdefault("statistics.interval.ms", STATISTICS_INTERVAL_MS)
        configuration.setdefault("logger", log.client_logger)
        configuration |= {
            "stats_cb": self._statistics,
            # A callback per record costs 20 %; errors are latched, the rest is counted.
            "delivery.report.only.error": not reports,
            "on_delivery": self.delivered,
        }
        try:
            self.producer = world.producer(configuration)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the producer's settings were refused: {describe_error(error)}") from error
        self.statistics_interval_s = int(configuration["statistics.interval.ms"]) / 1000
        self.watchdog = self.new_watchdog()

    def new_watchdog(self) -> Watchdog:
        return self.world.watchdog(f"eos-{self.transactional_id}", self._serve_unasked)

    def serve(self, timeout_s: float = 0.0) -> None:
        """Calls the callbacks of what the client has to say."""
        self._served_at = self.world.now()
        call_client(self.producer.poll, timeout_s)

    def _serve_unasked(self) -> None:
        """By the watchdog's thread, while a user's function runs for minutes or a kept producer has nothing to do:
        statistics come ten times a second, of 10 KB and more."""
        if self.world.now() - self._served_at < IDLE_INTERVAL_S:
            return
        try:
            self.serve()
        except (KafkaException, SystemError):
            pass  # a fatal error: it shows again at the next transactional call
        except BaseException as error:  # noqa: BLE001 - a callback's; the thread goes on, and the loop is told
            self._keep(error)

    def _statistics(self, text: str) -> None:
        try:
            statistics = decode_statistics(text)
            if statistics.eos.producer_epoch >= 0:
                self.identity = Identity(statistics.eos.producer_id, statistics.eos.producer_epoch)
            self.inits = max(self.inits, statistics.count("InitProducerId"))
            self.statistics_seen += 1
            with self._looking:
                self.evidence.statistics(statistics)
        except Exception as error:  # noqa: BLE001 - must not pass through C frames
            self._keep(error)
        if self.user_stats is not None:
            self.user_stats(text)

    def timed(self, call: Call, function: Callable[[], None]) -> None:
        """A call whose duration tells whether it was retried inside."""
        with self._looking:
            self.evidence.call_began()
        began = self.world.now()
        function()
        returned = self.world.now()
        with self._looking:
            self.evidence.call_took(call, (returned - began) * 1000, returned)

    def _keep(self, error: BaseException) -> None:
        """Raised at the transaction's end."""
        self.callback_error = self.callback_error or error

    def delivered(self, error: KafkaError | None, message: Message) -> None:
        """The delivery callback; without `reports` it sees errors only."""
        if error is not None:
            self.delivery_errors += 1
            if self.delivery_error is None:
                partition = "" if message.partition() is None else f"[{message.partition()}]"
                self.delivery_error = (error, f"{message.topic()}{partition}", size_of(message.key(), message.value()))


def size_of(key: bytes | str | None, value: bytes | str | None) -> int:
    """Return the bytes of a record, without its headers."""
    return len(key or b"") + len(value or b"")


def retire(client: Client) -> None:
    """Drops a client on another thread: destroying one can block, and one with a hung call must not be destroyed."""
    client.watchdog.close()
    client.world.background("eos-retire", lambda: _destroy(client))


def _destroy(client: Client) -> None:
    client.user_stats = None
    while not client.watchdog.join(ABANDONED_POLL_S):
        # A call hangs in it, perhaps for ever: what the client says meanwhile concerns nobody, but must not gather.
        _unheard(client.producer)
    producer = client.producer
    # The client and its producer's callbacks hold each other. Left to the garbage collector, which a worker keeps from
    # running, its threads and connections would stay, and its statistics gather unread: 10 a second, megabytes.
    del client.producer
    try:
        producer.purge()
    except (KafkaException, SystemError) as error:
        log.event(logging.DEBUG, "purge of a replaced producer raised", error=describe_error(error))
    looks, nobodys = 0, object()
    while sys.getrefcount(producer) > sys.getrefcount(nobodys):
        # The traceback of the failure for which it was replaced holds it while the failure is dealt with. A traceback
        # that is part of a circle would for ever, with six threads and what the client says.
        _unheard(producer)
        client.world.sleep(ABANDONED_POLL_S)
        looks += 1
        if looks == _LOOKS_UNTIL_COLLECTED:
            gc.collect()


def _unheard(producer: Producer) -> None:
    """Takes what a producer that is given up has to say."""
    with contextlib.suppress(KafkaException, SystemError):
        call_client(producer.poll, 0)
