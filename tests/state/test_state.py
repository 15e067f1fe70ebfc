"""Keep state on a real broker: after any kill or rebalance, each key's state follows from its committed records."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

import eos
from eos.app.cells import parse_cell
from eos.broker import LocalKafka
from eos.testing.verify import verify
from tests.support import forked
from tests.support.killed import KILLED
from tests.support.reading import configure, create_topic, settled_records, stable_offset, visible_records, wait_until
from tests.support.stepping_worker import counter_of

if TYPE_CHECKING:
    from tests.support.pipeline import Pipelines
pytest_plugins = ["tests.support.pipeline"]

Names = Callable[[str], str]
PARTITIONS, KEYS = 3, 40
APP = """
import time
import eos

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, on_error=eos.skip)
def count(record: eos.Record, seen: eos.State[int], last: eos.State[str]) -> str | None:
    before = seen.get(0)
    seen.set(before + 1)
    time.sleep({work_s})
    if record.value == b"bad":
        raise ValueError("changes nothing")
    if record.value == b"large":
        return "x" * 3_000_000
    if record.value == b"forget":
        last.delete()
        return None
    last.set(record.value.decode())
    return f"{{before + 1}}"
"""
KINDS = """
import asyncio
import eos
from eos import ListState, MapState, Out, Record, State

app = eos.App({id!r})

@app.process({source!r}, to={out!r})
async def visit(page: str, pages: MapState[str, int], last: ListState[str]) -> str:
    await asyncio.sleep(0.001)
    pages[page] = pages.get(page, 0) + 1
    last.append(page)
    while len(last) > 3:
        last.popleft()
    return f"{{pages[page]}} {{','.join(pages)}} {{','.join(last)}}"

@app.process_batch({other!r}, to={out!r})
def total(sales: list[Record], sold: dict[bytes, State[int]]) -> list[Out]:
    outs = []
    for sale in sales:
        sold[sale.key].set(sold[sale.key].get(0) + int(sale.value))
        outs.append(sale.out(str(sold[sale.key].get())))
    return outs
"""
CHAIN = """
import eos
from eos import Out, Record, State

app = eos.App({id!r})

@app.process({source!r}, to={other!r})
def by_group(record: Record) -> Out:
    return Out(record.value, key=record.key[-1:])

@app.process({other!r}, to={out!r})
def count(value: bytes, seen: State[int]) -> str:
    seen.set(seen.get(0) + 1)
    return str(seen.get())
"""
FORGETS = """
from datetime import timedelta
import eos
from eos import State

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, ttl={{"seen": timedelta(seconds=8)}})
def count(value: str, seen: State[int], ever: State[int]) -> str:
    ever.set(ever.get(0) + 1)
    seen.set(seen.get(0) + 1)
    return f"{{seen.get()}} of {{ever.get()}}"
