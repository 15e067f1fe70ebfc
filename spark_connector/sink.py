"""Implements the exactly-once Kafka sink: each micro-batch or batch write is one transaction of one producer identity.

Owns the functions that users call, and the number of times that a batch is retried. attempt.py owns the steps of one
attempt. A batch must be retried only by a new attempt, whose first step fences the previous one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from eos import log
from eos.errors import ConfigurationError, Temporary
from eos.kafka.admin import ownership
from eos.kafka.client.cluster import ClusterAdmin
from spark_connector import query
from spark_connector.attempt import Attempt, AttemptLost, Batch, SinkConnection, translate
from spark_connector.claims import ClaimServer, driver_addresses
from spark_connector.marker import Decision, Marker, WrongProgress, decide, is_of_a_write, sink_key
from spark_connector.options import Options, refuse_unsafe
from spark_connector.progress import Progress, to_spark_metrics
from spark_connector.shipping import ship_ourselves

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORGOTTEN_AT_ONCE = 10_000  # markers of old writes
_INIT_S = 10.0  # time that another run may take from its note of a batch in the checkpoint to its init
_ASK_AGAIN_S = 0.25
RESTARTS = 3  # retries of a batch inside one call; an exception from foreachBatch ends the query


def exactly_once_sink(
    *,
    topic: str | Sequence[str],
    transactional_id: str,
    bootstrap_servers: str,
    settings: Mapping[str, str] | None = None,
    compression: str = "none",
    adopt_at: int | None = None,
    on_step: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Stream:
    """Return a function for `writeStream.foreachBatch(...)` that writes every micro-batch to Kafka exactly once.

    Columns are those of Spark's Kafka sink: `value`, and optionally `key`, `headers`, `partition` and `timestamp`;
    others are ignored.

    `topic` a string: all rows go there. A list: each row goes to the topic in its column `topic`, which must be in the
    list. `transactional_id` identifies this query's writes: one per query, the same across restarts. `settings`:
    Kafka's dotted names as for the worker (TLS, SASL, `transaction.timeout.ms`). The timeout's default here is the
    broker's maximum, since a batch's whole computation runs inside it. `compression`: none, gzip, snappy, lz4, zstd.
    `adopt_at`: the batch number at which this sink takes over a query that another sink wrote before. `on_step` is
    called with "init", "add", "produce", "mark", "commit" after each of these steps. `on_progress` is called with a
    Progress after a batch is committed; an exception from it ends the query, and the batch stays committed.

    A stateful plan must give the same rows when it is run again (no current_timestamp(), no rand()). After a crash
    between Kafka and the checkpoint, Kafka has the rows of the first run, and the state comes from the second.

    Raises ConfigurationError at once for invalid arguments. The query raises Unavailable, NotAuthorised, Fenced,
    Temporary, or ConfigurationError when marker and checkpoint do not belong together.
    """
    sink = _Sink(Options.of(topic, transactional_id, bootstrap_servers, settings, compression, on_step))
    return Stream(sink, bootstrap_servers, adopt_at, on_progress)


class Stream:
    """Implements a foreachBatch function that writes each micro-batch to Kafka exactly once."""

    def __init__(
        self,
        sink: _Sink,
        bootstrap_servers: str,
        adopt_at: int | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._sink, self._servers, self._adopt_at, self._on_progress = sink, bootstrap_servers, adopt_at, on_progress

    def __call__(self, df: DataFrame, batch: int) -> None:
        current, sink = query.current(df, batch), self._sink
        try:
            key, name = sink_key(sink.transactional_id), sink.transactional_id
            with _WriteOnceGuard.of(self._servers, name, current.run).in_batch(batch):
                progress = sink.deliver(df, _MicroBatch(key, batch, current, self._adopt_at, sink.topics))
            if progress is None:
                # The batch's rows are in Kafka, but a stateful plan must run for its state, and Spark checks that it
                # ran.
                df.write.format("noop").mode("overwrite").save()
                return
            to_spark_metrics(df, current.execution, progress)
            if self._on_progress is not None:
                self._on_progress(progress)
        except Exception as error:
            if query.is_stop(df, error):
                raise error.with_traceback(None) from None
            raise

    def is_replaced(self, patience_s: float = _INIT_S) -> bool:
        """Return whether another run continues if this one ends.

        Another run continues if this run has fenced no other, or if another run owns the id or takes it within
        `patience_s` seconds. This function only reads: an init would fence the other run. Raises EosError.
        """
        mine = self._sink.identity
        if mine is None:
            return True
        deadline = time.monotonic() + patience_s
        with ClusterAdmin(self._sink.settings) as admin:
            while not ownership.has_newer_epoch(mine, admin.describe(self._sink.transactional_id)):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_ASK_AGAIN_S)
        return True


_SECOND = (
    "{name} wrote batch {number} already: a second call in the same micro-batch would lose its rows; give each sink a "
    "transactional_id of its own, or write one DataFrame with a column `topic`, to exactly_once_sink(topic=[...])"
)


def exactly_once_write(
    df: DataFrame,
    *,
    topic: str | Sequence[str],
    transactional_id: str,
    bootstrap_servers: str,
    settings: Mapping[str, str] | None = None,
    compression: str = "none",
    batch_id: str | None = None,
    remember_days: float | None = None,
) -> int:
    """Write a batch DataFrame in one transaction, all rows or none, and return the number of rows.

    With `batch_id`, a call whose (transactional_id, batch_id) was written before writes nothing and returns the number
    of rows of that write, however long ago it was. With `remember_days` a write deletes the markers of older batch_ids,
    so that they (some 200 bytes each) do not accumulate; one of those batch_ids would be written again. After an
    exception of a call without a batch_id, the rows may be in Kafka only if the message says that the commit was not
    answered. All other arguments and errors are as for `exactly_once_sink`.
    """
    sink = _Sink(Options.of(topic, transactional_id, bootstrap_servers, settings, compression))
    key = None if batch_id is None else sink_key(transactional_id, batch_id)
    batch = _Write(key, batch_id or "", sink.topics, remember_days)
    try:
        progress = sink.deliver(df, batch)
    finally:
        sink.close()
    if progress is not None:
        return progress.rows
    assert batch.found is not None, "nothing was written, for it is in Kafka already"
    return batch.found.rows


class _WriteOnceGuard:
    """Ensures that a sink writes once in a micro-batch of one run of a query.

    A second call in the micro-batch would find the marker of the first one, and its rows would count as written
    although they are not. The same holds for another sink with the same id, in the same process or after a restart. A
    call in another thread waits until the first call ends, and is then refused. A later run of the query does not wait.
    """

    _latest_guards: ClassVar[dict[tuple[frozenset[str], str], _WriteOnceGuard]] = {}
    _guards_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, transactional_id: str, run: str) -> None:
        self._name, self._run = transactional_id, run
        self._one_at_a_time = threading.Lock()
        self._last_batch: int | None = None

    @classmethod
    def of(cls, bootstrap_servers: str, transactional_id: str, run: str) -> _WriteOnceGuard:
        """Return the guard of this sink and run; the order of `bootstrap_servers` does not matter."""
        key = frozenset(server.strip() for server in bootstrap_servers.split(",")), transactional_id
        with cls._guards_lock:
            latest = cls._latest_guards.get(key)
            if latest is None or latest._run != run:
                latest = cls._latest_guards[key] = cls(transactional_id, run)
            return latest

    @contextmanager
    def in_batch(self, number: int) -> Iterator[None]:
        """Enclose the write of one batch. Raise ConfigurationError if this batch was written before."""
        with self._one_at_a_time:
            if self._last_batch == number:
                raise ConfigurationError(_SECOND.format(name=self._name, number=number))
            yield
            self._last_batch = number


@dataclass
class _MicroBatch:
    key: bytes | None
    number: int
    query: query.Query
    adopt_at: int | None
    topics: tuple[str, ...]
    name: str = field(init=False)
    call: str = field(init=False)
    """The id of the query's run, and of this call in it."""

    def __post_init__(self) -> None:
        self.name = f"batch {self.number}"
        self.call = f"{self.query.run}/{uuid.uuid4().hex[:8]}"

    def decide(self, found: Marker | None) -> Decision:
        if found is not None and found.query == self.query.id and found.batch == self.number:
            run, _, call = found.run.partition("/")
            if call and run == self.query.run and found.run != self.call:
                raise WrongProgress(_SECOND.format(name="this sink", number=self.number))
        return decide(found, self.query.id, self.number, self.query.offsets, self.adopt_at, self.topics)

    def refuse(self, found: Marker | None) -> None:
        if found is not None and (found.query != self.query.id or int(found.batch) > self.number):
            self.decide(found)

    def obsolete_keys(self, known: Mapping[bytes, int]) -> list[bytes]:
        return []

    def marker(self, found: Marker | None, decision: Decision, rows: int) -> Marker:
        adopted = found.adopted if found is not None and found.query == self.query.id else None
        if decision is Decision.ADOPT:
            adopted = self.adopt_at
        return Marker(self.query.id, self.number, rows, self.query.offsets, adopted, self.topics, self.call)


