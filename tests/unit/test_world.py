"""The seam: nothing in these rooms makes a client, a thread or a pause by itself, so a world can be scripted."""

from __future__ import annotations

import ast
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

import eos
from eos import Transaction, TransactSession
from eos.errors import InputGone
from eos.kafka.client.cluster import TransactionalIdState
from eos.kafka.client.watchdog import Job
from eos.kafka.client.world import World
from eos.records import Committed
from eos.session.outcomes import Listener, Outcome

PACKAGE = Path(eos.__file__).parent
# How a client is made and logs in, a clock and a call that can hang are the outside itself; the supervisor is a process
# of its own.
THEMSELVES = {"cluster.py", "security.py", "watchdog.py", "world.py", "supervisor.py"}
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
def test_a_session_and_what_it_asks_reach_the_outside_through_their_world(path: Path) -> None:
    assert bool(list(reaches_outside(path.read_text()))) is (path.name in THEMSELVES)


def test_the_world_itself_would_be_found() -> None:
    assert list(reaches_outside("import time\nConsumer({})\ntime.sleep(time.monotonic())\n")) == [
        "line 2: Consumer",
        "line 3: time.sleep",
        "line 3: time.monotonic",
    ]


# ---- a session in a scripted world ------------------------------------------------------------------------------


class Message:
    """As much of confluent-kafka's Message, which only a consumer can make, as a poll reads."""

    def __init__(self, offset: int) -> None:
        self.known = {"topic": "in", "partition": 0, "offset": offset, "timestamp": (1, 7), "value": b"%d" % offset}

    def __getattr__(self, name: str) -> Any:
        return lambda: self.known.get(name)