"""
HANGS = """
import os, sys, time
from datetime import timedelta
import eos

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, ttl=timedelta(seconds=60), on_error=eos.skip)
def count(record: eos.Record, seen: eos.State[int]) -> str:
    seen.set(seen.get(0) + 1)
    if record.value == b"hang" and os.environ.get("HANG"):
        print("HANGS", file=sys.stderr, flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
        print("RAISES", file=sys.stderr, flush=True)
        raise TimeoutError("the service did not answer")
    return f"{{seen.get()}}"
"""
# A worker that never receives the result of some commits: they succeeded, or their requests were lost.
UNKNOWN = """
import sys
from eos import cli
from eos.errors import Action, CallFailed
from eos.session.producer.producer import TransactionalProducer
when = sys.argv[1]
call, calls = TransactionalProducer.commit, []
def losing(self, *arguments, **more):
    calls.append(1)
    lost = len(calls) in (3, 6)
    if not lost or when == "behind":
        call(self, *arguments, **more)
    if lost:
        raise CallFailed("commit", Action.SETTLE, TimeoutError("its answer was lost"))
TransactionalProducer.commit = losing
sys.exit(cli.invoke(sys.argv[2:]))
"""
SMALL = ("-X", "eos.transaction.max.records=100")


class Counting:
    """Run an App that counts per key, with its topics and the expected results."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path, work_s: float = 0.0) -> None:
        self.servers, self.folder, self.work_s = kafka.bootstrap_servers, folder, work_s
        self.state_dir = str(folder / "state")  # directories of both workers on this machine
        self.engine = "lmdb"
        self.id, self.source, self.out = names("app"), names("in"), names("out")
        self.changelog = f"{self.id}-count-changelog"
        for topic in (self.source, self.out):
            create_topic(self.servers, topic, partitions=PARTITIONS)
        (folder / "counting.py").write_text(APP.format(**vars(self)))
        self.sent: list[tuple[str, str]] = []

    def load(self, records: int) -> None:
        """Load records: some fail, some have a refused output that aborts their transaction, and some delete a
        value."""
        news = []
        for number in range(len(self.sent), len(self.sent) + records):
            value = "bad" if number % 11 == 0 else "forget" if number % 13 == 0 else f"v{number}"
            value = "large" if number % 450 == 225 else value
            news.append((f"k{number * 7 % KEYS}", value))
        with eos.transaction({"bootstrap.servers": self.servers, "transactional.id": f"{self.id}-load"}) as txn:
            for key, value in news:
                txn.send(self.source, value, key=key)
        self.sent += news

    def command(self, *arguments: str, program: tuple[str, ...] = ("eos",)) -> list[str]:
        where = "-X", f"eos.state.dir={self.state_dir}", "-X", f"eos.state.engine={self.engine}"
        return [*program, "run", "counting:app", *SMALL, *where, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"KAFKA_BOOTSTRAP_SERVERS": self.servers, "PYTHONPATH": str(self.folder)}

    def run(self, *arguments: str, program: tuple[str, ...] = ("eos",), ends: int = 0) -> str:
        command = self.command("--until-end", "--instance", "one", *arguments, program=program)
        ended = forked.run(command, cwd=self.folder, env=self.environment)
        assert ended.returncode == ends, ended.stderr
        return ended.stderr

    @contextmanager
    def worker(
        self, instance: str, *arguments: str, program: tuple[str, ...] = ("eos",)
    ) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / f"{instance}.log").open("wb") as log:
            # With the other protocol, the brokers decide the session timeout.
            session = () if "group.protocol=consumer" in arguments else ("-X", "session.timeout.ms=6000")
            command = self.command("--instance", instance, *session, *arguments, program=program)
            worker = forked.Popen[bytes](command, cwd=self.folder, env=self.environment, stderr=log)
            try:
                yield worker
            finally:
                worker.kill()
                worker.wait()

    def log(self, instance: str) -> str:
        return (self.folder / f"{instance}.log").read_text()

    def outputs(self) -> dict[str, list[str]]:
        """Return the outputs by key, in order."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for messages in settled_records(self.servers, self.out).values():
            for message in messages:
                found[(message.key() or b"").decode()].append((message.value() or b"").decode())
        return dict(found)

    def counted(self) -> dict[str, list[int]]:
        """Return the outputs of functions that count, by key."""
        return {key: [int(value or -1) for value in values] for key, values in self.outputs().items()}

    @property
    def expected(self) -> int:
        """Return how many outputs exist once all records are handled."""
        return sum(value not in ("bad", "large", "forget") for _, value in self.sent)

    def visible(self) -> int:
        """Return the number of visible outputs; transactions may be open."""
        return sum(map(len, visible_records(self.servers, self.out).values()))

    def check_outputs(self) -> tuple[Counter[str], dict[str, str]]:
        """Compare the outputs of every key with an independent count, and return the expected state of each key."""
        counts: Counter[str] = Counter()
        outputs: defaultdict[str, list[int]] = defaultdict(list)
        last: dict[str, str] = {}
        for key, value in self.sent:
            if value in ("bad", "large"):
                continue
            counts[key] += 1
            if value == "forget":
                last.pop(key, None)
            else:
                outputs[key].append(counts[key])
                last[key] = value
        assert self.counted() == outputs
        return counts, last

    def check(self) -> int:
        """Compare outputs and changelog with an independent count, and return the number of values."""
        counts, last = self.check_outputs()
        state: dict[tuple[str, bytes], bytes] = {}
        for messages in settled_records(self.servers, self.changelog).values():
            for message in messages:
                cell = parse_cell(message.key() or b"")[:2]
                if not cell[0]:
                    continue  # the task's own header
                state.pop(cell, None)
                if (kept := message.value()) is not None:
                    state[cell] = kept
        expected = {("seen", key.encode()): str(count).encode() for key, count in counts.items()}
        assert state == expected | {("last", key.encode()): value.encode() for key, value in last.items()}
        return len(state)


def eos_of(counting: Counting, *arguments: str, ends: int = 0) -> subprocess.CompletedProcess[str]:
    done = forked.run(["eos", *arguments], cwd=counting.folder, env=counting.environment)
    assert done.returncode == ends, done.stdout + done.stderr
    return done


def doctor_output(counting: Counting, ends: int = 0) -> str:
    findings = json.loads(eos_of(counting, "doctor", "counting:app", "--json", ends=ends).stdout)
    (found,) = [finding["found"] for finding in findings if finding["check"] == "state"]
    return str(found)


@pytest.fixture
def counting(kafka: LocalKafka, names: Names, tmp_path: Path) -> Counting:
    return Counting(kafka, names, tmp_path)


@pytest.mark.takes(60)
@pytest.mark.deep_for("memory")
@pytest.mark.parametrize("where", ["memory", "lmdb", "rocksdb"])
def test_state_continues_from_its_committed_changelog(counting: Counting, where: str) -> None:
    if where == "memory":
        counting.state_dir = ""
    else:
        counting.engine = where
    counting.load(1_000)
    counting.run()
    keys = counting.check()
    changes = sum(map(len, settled_records(counting.servers, counting.changelog).values()))
    assert changes < 1_000, "a key must be written once per transaction"
    counting.load(500)
    printed = counting.run()
    ((found, read),) = re.findall(r"state restored function=count partitions=0,1,2 keys=(\d+) read=(\d+) ", printed)
    assert where == "rocksdb" or int(found) == keys, "the number of keys is wrong"
    counting.check()
    assert int(read) == (changes if where == "memory" else 0), "the folder must be at the offset of its last commit"


@pytest.mark.takes(50)
def test_returning_worker_reads_the_counts_of_another_member(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    """Suspend a worker past its session: another machine's worker takes over and is stopped with SIGTERM."""
    counting = Counting(kafka, names, tmp_path)
    counting.load(300)
    with counting.worker("one") as one:
        wait_until("the worker has counted", lambda: counting.visible() >= 200, 30)
        os.kill(one.pid, signal.SIGSTOP)
        counting.load(300)
        folder, counting.state_dir = counting.state_dir, str(tmp_path / "elsewhere")
        counting.run("--instance", "two", "-X", "session.timeout.ms=6000")
        counting.check()
        one.send_signal(signal.SIGTERM)
        one.send_signal(signal.SIGCONT)
        assert one.wait(60) == 0, counting.log("one")
    counting.state_dir = folder
    counting.load(300)
    printed = counting.run()
    counting.check()
    assert "read=0" not in printed