@dataclass
class _Write:
    key: bytes | None
    batch_id: str
    topics: tuple[str, ...]
    remember_days: float | None
    found: Marker | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"write {self.batch_id}".strip()

    def decide(self, found: Marker | None) -> Decision:
        self.found = found
        if found is not None and (elsewhere := found.went_elsewhere(self.topics)):
            raise WrongProgress(
                f"batch_id {self.batch_id} was written to {elsewhere}, and not to {', '.join(self.topics)}: give each "
                "write a batch_id of its own"
            )
        return Decision.WRITE if found is None else Decision.ALREADY

    def refuse(self, found: Marker | None) -> None:
        """Do nothing: `decide` alone distinguishes two writes with one batch_id."""

    def obsolete_keys(self, known: Mapping[bytes, int]) -> list[bytes]:
        if self.remember_days is None:
            return []
        oldest_ms = (time.time() - self.remember_days * 86_400) * 1000
        old = (key for key, at_ms in known.items() if at_ms < oldest_ms and is_of_a_write(key) and key != self.key)
        return list(islice(old, _FORGOTTEN_AT_ONCE))

    def marker(self, found: Marker | None, decision: Decision, rows: int) -> Marker:
        return Marker("", self.batch_id, rows, "", None, self.topics)


class _Sink:
    """Holds the state that one transactional id keeps from batch to batch."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.topics, self.transactional_id, self.settings = options.topics, options.transactional_id, options.settings
        self._connection: SinkConnection | None = None
        self._server: ClaimServer | None = None
        # One sink may have been given to two queries; the marker refuses the second one later.
        self._one_at_a_time = threading.Lock()

    @property
    def identity(self) -> ownership.Identity | None:
        """Return the identity of the last init, or None without one."""
        if self._connection is None or not self._connection.transaction.initialised:
            return None
        return self._connection.transaction.identity

    def close(self) -> None:
        self._disconnect()
        if self._server is not None:
            self._server.close()

    def deliver(self, df: DataFrame, batch: Batch) -> Progress | None:
        """Return the progress of the batch, or None if it was in Kafka already."""
        with self._one_at_a_time:
            return self._deliver(df, batch)

    def _deliver(self, df: DataFrame, batch: Batch) -> Progress | None:
        server = self._claims(df)
        for attempt in range(1 + RESTARTS):
            try:
                if self._connection is None:
                    self._connection = SinkConnection.open(self._options)
                return Attempt(self._options, self._connection, server, df, batch).run()
            except AttemptLost as again:
                self._disconnect()
                if attempt == RESTARTS or (batch.key is None and again.outcome_unknown):
                    raise Temporary(
                        f"{self._options.transactional_id}, {batch.name} failed {attempt + 1} times, last: {again}"
                    ) from again
                log.warning(
                    "batch begins anew",
                    transactional_id=self._options.transactional_id,
                    batch=batch.name,
                    reason=str(again),
                )
            except Exception as error:
                self._disconnect()
                public = translate(error)
                if public is error:
                    raise
                raise public from error
        raise AssertionError("the last attempt returns or raises")

    def _claims(self, df: DataFrame) -> ClaimServer:
        """Return the server for claims; at the first call, check the session and send this package to executors.

        Raises ConfigurationError for a session in which the guarantee cannot hold.
        """
        if not hasattr(df, "_jdf"):
            raise ConfigurationError("Spark Connect is not supported: the sink runs in the driver's own process")
        if self._server is None:
            # An application's configuration does not change, and reading it takes a hundred calls to the JVM.
            configuration = df.sparkSession.sparkContext.getConf()
            session = df.sparkSession.conf

            def setting(name: str) -> str | None:
                # Settings of Spark SQL belong to the session, and all others belong to the application.
                return session.get(name, None) if name.startswith("spark.sql.") else configuration.get(name)

            refuse_unsafe(setting)
            ship_ourselves(df.sparkSession)
            self._server = ClaimServer(*driver_addresses(setting), self._options.claims_port)
        return self._server

    def _disconnect(self) -> None:
        """Close the connection, because its knowledge of the cluster may be outdated."""
        if self._connection is not None:
            self._connection.wire.close()
            self._connection = None