class Script:
    """A topic `in` with ten records, a group's offset, and what became visible; a clock that moves when one waits.

    It knows nothing of transactions but that a commit makes sends visible and moves the offset, both or none.
    `fails`: by the name of a call, what the next one raises, and whether it comes to pass all the same. `when`: what
    else happens at it. `calls` are the producers', `outcomes` what a session told its listener.
    """

    def __init__(self) -> None:
        self.time, self.committed, self.position = 0.0, -1001, 0
        self.epochs: dict[str, int] = {}
        self.beside = ""  # the group's offset, as its committer wrote it
        self.visible: list[bytes] = []
        self.calls: list[str] = []
        self.outcomes: list[str] = []
        self.owned: list[int] = []
        self.follows = Follows()
        self.sending_s = 0.0  # of each record; a transaction has 10 s
        self.fails: dict[str, tuple[KafkaError, bool]] = {}
        self.when: dict[str, Callable[[], None]] = {}
        self.counts: Counter[str] = Counter()
        self.interrupts: set[tuple[str, int, str]] = set()
        self.admin: Any = SimpleNamespace(
            transaction_version=lambda: 2,
            describe_all=lambda ids: [],
            describe=lambda name: TransactionalIdState("CompleteCommit", 7, self.epochs[name]),
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
        error, all_the_same = self.fails.pop(name, (None, True))
        self.when.pop(name, lambda: None)()
        self.interrupted(name, "before")
        if all_the_same:
            happens()
        self.interrupted(name, "behind")
        if error is not None:
            raise KafkaException(error)

    def interrupted(self, name: str, when: str) -> None:
        """A signal's handler raises, the first, second ... time that this call is made."""
        if (name, self.counts[name], when) in self.interrupts:
            self.interrupts.remove((name, self.counts[name], when))
            raise KeyboardInterrupt


class AtOnce:
    """A caller whose calls have ended when they have begun."""

    hung = False

    def __init__(self, name: str, idle: object = None) -> None:
        pass

    def start(self, function: Callable[..., Any], *args: Any) -> Job:
        return self.submit(Job(function, args))

    def submit(self, job: Job) -> Job:
        if not job.done.is_set():
            try:
                job.result = job.call(*job.args)
            except BaseException as error:  # noqa: BLE001 - as the real one
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
            told, self.assign = self.assign, None
            told(self, [TopicPartition("in", 0)])
            return []
        first = self.script.position
        last = min(10, first + most) if self.reads else first

        def happens() -> None:
            self.script.position = last

        self.script.call("consume", happens)
        return [Message(offset) for offset in range(first, last)]

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.script.call("committed")
        return [TopicPartition("in", 0, self.script.committed, self.script.beside)]

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
        self.script, self.told, self.name = script, configuration["stats_cb"], configuration["transactional.id"]
        self.sent: list[bytes] = []
        self.offset: int | None = None

    def __len__(self) -> int:
        return 0

    def init_transactions(self, timeout_s: float) -> None:
        self.script.call("init")
        self.epoch = self.script.epochs[self.name] = self.script.epochs.get(self.name, -1) + 1

    def poll(self, timeout_s: float) -> None:
        self.script.passes(timeout_s)
        eos_of = {"producer_id": 7, "producer_epoch": self.epoch}
        self.told(json.dumps({"ts": round(self.script.time * 1e6), "eos": eos_of}))

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
        self.script.passes(min(needed_s, 10.0))
        if needed_s > 10.0:
            timed_out = KafkaError(KafkaError._TIMED_OUT, "scripted", retriable=False, txn_requires_abort=True)
            raise KafkaException(timed_out)
        return 0

    def send_offsets_to_transaction(self, offsets: list[TopicPartition], group: object, timeout_s: float) -> None:
        self.script.call("offsets")
        self.offset, self.beside = offsets[0].offset, offsets[0].metadata

    def commit_transaction(self, timeout_s: float) -> None:
        def happens() -> None:
            self.script.visible += self.sent
            if self.offset is not None:
                self.script.committed, self.script.beside = self.offset, self.beside

        self.script.call("commit", happens)

    def abort_transaction(self, timeout_s: float) -> None:
        self.script.call("abort")


SETTINGS = {"group.id": "g", "transactional.id": "t", "eos.transaction.max.records": 5, "eos.places.topic": ""}
ALL = [b"%d" % number for number in range(10)]


class Follows:
    """A participant that notes what it is told; it is ready for a partition when it is asked for the third time."""

    topics = ("changelog",)

    def __init__(self) -> None:
        self.told: list[str] = []
        self.sends = False
        self.writing: list[tuple[str, int]] = []
        self.fenced: list[set[tuple[str, int]]] = []
        self._asked = 0

    def forget(self, gone: Collection[tuple[str, int]]) -> None:
        self.told.append("forget")
        self._asked = 0

    def restore(
        self, starts: Mapping[tuple[str, int], Committed], uncommitted: Collection[tuple[str, int]]
    ) -> Collection[tuple[str, int]]:
        self._asked += 1
        if self._asked < 3:
            return ()
        self.told += [f"restore {max(at.offset, 0)}" for at in starts.values()]
        return starts.keys()

    def changed_partitions(self) -> Collection[tuple[str, int]]:
        return self.writing

    def before_flush(self, send: Callable[..., None], partitions: Collection[tuple[str, int]]) -> None:
        self.fenced.append(set(partitions))
        if self.sends:
            send("changelog", b"state", b"key", 0, 0)

    def offset_metadata(self, partition: tuple[str, int]) -> Mapping[str, object]:
        self.told.append("offset metadata")
        return {}

    def committed(self) -> None:
        self.told.append("committed")
        self.writing = []

    def aborted(self) -> None:
        self.told.append("aborted")


def copied(script: Script, **settings: object) -> TransactSession:
    """A session in that world has copied all records of `in`, five in a transaction."""

    class Ears(Listener):
        def on_idle(self) -> None:
            session.stop_requested = script.committed == 10 or script.time > 60

        def on_end(self, transaction: Transaction, outcome: Outcome) -> None:
            script.outcomes.append(outcome.value)
            script.owned.append(len(session.assignment))

    session = TransactSession(
        SETTINGS | settings, ["in"], participants=[script.follows], listener=Ears(), world=script.world
    )
    with session:
        while not session.stop_requested:
            with contextlib.suppress(KeyboardInterrupt):
                for txn in session:
                    for record in txn.records:
                        txn.send("out", record.value)
    return session


def test_a_session_commits_in_a_world_without_a_broker() -> None:
    script = Script()
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    one = ["begin", "flush", "offsets", "commit"]
    assert script.calls == ["init", "init", *one, *one]  # both transactional.ids are fenced at the start
    assert (session.counters.transactions, session.counters.records_in, session.counters.aborts) == (2, 10, 0)
    assert script.outcomes == ["committed"] * 2
    assert script.follows.told == ["restore 0", *["offset metadata", "committed"] * 2]


def test_participant_that_writes_alone_commits_the_unmoved_offset() -> None:
    """As a timer does. Without an offset the group would not refuse a member that lost the partition."""
    script = Script()
    in_order = script.follows.committed

    def then_write_alone() -> None:
        in_order()
        if script.committed == 10 and len(script.follows.fenced) == 2:
            script.follows.writing = [("in", 0), ("not ours", 0)]
            script.committed = 9  # of the script: so that the loop goes on

    script.follows.committed = then_write_alone  # type: ignore[method-assign]
    copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert script.follows.fenced == [{("in", 0)}] * 3
    assert script.calls[-4:] == ["begin", "flush", "offsets", "commit"]


def test_commit_time_and_record_age_are_counted() -> None:
    script = Script()
    script.when["commit"] = lambda: script.passes(3)
    session = copied(script)
    commits, ages = session.counters.commit_seconds, session.counters.end_to_end_seconds
    assert (sum(commits.counts), commits.total) == (2, pytest.approx(3))
    # The records are of 1970, and the script's clock began 1e9 s later.
    assert (sum(ages.counts), 3 < ages.total - 2e9 <= 2 * script.time) == (2, True)


def test_an_abort_in_it_hands_the_records_out_again() -> None:
    script = Script()
    abortable = KafkaError(KafkaError._TIMED_OUT, "scripted", retriable=False, txn_requires_abort=True)
    script.fails["offsets"] = abortable, False
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.transactions, session.counters.aborts, session.counters.rebuilds) == (2, 1, 0)
    assert session.counters.replacements == {"abort": 1}
    assert script.calls[2:9] == ["begin", "flush", "offsets", "abort", "init", "begin", "flush"]
    assert script.outcomes == ["aborted", "committed", "committed"]
    assert script.follows.told == ["restore 0", "offset metadata", "aborted", *["offset metadata", "committed"] * 2]