def test_worker_killed_before_a_rocksdb_write_restores_the_rest(counting: Counting) -> None:
    counting.engine = "rocksdb"
    counting.load(1_200)
    counting.run(program=("-c", KILLED, "committed", "before", "4"), ends=-signal.SIGKILL)
    assert "read=0" not in counting.run()
    counting.check()


@pytest.mark.deep_for("send_offsets-behind")
@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("before_flush", "behind"),
        ("send_offsets", "behind"),
        ("commit", "behind"),
        pytest.param("flush", "behind", marks=pytest.mark.long),
        pytest.param("commit", "before", marks=pytest.mark.long),
        pytest.param("committed", "before", marks=pytest.mark.long),
        pytest.param("restore", "behind", marks=pytest.mark.long),
    ],
)
def test_worker_killed_at_a_step_leaves_every_key_right(counting: Counting, step: str, when: str) -> None:
    counting.load(1_200)
    number = "1" if step == "restore" else "4"
    counting.run(program=("-c", KILLED, step, when, number), ends=-signal.SIGKILL)
    assert counting.visible() < 1_000, "the kill came before or after the work"
    printed = counting.run()
    counting.check()
    if (step, when) == ("committed", "before"):
        assert "read=0" not in printed, "committed entries that were not written must come from the changelog"


@pytest.mark.deep_for("before")
@pytest.mark.parametrize("when", ["before", "behind"])
def test_commit_with_unknown_outcome_counts_if_it_succeeded(counting: Counting, when: str) -> None:
    counting.load(1_200)
    printed = counting.run(program=("-c", UNKNOWN, when))
    counting.check()
    outcome = "committed" if when == "behind" else "aborted"
    assert printed.count(f"outcome={outcome}") >= 2


