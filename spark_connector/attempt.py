"""Makes one attempt at one batch under one epoch; the order of its steps is the guarantee.

    look       only at the first attempt of a process: refuse the batch if the marker rules it out, before fencing
    init       InitProducerId: fences every earlier attempt and ends its open transaction; after a batch of this
               process the coordinator refuses it if another process has initialised since (KIP-360)
    decide     the progress marker says whether this batch is in Kafka already (marker.py)
    fetch      at the same time as init and decide: the rows of a small batch, if the driver may write it; no row is
               written before they have returned
    add        AddPartitionsToTxn: all target partitions and the marker's
    produce    tasks write, each a share of the Kafka partitions, under this identity (task.py, claims.py); or the
               driver writes a small batch, as one share
    mark       the marker of this batch, in the same transaction
    commit     one EndTxn

Owns this order and the consequence of a failure at each step. It must never write outside the order, never abort after
a commit was sent, and never initialise again before it is known that no newer instance owns the transactional id.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa
from kafka import errors as kafka_errors

from eos import log
from eos.errors import ConfigurationError, EosError, Fenced, NotAuthorised, Temporary, Unavailable
from eos.kafka.admin import ownership
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.world import read_boot_clock
from spark_connector import marker
from spark_connector.answers import Answer, Stopped
from spark_connector.claims import ClaimServer
from spark_connector.marker import Decision, Marker, MarkerReader, WrongProgress
from spark_connector.options import Options
from spark_connector.packing import targets_of
from spark_connector.partition import PartitionWriter
from spark_connector.placing import murmur2_column
from spark_connector.progress import Progress
from spark_connector.routing import fetch, pack, planned_for_the_sink, route
from spark_connector.shipping import find_missing_package
from spark_connector.targets import AUTHORIZATION_ERRORS, Target, Targets, ensure_marker_topic, longest_transaction_ms
from spark_connector.task import RESULT, Job, Result, write_rows, writer
from spark_connector.transaction import Transaction
from spark_connector.wire import Broken, Unreachable, Wire

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")
_PACKERS_PER_CORE = 4  # with one packing task per core, the slowest would delay the batch
_LONGEST_PAUSE = 64  # after at most this many batches, the driver tries again to write one itself
_LEAST_ROWS = 64  # of a task, which the driver fetches at least
_MOST_FETCHED_BYTES = 64_000_000  # if all rows were as large as the driver allows a row to be
_MAX_RESULT = "spark.driver.maxResultSize"


class AttemptLost(Exception):
    """Reports that this attempt is lost, and that an attempt with a new epoch may succeed. `outcome_unknown`: its
    commit was sent and never answered."""

    def __init__(self, sentence: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(sentence)
        self.outcome_unknown = outcome_unknown


class Batch(Protocol):
    """Holds the data to write: a micro-batch of a query, or a batch write."""

    name: str
    key: bytes | None
    """The marker's key, or None if no marker is written."""

    def decide(self, found: Marker | None) -> Decision: ...

    def refuse(self, found: Marker | None) -> None:
        """Raise WrongProgress for a marker that no open transaction can correct."""

    def marker(self, found: Marker | None, decision: Decision, rows: int) -> Marker: ...

    def obsolete_keys(self, known: Mapping[bytes, int]) -> list[bytes]:
        """Return the marker keys that are no longer needed; `known` has each key's write time in Unix milliseconds."""
        ...


