"""Run one cell: topics, a steady input, real workers in one or three stages, faults, and the judgement.

There are at least 100,000 records and five faults. A read_committed reader runs all the time, and everything is read
again at the end. The expected outputs come from the complete input topic, which must contain everything that the loader
saw acknowledged.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from eos.errors import EosError
from eos.shim.faults import Plan
from eos.testing.checker import CommitSeries, Counts, Inputs, Outputs, Position, Report, Verdict, check, verdict
from eos.testing.clusters import Cluster
from eos.testing.history import ConcurrentReader, Log, committed_offsets, end_offsets, read_topic
from eos.testing.shim import ShimThread
from tests.containers.matrix.breakages import ALL
from tests.containers.matrix.cells import FAULTS, LEADERLESS, STEPS, TARGETS, Cell
from tests.containers.matrix.explain import count_in_transaction, explain
from tests.containers.matrix.faults import (
    OUTLASTS_S,
    SESSION_TIMEOUT_S,
    STILL_LEADER_S,
    TRANSACTION_TIMEOUT_S,
    Faults,
)
from tests.containers.matrix.stage_worker import Orders
from tests.containers.matrix.transaction_log import Written, fenced_state, read_transaction_log
from tests.containers.matrix.workers import Member, Workers
from tests.support.pipeline import CommitWatcher, WorkerProcess, counts_of
from tests.support.reading import TooSlow, wait_until

PARTITIONS = 6
KEYS = 600
FAN_OUT = 2
RECORDS_PER_S = 1_000
WORK_MS = 0.3
PROGRESS_S = 180.0
END_S = 300.0
_LAST_MARKERS = 16
QUIET_S = 30.0  # the transaction timeout, and time for the coordinator to find expired transactions
SETTLED_S = 40.0
EVERY_FAULT = [*itertools.product(FAULTS, TARGETS), ("move", "transaction-coordinator")]
HELD_AT = 5  # the occurrence of a step at which a worker is held, in the middle of its work


@dataclass
class Size:
    """Set the size of a cell: one for CI and the whole matrix, and a smaller one for breakages.

    `minutes`: faults continue for this long, however many that makes.
    """

    records: int = 100_000
    faults: int = 5
    minutes: float = 0.0
    records_per_s: int = RECORDS_PER_S

    def rounds(self) -> Iterator[int]:
        """Yield the numbers of the faults to cause."""
        until = time.monotonic() + self.minutes * 60
        number = 0
        while number < self.faults or time.monotonic() < until:
            yield number
            number += 1


@dataclass
class Outcome:
    """Hold the result of a run. `sentence` is for the table."""

    report: Report
    records: int
    faults: list[str]
    restarts: list[str]
    phases: dict[str, float]  # seconds of each recovery, in order
    slow: list[str]  # brokers that were slow to start
    explanation: str = ""
    in_transaction: int = 0  # faults during an open transaction of a worker that they could hit
    steps_hit: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.report.ok


class Phases:
    """Measure the duration of each part of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._since, 1)
        self._since = now


class Loader:
    """Load numbered records in a thread at a steady rate, whatever happens to the brokers, until told to end."""

    def __init__(self, servers: str, topic: str, size: Size) -> None:
        self._topic, self._least, self._per_s = topic, size.records, size.records_per_s
        self._producer = Producer(
            {
                "bootstrap.servers": servers,
                # The producer is not idempotent: an idempotent one spins while it waits for slow brokers
                # (confluentinc/librdkafka#3692, seen with 2.16), and would take up to two cores from the workers and
                # brokers. Duplicate inputs do no harm, because the expected outputs come from the topic.
                "enable.idempotence": False,
                "acks": "all",
                "linger.ms": 200,
                "message.timeout.ms": 300_000,
                "log_level": 0,
            }
        )
        self.acknowledged: list[tuple[int, int]] = []
        self.failed: list[str] = []
        self._enough = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number, began = 0, time.monotonic()
        while not (self._given_up or (self._enough.is_set() and number >= self._least)):
            # Once enough is loaded, load the rest of the minimum as fast as possible.
            due = self._least if self._enough.is_set() else int((time.monotonic() - began) * self._per_s)
            while number < due:
                try:
                    self._producer.produce(
                        self._topic, b"input", b"key %d" % (number % KEYS), number % PARTITIONS, self._delivered
                    )
                    number += 1
                except BufferError:
                    self._producer.poll(0.1)
                    if self._given_up:
                        return
            self._producer.poll(0.01)
        if self._given_up:
            return
        left = self._producer.flush(300)
        if left:
            self.failed.append(f"{left} records were never acknowledged")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(error.str())
        else:
            self.acknowledged.append((message.partition() or 0, message.offset() or 0))

    def give_up(self) -> None:
        """Stop loading, because the run is over."""
        self._given_up = True
        self._thread.join(10)

    def finish(self) -> int:
        """Wait until the minimum is loaded, and return how many records were acknowledged."""
        self._enough.set()
        self._thread.join(400)
        if self._thread.is_alive():
            raise TooSlow("the loader did not end within 400 s")
        assert not self.failed, f"loading failed: {self.failed[0]}"
        return len(self.acknowledged)