@pytest.mark.parametrize(
    ("engine", "most_bytes"),
    [
        ("lmdb", 40_000),
        pytest.param("rocksdb", 10_000, marks=pytest.mark.long),
        pytest.param("rocksdb", 1_000, marks=pytest.mark.long),
    ],
)
def test_unwritable_folder_stops_the_worker_without_loss(counting: Counting, engine: str, most_bytes: int) -> None:
    counting.engine = engine
    counting.load(1_200 if engine == "lmdb" else 5_000)
    limited = (
        "-c",
        f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes})); "
        "sys.argv[0] = 'eos'; runpy.run_module('eos', run_name='__main__')",
    )
    printed = counting.run(program=limited, ends=75)
    assert "eos: state cannot be written to " in printed
    assert "Traceback" not in printed
    counting.run()
    counting.check()


@pytest.mark.parametrize("engine", ["lmdb", "rocksdb"])
def test_deleted_folder_does_not_stop_watched_workers(counting: Counting, engine: str) -> None:
    counting.engine = engine
    counting.load(200)
    with counting.worker("one", "--workers", "2", "--http-port", "0") as worker:
        wait_until("both workers work", lambda: counting.log("one").count("partitions assigned") == 2, 60)
        wait_until("all records are handled", lambda: counting.visible() >= counting.expected, 60)
        shutil.rmtree(counting.state_dir)
        for _ in range(3):
            counting.load(200)
            wait_until("the remaining records are handled", lambda: counting.visible() >= counting.expected, 60)
        worker.terminate()
        assert worker.wait(60) == 0, counting.log("one")
    assert "exit=70" not in counting.log("one")
    counting.check()
    counting.load(200)
    counting.run()
    counting.check()


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_all_kinds_of_functions_continue_after_a_kill(counting: Counting, names: Names, where: str) -> None:
    counting.state_dir = counting.state_dir if where == "folder" else ""
    other = names("sales")
    create_topic(counting.servers, other, partitions=PARTITIONS)
    (counting.folder / "counting.py").write_text(KINDS.format(other=other, **vars(counting)))
    expected: defaultdict[str, list[str]] = defaultdict(list)
    pages: defaultdict[str, Counter[str]] = defaultdict(Counter)
    last: defaultdict[str, list[str]] = defaultdict(list)
    sold: Counter[str] = Counter()
    with eos.transaction({"bootstrap.servers": counting.servers, "transactional.id": f"{counting.id}-load"}) as txn:
        for number in range(900):
            key, page = f"k{number % 17}", f"p{number % 5}"
            txn.send(counting.source, page, key=key)
            pages[key][page] += 1
            last[key] = [*last[key], page][-3:]
            expected[key].append(f"{pages[key][page]} {','.join(sorted(pages[key]))} {','.join(last[key])}")
            txn.send(other, str(number), key=f"s{number % 7}")
            sold[f"s{number % 7}"] += number
            expected[f"s{number % 7}"].append(str(sold[f"s{number % 7}"]))
    counting.run(program=("-c", KILLED, "commit", "behind", "4"), ends=-signal.SIGKILL)
    counting.run()
    assert counting.outputs() == expected