def test_transaction_that_times_out_is_followed_by_smaller_ones(caplog: pytest.LogCaptureFixture) -> None:
    """Five small records need 15 s of the 10 that they have: they are tried once more, and then two of them, in 6 s."""
    script = Script()
    script.sending_s = 3.0
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.aborts, session.counters.transactions) == (2, 5)
    again, line = [one.message for one in caplog.records if one.message.startswith("transaction timed out")]
    assert again.split("next_at_most=")[1].startswith("5 ")
    assert "sending the outputs of 5 records took longer than transaction.timeout.ms=10000" in line
    assert "raise it, or lower eos.transaction.max.records next_at_most=2" in line


@pytest.mark.parametrize("came_to_pass", [False, True])
def test_a_commit_whose_outcome_is_unknown_is_looked_up_in_it(came_to_pass: bool) -> None:
    script = Script()
    script.fails["commit"] = KafkaError(KafkaError._FATAL, "scripted", fatal=True), came_to_pass
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.rebuilds, session.counters.aborts) == (1, 0)
    assert script.calls.count("commit") == (2 if came_to_pass else 3)
    assert script.outcomes == ["committed"] * 2 if came_to_pass else ["aborted", "committed", "committed"]


def test_what_another_member_committed_is_not_taken_for_ours() -> None:
    """Ours was aborted, and another member handled the same records: the offset is as ours would have been."""
    script = Script()
    script.fails["commit"] = KafkaError(KafkaError._FATAL, "scripted", fatal=True), False
    script.when["commit"] = lambda: vars(script).update(committed=5, beside='{"v": 1, "instance": "other", "n": 1}')
    copied(script)
    assert script.outcomes == ["unknown", "committed"]
    assert script.follows.told == ["restore 0", "offset metadata", "aborted", "offset metadata", "committed"]


@pytest.mark.parametrize("recreated", [False, True])
def test_changelog_error_is_looked_into_and_not_handed_to_a_policy(recreated: bool) -> None:
    """Its client's metadata may be old, which a new one cures; a topic that was recreated stops the session."""
    script = Script()
    script.follows.sends = True
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


def test_a_rebuild_that_has_to_join_again_counts_once() -> None:
    """Else the breaker of five would trip at the third."""
    script = Script()
    script.fails["commit"] = KafkaError(KafkaError._FATAL, "scripted", fatal=True), False
    script.when["commit"] = lambda: script.fails.update(
        committed=(KafkaError(KafkaError._TRANSPORT, "scripted"), False)
    )
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert (session.counters.rebuilds, session._loop._recovery.rebuilds_in_a_row) == (1, 0)
    assert script.outcomes == ["unknown", "committed", "committed"]
    assert script.owned == [1, 1, 1], "whoever hears of an end can tell whose partitions are whose"
    assert script.follows.told == [
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
    assert script.calls.count("init") == 2, "those of the start"
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
        txn.send("out", b"leads nowhere")
        assert len(list(next(session).records)) == 10
    assert script.visible == []


def test_a_stop_ends_a_loop_that_was_left_half_way_without_a_recovery() -> None:
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


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_loop_interrupted_at_any_call_loses_and_doubles_nothing(name: str, nth: int, when: str, again: bool) -> None:
    """In mid-call, and in the recovery from it; an abort among them, so that each call is made."""
    script = Script()
    script.fails["offsets"] = KafkaError(KafkaError._TIMED_OUT, "scripted", txn_requires_abort=True), False
    nth += 2 if name == "init" else 0  # not the start's
    script.interrupts = {(name, nth, when)} | ({(name, nth + 1, when)} if again else set())
    session = copied(script)
    assert (script.visible, script.committed) == (ALL, 10)
    assert session.counters.transactions >= 2 - script.outcomes.count("unknown")