class Run:
    """Run one cell on one cluster; every name starts with `prefix`."""

    def __init__(
        self,
        cluster: Cluster,
        cell: Cell,
        seed: int,
        prefix: str,
        directory: Path,
        breakage: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster, self._cell, self._directory = cluster, cell, directory
        self._breakage, self._breakage_name = ALL[breakage] if breakage else None, breakage
        self._settings = settings or {}
        self._chance = random.Random(f"{cell.name} {seed}")
        self._servers = self._workers_servers = cluster.bootstrap_servers
        middle = [f"{prefix}-middle-{stage}" for stage in range(1, cell.stages)]
        self._outputs = [f"{prefix}-out-{copy}" for copy in range(FAN_OUT)]
        self._sources = [f"{prefix}-in", *middle]
        self._groups = [f"{prefix}-stage-{stage}" for stage in range(cell.stages)]
        self.workers = Workers(self._orders, directory)
        self.faults = Faults(cluster, self.workers, self._chance, self._tend)
        self._steps_hit: list[str] = []
        self._reader: ConcurrentReader | None = None

    @property
    def outputs_seen(self) -> int:
        """Return how many outputs the read_committed reader has received."""
        return self._reader.records if self._reader is not None else 0

    @property
    def topics(self) -> list[str]:
        return [*self._sources, *self._outputs]

    def _orders(self, stage: int, instance: str) -> Orders:
        last = stage == self._cell.stages - 1
        settings = {
            "bootstrap.servers": self._workers_servers,
            "group.protocol": self._cell.group_protocol,
            "transaction.timeout.ms": f"{TRANSACTION_TIMEOUT_S * 1000:.0f}",
            # On 2 cores, a commit to three brokers takes 100 to 300 ms; with such intervals a cell would only wait.
            "eos.transaction.interval.ms": "300",
            # A transaction sends all its records in its flush. With a request unanswered, librdkafka's idempotent
            # producer spins as soon as more records are due (confluentinc/librdkafka#4989), and six spinning workers
            # during a pause of a broker leave nothing of 2 cores to the others.
            "linger.ms": "1000",
            "eos.state.dir": str(self._directory / "state"),
        }
        if self._cell.group_protocol == "classic":
            settings |= {
                "session.timeout.ms": f"{SESSION_TIMEOUT_S * 1000:.0f}",
                "heartbeat.interval.ms": "1000",
                # One of the two default strategies, chosen by the cell's seed.
                "partition.assignment.strategy": "cooperative-sticky" if self._cell.stages == 3 else "roundrobin",
            }
        settings |= self._settings
        if self._breakage is not None:
            settings |= self._breakage.settings
        return Orders(
            group=self._groups[stage],
            instance=instance,
            source=self._sources[stage],
            destinations=self._outputs if last else [self._sources[stage + 1]],
            settings=settings,
            step_log="",
            first=stage == 0,
            state=last and self._cell.state,
            # With this work per record, a transaction is open about half of the time, and half of the faults hit one.
            work_ms=(self._breakage and self._breakage.work_ms) or WORK_MS,
            breakage=self._breakage_name,
        )

    def play(self, size: Size) -> Outcome:
        """Run the cell. Raise AssertionError if a worker or the loader ended unexpectedly, or if nothing progressed."""
        phases = Phases()
        self._create_topics()
        commits = self._commit_watchers()
        self._reader = reader = ConcurrentReader(self._servers, self._outputs, {"log_level": 0})
        try:
            with reader, ExitStack() as ending:
                plan = self._plan(ending)
                for stage in range(self._cell.stages):
                    for instance in ("a", "b"):
                        self.workers.join(stage, instance)
                self.workers.wait_running()
                phases.end("begin")
                loader = Loader(self._servers, self._sources[0], size)
                ending.callback(loader.give_up)
                for number in size.rounds():
                    self._wait_progress(reader, 1_000)
                    if number % 2 == 1 and self._cell.fault != "join":
                        self._change_members(number)
                    # A commit showed the progress, so immediate faults would all fall between two transactions.
                    self._tend(self._chance.uniform(0, 1))
                    self._fault(number)
                self._cluster.repair()
                phases.end("faults")
                loaded = loader.finish()
                self._wait_handled(reader, loaded * FAN_OUT)
                phases.end("handle")
                self.workers.stop(*self.workers.wanted)
                phases.end("stop")
                complaints = plan.complaints() if plan is not None else ()
                assert not complaints, f"planned request faults did not happen: {'; '.join(complaints)}"
                return self._judge(loader, reader, commits, phases)
        finally:
            self.workers.end()
            for watcher in commits:
                watcher.stop()

    def _commit_watchers(self) -> list[CommitWatcher]:
        """Return one watcher per stage; together they query as often as a single one."""
        stages = zip(self._groups, self._sources, strict=True)
        interval_s = 0.05 * self._cell.stages
        return [
            CommitWatcher(self._servers, group, [(source, p) for p in range(PARTITIONS)], interval_s)
            for group, source in stages
        ]

    def _plan(self, ending: ExitStack) -> Plan | None:
        """Return the planned faults on the workers' requests, which only some breakages have."""
        if self._breakage is None or self._breakage.requests is None:
            return None
        plan = Plan(list(self._breakage.requests(f"{self._groups[0]}-a")))
        self._workers_servers = ending.enter_context(ShimThread(self._servers, plan)).bootstrap_servers
        return plan

    def _create_topics(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._servers, "log_level": 0})
        replicas = min(3, self._cluster.size)
        config = {"min.insync.replicas": str(min(2, replicas))}
        topics = [NewTopic(t, PARTITIONS, replicas, config=config) for t in self.topics]
        if self._cell.column == "K19":
            # Each partition has a single replica, so that no broker can take over while its node is down.
            alone = [[p % self._cluster.size] for p in range(PARTITIONS)]
            one = {"min.insync.replicas": "1"}
            topics[-1] = NewTopic(self._outputs[-1], PARTITIONS, replica_assignment=alone, config=one)
        for future in admin.create_topics(topics).values():
            future.result(30)
        for topic in self.topics:
            for partition in range(PARTITIONS):
                wait_until(
                    f"a leader of {topic}[{partition}]",
                    lambda topic=topic, partition=partition: self._cluster.leader_of(topic, partition) >= 0,  # type: ignore[misc]
                )

    # ---- during the run
    # -----------------------------------------------------------------------------------------------

    def _tend(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.workers.tend()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.2, left))

    def _wait(self, done: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() >= deadline:
                raise TooSlow(f"not within {timeout_s:.0f} s: {what()}")
            self._tend(0.2)

    def _wait_handled(self, reader: ConcurrentReader, outputs: int) -> None:
        """Wait until the expected number of outputs came and everything is committed.

        Stop as well when everything is committed and nothing came for longer than a transaction can be open: some
        outputs are lost then, and the checker names them.
        """
        last, since, next_check = reader.records, time.monotonic(), 0.0

        def done() -> bool:
            nonlocal last, since, next_check
            now = time.monotonic()
            if reader.records != last:
                last, since = reader.records, now
            quiet = now - since > QUIET_S
            if not (last >= outputs or quiet) or now < next_check:
                return False
            next_check = now + 1
            return (last >= outputs and quiet) or self._all_committed()

        self._wait(done, END_S, lambda: f"{reader.records} of {outputs} outputs; {self._story()}")

    def _all_committed(self) -> bool:
        try:
            return not any(self._has_lag(stage, _LAST_MARKERS if stage else 0) for stage in range(self._cell.stages))
        except EosError:
            return False  # A transaction is open on the offsets, or a broker is down: query again.

    def _has_lag(self, stage: int, few: int) -> bool:
        """Return whether a partition of the stage's source is committed more than a few offsets before its end.

        The last offsets of an intermediate topic are markers, which its readers need not commit.
        """
        source = self._sources[stage]
        committed = committed_offsets(self._servers, self._groups[stage], source)
        ends = end_offsets(self._servers, source).stable
        return any(end > 0 and committed.get(place, 0) + few < end for place, end in ends.items())

    def _wait_progress(self, reader: ConcurrentReader, records: int) -> None:
        """Wait for more visible outputs, which show that the run has recovered from the previous faults."""
        before = reader.records
        self._wait(
            lambda: reader.records >= before + records,
            PROGRESS_S,
            lambda: f"{reader.records - before} of {records} outputs came; {self._story()}",
        )

    def _story(self) -> str:
        """Return the story of the run for the message about a run that makes no progress."""
        lines = [f"faults: {', '.join(map(str, self.faults.made)) or 'none'}", *self.faults.slow]
        states = [f"{m.process.name}: {_last_line(m.process)}" for m in self.workers.wanted if m.process is not None]
        return "; ".join([*lines, *states])

    def _change_members(self, number: int) -> Member:
        """Let a third member join a stage or leave it, and return this member."""
        guests = [m for m in self.workers.wanted if m.instance.startswith("guest")]
        if guests:
            self.workers.stop(guests[0])
            return guests[0]
        return self.workers.join(self._chance.randrange(self._cell.stages), f"guest-{number}")

    def _fault(self, number: int) -> None:
        fault, target = self._cell.fault, self._cell.target
        if fault == "random":
            fault, target = self._chance.choice(EVERY_FAULT)
            if fault == "cut" and self._cluster.backend == "jvm":
                fault = "pause"
        if fault == "move":
            self._move_coordinator(STEPS[number % len(STEPS)])
        elif fault == "join":
            guest = self._change_members(number)
            self.faults.note(f"{guest.name} {'joins' if guest.wanted else 'leaves'}")
            if guest.wanted and guest.process is not None:
                guest.process.wait_log("partitions assigned", PROGRESS_S)
        elif " at " in fault:
            self._hit_at(*fault.split(" at "))
        elif self._cell.column == "K19":
            node, why = self._chance.randrange(self._cluster.size), f"the only replica of parts of {self._outputs[-1]}"
            if fault == LEADERLESS:
                self.faults.hit_node("stop", node, why)
            else:
                self.faults.hit_node("pause", node, why, self._chance.uniform(*STILL_LEADER_S))
        elif target == "worker":
            self.faults.hit_worker(fault)
        else:
            node, why = self._node_of(target)
            self.faults.hit_node(fault, node, why)

    def _node_of(self, target: str) -> tuple[int, str]:
        cluster, chance = self._cluster, self._chance
        if target == "controller":
            return cluster.controller(), "the controller"
        if target == "leader":
            topic, partition = chance.choice(self.topics), chance.randrange(PARTITIONS)

            def led() -> tuple[int] | None:
                # None for a moment while the previous member restarts.
                node = cluster.leader_of(topic, partition)
                return (node,) if node >= 0 else None

            (leader,) = wait_until("a leader to hit", led, PROGRESS_S)
            return leader, f"leader of {topic}[{partition}]"
        stage = chance.randrange(self._cell.stages)
        group = self._groups[stage]
        if target == "group-coordinator":
            return cluster.coordinator_of(group=group), f"coordinator of group {group}"
        name = f"{group}-{chance.choice('ab')}"
        return cluster.coordinator_of(transactional_id=name), f"coordinator of {name}"

    def _hold_at(self, step: str) -> tuple[Member, str]:
        """Return a worker that holds at this step of a transaction, and the transactional.id of this transaction."""
        member = self.workers.wanted[0]
        self.workers.kill(member)
        self.workers.start(member, holds=[(step, HELD_AT)])

        def process() -> WorkerProcess:
            # This is another process if the first one ended with an expected exit code. It is held too.
            assert member.process is not None
            return member.process

        def transactional_id_file() -> Path:
            return self._directory / f"{process().name}.steps.held"

        self._wait(
            lambda: transactional_id_file().exists(),
            PROGRESS_S,
            lambda: f"{process().name} at {step!r}; {self._story()}",
        )
        process().wait_at(step, HELD_AT, PROGRESS_S)
        member.changes = {}
        return member, transactional_id_file().read_text()

    def _hit_at(self, fault: str, step: str) -> None:
        """Kill a worker at this step of a transaction, or pause it for longer than its session."""
        member, name = self._hold_at(step)
        assert member.process is not None
        if fault == "kill":
            self.workers.kill(member)
            self.faults.note(f"SIGKILL {member.name} at {step!r} of {name}", member)
            self.workers.start(member)
        else:
            self.workers.pause(member)
            self.faults.note(f"pause {member.name} at {step!r} of {name}", member)
            self._tend(self._chance.uniform(*OUTLASTS_S))
            self.workers.resume(member)
            member.process.release()

    def _move_coordinator(self, step: str) -> None:
        """Move the coordinator of a transaction to another node while its worker holds at this step (K12)."""
        member, name = self._hold_at(step)
        assert member.process is not None
        before = self._cluster.coordinator_of(transactional_id=name)
        self._cluster.kill(before)
        self.faults.note(f"move the coordinator of {name}, held at {step!r}: kill node {before}", member)

        def moved() -> bool:
            return self._cluster.coordinator_of(transactional_id=name) != before

        wait_until(f"the coordinator of {name} moves", moved, PROGRESS_S)
        member.process.release()
        self._steps_hit.append(step)
        self.faults.start_again(before)

    # ---- after the run
    # ------------------------------------------------------------------------------------------------

    def _judge(
        self, loader: Loader, reader: ConcurrentReader, commits: Sequence[CommitWatcher], phases: Phases
    ) -> Outcome:
        ends, deadline = end_offsets(self._servers, self.topics), time.monotonic() + SETTLED_S
        while (
            ends.stable != ends.log_end and time.monotonic() < deadline
        ):  # A longer wait is a violation of the rule `stable_end`.
            time.sleep(0.2)
            ends = end_offsets(self._servers, self.topics)
        reader.wait_for_ends({p: e for p, e in ends.stable.items() if p[0] in self._outputs and e > 0})
        for watcher in commits:
            watcher.wait_for_next_read()
        inputs = read_topic(self._servers, self._sources[0], contents=False).inputs()
        written = read_topic(self._servers, self._outputs)
        outputs = written.outputs()
        _must_contain(inputs, loader.acknowledged)
        seen, series = reader.collect_outputs(), joined([watcher.series(tuple(self._sources)) for watcher in commits])
        report = check(
            inputs,
            outputs,
            fan_out=FAN_OUT,
            committed=committed_offsets(self._servers, self._groups[0], self._sources[0]),
            complete=True,
            ends=ends,
            seen=seen,
            commits=series,
            counts=self._counts(written) if self._cell.state else None,
        )
        if self._cell.stages > 1:
            report = Report((*report.verdicts, self._middle_offsets()))
        if self._cell.state:
            report = Report((*report.verdicts, fenced_state(self._transaction_log())))
        explanation = ""
        if not report.ok:
            explanation = self._explain(inputs, outputs, seen, series, report)
        made = self.faults.made
        phases.end("judge")
        return Outcome(
            report,
            len(inputs),
            [str(fault) for fault in made],
            self.workers.ends,
            phases.seconds,
            self.faults.slow,
            explanation,
            count_in_transaction(self._directory, made),
            self._steps_hit,
        )

    def _counts(self, written: Log) -> Counts:
        """Return the counts of the last stage's function, in whose source topic a key's records share a partition."""
        changes = read_topic(self._servers, f"{self._groups[-1]}-count-changelog")
        return counts_of(written, [changes], lambda _, key: int(key.removeprefix(b"key ")) % PARTITIONS)

    def _middle_offsets(self) -> Verdict:
        """Check that each later stage has committed all that the previous stage made visible; the rest would be
        repeated."""
        examined, examples, about = 0, [], []
        for group, source in zip(self._groups[1:], self._sources[1:], strict=True):
            committed = committed_offsets(self._servers, group, source)
            records = read_topic(self._servers, source, contents=False).inputs()
            for partition in np.unique(records.partition).tolist():
                examined += 1
                last = int(records.offset[records.partition == partition].max())
                if (at := committed.get((source, partition), 0)) <= last:
                    examples.append(f"{group} committed {at} of {source}[{partition}], whose last record is {last}")
                    about.append((source, partition, last))
        what, good = "partitions between the stages", "each is committed to its end"
        return verdict("middle_offsets", examined, what, len(examples), examples, good, about[:1])

    def keep(self) -> str:
        """Save the records and the transaction log of an aborted run while its brokers run, with an explanation of
        damage.

        Inputs that were still being handled are reported as lost.
        """
        self._cluster.repair()
        inputs = read_topic(self._servers, self._sources[0], contents=False).inputs()
        outputs = read_topic(self._servers, self._outputs).outputs()
        return self._explain(inputs, outputs)

    def _explain(
        self,
        inputs: Inputs,
        outputs: Outputs,
        seen: Outputs | None = None,
        commits: CommitSeries | None = None,
        report: Report | None = None,
    ) -> str:
        """Explain a violation; an error in here must not hide the violation."""
        try:
            _save(self._directory / "inputs.npz", inputs, ("partition", "offset"))
            _save(self._directory / "outputs.npz", outputs, OUTPUT_COLUMNS)
            if seen is not None and commits is not None:
                _save(self._directory / "seen.npz", seen, OUTPUT_COLUMNS)
                _save(self._directory / "commits.npz", commits, ("topic", "partition", "offset"))
            self._cluster.save_logs(self._directory)
            log = self._transaction_log()
            return explain(inputs, outputs, FAN_OUT, self._directory, log, self._groups, report, self._origin)
        except Exception as error:  # noqa: BLE001 - an error in here must not hide the violation
            return f"no explanation: {type(error).__name__}: {error}"

    def _origin(self, place: Position) -> Position | None:
        """Return the origin of a record between two stages; for a marker, that of the record before it."""
        topic, partition, offset = place
        made = read_topic(self._servers, topic).outputs()
        upto = np.flatnonzero((made.partition == partition) & (made.offset <= offset))
        if not upto.size:
            return None
        row = upto[np.argmax(made.offset[upto])]
        return self._sources[0], int(made.source_partition[row]), int(made.source_offset[row])

    def _transaction_log(self) -> list[Written]:
        """Return the coordinators' records of this run's transactions, and save them as a file."""
        ours = tuple(f"{group}-" for group in self._groups)
        log = [written for written in read_transaction_log(self._servers) if written.transactional_id.startswith(ours)]
        (self._directory / "transaction-log.txt").write_text("\n".join(map(str, log)) + "\n")
        return log


OUTPUT_COLUMNS = ("topic", "partition", "offset", "source_partition", "source_offset", "copy")


def _save(file: Path, history: object, columns: Sequence[str]) -> None:
    np.savez_compressed(file, **{name: getattr(history, name) for name in columns})


def joined(series: Sequence[CommitSeries]) -> CommitSeries:
    """Combine the offsets of several watchers, which share no partition."""
    return CommitSeries(
        topics=series[0].topics,
        topic=np.concatenate([one.topic for one in series]),
        partition=np.concatenate([one.partition for one in series]),
        offset=np.concatenate([one.offset for one in series]),
    )


def _last_line(process: WorkerProcess) -> str:
    return (process.log.strip() or "it wrote nothing").splitlines()[-1][:200]


def _must_contain(inputs: Inputs, acknowledged: Sequence[tuple[int, int]]) -> None:
    """Check that the input topic lost no acknowledged record; otherwise right outputs would prove nothing."""
    handled_inputs = inputs.partition.astype(np.int64) << 40 | inputs.offset
    asked = np.array(acknowledged, np.int64).reshape(-1, 2)
    missing = np.setdiff1d(asked[:, 0] << 40 | asked[:, 1], handled_inputs)
    assert len(asked), "the loader acknowledged no record"
    assert not len(missing), f"the input topic itself lost {len(missing)} acknowledged records"
