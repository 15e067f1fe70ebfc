"""Wraps one confluent-kafka Producer, with the facts known about it, and destroys it safely.

Owns the callbacks (statistics, deliveries), the thread on which calls run, and the end of a client in which a call may
still hang. It never decides how to handle a failed call.
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
from eos.errors import Call, ConfigurationError, describe_error
from eos.kafka.admin.ownership import Identity
from eos.kafka.client.client_calls import call_client, guard_callbacks
from eos.kafka.client.cluster import TRANSACTION_LOG
from eos.kafka.client.settings import STATISTICS_INTERVAL_MS, Settings
from eos.kafka.client.watchdog import IDLE_INTERVAL_S, Watchdog
from eos.kafka.client.world import REAL, World
from eos.session.producer.retry_evidence import RetryEvidence, decode_statistics

ABANDONED_POLL_S = 0.5
_CONNECT_S = 1.0
_LOOKS_UNTIL_COLLECTED = 20


class Client:
    """Wraps one confluent-kafka Producer, which is replaced as a whole and never repaired."""

    def __init__(self, settings: Settings, transactional_id: str, reports: bool, world: World = REAL) -> None:
        self.transactional_id, self.world = transactional_id, world
        self._evidence_lock = threading.Lock()
        self._served_at = world.now()
        self.evidence = RetryEvidence(settings.retry_backoff_ms)
        self.identity: Identity | None = None
        """Producer id and epoch, as of the last statistics."""
        self.inits = 1
        """InitProducerId requests sent."""
        self.init_ms = 0.0
        """The time that the init took."""
        self.statistics_seen = 0
        self.delivery_error: tuple[KafkaError, str, int] | None = None
        """The open transaction's first delivery error: error, destination, bytes of key and value."""
        self.delivery_errors = 0
        self._callback_error: BaseException | None = None
        configuration = guard_callbacks(settings.producer(transactional_id), self._latch)
        self._user_stats = configuration.get("stats_cb")
        configuration.setdefault("statistics.interval.ms", STATISTICS_INTERVAL_MS)
        configuration.setdefault("logger", log.client_logger)
        configuration |= {
            "stats_cb": self._take_statistics,
            # A callback for each delivered record would cost 20 % of the throughput, so only errors call back unless
            # the application wants delivery reports.
            "delivery.report.only.error": not reports,
            "on_delivery": self.take_delivery,
        }
        try:
            self.producer = world.producer(configuration)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(f"the producer's settings were refused: {describe_error(error)}") from error
        self.statistics_interval_s = int(configuration["statistics.interval.ms"]) / 1000
        self.renew_watchdog()

    def renew_watchdog(self) -> None:
        """Run further calls on a new thread."""
        self.watchdog: Watchdog = self.world.watchdog(f"eos-{self.transactional_id}", self._serve_while_idle)

    # ---- callbacks --------------------------------------------------------------------------------------------

    def serve(self, timeout_s: float = 0.0) -> None:
        """Run the waiting callbacks of the client."""
        self._served_at = self.world.now()
        call_client(self.producer.poll, timeout_s)

    def _serve_while_idle(self) -> None:
        """Run callbacks on the watchdog's thread while nobody else does: a user's function may run for minutes, and
        statistics of 10 KB and more arrive ten times a second."""
        if self.world.now() - self._served_at < IDLE_INTERVAL_S:
            return
        try:
            self.serve()
        except (KafkaException, SystemError):
            pass  # a fatal error, which the next transactional call raises again
        except BaseException as error:  # noqa: BLE001 - callbacks may raise anything; the loop raises it, the thread goes on
            self._latch(error)

    def _take_statistics(self, text: str) -> None:
        try:
            statistics = decode_statistics(text)
            if statistics.eos.producer_epoch >= 0:
                self.identity = Identity(statistics.eos.producer_id, statistics.eos.producer_epoch)
            self.inits = max(self.inits, statistics.count("InitProducerId"))
            self.statistics_seen += 1
            with self._evidence_lock:
                self.evidence.add_statistics(statistics)
        except Exception as error:  # noqa: BLE001 - must not pass through C frames
            self._latch(error)
        if self._user_stats is not None:
            self._user_stats(text)

    def take_delivery(self, error: KafkaError | None, message: Message) -> None:
        """Serve as the delivery callback; without `reports` the client calls it for errors only."""
        if error is not None:
            self.delivery_errors += 1
            if self.delivery_error is None:
                partition = "" if message.partition() is None else f"[{message.partition()}]"
                self.delivery_error = (error, f"{message.topic()}{partition}", size_of(message.key(), message.value()))

    def _latch(self, error: BaseException) -> None:
        """Keep an error of a callback for the end of the transaction."""
        self._callback_error = self._callback_error or error

    def raise_callback_error(self) -> None:
        """Raise the first error that a user's callback raised, once."""
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    # ---- transactions -----------------------------------------------------------------------------------------

    def init_transactions(self, timeout_s: float) -> None:
        """Initialise the transactional.id, once the client has a connection.

        An init that finds no connection looks for the coordinator again after a fixed 500 ms (rdkafka_txnmgr.c). On a
        busy machine that happened to 18 of 30 new clients. After the first answer librdkafka drops the connection to a
        bootstrap address and then connects to the broker under its id, so an init after one query found no connection 8
        times of 149, and after two queries never. Brokers create the transaction log for the init, if not for the query
        of its metadata."""
        with contextlib.suppress(KafkaException):  # the init reports an unreachable cluster
            for _ in range(2):
                self.producer.list_topics(TRANSACTION_LOG, min(_CONNECT_S, timeout_s))
        began = self.world.now()
        self.producer.init_transactions(timeout_s)
        self.init_ms = (self.world.now() - began) * 1000

    def begin_transaction(self) -> None:
        self.producer.begin_transaction()
        self.evidence.begin_transaction()
        self.delivery_errors, self.delivery_error = 0, None

    def call_timed(self, call: Call, function: Callable[[], None]) -> None:
        """Call the function and add its duration to the evidence: the duration shows whether a request was retried
        inside."""
        with self._evidence_lock:
            self.evidence.begin_call()
        began = self.world.now()
        function()
        returned = self.world.now()
        with self._evidence_lock:
            self.evidence.return_from(call, (returned - began) * 1000, returned)

    # ---- the end ----------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Destroy this client on another thread: that can block, and a client with a hung call must not be
        destroyed."""
        self.watchdog.close()
        self.world.background("eos-retire", self._destroy)

    def _destroy(self) -> None:
        self._user_stats = None
        while not self.watchdog.join(ABANDONED_POLL_S):
            # A call hangs in the client, perhaps for ever. Its callbacks no longer matter, but must not pile up.
            _drain(self.producer)
        producer = self.producer
        # The client and its producer's callbacks refer to each other. If they were left to the garbage collector, which
        # a worker keeps from running, the client's threads and connections would stay, and megabytes of statistics
        # would pile up.
        del self.producer
        try:
            producer.purge()
        except (KafkaException, SystemError) as error:
            log.event(logging.DEBUG, "purge of a replaced producer failed", error=describe_error(error))
        looks, unshared = 0, object()
        while sys.getrefcount(producer) > sys.getrefcount(unshared):
            # The traceback of the failure that led to the replacement holds the producer while the failure is handled.
            # A traceback in a reference cycle would hold it for ever, with six threads and its callbacks.
            _drain(producer)
            self.world.sleep(ABANDONED_POLL_S)
            looks += 1
            if looks == _LOOKS_UNTIL_COLLECTED:
                gc.collect()


def size_of(key: bytes | str | None, value: bytes | str | None) -> int:
    """Return the size of a record in bytes, without its headers."""
    return len(key or b"") + len(value or b"")


def _drain(producer: Producer) -> None:
    """Run the callbacks of an abandoned producer."""
    with contextlib.suppress(KafkaException, SystemError):
        call_client(producer.poll, 0)
