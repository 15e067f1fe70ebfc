"""The World seam: sessions and workers create clients, threads and pauses through it, so tests can script them."""

from __future__ import annotations

import ast
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

import eos
from eos import Transaction, TransactSession
from eos.errors import Action, CallFailed, InputGone
from eos.kafka.client.cluster import TransactionalIdState
from eos.kafka.client.settings import Settings
from eos.kafka.client.watchdog import Job
from eos.kafka.client.world import World
from eos.records import Committed, SendAll
from eos.session.outcomes import Listener, Outcome
from eos.session.producer.producer import TransactionalProducer

PACKAGE = Path(eos.__file__).parent
# These modules implement the World: clients, logins, clocks and calls that can hang. The supervisor is a process
# of its own.
IMPLEMENTATIONS = {"cluster.py", "security.py", "watchdog.py", "world.py", "supervisor.py"}
ROOMS = [path for room in ("session", "worker", "kafka") for path in sorted((PACKAGE / room).rglob("*.py"))]
OUTSIDE = {
    *("Consumer", "Producer", "AdminClient", "ClusterAdmin", "KafkaAdminClient", "Watchdog"),
    *("time.monotonic", "time.time", "time.sleep", "threading.Thread", "threading.Timer"),
}


def reaches_outside(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in OUTSIDE:
            yield f"line {node.lineno}: {ast.unparse(node.func)}"


@pytest.mark.parametrize("path", [PACKAGE / "plain.py", *ROOMS], ids=lambda path: path.name)
def test_module_calls_the_outside_only_through_the_world(path: Path) -> None:
    assert bool(list(reaches_outside(path.read_text()))) is (path.name in IMPLEMENTATIONS)


def test_scan_finds_calls_that_bypass_world() -> None:
    assert list(reaches_outside("import time\nConsumer({})\ntime.sleep(time.monotonic())\n")) == [
        "line 2: Consumer",
        "line 3: time.sleep",
        "line 3: time.monotonic",
    ]


# ---- a session in a scripted world ------------------------------------------------------------------------------


class Message:
    """Stands for confluent-kafka's Message, which only a consumer can create; has what a poll reads."""

    def __init__(self, offset: int) -> None:
        self.known = {"topic": "in", "partition": 0, "offset": offset, "timestamp": (1, 7), "value": b"%d" % offset}

    def __getattr__(self, name: str) -> Any:
        return lambda: self.known.get(name)


class Script:
    """A scripted cluster: a topic `in` with ten records, a group's offset, the visible outputs, and a manual clock.

    A commit makes the sends visible and moves the offset, both or neither. `fails` maps the name of a call to the
    error that the next such call raises, and whether it takes effect nevertheless. `when` maps it to an action to run
    during that call. `calls` lists the producers' calls, `outcomes` those reported to the session's listener.
    """

    def __init__(self) -> None:
        self.time, self.committed, self.position = 0.0, -1001, 0
        self.epochs = {"t-alternate": 0}  # of the transactional.ids that the coordinator knows
        self.metadata = ""  # metadata of the group's committed offset
        self.visible: list[bytes] = []
        self.calls: list[str] = []
        self.outcomes: list[str] = []
        self.owned: list[int] = []
        self.participant = RecordingParticipant()
        self.sending_s = 0.0  # time to send one record; the transaction timeout is 10 s
        self.fails: dict[str, tuple[KafkaError, bool]] = {}
        self.when: dict[str, Callable[[], None]] = {}
        self.counts: Counter[str] = Counter()
        self.interrupts: set[tuple[str, int, str]] = set()
        self.admin: Any = SimpleNamespace(
            transaction_version=lambda: 2,
            describe_transactions=lambda ids: [],
            describe=lambda name: (
                TransactionalIdState("CompleteCommit", 7, self.epochs[name]) if name in self.epochs else None
            ),
            members=lambda group: [],
            classic_group=lambda group: {"members": [], "protocol_data": ""},
            committed_metadata=lambda group: [],
            remove_member=lambda group, member: None,
            topic_ids=lambda topics: dict.fromkeys(topics, "id"),
        )
        self.world = World(
            consumer=lambda configuration: ScriptedConsumer(self),  # type: ignore[arg-type, return-value]
            producer=lambda configuration: ScriptedProducer(self, configuration),  # type: ignore[arg-type, return-value]
            admin=lambda settings, timeout_ms=0: contextlib.nullcontext(self.admin),
            now=lambda: self.time,
            boot_clock=lambda: self.time,
            unix=lambda: 1e9 + self.time,
            sleep=self.passes,
            watchdog=AtOnce,  # type: ignore[arg-type]
            background=lambda name, run: None,
        )

    def passes(self, seconds: float) -> None:
        self.time += seconds

    def call(self, name: str, happens: Callable[[], None] = lambda: None) -> None:
        self.calls += [name] if name not in ("seek", "committed", "consume", "assign") else []
        self.counts[name] += 1
        error, takes_effect = self.fails.pop(name, (None, True))
        self.when.pop(name, lambda: None)()
        self.raise_if_interrupted(name, "before")
        if takes_effect:
            happens()
        self.raise_if_interrupted(name, "after")
        if error is not None:
            raise KafkaException(error)

    def raise_if_interrupted(self, name: str, when: str) -> None:
        """Raise as a signal handler would, if this call of this number is to be interrupted."""
        if (name, self.counts[name], when) in self.interrupts:
            self.interrupts.remove((name, self.counts[name], when))
            raise KeyboardInterrupt


class AtOnce:
    """Stands for the Watchdog and runs each call at once."""

    hung = False

    def __init__(self, name: str, idle: object = None) -> None:
        pass

    def start(self, function: Callable[..., Any], *args: Any) -> Job:
        return self.submit(Job(function, args))

    def submit(self, job: Job) -> Job:
        if not job.done.is_set():
            try:
                job.result = job.call(*job.args)
            except BaseException as error:  # noqa: BLE001 - like the real one
                job.error = error
            job.done.set()
        return job

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float) -> Any:
        return function(*args)

    def join(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


class ScriptedConsumer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.assign: Callable[..., None] | None = None
        self.reads = False

    def list_topics(self, topic: str = "", timeout: float = 0) -> Any:
        return SimpleNamespace(
            brokers={}, topics=dict.fromkeys(("in", "out"), SimpleNamespace(error=None, partitions={0: None}))
        )

    def subscribe(self, topics: list[str], on_assign: Callable[..., None], **others: object) -> None:
        self.assign = on_assign

    def consume(self, most: int, timeout_s: float) -> list[Message]:
        self.script.passes(timeout_s)
        if self.assign is not None:
            on_assign, self.assign = self.assign, None
            on_assign(self, [TopicPartition("in", 0)])
            return []
        first = self.script.position
        last = min(10, first + most) if self.reads else first

        def happens() -> None:
            self.script.position = last

        self.script.call("consume", happens)
        return [Message(offset) for offset in range(first, last)]

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.script.call("committed")
        return [TopicPartition("in", 0, self.script.committed, self.script.metadata)]

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        def happens() -> None:
            self.script.position = max(0, sum(tp.offset for tp in partitions))
            self.reads = bool(partitions)

        self.script.call("assign", happens)

    def seek(self, partition: TopicPartition) -> None:
        self.script.call("seek")
        self.script.position = partition.offset

    def assignment(self) -> list[TopicPartition]:
        return []

    def memberid(self) -> str:
        return "member"

    def consumer_group_metadata(self) -> object:
        return object()

    def close(self) -> None:
        pass


class ScriptedProducer:
    def __init__(self, script: Script, configuration: dict[str, Any]) -> None:
        self.script, self.on_statistics = script, configuration["stats_cb"]
        self.name = configuration["transactional.id"]
        self.sent: list[bytes] = []
        self.offset: int | None = None

    def __len__(self) -> int:
        return 0

    def list_topics(self, topic: str, timeout_s: float) -> None:
        self.script.passes(0.01)

    def init_transactions(self, timeout_s: float) -> None:
        self.script.call("init")
        self.epoch = self.script.epochs[self.name] = self.script.epochs.get(self.name, -1) + 1

    def poll(self, timeout_s: float) -> None:
        self.script.passes(timeout_s)
        eos_of = {"producer_id": 7, "producer_epoch": self.epoch}
        self.on_statistics(json.dumps({"ts": round(self.script.time * 1e6), "eos": eos_of}))

    def begin_transaction(self) -> None:
        self.script.call("begin")
        self.sent, self.offset = [], None

    def produce(self, topic: str, value: bytes, *others: object) -> None:
        if topic == "changelog":
            self.script.call("changelog")
        self.sent.append(value)

    def flush(self, timeout_s: float) -> int:
        self.script.call("flush")
        needed_s = len(self.sent) * self.script.sending_s
        self.script.passes(min(needed_s, 10.01))  # a timeout is noticed after it
        if needed_s > 10.0:
            timed_out = KafkaError(KafkaError._TIMED_OUT, "scripted", retriable=False, txn_requires_abort=True)
            raise KafkaException(timed_out)
        return 0

    def send_offsets_to_transaction(self, offsets: list[TopicPartition], group: object, timeout_s: float) -> None:
        self.script.call("offsets")
        self.offset, self.metadata = offsets[0].offset, offsets[0].metadata

    def commit_transaction(self, timeout_s: float) -> None:
        def happens() -> None:
            self.script.visible += self.sent
            if self.offset is not None:
                self.script.committed, self.script.metadata = self.offset, self.metadata

        self.script.call("commit", happens)

    def abort_transaction(self, timeout_s: float) -> None:
        self.script.call("abort")


SETTINGS = {"group.id": "g", "transactional.id": "t", "eos.transaction.max.records": 5, "eos.places.topic": ""}
ALL = [b"%d" % number for number in range(10)]


class RecordingParticipant:
    """A participant that records its notifications. It is ready for a partition at the third query."""

    topics = ("changelog",)

    def __init__(self) -> None:
        self.notifications: list[str] = []
        self.sends = False
        self.writing: list[tuple[str, int]] = []
        self.fenced: list[set[tuple[str, int]]] = []
        self._queries = 0

    def forget(self, gone: Collection[tuple[str, int]]) -> None:
        self.notifications.append("forget")
        self._queries = 0

    def restore(
        self, starts: Mapping[tuple[str, int], Committed], uncommitted: Collection[tuple[str, int]]
    ) -> Collection[tuple[str, int]]:
        self._queries += 1
        if self._queries < 3:
            return ()
        self.notifications += [f"restore {max(at.offset, 0)}" for at in starts.values()]
        return starts.keys()

    def changed_partitions(self) -> Collection[tuple[str, int]]:
        return self.writing

    def before_flush(self, send: SendAll, offsets: Mapping[tuple[str, int], int]) -> None:
        self.fenced.append(set(offsets))
        if self.sends:
            send([("changelog", b"state", b"key", 0, 0, None)])

    def offset_metadata(self, partition: tuple[str, int]) -> Mapping[str, object]:
        self.notifications.append("offset metadata")
        return {}

    def committed(self) -> None:
        self.notifications.append("committed")
        self.writing = []

    def aborted(self) -> None:
        self.notifications.append("aborted")


class KeepingParticipant(RecordingParticipant):
    """A participant that keeps the next offset outside of Kafka, and lists the offsets of its written records."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def take_over(self, starts: Mapping[tuple[str, int], int]) -> Mapping[tuple[str, int], int]:
        return {}

    def keeps_offset(self, partition: tuple[str, int]) -> bool:
        return partition == ("in", 0)

    def before_flush(self, send: SendAll, offsets: Mapping[tuple[str, int], int]) -> None:
        self.written += range(len(self.written), offsets.get(("in", 0), 0))


def copied(script: Script, *, sends: bool = True, **settings: object) -> TransactSession:
    """Run a session in the scripted world that reads all records of `in`, five per transaction, and copies them if it
    `sends`. Return the session."""

    class RecordingListener(Listener):
        def on_idle(self) -> None:
            session.stop_requested = script.committed == 10 or script.time > 60

        def on_end(self, transaction: Transaction, outcome: Outcome) -> None:
            script.outcomes.append(outcome.value)
            script.owned.append(len(session.assignment))

    session = TransactSession(
        SETTINGS | settings, ["in"], participants=[script.participant], listener=RecordingListener(), world=script.world
    )
    with session:
        while not session.stop_requested:
            with contextlib.suppress(KeyboardInterrupt):
                for txn in session:
                    for record in txn.records:
                        if sends:
                            txn.send("out", record.value)
    return session


def test_session_commits_in_a_scripted_world() -> None:
    script = Script()
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    one = ["begin", "flush", "offsets", "commit"]
    assert script.calls == ["init", "init", *one, *one]  # the start fences both transactional.ids
    assert (session.counters.transactions, session.counters.records_in, session.counters.aborts) == (2, 10, 0)
    assert script.outcomes == ["committed"] * 2
    assert script.participant.notifications == ["restore 0", *["offset metadata", "committed"] * 2]


def test_participant_write_without_records_commits_the_unchanged_offset() -> None:
    """Timers do this. Without an offset the group could not refuse a member that lost the partition."""
    script = Script()
    in_order = script.participant.committed

    def then_write_alone() -> None:
        in_order()
        if script.committed == 10 and len(script.participant.fenced) == 2:
            script.participant.writing = [("in", 0), ("not ours", 0)]
            script.committed = 9  # keeps the script's loop running

    script.participant.committed = then_write_alone  # type: ignore[method-assign]
    copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert script.participant.fenced == [{("in", 0)}] * 3
    assert script.calls[-4:] == ["begin", "flush", "offsets", "commit"]


def test_start_fences_no_alternate_id_that_the_coordinator_does_not_know() -> None:
    script = Script()
    del script.epochs["t-alternate"]
    copied(script)
    assert (script.visible, script.calls.count("init"), list(script.epochs)) == (ALL, 1, ["t"])


@pytest.mark.parametrize(("init_s", "before_begin"), [(0.001, False), (1.0, True)], ids=["fast init", "slow init"])
def test_first_statistics_come_before_the_first_call_that_may_be_retried(init_s: float, before_begin: bool) -> None:
    """Only a producer with a slow init waits for them before its first transaction."""
    script = Script()
    script.when["init"] = lambda: script.passes(init_s)
    producer = TransactionalProducer(Settings(SETTINGS), "t", world=script.world)
    producer.start(None)
    producer.begin()
    assert (producer.client.statistics_seen > 0) is before_begin
    producer.flush()
    assert producer.client.statistics_seen > 0
    producer.commit()
    producer.replace("retry: test")
    assert producer.client.statistics_seen > 0


@pytest.mark.parametrize("is_reachable", [True, False])
def test_init_waits_for_a_connection_first(is_reachable: bool) -> None:
    """Without a connection, librdkafka's init waits 500 ms. An unreachable cluster is the init's own error."""
    calls: list[tuple[str, float]] = []

    class Producer(ScriptedProducer):
        def list_topics(self, topic: str, timeout_s: float) -> None:
            calls.append((topic, timeout_s))
            if not is_reachable:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT))

        def init_transactions(self, timeout_s: float) -> None:
            calls.append(("init", timeout_s))

    script = Script()
    world = replace(script.world, producer=lambda configuration: Producer(script, configuration))  # type: ignore[arg-type, return-value]
    TransactionalProducer(Settings(SETTINGS), "t", world=world).start(None)
    queries = [("__transaction_state", 1.0)] * (2 if is_reachable else 1)
    assert calls == [*queries, ("init", 5.0)]


@pytest.mark.parametrize("sends", [False, True])
def test_offsets_that_a_participant_keeps_are_committed_when_idle(sends: bool) -> None:
    """A transaction with outputs commits its offsets at once, and so does the first one after the start."""
    script = Script()
    script.participant = KeepingParticipant()
    session = copied(script, sends=sends)
    assert (script.participant.written, script.committed) == ([*range(10)], 10)
    one = ["begin", "flush", "offsets", "commit"]
    assert script.calls[2:] == one + (one if sends else ["begin", "flush", "commit", *one])
    assert session.counters.records_in == 10


def test_kept_offsets_are_committed_at_a_stop_and_after_a_second() -> None:
    script = Script()
    script.participant = KeepingParticipant()
    session = TransactSession(
        SETTINGS | {"eos.transaction.max.records": 1}, ["in"], participants=[script.participant], world=script.world
    )
    committed = []
    with session:
        for txn in session:
            committed.append(script.committed)
            assert len(list(txn.records)) == 1
            script.passes(0.4)
            session.stop_requested = len(committed) == 9
    assert script.participant.written == [*range(9)]
    assert committed == [-1001, 1, 1, 1, 4, 4, 4, 7, 7]
    assert script.committed == 9, "a stop commits what was deferred"


def test_commit_time_and_record_age_are_counted() -> None:
    script = Script()
    script.when["commit"] = lambda: script.passes(3)
    session = copied(script)
    commits, ages = session.counters.commit_seconds, session.counters.end_to_end_seconds
    assert (sum(commits.counts), commits.total) == (2, pytest.approx(3))
    # The records' timestamps are in 1970, and the script's clock starts 1e9 s later.
    assert (sum(ages.counts), 3 < ages.total - 2e9 <= 2 * script.time) == (2, True)


def test_abort_hands_the_records_out_again() -> None:
    script = Script()
    abortable = KafkaError(KafkaError._TIMED_OUT, "scripted", retriable=False, txn_requires_abort=True)
    script.fails["offsets"] = abortable, False
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.transactions, session.counters.aborts, session.counters.rebuilds) == (2, 1, 0)
    assert session.counters.replacements == {"abort": 1}
    assert script.calls[2:9] == ["begin", "flush", "offsets", "abort", "init", "begin", "flush"]
    assert script.outcomes == ["aborted", "committed", "committed"]
    assert script.participant.notifications == [
        "restore 0",
        "offset metadata",
        "aborted",
        *["offset metadata", "committed"] * 2,
    ]


@pytest.mark.parametrize("sends", [False, True])
def test_abort_without_sent_records_keeps_the_producer(sends: bool) -> None:
    """A row that a database refuses aborts such a transaction. Sent records would have used sequence numbers."""
    script = Script()
    script.participant = KeepingParticipant()
    write = script.participant.before_flush

    def refuse_once(send: SendAll, offsets: Mapping[tuple[str, int], int]) -> None:
        script.participant.before_flush = write  # type: ignore[method-assign]
        raise CallFailed("database", Action.ABORT, ValueError("refused"))

    script.participant.before_flush = refuse_once  # type: ignore[method-assign]
    session = copied(script, sends=sends)
    assert (script.participant.written, script.committed) == ([*range(10)], 10)
    assert session.counters.aborts == 1
    assert session.counters.replacements == ({"abort": 1} if sends else {})


def test_transactions_shrink_after_a_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """Five small records need 15 s and have 10 s. The session retries them once, and then sends two of them in 6 s."""
    script = Script()
    script.sending_s = 3.0
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.aborts, session.counters.transactions) == (2, 5)
    again, line = [one.message for one in caplog.records if one.message.startswith("transaction timed out")]
    assert again.split("next_at_most=")[1].startswith("5 ")
    assert "sending the outputs of 5 records took longer than transaction.timeout.ms=10000" in line
    assert "raise it, or lower eos.transaction.max.records next_at_most=2" in line


@pytest.mark.parametrize("committed", [False, True])
def test_unknown_commit_outcome_is_looked_up(committed: bool) -> None:
    script = Script()
    script.fails["commit"] = KafkaError(KafkaError._FATAL, "scripted", fatal=True), committed
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.rebuilds, session.counters.aborts) == (1, 0)
    assert script.calls.count("commit") == (2 if committed else 3)
    assert script.outcomes == ["committed"] * 2 if committed else ["aborted", "committed", "committed"]


def test_commit_of_another_member_is_not_mistaken_for_ours() -> None:
    """Our commit was aborted, and another member committed the offset that ours would have committed."""
    script = Script()
    script.fails["commit"] = KafkaError(KafkaError._FATAL, "scripted", fatal=True), False
    script.when["commit"] = lambda: vars(script).update(committed=5, metadata='{"v": 1, "instance": "other", "n": 1}')
    copied(script)
    assert script.outcomes == ["unknown", "committed"]
    assert script.participant.notifications == [
        "restore 0",
        "offset metadata",
        "aborted",
        "offset metadata",
        "committed",
    ]


@pytest.mark.parametrize("recreated", [False, True])
def test_changelog_error_is_examined_and_not_handled_by_a_policy(recreated: bool) -> None:
    """Old client metadata is cured by a new client; a recreated topic stops the session."""
    script = Script()
    script.participant.sends = True
    script.fails["changelog"] = KafkaError(KafkaError._UNKNOWN_PARTITION), False
    if recreated:
        script.when["changelog"] = lambda: vars(script.admin).update(topic_ids=lambda _: {"changelog": "another id"})
        with pytest.raises(InputGone, match="the changelog changelog was deleted and recreated"):
            copied(script)
        assert script.visible == []
        return
    session = copied(script)
    assert [value for value in script.visible if value != b"state"] == ALL
    assert (session.counters.rebuilds, session.counters.aborts) == (1, 0)
    assert script.outcomes == ["aborted", "committed", "committed"]


def test_rebuild_with_a_rejoin_counts_once() -> None:
    """Counted twice, the third rebuild would trip the breaker of five."""
    script = Script()
    script.fails["commit"] = KafkaError(KafkaError._FATAL, "scripted", fatal=True), False
    script.when["commit"] = lambda: script.fails.update(
        committed=(KafkaError(KafkaError._TRANSPORT, "scripted"), False)
    )
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.rebuilds, session._loop._recovery.rebuilds_in_a_row) == (1, 0)
    assert script.outcomes == ["unknown", "committed", "committed"]
    assert script.owned == [1, 1, 1], "the assignment is known when an outcome is reported"
    assert script.participant.notifications == [
        *("restore 0", "offset metadata", "aborted"),
        *("forget", "restore 0", "offset metadata", "committed", "offset metadata", "committed"),
    ]


def test_abort_with_a_failed_seek_counts_as_one_rebuild() -> None:
    script = Script()
    script.fails["offsets"] = KafkaError(KafkaError._TIMED_OUT, "scripted", txn_requires_abort=True), False
    script.fails["seek"] = KafkaError(KafkaError._STATE, "scripted"), False
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.transactions, session.counters.aborts, session.counters.rebuilds) == (2, 0, 1)


def test_rejoin_does_not_take_the_id_from_a_newer_instance() -> None:
    script = Script()
    script.fails["offsets"] = KafkaError(KafkaError._TIMED_OUT, "scripted", txn_requires_abort=True), False
    script.fails["seek"] = KafkaError(KafkaError._STATE, "scripted"), False
    script.when["seek"] = lambda: script.epochs.update(t=script.epochs["t"] + 2)
    with pytest.raises(eos.Fenced, match="a newer instance took over"):
        copied(script)
    assert script.calls.count("init") == 2, "only the two calls of the start"
    assert (script.visible, script.outcomes) == ([], ["aborted"])


def test_transaction_interrupted_in_its_body_reports_the_abort() -> None:
    script = Script()
    session = TransactSession(SETTINGS | {"eos.transaction.max.records": 20}, ["in"], world=script.world)
    with session:
        txn = next(session)
        script.interrupts = {("consume", script.counts["consume"] + 1, "before")}
        with pytest.raises(KeyboardInterrupt):
            for record in txn.records:
                txn.send("out", record.value)
        assert not txn.commit()
        txn.abort()
        txn.send("out", b"ignored")
        assert len(list(next(session).records)) == 10
    assert script.visible == []


def test_stop_ends_an_interrupted_loop_without_recovery() -> None:
    script = Script()
    script.interrupts = {("flush", 1, "before")}
    session = TransactSession(SETTINGS, ["in"], world=script.world)
    with session:
        with pytest.raises(KeyboardInterrupt):
            for txn in session:
                txn.send("out", b"x")
        session.stop_requested = True
        assert list(session) == []
    assert (script.visible, session.counters.rebuilds) == ([], 0)


CALLS = ("begin", "flush", "offsets", "commit", "consume", "assign", "committed", "init", "abort", "seek")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_loop_interrupted_at_any_call_loses_and_duplicates_nothing(name: str, nth: int, when: str, again: bool) -> None:
    """The scripted failure causes an abort, so that every call occurs; calls of the recovery are interrupted too."""
    script = Script()
    script.fails["offsets"] = KafkaError(KafkaError._TIMED_OUT, "scripted", txn_requires_abort=True), False
    nth += 2 if name == "init" else 0  # the start made the first two
    script.interrupts = {(name, nth, when)} | ({(name, nth + 1, when)} if again else set())
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert session.counters.transactions >= 2 - script.outcomes.count("unknown")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_loop_with_kept_offsets_loses_nothing(name: str, nth: int, when: str) -> None:
    script = Script()
    script.participant = KeepingParticipant()
    script.interrupts = {(name, nth + (2 if name == "init" else 0), when)}
    session = copied(script, sends=False)
    assert (script.participant.written, script.committed) == ([*range(10)], 10)
    assert not session._parts.offsets.has_deferred
