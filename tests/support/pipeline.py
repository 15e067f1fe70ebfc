"""Run real worker processes that consume, transform and produce on real Kafka, and judge the result.

There are two source topics with three partitions each, with markers and aborted records in them, and two destination
topics with three partitions each. Every input is copied to both. The expected outputs follow from the loader's delivery
reports, never from reading. `verify` checks every rule of eos.testing.checker. This module must never import a session:
workers are processes, as a user's are.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import random
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil
import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)

from eos.app.cells import parse_cell
from eos.broker import LocalKafka
from eos.errors import Unavailable
from eos.kafka.client.cluster import ClusterAdmin, TransactionalIdState
from eos.kafka.client.settings import Settings
from eos.testing.checker import CommitSeries, Counts, Inputs, Report, check
from eos.testing.history import ConcurrentReader, Log, committed_offsets, end_offsets, read_topic
from eos.testing.lineage import WIDTH_BYTES
from tests.suites.table import STATEFUL
from tests.support import forked
from tests.support.reading import (
    TooSlow,
    create_topics,
    set_group_session_timeout,
    settled_ends,
    transaction_of,
    wait_until,
)
from tests.support.stepping_worker import ATTEMPT, COUNT, Orders, counter_of

REPOSITORY = Path(__file__).parents[2]
PARTITIONS = 3
TAIL_BYTES = 6_000
TRANSACTION_TIMEOUT_MS = 3_000
SESSION_TIMEOUT_MS = 6_000
START_S = 30.0
END_S = 60.0
SETTLE_S = 15.0
FENCED = 79
RULES = {
    "no_duplicates",
    "no_losses",
    "no_unexpected_outputs",
    "order",
    "atomic",
    "atomic_transactions",
    "offsets_match_outputs",
    "no_aborted_seen",
    "stable_end",
    "no_rewind",
}
Place = tuple[str, int]


class WorkerProcess:
    """Own one real worker, whose stderr goes to a file; it ends with its pipeline, however the test ends."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        group: int | None = None,
        end_s: float = END_S,
    ) -> None:
        self.name, self._end_s = name, end_s
        self.log_path = directory / f"{name}.log"
        self._lines: queue.Queue[str] = queue.Queue()
        with self.log_path.open("wb") as log:
            self.process = forked.Popen[str](
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                cwd=REPOSITORY,
                text=True,
                group=group,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def final_output(self) -> str:
        """Return the last output of the command line, without the lines of the log."""
        return "\n".join(line for line in self.log.splitlines() if line.startswith("eos: "))

    def wait_line(self, wanted: str, timeout_s: float = START_S) -> None:
        """Wait until the worker prints this line, and drop the lines before it."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = self.running  # checked first, because an ended worker has printed everything
            try:
                if self._lines.get(timeout=0.05) == wanted:
                    return
            except queue.Empty:
                assert running, f"{self.name} ended with {self.process.returncode} before it printed {wanted!r}"
                if time.monotonic() >= deadline:
                    raise TooSlow(f"{self.name} did not print {wanted!r} within {timeout_s} s") from None

    def wait_at(self, step: str, nth: int, timeout_s: float = START_S) -> None:
        """Wait until the worker holds at the n-th occurrence of this step."""
        self.wait_line(f"AT {step} {nth}", timeout_s)

    def release(self) -> None:
        """Let the worker continue from the step at which it holds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_log(self, text: str, timeout_s: float = START_S, count: int = 1) -> None:
        def is_logged() -> bool:
            running = self.running  # checked first, because an ended worker has written all of its log
            found_enough = self.log.count(text) >= count
            assert found_enough or running, f"{self.name} ended with {self.process.returncode} without {text!r}"
            return found_enough

        wait_until(f"{self.name} logs {text!r}", is_logged, timeout_s)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end. The worker must have been alive, because killing a dead one tests
        nothing."""
        assert self.running, f"{self.name} had ended with {self.process.returncode} before it was killed"
        self.process.kill()
        assert self.process.wait(10) == -signal.SIGKILL

    def pause(self) -> None:
        """Send SIGSTOP and wait until all threads are stopped."""
        self.process.send_signal(signal.SIGSTOP)
        wait_until(f"{self.name} is stopped", lambda: psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send one SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code."""
        try:
            return self.process.wait(timeout_s or self._end_s)
        except subprocess.TimeoutExpired as error:
            raise TooSlow(f"{self.name} did not end within {error.timeout} s") from None

    def assert_ended(self, code: int, *is_logged: str) -> None:
        """Check the exit code and a single sentence that contains each of `said`, without a traceback of eos."""
        assert self.wait() == code, self.final_output
        for part in is_logged:
            assert part in self.final_output, f"{part!r} is missing in: {self.final_output}"
        assert "internal error" not in self.log

    def end(self) -> None:
        if self.running:
            self.process.kill()
            self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


class CommitWatcher:
    """Read the group's stable committed offsets continuously in a thread, for the rule `no_rewind`."""

    def __init__(self, servers: str, group: str, places: Sequence[Place], interval_s: float = 0.05) -> None:
        self._group, self._places, self._interval_s = group, list(places), interval_s
        self._settings = {
            "bootstrap.servers": servers,
            "group.id": group,
            "isolation.level": "read_committed",
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
        self._seen: list[tuple[str, int, int]] = []
        self._stopping = threading.Event()
        self._reads = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        consumer = Consumer(self._settings)
        last: dict[Place, int] = {}
        try:
            while not self._stopping.wait(self._interval_s):
                try:
                    found = consumer.committed([TopicPartition(*p) for p in self._places], timeout=2.0)
                except KafkaException:
                    continue  # a transaction is open on the offsets, or a broker is down: read them again
                if any(at.error is not None for at in found):
                    continue
                self._reads += 1
                for at in found:
                    if last.get((at.topic, at.partition)) != at.offset:
                        last[at.topic, at.partition] = at.offset
                        self._seen.append((at.topic, at.partition, max(at.offset, -1)))
        finally:
            consumer.close()

    def read_offsets(self, places: Sequence[Place]) -> None:
        self._places = [*self._places, *places]

    def wait_for_next_read(self) -> None:
        reads = self._reads
        wait_until("another read of the committed offsets", lambda: self._reads >= reads + 2, 20)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)

    def series(self, topics: tuple[str, ...]) -> CommitSeries:
        seen = list(self._seen)
        return CommitSeries(
            topics=topics,
            topic=np.array([topics.index(topic) for topic, _, _ in seen], np.int32),
            partition=np.array([partition for _, partition, _ in seen], np.int32),
            offset=np.array([offset for _, _, offset in seen], np.int64),
        )


class Pipeline:
    """Own the topics, input, workers and judgement of one run; every name starts with `prefix`."""

    def __init__(
        self, kafka: LocalKafka, prefix: str, directory: Path, replicas: int = 1, stateful: bool = False
    ) -> None:
        self.kafka, self.app, self.directory, self.stateful = kafka, prefix, directory, stateful
        self.servers = kafka.bootstrap_servers
        self.sources = [f"{prefix}-in-a", f"{prefix}-in-b"]
        self.later = [f"{prefix}-in-c", f"{prefix}-in-d", f"{prefix}-in-e"]
        """Source topics that do not exist yet, in the order in which `add_source` creates them."""
        self.pattern = f"^{prefix}-in-.*"
        self.destinations = [f"{prefix}-out-a", f"{prefix}-out-b"]
        self.workers: list[WorkerProcess] = []
        self._attempts: list[Path] = []
        self._loaded: list[tuple[int, int, int]] = []
        self._loader: Producer | None = None
        self._cluster: ClusterAdmin | None = None
        self.admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        topics = [*self.sources, *self.destinations]
        create_topics(self.servers, [NewTopic(topic, PARTITIONS, replicas) for topic in topics])
        self._commits = CommitWatcher(self.servers, self.app, [(t, p) for t in self.sources for p in range(PARTITIONS)])
        self._replicas = replicas
        self._reader = ConcurrentReader(self.servers, self.destinations, {"log_level": 0})
        self._reader.start()

    # ---- input --------------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> int:
        return len(self._loaded)

    def record(self, place: Place, number: int) -> tuple[str, int, int]:
        """Return (topic, partition, offset) of the n-th loaded record of a partition, counted from 0."""
        here = [o for t, p, o in sorted(self._loaded) if (self.sources[t], p) == place]
        return (*place, here[number])

    def add_partition(self, topic: str) -> Place:
        """Add a partition to a source; the loader must learn of it too."""
        place = (topic, len(self.admin.list_topics(topic, timeout=10).topics[topic].partitions))
        self.admin.create_partitions([NewPartitions(topic, place[1] + 1)])[topic].result(10)

        def has_leader() -> bool:
            known = self.admin.list_topics(topic, timeout=10).topics[topic].partitions
            return place[1] in known and known[place[1]].leader >= 0

        wait_until(f"a leader of {place}", has_leader)
        self._loader = None
        return place

    def add_source(self) -> list[Place]:
        """Create one more source topic and its partitions."""
        topic = self.later.pop(0)
        create_topics(self.servers, [NewTopic(topic, PARTITIONS, self._replicas)])
        self.sources.append(topic)
        places = [(topic, partition) for partition in range(PARTITIONS)]
        self._commits.read_offsets(places)
        self._loader = None
        return places

    def skip_loaded(self) -> None:
        """Expect nothing for the records loaded so far (`auto.offset.reset=latest`)."""
        self._loaded = []

    def load(self, records: int, transactions: int = 6) -> None:
        """Load committed transactions with aborted ones between them, so that the log has markers and gaps."""
        assert records >= transactions
        sizes = [len(part) for part in np.array_split(range(records), transactions)]
        for number, size in enumerate(sizes):
            self.load_transaction(size)
            if number % 3 == 1:
                self.load_transaction(20, commit=False)

    def load_transaction(self, records: int, commit: bool = True, places: Sequence[Place] | None = None) -> None:
        """Load one transaction of `records` input records, round robin over `places` (default: all source
        partitions)."""
        producer = self._input_producer()
        placed: list[tuple[int, int, int]] = []
        failed: list[KafkaError] = []
        where = places or [(topic, partition) for partition in range(PARTITIONS) for topic in self.sources]

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                failed.append(error)
            else:
                placed.append((self.sources.index(message.topic()), message.partition(), message.offset()))

        producer.begin_transaction()
        for number in range(records):
            topic, partition = where[number % len(where)]
            key = f"key {number % 50}".encode()
            producer.produce(topic, b"input", key, partition=partition, on_delivery=delivered)
        assert producer.flush(30) == 0
        assert not failed, f"loading failed: {failed[0]}"
        assert len(placed) == records
        if commit:
            producer.commit_transaction(30)
            self._loaded += placed
        else:
            producer.abort_transaction(30)

    def _input_producer(self) -> Producer:
        if self._loader is None:
            self._loader = Producer(
                {"bootstrap.servers": self.servers, "transactional.id": f"{self.app}-loader", "linger.ms": 1}
            )
            self._loader.init_transactions(30)
        return self._loader

    def inputs(self) -> Inputs:
        """Return the committed inputs as the loader knows them, each with the transaction that handled it last."""
        last = {(t, p, offset): transaction for _, transaction, t, p, offset in sorted(self._all_attempts())}
        table = np.array(self._loaded, np.int64).reshape(-1, 3)
        return Inputs(
            topics=tuple(self.sources),
            topic=table[:, 0].astype(np.int32),
            partition=table[:, 1].astype(np.int32),
            offset=table[:, 2],
            transaction=np.array([last.get(place, -1) for place in self._loaded], np.int64),
        )

    def _all_attempts(self) -> list[tuple[int, int, int, int, int]]:
        found: list[tuple[int, int, int, int, int]] = []
        for path in self._attempts:
            written = path.read_bytes() if path.exists() else b""
            whole = len(written) // ATTEMPT.size * ATTEMPT.size
            found += ATTEMPT.iter_unpack(written[:whole])
        return found

    # ---- workers ------------------------------------------------------------------------------------------------

    def worker(
        self,
        instance: str = "one",
        *,
        servers: str | None = None,
        settings: Mapping[str, object] | None = None,
        until_end: bool = False,
        **orders: object,
    ) -> WorkerProcess:
        """Start a real worker on this pipeline's App; `orders` are fields of stepping_worker.Orders."""
        number = len(self.workers) + 1
        name = f"worker-{number}-{instance}"
        attempts = self.directory / f"{name}.attempts"
        self._attempts.append(attempts)
        values: dict[str, object] = {
            "bootstrap.servers": servers or self.servers,
            "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
            "eos.transaction.interval.ms": 50,
            "eos.transaction.max.records": 200,
        } | dict(settings or {})
        if self.stateful:
            values = {"eos.state.dir": self.directory / "state"} | values
        if values.get("group.protocol", "classic") == "classic":
            values = {"session.timeout.ms": SESSION_TIMEOUT_MS, "heartbeat.interval.ms": 500} | values
        order = Orders(
            app=self.app,
            instance=instance,
            sources=self.sources,
            later=self.later,
            destinations=self.destinations,
            settings={name: str(value) for name, value in values.items()},
            attempts=str(attempts),
            first_transaction=number * 1_000_000,
            until_end=until_end,
            stateful=self.stateful,
            **orders,  # type: ignore[arg-type]
        )
        environment = {"EOS_STEPPING": json.dumps(dataclasses.asdict(order))}
        return self._start(name, ["tests.support.stepping_worker"], environment)

    def eos(self, *arguments: str, name: str = "eos") -> WorkerProcess:
        """Start the `eos` program itself."""
        return self._start(f"{name}-{len(self.workers) + 1}", ["eos", *arguments], {})

    def program(
        self,
        text: str,
        *arguments: str,
        sources: Sequence[str] | None = None,
        destinations: Sequence[str] | None = None,
    ) -> WorkerProcess:
        """Run `eos run` with an App in a file, as a user would."""
        path = self.directory / "program.py"
        topics = {"sources": list(sources or self.sources), "destinations": list(destinations or self.destinations)}
        path.write_text(text.format(app=self.app, **topics))
        given = () if "--bootstrap-servers" in arguments else ("--bootstrap-servers", self.servers)
        return self.eos("run", f"{path}:app", "--instance", "one", *given, *arguments)

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> WorkerProcess:
        process = WorkerProcess(name, command, environment, self.directory)
        self.workers.append(process)
        return process

    def finish(self, instance: str = "one", **options: object) -> None:
        """Run a worker until the end of its input, and check that it succeeds."""
        code = self.worker(instance, until_end=True, **options).wait()  # type: ignore[arg-type]
        assert code == 0, f"the last worker ended with {code}: {self.workers[-1].final_output}"

    # ---- contents of Kafka ----------------------------------------------------------------------------------------

    def transactional_ids(self, instance: str = "one") -> list[str]:
        """Return the ids that a worker may use: before 4.0, a replaced producer continues under the second one."""
        return [f"{self.app}-{instance}", f"{self.app}-{instance}-alternate"]

    def describe(self, instance: str = "one") -> list[TransactionalIdState]:
        """Return the worker's ids as the coordinator describes them to an outside client."""
        return list(self._described(instance).values())

    def _described(self, instance: str) -> dict[str, TransactionalIdState]:
        if self._cluster is None:
            self._cluster = ClusterAdmin(Settings({"bootstrap.servers": self.servers}))
        answers = {name: self._cluster.describe(name) for name in self.transactional_ids(instance)}
        found = {name: answer for name, answer in answers.items() if answer is not None}
        assert found, f"the coordinator knows none of {list(answers)}"
        return found

    def open_partitions(self, instance: str = "one") -> list[Place]:
        """Return the partitions of the worker's open transaction, including that of the group's offsets."""
        names = [name for name, found in self._described(instance).items() if found.state == "Ongoing"]
        return [place for name in names for place in transaction_of(self.servers, name).partitions]

    def wait_state(self, *states: str, instance: str = "one", timeout_s: float = 15.0) -> TransactionalIdState:
        """Wait until one of the worker's ids is in one of these states."""

        def reached() -> TransactionalIdState | None:
            return next((found for found in self.describe(instance) if found.state in states), None)

        return wait_until(f"instance {instance} in state {' or '.join(states)}", reached, timeout_s)

    def wait_not_open(self, instance: str = "one", timeout_s: float = 15.0) -> None:
        """Wait until no transaction of the worker is open: it has ended or is ending."""
        ended = {"Empty", "PrepareCommit", "CompleteCommit", "CompleteAbort"}
        wait_until(
            f"no open transaction of instance {instance}",
            lambda: all(found.state in ended for found in self.describe(instance)),
            timeout_s,
        )

    def members(self) -> list[str]:
        """Return the ids of the group's members, for either protocol."""
        described = self.admin.describe_consumer_groups([self.app])[self.app].result(10)
        return [member.member_id for member in described.members]

    def wait_members(self, count: int, timeout_s: float = 30.0) -> None:
        wait_until(f"{count} members in the group", lambda: len(self.members()) == count, timeout_s)

    def wait_stable(self, timeout_s: float = 30.0) -> None:
        """Wait until the members of the group have their assignments and no rebalance is going on."""

        def stable() -> bool:
            described = self.admin.describe_consumer_groups([self.app])[self.app].result(10)
            return bool(described.state == ConsumerGroupState.STABLE)

        wait_until("a stable group", stable, timeout_s)

    def committed(self) -> dict[Place, int]:
        return committed_offsets(self.servers, self.app, self.sources)

    def wait_handled(self, records: int, timeout_s: float = END_S) -> None:
        """Wait until at least `count` input records have outputs that the concurrent reader received."""
        fan_out = len(self.destinations)
        try:
            self._reader.wait_for_records(records * fan_out, timeout_s)
            return
        except Unavailable as error:
            slow = TooSlow(str(error))
        # Do this after the `except`, so that a violation does not look like a timeout.
        ended = {w.name: w.process.returncode for w in self.workers if not w.running}
        assert len(ended) < len(self.workers), f"no worker is left to handle them: {ended}"
        strange = {name: code for name, code in ended.items() if code not in (0, -signal.SIGKILL, FENCED)}
        assert not strange, f"workers ended: {strange}"
        committed = self.committed()
        handled = sum(offset < committed.get((self.sources[topic], p), 0) for topic, p, offset in self._loaded)
        with suppress(Unavailable):  # A commit becomes visible a moment after its offsets.
            self._reader.wait_for_records(handled * fan_out, SETTLE_S)
        assert self.delivered >= handled * fan_out, f"{handled} inputs are committed, {self.delivered} outputs visible"
        raise slow

    @property
    def delivered(self) -> int:
        """Return how many output records the read_committed reader has received."""
        return self._reader.records

    def settle(self) -> None:
        settled_ends(self.servers, [*self.sources, *self.destinations], SETTLE_S)

    def delete_before(self, place: Place, offset: int) -> None:
        self.admin.delete_records([TopicPartition(*place, offset)])[TopicPartition(*place, offset)].result(30)

    def earliest(self, place: Place) -> int:
        wanted = {TopicPartition(*place): OffsetSpec.earliest()}
        return int(self.admin.list_offsets(wanted)[TopicPartition(*place)].result(10).offset)

    def set_group_session_timeout(self, timeout_ms: int) -> None:
        set_group_session_timeout(self.servers, self.app, timeout_ms)

    # ---- judgement -------------------------------------------------------------------------------------------------

    def verify(self, complete: bool = True) -> Report:
        """Check every rule on the contents of Kafka, and raise AssertionError for the first violation.

        `complete`: every loaded record must be handled; otherwise only committed offsets and visible outputs must
        agree.
        """
        try:
            self.settle()
        except TooSlow as error:
            raise AssertionError(f"transactions hang: {error}") from None
        written = read_topic(self.servers, self.destinations)
        outputs = written.outputs()
        ends = end_offsets(self.servers, [*self.sources, *self.destinations])
        self._reader.wait_for_ends({p: e for p, e in ends.stable.items() if p[0] in self.destinations and e > 0})
        self._commits.wait_for_next_read()
        report = check(
            self.inputs(),
            outputs,
            fan_out=len(self.destinations),
            committed=self.committed(),
            complete=complete,
            ends=ends,
            seen=self._reader.collect_outputs(),
            commits=self._commits.series(tuple(self.sources)),
            counts=counts_of(written, self._changelogs()) if self.stateful else None,
        )
        assert {v.rule for v in report.verdicts} == RULES | ({"state"} if self.stateful else set())
        report.raise_if_violated()
        if complete:
            assert len(outputs) == len(self.destinations) * self.loaded
        return report

    def _changelogs(self) -> list[Log]:
        functions = map(counter_of, range(len(self.sources)))
        return [read_topic(self.servers, f"{self.app}-{function}-changelog") for function in functions]

    # ---- life --------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        for worker in self.workers:
            worker.end()
        if self._cluster is not None:
            self._cluster.close()
        self._commits.stop()
        self._reader.__exit__(None, None, None)

    def print_logs(self) -> None:
        """Print the paths and ends of the logs; pytest shows them when a test fails."""
        nodes = 3 if len(self.servers.split(",")) == 3 else 1
        for node in range(nodes):
            print(f"broker {node}: {self.kafka.log_path(node)}")
        for worker in self.workers:
            print(f"--- {worker.name} (exit code {worker.process.returncode}): {worker.log_path}")
            print(worker.log[-TAIL_BYTES:])


def counts_of(
    outputs: Log,
    changelogs: Sequence[Log],
    partition_of: Callable[[int, bytes], int] = lambda partition, key: partition,
) -> Counts:
    """Return the counts after each output's stamp, and the values in the changelogs, of which the n-th belongs to
    the n-th source.

    `partition_of`: returns the source's partition for a partition and key of the changelog.
    """
    told = [COUNT.unpack_from(value or b"", WIDTH_BYTES)[0] for value in outputs.values]
    kept: dict[tuple[int, int, bytes | None], int] = {}
    for source, changes in enumerate(changelogs):
        for partition, cell, value in zip(changes.partition, changes.keys, changes.values, strict=True):
            store, key, _ = parse_cell(cell or b"")
            if not store:
                continue  # the task's own header
            kept[source, partition_of(int(partition), key), key] = int(value or b"")
    return Counts(keys=outputs.keys, reported=np.array(told, np.int64), final=kept)


class Pipelines:
    """Create pipelines for one test, and end them all."""

    def __init__(self, names: Callable[[str], str], directory: Path, stateful: bool) -> None:
        self._names, self._directory, self.stateful = names, directory, stateful
        self._made: list[Pipeline] = []

    def on(self, kafka: LocalKafka, records: int = 0, replicas: int = 1) -> Pipeline:
        """Create a pipeline with this many records to handle."""
        number = len(self._made)
        directory = self._directory / f"pipeline-{number}"
        directory.mkdir()
        # Use only the end of the name, which is unique. The test's name would make every log line long.
        name = "-".join(self._names(f"p{number}").split("-")[-2:])
        pipeline = Pipeline(kafka, name, directory, replicas, self.stateful)
        self._made.append(pipeline)
        if records:
            pipeline.load(records)
        return pipeline

    def __enter__(self) -> Pipelines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipeline in self._made:
            pipeline.end()
            pipeline.print_logs()


@pytest.fixture
def pipelines(names: Callable[[str], str], tmp_path: Path) -> Iterator[Pipelines]:
    """Create pipelines for this test; the logs of their workers and brokers are shown when it fails."""
    with Pipelines(names, tmp_path, STATEFUL in os.environ) as made:
        yield made


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Return a random generator whose seed is shown when the test fails; EOS_TEST_SEED repeats it."""
    given = os.environ.get("EOS_TEST_SEED")
    seed = int(given) if given else zlib.crc32(os.urandom(8))
    print(f"EOS_TEST_SEED={seed} for {request.node.name}")
    return random.Random(seed)