@dataclass
class Recent:
    """Records the sizes of the last batches, from which the sink predicts whether the driver can write the next one.

    The first batch, at the start or after a failure, goes to the executors, because it may be a backlog.
    """

    small: bool = False
    """True if the last batch was small enough for the driver, by the bytes of its record batches."""
    row_bytes: float = 1_000.0
    """The mean size of a row in the last batch that had any."""
    pause: int = 0
    """The number of batches for which the driver does not try after a batch was too large.

    It doubles each time, because some batches are always too large uncompressed although they are small compressed.
    """
    pause_left: int = 0
    """The number of batches for which the driver still does not try."""

    @property
    def tries(self) -> bool:
        return self.small and not self.pause_left

    def most_rows(self, driver_bytes: int) -> int:
        """Return how many rows of a task the driver fetches: four times as many as it writes itself after this batch.

        A power of two, so that Spark often finds the plan's code compiled."""
        return max(_LEAST_ROWS, 1 << int(4 * driver_bytes / max(1.0, self.row_bytes)).bit_length())

    def record_batch(self, small: bool, row_bytes: float | None, tried: bool, by_driver: bool) -> None:
        """Record one batch; `row_bytes` is None if it had no rows."""
        self.small, self.row_bytes = small, self.row_bytes if row_bytes is None else row_bytes
        if by_driver:
            self.pause = self.pause_left = 0
        elif tried:
            self.pause = self.pause_left = min(2 * self.pause, _LONGEST_PAUSE) or 1
        elif self.pause_left:
            self.pause_left -= 1


@dataclass(frozen=True)
class SinkConnection:
    """Holds the state that one transactional id keeps from batch to batch while nothing fails."""

    wire: Wire
    targets: Targets
    markers: MarkerReader
    transaction: Transaction
    transaction_ms: int  # transaction.timeout.ms
    longest_ms: int  # the broker's transaction.max.timeout.ms
    recent: Recent = field(default_factory=Recent)

    @classmethod
    def open(cls, options: Options) -> SinkConnection:
        """Connect and read the topics. Raise errors that `translate` converts."""
        wire, timeout_s = Wire(options.connection, options.timeout_s), options.timeout_s
        try:
            targets = Targets(wire, options.topics, timeout_s)
            targets.read()  # reports wrong topics before anything is fenced
            count = ensure_marker_topic(wire, options.topics, timeout_s)
            name = pa.array([options.transactional_id.encode()], pa.binary())
            place = (murmur2_column(name)[0].as_py() & 0x7FFFFFFF) % count
            longest_ms = longest_transaction_ms(wire, timeout_s)
            transaction_ms = options.transaction_ms or longest_ms
            markers = MarkerReader(wire, place, timeout_s, options.transactional_id)
            transaction = Transaction(wire, options.transactional_id, transaction_ms, timeout_s)
            return cls(wire, targets, markers, transaction, transaction_ms, longest_ms)
        except BaseException:
            wire.close()
            raise