@pytest.mark.deep_for("folder")
@pytest.mark.parametrize("where", ["memory", "folder"])
def test_ttl_uses_record_time_even_after_a_kill(counting: Counting, where: str) -> None:
    counting.state_dir = counting.state_dir if where == "folder" else ""
    (counting.folder / "counting.py").write_text(FORGETS.format(**vars(counting)))
    expected: defaultdict[str, list[str]] = defaultdict(list)
    seen: dict[str, tuple[int, int]] = {}
    ever: Counter[str] = Counter()
    times = [0] * PARTITIONS
    producer = Producer({"bootstrap.servers": counting.servers, "enable.idempotence": True})
    began = int(time.time() * 1000) - 3_600_000  # Retention would delete old records during the test.
    for number in range(900):
        # Keys that arrive every second, and keys that arrive when they expire; some records are late.
        key = f"k{number % 2}" if number % 7 else f"r{number % 23}"
        partition, at = int(key[1:]) % PARTITIONS, began + 500 * number - 7_000 * (number % 5 == 0)
        producer.produce(counting.source, b"x", key, partition, timestamp=at)
        times[partition] = now = max(times[partition], at)
        count, written = seen.get(key, (0, 0))
        seen[key] = (count if now < written + 8_000 else 0) + 1, now
        ever[key] += 1
        expected[key].append(f"{seen[key][0]} of {ever[key]}")
    producer.flush()
    counting.run(program=("-c", KILLED, "commit", "behind", "4"), ends=-signal.SIGKILL)
    counting.run()
    assert counting.outputs() == expected
    # Entries that expire by the end of a transaction are deleted by the next one.
    for partition, now in enumerate(times):
        producer.produce(counting.source, b"x", f"e{partition}", partition, timestamp=now)
        seen[f"e{partition}"], ever[f"e{partition}"] = (1, now), 1
    producer.flush()
    counting.run()
    left = {key: count for key, (count, at) in seen.items() if times[int(key[1:]) % PARTITIONS] < at + 8_000}
    assert 0 < len(left) < len(ever)
    rows = [json.loads(line) for line in eos_of(counting, "state", "export", "counting:app").stdout.splitlines()]
    assert {row["key"]: row["state"]["ever"] for row in rows} == ever
    assert {row["key"]: row["state"]["seen"] for row in rows if row["state"].get("seen")} == left, (
        "the other expired entries are deleted"
    )


def test_chain_of_functions_is_exact_after_a_kill(counting: Counting, names: Names) -> None:
    other = names("between")
    (counting.folder / "counting.py").write_text(CHAIN.format(other=other, **vars(counting)))
    counting.load(1_500)
    more = "--create-topics", "-X", "eos.lineage=true"
    counting.run(*more, program=("-c", KILLED, "commit", "behind", "6"), ends=-signal.SIGKILL)
    counting.run(*more)
    groups = Counter(key[-1] for key, _ in counting.sent)
    assert counting.counted() == {group: list(range(1, count + 1)) for group, count in groups.items()}
    for source, out in ((counting.source, other), (other, counting.out)):
        found = verify(counting.servers, [source], [out], counting.id)
        assert (found.report.ok, found.inputs, found.outputs) == (True, 1_500, 1_500), str(found.report)


def test_state_can_be_queried_from_outside(counting: Counting) -> None:
    eos_state = functools.partial(eos_of, counting, "state")
    counting.load(400)
    assert "topic " in eos_state("show", "counting:app", ends=69).stderr, "the changelog must not exist yet"
    counting.run()
    rows = [json.loads(line) for line in eos_state("export", "counting:app").stdout.splitlines()]
    counts = Counter(key for key, value in counting.sent if value not in ("bad", "large"))
    assert {row["key"]: row["state"]["seen"] for row in rows} == counts
    assert {row["function"] for row in rows} == {"count"}
    (one,) = json.loads(eos_state("show", "counting:app", "--key", "k7", "--json").stdout)
    assert one["state"]["seen"] == counts["k7"]
    shown = eos_state("show", "counting:app", "--limit", "3")
    assert (shown.stdout.count("seen"), "only 3 keys of each function are shown" in shown.stderr) == (3, True)
    assert "not a stateful function of" in eos_state("show", "counting:app", "--function", "nope", ends=64).stderr


def test_moved_partitions_keep_their_state(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    """Let a second worker join and be killed during its work; the first one continued and takes over again."""
    counting = Counting(kafka, names, tmp_path, work_s=0.002)
    counting.load(1_500)
    with counting.worker("one"), counting.worker("two") as second:
        wait_until("both workers have partitions", lambda: "state restored" in counting.log("two"), 60)
        counting.load(1_500)
        begun = counting.visible()
        wait_until("both workers work", lambda: counting.visible() > begun + 300, 60)
        second.send_signal(signal.SIGKILL)
        second.wait()
        counting.load(500)
        wait_until("all records are handled", lambda: counting.visible() >= counting.expected, 90)
        counting.check()


def test_other_partitions_continue_during_a_restore(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipelines.stateful = True
    pipeline = pipelines.on(kafka, 600)
    pipeline.finish()
    blocked = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": f"{pipeline.app}-blocks"})
    blocked.init_transactions(30)
    blocked.begin_transaction()
    blocked.produce(f"{pipeline.app}-{counter_of(0)}-changelog", b"aborted", b"no cell", partition=0)
    blocked.flush(30)
    limit_ms = 3_000
    worker = pipeline.worker(settings={"max.poll.interval.ms": limit_ms, "session.timeout.ms": limit_ms})
    pipeline.load_transaction(600)
    waiting = 100  # records of one partition of one source
    pipeline.wait_handled(1_200 - waiting)
    began = time.monotonic()
    wait_until("one second more than the limit has passed", lambda: time.monotonic() > began + limit_ms / 1000 + 1)
    assert pipeline.delivered == 2 * (1_200 - waiting)
    blocked.abort_transaction(30)
    pipeline.wait_handled(1_200)
    worker.terminate()
    assert worker.wait() == 0
    first, *later = [line for line in worker.log.splitlines() if "partitions assigned" in line]
    partition_name = f"{pipeline.sources[0]}[0]"
    assert (partition_name in first, any(partition_name in line for line in later)) == (False, True), (
        "the worker must start after a decision"
    )
    assert "partitions lost" not in worker.log
    pipeline.verify()


def test_incompatible_state_is_reported_before_the_first_record(counting: Counting) -> None:
    counting.load(20)
    counting.run()
    reset = eos_of(counting, "reset", "counting:app", "--from", "earliest", "--yes", ends=64)
    assert reset.stderr.startswith(f"eos: count of {counting.id} has state, and records that are read again")
    admin = AdminClient({"bootstrap.servers": counting.servers})
    configure(counting.servers, counting.changelog, "cleanup.policy", "delete")
    assert f"the changelog {counting.changelog} has cleanup.policy=delete" in counting.run(ends=78)
    assert f"the changelog {counting.changelog} has cleanup.policy=delete" in doctor_output(counting, ends=78)
    configure(counting.servers, counting.changelog, "cleanup.policy", "compact")
    assert doctor_output(counting) == f"count: its changelog {counting.changelog} exists"
    source = counting.folder / "counting.py"
    code = source.read_text()
    source.write_text(code.replace("eos.State[str]", "eos.MapState[str, int]"))
    counting.load(20)
    assert "the state last of count was a State when it was stored, and is a MapState[str] now" in counting.run(ends=78)
    source.write_text(code)
    admin.create_partitions([NewPartitions(counting.source, PARTITIONS + 1)])[counting.source].result(30)

    def refused() -> bool:
        return "has 3 partitions, and" in counting.run(ends=78)

    assert refused()
    # The changelog gets more partitions too, so keys would start again in another partition.
    admin.create_partitions([NewPartitions(counting.changelog, PARTITIONS + 1)])[counting.changelog].result(30)
    assert "and its changelog had 3 partitions when it was stored, and have 4" in counting.run(ends=78)


@pytest.mark.deep
def test_lost_state_is_not_recreated_without_a_request(counting: Counting) -> None:
    """Delete the state after a single run: the offsets' metadata already has the end of the changelog."""
    counting.load(20)
    counting.run()
    admin = AdminClient({"bootstrap.servers": counting.servers})
    admin.delete_topics([counting.changelog])[counting.changelog].result(30)
    counting.load(5)
    before = counting.visible()
    message = counting.run(ends=66)
    assert "eos: state is gone: the changelog " in message
    assert " ends at 0, but went up to " in message
    assert counting.visible() == before, "a record was handled"


def test_deleted_changelog_is_noticed_after_a_reset(counting: Counting) -> None:
    """Continue with the contents of the changelog after `--accept-changelog`."""
    counting.state_dir = ""
    counting.load(20)
    counting.run()
    producer, skipped = Producer({"bootstrap.servers": counting.servers}), list[str]()
    for partition in range(PARTITIONS):
        offset = stable_offset(counting.servers, counting.id, counting.source, partition)
        skipped += "--skip", f"{counting.source}[{partition}]@{offset}"
        producer.produce(counting.source, b"not handled", b"k0", partition)
    producer.flush()
    eos_of(counting, "reset", "counting:app", *skipped, "--wait", "30", "--yes")
    admin = AdminClient({"bootstrap.servers": counting.servers})
    admin.delete_topics([counting.changelog])[counting.changelog].result(30)
    counting.load(60)
    assert f"eos: state is gone: the changelog {counting.changelog}[" in counting.run(ends=66)
    accepted = eos_of(counting, "reset", "counting:app", "--accept-changelog", "--wait", "30", "--yes").stdout
    assert "the next start accepts the changelogs as complete" in accepted
    counting.run()
    assert any(values.count("1") == 2 for values in counting.outputs().values()), "the counts must start at 1 again"


def test_changelog_without_its_beginning_stops_the_worker(counting: Counting) -> None:
    """Let retention delete changelog records while cleanup.policy is delete; the folder still has their values."""
    counting.load(200)
    counting.run()
    admin = AdminClient({"bootstrap.servers": counting.servers})
    configure(counting.servers, counting.changelog, "cleanup.policy", "delete")
    removed = admin.delete_records([TopicPartition(counting.changelog, 1, 10)])
    assert [future.result(30).low_watermark for future in removed.values()] == [10]
    configure(counting.servers, counting.changelog, "cleanup.policy", "compact")
    counting.load(200)
    folder, counting.state_dir = counting.state_dir, str(counting.folder / "empty")
    before = counting.visible()
    assert f"state is gone: the changelog {counting.changelog}[1] begins at 10, so values " in counting.run(ends=66)
    assert counting.visible() == before, "a record was handled"
    counting.state_dir = folder
    counting.run()
    counting.check_outputs()


def test_foreign_changelog_stops_the_worker(counting: Counting) -> None:
    """Give a deleted group's changelog a record of another program; neither is a failure of an input record."""
    counting.load(60)
    counting.run()
    counting.load(60)
    before = counting.visible()
    admin = AdminClient({"bootstrap.servers": counting.servers})
    admin.delete_consumer_groups([counting.id])[counting.id].result(30)
    without_notes = "-X", "eos.places.topic="
    forgotten = counting.run(*without_notes, ends=66)
    assert f"has no committed offset, but the changelog {counting.changelog}[" in forgotten
    assert counting.visible() == before, "a record was counted again"
    producer = Producer({"bootstrap.servers": counting.servers})
    producer.produce(counting.changelog, b"{}", b"hello", 2)
    producer.flush()
    counting.state_dir = ""
    strange = counting.run(*without_notes, ends=78)
    assert re.search(rf"the changelog record {counting.changelog}\[2\]@\d+ was written by another program", strange)


@pytest.mark.deep
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_member_that_lost_its_partition_writes_no_state(counting: Counting, protocol: str) -> None:
    """Let a function hang past max.poll.interval.ms and then raise, while the new owner counts an expired key again.

    A tombstone of the old owner would delete the new count.
    """
    (counting.folder / "counting.py").write_text(HANGS.format(**vars(counting)))
    began = int(time.time() * 1000) - 600_000
    producer = Producer({"bootstrap.servers": counting.servers, "partitioner": "murmur2_random"})

    def send(key: str, value: str, at: int) -> None:
        producer.produce(counting.source, value, key, 0, timestamp=began + at)
        producer.flush()

    group = "-X", f"group.protocol={protocol}"
    os.environ["HANG"] = "1"
    try:
        first = counting.worker("one", *group, "-X", "max.poll.interval.ms=6000")
        with first as one:
            send("k", "x", 0)
            wait_until("the first worker has counted k", lambda: counting.outputs().get("k") == ["1"], 30)
            send("h", "hang", 61_000)
            wait_until("the function hangs", lambda: "HANGS" in counting.log("one"), 30)
            del os.environ["HANG"]
            counting.state_dir = str(counting.folder / "elsewhere")
            with counting.worker("two", *group):
                wait_until("the other worker has the partition", lambda: counting.outputs().get("h") == ["1"], 60)
                send("k", "x", 62_000)
                wait_until(
                    "the other worker counts k from 1 again", lambda: counting.outputs().get("k") == ["1", "1"], 30
                )
                (counting.folder / "go").touch()
                wait_until("the function has raised", lambda: "RAISES" in counting.log("one"), 30)
                wait_until(
                    "the first worker has finished the record", lambda: one.poll() is not None or _again(counting), 30
                )
        counting.state_dir = ""
        send("k", "x", 63_000)
        counting.run()
        assert counting.outputs()["k"] == ["1", "1", "2"]
    finally:
        os.environ.pop("HANG", None)


def _again(counting: Counting) -> bool:
    """Return whether the first worker aborted or joined the group again."""
    lines = counting.log("one").rpartition("RAISES")[2]
    return "transaction aborted" in lines or "rejoined the group" in lines or "stopped" in lines