class Attempt:
    """Makes one attempt at one batch; `run` is called once."""

    def __init__(
        self, options: Options, connected: SinkConnection, server: ClaimServer, df: DataFrame, batch: Batch
    ) -> None:
        self._options, self._connection, self._server = options, connected, server
        self._df, self._batch = df, batch
        self._transaction = connected.transaction
        self._seconds: dict[str, float] = {}
        self._began: float | None = None  # when the transaction began
        self._commit_sent = False
        self._tasks_write = True

    def run(self) -> Progress | None:
        """Return the progress of the batch, or None if it is in Kafka already.

        Raises AttemptLost, an EosError, or an exception of Spark.
        """
        try:
            return self._run()
        except WrongProgress as error:
            raise ConfigurationError(self._describe_error(error)) from None
        except Unreachable as error:
            if self._commit_sent:
                # The outcome is unknown. The next init ends the transaction if it is open, and then the marker shows
                # the outcome.
                raise self._settle(Exception(f"the commit's answer never came ({error})")) from error
            self._abort()
            raise Unavailable(self._describe_error(error)) from error
        except Stopped as stopped:
            raise self._to_public_error(stopped) from stopped

    def _run(self) -> Progress | None:
        batch = self._batch
        if not self._transaction.initialised:
            batch.refuse(self._look_for_marker())
        # Call the JVM before the transaction begins: a failing JVM would leave it open.
        cores = self._cores()
        # Spark needs longer for the rows of a small batch than the brokers for their answers.
        with ThreadPoolExecutor(1, "eos-sink") as thread:
            prepared, began = thread.submit(self._prepare), time.monotonic()
            try:
                rows = self._fetch(cores)
            finally:
                fetching_s = time.monotonic() - began
                found, decision, targets = prepared.result()
        self._options.on_step("init")
        if decision is Decision.ALREADY:
            log.info("batch is in Kafka already", **self._who())
            return None
        if decision is Decision.ADOPT:
            log.warning("batch adopts what another sink wrote", **self._who())
        gathered = None if rows is None else pack(rows, targets)
        self._began = read_boot_clock()
        self._measure("add", lambda: self._transaction.add(self._partitions(targets, gathered)))
        self._options.on_step("add")
        results = self._measure("produce", lambda: self._produce(targets, cores, gathered))
        self._seconds["produce"] += fetching_s
        written = sum(result.rows for result in results)
        self._options.on_step("produce")
        if batch.key is not None:
            self._measure("mark", lambda: self._mark(batch.marker(found, decision, written)))
        self._options.on_step("mark")
        self._commit_sent = True
        self._measure("commit", lambda: self._transaction.end(commit=True))
        self._options.on_step("commit")
        progress = self._progress(written, results)
        log.info("batch committed", **self._who(), state="CompleteCommit", **progress.figures())
        return progress

    def _prepare(self) -> tuple[Marker | None, Decision, Sequence[Target]]:
        """Initialise the transaction, and return the marker, what it means for this batch, and the targets."""
        self._measure("init", self._transaction.init)
        found = self._measure("decide", self._find_marker)
        return found, self._batch.decide(found), self._measure("targets", self._connection.targets.read)

    def _look_for_marker(self) -> Marker | None:
        """Return the marker. Other instances may be writing meanwhile, so return None also if the transaction of the
        marker is still open.
        """
        try:
            return self._find_marker()
        except Stopped as stopped:
            if stopped.answer is not Answer.RESTART:
                raise
            return None

    def _find_marker(self) -> Marker | None:
        if self._batch.key is None:
            return None
        try:
            return self._connection.markers.read(self._batch.key)
        except ValueError as error:
            raise ConfigurationError(
                f"the entry for this sink in {marker.TOPIC} cannot be read: {error}",
                remedy="continue with the version of eos that wrote it",
            ) from error

    def _fetch(self, cores: int | None) -> pa.Table | None:
        """Return all rows for the driver to write if the last batch was small, or None if tasks must write.

        Nothing is written yet, and no transaction is open.
        """
        recent = self._connection.recent
        if not recent.tries:
            return None
        most_rows, most_bytes = recent.most_rows(self._options.driver_bytes), self._most_fetched_bytes()
        return fetch(self._df, self._options.topic, self._most_packers(cores), most_rows, most_bytes)

    def _most_fetched_bytes(self) -> int:
        """Return how many bytes of rows all tasks together may bring to the driver.

        Spark fails a job above its own limit (0: no limit). Half of that limit is kept for the data that comes with the
        rows.
        """
        java: Any = self._df.sparkSession.sparkContext._jsc
        limit = int(java.sc().conf().getSizeAsBytes(_MAX_RESULT, "1g"))
        return min(_MOST_FETCHED_BYTES, limit // 2) if limit else _MOST_FETCHED_BYTES

    def _partitions(self, targets: Sequence[Target], gathered: pa.RecordBatch | None) -> list[tuple[str, int]]:
        """Return the partitions to add to the transaction. They should be the ones that get rows, as far as these are
        known, because each added partition gets a control record."""
        used = range(len(targets)) if gathered is None else sorted(targets_of(gathered) & set(range(len(targets))))
        partitions = [(targets[number].topic, targets[number].partition) for number in used]
        if self._batch.key is not None:
            partitions.append((marker.TOPIC, self._connection.markers.partition))
        return partitions

    def _produce(self, targets: Sequence[Target], cores: int | None, gathered: pa.RecordBatch | None) -> list[Result]:
        """Write all rows and return once each is acknowledged.

        One task writes each share of the partitions, or the driver writes gathered rows.
        """
        claims, recent = self._server.claims, self._connection.recent
        tried, self._tasks_write = recent.tries, gathered is None
        claims.begin(self._transaction.identity)
        try:
            if gathered is not None:
                results = self._by_driver(targets, gathered)
            else:
                with planned_for_the_sink(self._df):
                    results = self._on_executors(targets, cores)
        except Exception as error:
            if claims.poison is not None:
                raise Stopped(Answer.RESTART, claims.poison) from error
            self._abort()
            raise
        finally:
            granted, poison = claims.end()
        if poison is not None:
            raise Stopped(Answer.RESTART, poison)
        _check(results, granted)
        size, rows = sum(result.bytes for result in results), sum(result.rows for result in results)
        small = size < self._options.driver_bytes
        recent.record_batch(small, size / rows if rows else None, tried, by_driver=not self._tasks_write)
        return results

    def _by_driver(self, targets: Sequence[Target], rows: pa.RecordBatch) -> list[Result]:
        # The driver calls its claims directly, because it perhaps cannot connect to the address that executors use.
        job = replace(self._job(targets, 1), claims_client=self._server.claims)
        result = write_rows(job, iter([rows]), lambda: self._connection.wire)
        return [] if result is None else [result]

    def _on_executors(self, targets: Sequence[Target], cores: int | None) -> list[Result]:
        """Write the rows with tasks, at most as many as can run at once: others would only wait.

        With dynamic allocation Spark starts executors while tasks wait, so each partition is a share.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        job = self._job(targets, len(targets) if cores is None else min(len(targets), cores))
        packed = route(self._df, targets, self._options.topic, job.shares, self._most_packers(cores))
        rows = packed.mapInArrow(writer(job), from_arrow_schema(RESULT)).collect()
        return [Result.decode(text) for (text,) in rows]

    def _job(self, targets: Sequence[Target], shares: int) -> Job:
        options = self._options
        return Job(
            options.transactional_id,
            self._transaction.identity,
            tuple((target.topic, target.partition, target.max_bytes) for target in targets),
            shares,
            options.connection,
            self._server.claims_client,
            options.compression,
            options.delivery_s,
        )

    @staticmethod
    def _most_packers(cores: int | None) -> int | None:
        """Return the maximum number of tasks that pack a batch: a few times the number that run at once, not more,
        since each task has an overhead."""
        return None if cores is None else cores * _PACKERS_PER_CORE

    def _cores(self) -> int | None:
        """Return how many tasks run at once, or None with dynamic allocation, where the number is not fixed."""
        session = self._df.sparkSession
        if str(session.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
            return None
        return session.sparkContext.defaultParallelism

    def _mark(self, new: Marker) -> None:
        one = PartitionWriter(
            self._connection.wire,
            self._options.transactional_id,
            self._transaction.identity,
            marker.TOPIC,
            self._connection.markers.partition,
            delivery_timeout_s=self._options.delivery_s,
        )
        obsolete = self._batch.obsolete_keys(self._connection.markers.write_times)
        keys, values = [self._batch.key, *obsolete], [new.encode(), *[None] * len(obsolete)]
        one.write(pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}))
        one.finish()

    def _abort(self) -> Stopped | None:
        """Abort the transaction, so that readers need not wait for its timeout; return the coordinator's refusal.

        The guarantee does not depend on it: the next init aborts an open transaction. Returns None if the coordinator
        did not refuse.
        """
        if self._began is not None and not self._commit_sent:
            try:
                self._transaction.end(commit=False)
            except (Stopped, Unreachable, Broken) as error:
                log.warning("the abort failed", error=str(error), **self._who())
                return error if isinstance(error, Stopped) else None
        return None

    def _to_public_error(self, stopped: Stopped) -> Exception:
        """Return the exception for `stopped` that callers see: AttemptLost, or an error of eos.errors."""
        if stopped.answer is Answer.FENCED:
            return self._settle(stopped)
        refused = self._abort()
        if stopped.answer is Answer.RESTART:
            # The attempt failed for another reason, but its epoch may be outdated too. The abort then shows that.
            fenced = refused is not None and refused.answer is Answer.FENCED
            return self._settle(stopped) if fenced else AttemptLost(str(stopped), outcome_unknown=self._commit_sent)
        kind = NotAuthorised if stopped.answer is Answer.UNAUTHORISED else ConfigurationError
        return kind(self._describe_error(stopped))

    def _settle(self, error: Exception) -> Exception:
        """Return AttemptLost, unless another instance owns the epoch.

        The coordinator is queried, because an init would fence the newer instance.
        """
        connected = self._connection
        age_ms = 0.0 if self._began is None else (read_boot_clock() - self._began) * 1000
        reach = ownership.Progress.NOTHING if self._began is None else ownership.Progress.ACKNOWLEDGED
        situation = ownership.Situation(self._transaction.identity, reach, age_ms, connected.transaction_ms)
        try:
            with ClusterAdmin(self._options.settings) as admin:
                owner, answer = ownership.settle(situation, lambda: admin.describe(self._options.transactional_id))
        except EosError as unanswered:
            return Temporary(f"{self._describe_error(error)}, and the owner of the epoch is unknown ({unanswered})")
        if owner is ownership.Owner.OWN_TIMEOUT:
            return Temporary(
                f"{self._describe_error(error)}: the batch took longer than "
                f"transaction.timeout.ms={connected.transaction_ms} and the broker aborted it: raise that setting (the "
                f"broker's transaction.max.timeout.ms allows {connected.longest_ms}), or give the source smaller "
                "batches (maxOffsetsPerTrigger)"
            )
        # Without a group no check shows whether another driver is in the middle of its init.
        if owner in (ownership.Owner.NEWER, ownership.Owner.ABORTED_EARLY):
            newer = "" if answer is None else f" (epoch {answer.epoch} of producer {answer.producer_id} by now)"
            return Fenced(f"{self._describe_error(error)}: another query, or another run of this one, took over{newer}")
        return AttemptLost(f"{error}: {owner.value}", outcome_unknown=self._commit_sent)

    def _measure(self, step: str, call: Callable[[], T]) -> T:
        started = time.monotonic()
        try:
            return call()
        finally:
            self._seconds[step] = time.monotonic() - started

    def _describe_error(self, error: Exception) -> str:
        return f"{self._options.transactional_id}, {self._batch.name}: {error}"

    def _who(self) -> dict[str, Any]:
        identity = self._transaction.identity
        return {
            "batch": self._batch.name,
            "transactional_id": self._options.transactional_id,
            "producer_id": identity.producer_id,
            "epoch": identity.epoch,
        }

    def _progress(self, rows: int, results: Sequence[Result]) -> Progress:
        return Progress(
            transactional_id=self._options.transactional_id,
            batch=self._batch.name,
            rows=rows,
            bytes=sum(result.bytes for result in results),
            partitions=sum(result.partitions for result in results),
            tasks=len(results) if self._tasks_write else 0,
            resent=sum(result.retries for result in results),
            seconds=self._seconds,
            tasks_s=sum(result.seconds for result in results),
            waited_s=sum(result.waited for result in results),
        )


def _check(results: Sequence[Result], granted: frozenset[int]) -> None:
    """Raise Stopped or Unreachable unless every task that claimed a share wrote all of its rows."""
    for answer in (Answer.FENCED, Answer.UNAUTHORISED, Answer.REFUSED, Answer.RESTART):
        for result in results:
            if result.answer == answer.name:
                raise Stopped(answer, result.sentence or "")
    for result in results:
        if result.answer is not None:
            raise Unreachable(result.sentence)
        if result.rows != result.sequences:
            raise Stopped(Answer.RESTART, f"a task had {result.rows} rows and wrote {result.sequences} sequences")
    told = sorted(result.share for result in results)
    if told != sorted(granted):
        raise Stopped(Answer.RESTART, f"tasks claimed shares {sorted(granted)} and reported {told}")


def translate(error: Exception) -> Exception:
    """Return the public error for a failure outside an attempt's steps, such as one of kafka-python."""
    from pyspark.errors import PythonException

    if isinstance(error, PythonException):
        return find_missing_package(str(error)) or error
    if isinstance(error, AUTHORIZATION_ERRORS):
        return NotAuthorised(f"{type(error).__name__}: {error}")
    if isinstance(error, Stopped):
        kind = NotAuthorised if error.answer is Answer.UNAUTHORISED else ConfigurationError
        return kind(str(error))
    if isinstance(error, (Unreachable, Broken, kafka_errors.KafkaError)):
        return Unavailable(str(error))
    return error
