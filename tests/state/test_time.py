"""Use time on a real broker: final results follow from the input alone, whatever kills and rebalances happen."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer

import eos
from eos.broker import LocalKafka
from eos.testing import run
from eos.testing.history import read_topic
from tests.state.test_state import PARTITIONS, Counting, eos_of
from tests.support.killed import KILLED
from tests.support.reading import (
    configure,
    create_topic,
    set_group_session_timeout,
    settled_records,
    visible_records,
    wait_until,
)

Names = Callable[[str], str]
APP = """
import time
from datetime import timedelta
import eos
from eos import ListState, State, Timers, Window, sessions, tumbling

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, window=tumbling(minutes=1), grace=timedelta(seconds=10), late={late!r})
def add(value: int, total: State[int]) -> None:
    time.sleep({work_s})
    total.set(total.get(0) + value)

@app.on_close(add)
def close(window: Window, total: State[int]) -> str:
    return f"{{window.start_ms}} {{total.get()}}"

@app.process({visits!r}, to={out!r}, window=sessions(seconds=20), grace=timedelta(seconds=10), late={late!r})
def visit(page: str, pages: ListState[str]) -> None:
    pages.append(page)

@app.on_merge(visit)
def merge(pages: ListState[str], others: ListState[str]) -> None:
    pages.extend(others)

@app.on_close(visit)
def left(window: Window, pages: ListState[str]) -> str:
    return f"s{{window.start_ms}} {{window.end_ms}} {{','.join(pages)}}"

@app.process({ids!r}, to={out!r}, once=lambda value: value, within=timedelta(minutes=5), duplicates={late!r})
def unique(value: str) -> str:
    return f"u{{value}}"

@app.process({carts!r}, to={out!r})
def cart(item: str, items: ListState[str], due: Timers) -> None:
    items.append(item)
    due.set("abandoned", after=timedelta(minutes=2))
    if item.endswith("9"):
        due.clear("abandoned")

@app.on_timer(cart, "abandoned")
def abandoned(key: str, items: ListState[str]) -> str:
    listed = ",".join(items)
    items.clear()
    return f"{{key}} {{listed}}"
"""
MINUTE_MS = 60_000
# An hour ago: records of long ago would be deleted by retention during the test.
START_MS = (int(time.time() * 1000) // MINUTE_MS - 60) * MINUTE_MS


class Timed(Counting):
    """Run an App with windows and timers, and compare it with a plain function of the input."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path, work_s: float = 0.0) -> None:
        self.late, self.carts, self.visits, self.ids = names("late"), names("carts"), names("visits"), names("ids")
        super().__init__(kafka, names, folder, work_s)
        for topic in (self.late, self.carts, self.visits, self.ids):
            create_topic(self.servers, topic, partitions=PARTITIONS)
        self.write_program()

    def write_program(self) -> None:
        (self.folder / "counting.py").write_text(APP.format(**vars(self)))

    def load_times(self, records: int, seed: int = 1) -> None:
        """Load records of about two per second, up to a minute out of order, and at the end one that closes all."""
        draw = random.Random(seed)
        with eos.transaction({"bootstrap.servers": self.servers, "transactional.id": f"{self.id}-load"}) as txn:
            for number in range(records):
                time_ms = START_MS + number * 500 - draw.choice((0, 0, 0, 5_000, 60_000))
                key = f"k{draw.randrange(20)}"
                txn.send(self.source, str(number), key=key, timestamp_ms=time_ms)
                txn.send(self.carts, f"i{number}", key=key, timestamp_ms=time_ms)
                txn.send(self.visits, f"p{number}", key=key, timestamp_ms=time_ms)
                txn.send(self.ids, f"{key}{draw.randrange(100)}", key=key, timestamp_ms=time_ms)
            for topic in (self.source, self.carts, self.visits, self.ids):
                for partition in range(PARTITIONS):
                    end_ms = START_MS + records * 500 + 10 * MINUTE_MS
                    txn.send(topic, "0", key="last", partition=partition, timestamp_ms=end_ms)

    def expected_times(self) -> tuple[dict[str, list[str]], int]:
        """Return the outputs by key, in order, and the number of late records: by a plain loop over each partition."""
        outputs: defaultdict[str, list[str]] = defaultdict(list)
        late = 0
        for messages in settled_records(self.servers, self.source).values():
            now = 0
            sums: dict[tuple[int, str], int] = {}

            def close(now: int, sums: dict[tuple[int, str], int] = sums) -> None:
                for start, key in sorted(sums):
                    if start + 70_000 <= now:
                        outputs[key].append(f"{start} {sums.pop((start, key))}")

            for message in messages:
                key, value, time_ms = message.key().decode(), int(message.value()), message.timestamp()[1]
                now = max(now, time_ms)
                close(now)
                start = time_ms // MINUTE_MS * MINUTE_MS
                if start + 70_000 <= now:
                    late += 1
                else:
                    sums[start, key] = sums.get((start, key), 0) + value
        for messages in settled_records(self.servers, self.carts).values():
            now = 0
            items: defaultdict[str, list[str]] = defaultdict(list)
            timers: dict[str, int] = {}

            def fire(now: int, items: dict[str, list[str]] = items, timers: dict[str, int] = timers) -> None:
                for due, key in sorted((due, key) for key, due in timers.items()):
                    if due <= now:
                        outputs[key].append(f"{key} {','.join(items.pop(key))}")
                        del timers[key]

            for message in messages:
                key, item, time_ms = message.key().decode(), message.value().decode(), message.timestamp()[1]
                now = max(now, time_ms)
                fire(now)
                items[key].append(item)
                timers[key] = time_ms + 2 * MINUTE_MS
                if item.endswith("9"):
                    del timers[key]
                fire(now)
        return dict(outputs), late

    def outputs_so_far(self) -> dict[str, list[str]]:
        """Return the visible outputs by key; transactions may be open."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for messages in visible_records(self.servers, self.out).values():
            for message in messages:
                found[message.key().decode()].append(message.value().decode())
        return dict(found)

    def check_times(self) -> None:
        """Compare with a plain loop, and all four functions with a run without a broker, which the unit tests check."""
        expected, late = self.expected_times()
        found = self.outputs()
        inputs = [
            eos.Record(
                topic, message.partition(), message.offset(), message.timestamp()[1], message.key(), message.value()
            )
            for topic in (self.source, self.carts, self.visits, self.ids)
            for messages in settled_records(self.servers, topic).values()
            for message in messages
        ]
        app = runpy.run_path(str(self.folder / "counting.py"))["app"]
        ran = run(app, inputs)
        offline: defaultdict[str, list[str]] = defaultdict(list)
        for sent in ran.to(self.out):
            offline[(sent.key or b"").decode()].append((sent.value or b"").decode())
        # The functions write to one topic, in no common order; all begin their outputs differently.
        for function in "1kus":
            for key in offline.keys() | found.keys():
                one, other = ([v for v in of.get(key, ()) if v.startswith(function)] for of in (found, offline))
                assert one == other
                if function in "1k":
                    assert one == [v for v in expected.get(key, ()) if v.startswith(function)]
        assert len(read_topic(self.servers, self.late).values) == ran.late + ran.duplicates > late > 0


@pytest.fixture
def timed(kafka: LocalKafka, names: Names, tmp_path: Path) -> Timed:
    return Timed(kafka, names, tmp_path)


@pytest.mark.takes(30)
@pytest.mark.deep_for("memory", "rocksdb")
@pytest.mark.parametrize("where", ["memory", "lmdb", "rocksdb"])
def test_windows_and_timers_equal_a_plain_loop_after_kills(timed: Timed, where: str) -> None:
    if where == "memory":
        timed.state_dir = ""
    else:
        timed.engine = where
    timed.load_times(3_000)
    # T3: a late record after a restart is late as before.
    for step, when, number in (
        ("before_flush", "behind", "3"),
        ("send_offsets", "behind", "3"),
        ("commit", "behind", "4"),
        ("committed", "before", "3"),
    ):
        timed.run(program=("-c", KILLED, step, when, number), ends=-signal.SIGKILL)
    timed.run()
    timed.check_times()


@pytest.mark.takes(40)
@pytest.mark.deep_for("classic")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_windows_and_timers_equal_a_plain_loop_across_rebalances(
    kafka: LocalKafka, names: Names, tmp_path: Path, protocol: str
) -> None:
    """A member joins and is killed, and another joins and leaves, while windows and timers are open."""
    timed = Timed(kafka, names, tmp_path, work_s=0.01)
    timed.load_times(1_500)
    set_group_session_timeout(timed.servers, timed.id, 6_000)
    group = "-X", f"group.protocol={protocol}"

    def wait_for_more(outputs: int) -> None:
        seen = timed.visible()
        wait_until(f"{outputs} more outputs", lambda: timed.visible() >= seen + outputs, 60)

    with timed.worker("one", *group):
        wait_for_more(100)
        with timed.worker("two", *group) as second:
            wait_until("the second member has partitions", lambda: "state restored" in timed.log("two"), 60)
            wait_for_more(100)
            second.kill()
        with timed.worker("three", *group) as third:
            wait_until("the third member has partitions", lambda: "state restored" in timed.log("three"), 60)
            wait_for_more(50)
            third.terminate()
            assert third.wait(60) == 0, timed.log("three")
    timed.work_s = 0
    timed.write_program()
    timed.run(*group)
    timed.check_times()


def test_changed_window_is_refused_until_its_state_begins_empty(timed: Timed) -> None:
    timed.load_times(300)
    timed.run()
    shown = eos_of(timed, "state", "show", "counting:app", "--function", "add").stdout
    assert "last 20" in shown, "the open window of the last record is shown with its start"
    program = timed.folder / "counting.py"
    program.write_text(program.read_text().replace("tumbling(minutes=1)", "tumbling(minutes=2)"))
    timed.load_times(10)
    refused = timed.run(ends=78)
    assert (
        "was a State per tumbling window of 0:01:00, grace 0:00:10 when it was stored, and is a State per tumbling"
        in refused
    )
    eos_of(timed, "state", "begin", "counting:app", "add", "--wait", "30", "--yes")
    timed.run()


GROWS = """
from datetime import timedelta
import eos
from eos import State, Timers

app = eos.App({id!r})

@app.process({source!r}, to={out!r})
def count(value: str, seen: State[int]) -> str:
    seen.set(seen.get(0) + 1)
    return f"{{seen.get()}}"
"""
TIMERS = """
@app.on_timer(count, "quiet")
def quiet(key: str, seen: State[int]) -> str:
    return f"quiet after {seen.get()}"
"""


@pytest.mark.deep_for("memory")
@pytest.mark.parametrize("where", ["memory", "lmdb"])
def test_timers_are_added_to_a_function_with_state(timed: Timed, where: str) -> None:
    """T16, T8: its state continues, and its timers are restored by a later run."""
    timed.state_dir = timed.state_dir if where == "lmdb" else ""
    program, loads = timed.folder / "counting.py", iter(range(9))
    program.write_text(GROWS.format(**vars(timed)))

    def load(seconds: int) -> None:
        with eos.transaction({"bootstrap.servers": timed.servers, "transactional.id": f"{timed.id}-load"}) as txn:
            txn.send(timed.source, f"{next(loads)}", key="k", timestamp_ms=START_MS + seconds * 1_000)

    load(0)
    timed.run()
    code = program.read_text().replace("seen: State[int])", "seen: State[int], due: Timers)")
    body = 'seen.set(seen.get(0) + 1)\n    due.set("quiet", after=timedelta(seconds=10))'
    program.write_text(code.replace("seen.set(seen.get(0) + 1)", body) + TIMERS)
    load(1)
    timed.run()
    load(30)
    timed.run()
    assert timed.outputs() == {"k": ["1", "2", "quiet after 2", "3"]}
    program.write_text(program.read_text().replace('"quiet"', '"silent"'))
    load(60)
    assert "the timer 'quiet' of count is due, but no function runs for it" in timed.run(ends=78)


SILENT = """
from datetime import timedelta
import eos
from eos import State, Timers, Window, tumbling

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, window=tumbling(seconds=1), grace=timedelta(0), idle=timedelta(seconds=2))
def add(value: int, total: State[int]) -> None:
    total.set(total.get(0) + value)

@app.on_close(add)
def close(window: Window, total: State[int]) -> str:
    return f"{{total.get()}}"
"""


def test_silent_partition_closes_windows_unless_a_backlog_is_slow(timed: Timed) -> None:
    """T11, T12: a producer's open transaction keeps its partition from being silent; the other two close theirs."""
    (timed.folder / "counting.py").write_text(SILENT.format(**vars(timed)))
    now = int(time.time() * 1000) // 1000 * 1000
    for partition in range(PARTITIONS):
        with eos.transaction({"bootstrap.servers": timed.servers, "transactional.id": f"{timed.id}-load"}) as txn:
            txn.send(timed.source, "1", key=f"k{partition}", partition=partition, timestamp_ms=now)
    slow = Producer({"bootstrap.servers": timed.servers, "transactional.id": f"{timed.id}-slow"})
    slow.init_transactions(30)
    slow.begin_transaction()
    slow.produce(timed.source, b"5", key=b"k2", partition=2, timestamp=now)
    slow.flush(30)
    with timed.worker("one"):
        wait_until("two windows are closed", lambda: timed.visible() >= 2, 40)
        waited_until = time.monotonic() + 3
        wait_until("the third would have closed long ago", lambda: time.monotonic() > waited_until, 10)
        assert timed.outputs_so_far() == {"k0": ["1"], "k1": ["1"]}
        slow.commit_transaction(30)
        wait_until("the third window is closed", lambda: timed.visible() == 3, 40)
    assert timed.outputs() == {"k0": ["1"], "k1": ["1"], "k2": ["6"]}


CLOCK = """
from datetime import timedelta
import eos
from eos import State, Timers

app = eos.App({id!r})

@app.process({source!r}, to={out!r})
def start(value: str, due: Timers) -> None:
    due.set("later", after=timedelta(seconds=int(value)), clock=True)

@app.on_timer(start, "later")
def later(key: str) -> str:
    return f"{{key}} fired"
"""


FAILS = """
from datetime import timedelta
import eos
from eos import State, Timers

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, on_error=eos.retry(2, then="dlq"))
def start(value: str, seen: State[int], due: Timers) -> None:
    seen.set(1)
    due.set(value, after=timedelta(milliseconds=1), clock=value == "raises")

@app.on_timer(start, "raises")
def raises(key: str, seen: State[int]) -> str:
    seen.set(2)
    raise ValueError("on purpose")

@app.on_timer(start, "large")
def large(key: str) -> str:
    return "x" * 3_000_000

@app.on_timer(start, "works")
def works(key: str, seen: State[int]) -> str:
    return f"{{seen.get()}}"
"""


@pytest.mark.deep_for("client")
@pytest.mark.parametrize("refuses", ["client", "broker"])
def test_failed_timers_go_to_the_dead_letter_topic_and_others_fire(timed: Timed, refuses: str) -> None:
    """Timers of both clocks: one raises, and an output of another one is refused. A broker does not say which one."""
    if refuses == "broker":
        configure(timed.servers, timed.out, "max.message.bytes", "100000")
    (timed.folder / "counting.py").write_text(FAILS.format(**vars(timed)))
    letters = create_topic(timed.servers, f"{timed.source}.dlq")
    with eos.transaction({"bootstrap.servers": timed.servers, "transactional.id": f"{timed.id}-load"}) as txn:
        for number, name in enumerate(("works", "raises", "large", "works", "raises", "works")):
            txn.send(timed.source, name, key=f"k{number}", partition=0, timestamp_ms=START_MS + number * 1_000)
    timed.run("-X", f"message.max.bytes={1_000_000 if refuses == 'client' else 9_000_000}")
    assert timed.outputs() == {key: ["1"] for key in ("k0", "k3")}, "the timer of the last record is not due"
    failed = read_topic(timed.servers, letters, header="eos-timer")
    assert sorted(zip(failed.keys, failed.headers, strict=True)) == [
        (b"k1", b"raises"),
        (b"k2", b"large"),
        (b"k4", b"raises"),
    ]


# Suspends itself in an open transaction in which timers have fired.
SUSPENDED = """
import os, signal, sys
from eos import cli
from eos.engine.handling import Handler
call = Handler.fire_waiting
def suspending(self, txn):
    due = self.has_due_timers()
    halt = call(self, txn)
    if due:
        os.kill(os.getpid(), signal.SIGSTOP)
    return halt
Handler.fire_waiting = suspending
sys.exit(cli.invoke(sys.argv[1:]))
"""


def test_clock_timers_fire_without_records_and_never_from_a_zombie(timed: Timed) -> None:
    """T1, T2: a worker that was suspended while its timers fired commits nothing after another member fired them."""
    (timed.folder / "counting.py").write_text(CLOCK.format(**vars(timed)))
    with eos.transaction({"bootstrap.servers": timed.servers, "transactional.id": f"{timed.id}-load"}) as txn:
        for number in range(60):
            txn.send(timed.source, "4", key=f"k{number}")

    def timers() -> dict[str, list[str]]:
        rows = map(json.loads, eos_of(timed, "state", "export", "counting:app").stdout.splitlines())
        return {row["key"]: list(row["timers"]) for row in rows}

    with timed.worker("one", program=("-c", SUSPENDED)) as one:
        process = psutil.Process(one.pid)
        wait_until("it fires timers", lambda: process.status() == psutil.STATUS_STOPPED, 40)
        assert timers() == {f"k{number}": ["later"] for number in range(60)}, "its transaction is still open"
        timed.state_dir = str(timed.folder / "elsewhere")
        with timed.worker("two"):
            wait_until("the other member fires them", lambda: not timers(), 60)
            os.kill(one.pid, signal.SIGCONT)
            wait_until("its commit is refused", lambda: "transaction aborted" in timed.log("one"), 30)
            wait_until("all outputs are visible", lambda: timed.visible() == 60, 60)
            assert timed.outputs_so_far() == {f"k{number}": [f"k{number} fired"] for number in range(60)}


FLIGHTS = """
from datetime import timedelta
import eos
from eos import Out, State, Window, tumbling

app = eos.App({id!r})

@app.process({source!r}, to={carts!r})
def by_airline(flight: str) -> Out:
    airline, delay = flight.split()
    return Out(delay, key=airline)

@app.process({carts!r}, to={out!r}, window=tumbling(days=1), grace=timedelta(0), late={late!r})
def add(delay: int, total: State[int]) -> None:
    total.set(total.get(0) + delay)

@app.on_close(add)
def close(window: Window, total: State[int]) -> str:
    return f"{{window.start:%Y-%m-%d}} {{total.get()}}"
"""
DAY_MS = 86_400_000


@pytest.mark.deep_for("0")
@pytest.mark.parametrize("kills", [0, 2])
def test_window_after_rekeying_drops_nothing_of_a_backlog(timed: Timed, kills: int) -> None:
    """Read a year of flights, whose partitions the first step reads one after the other: the second sees all ages."""
    (timed.folder / "counting.py").write_text(FLIGHTS.format(**vars(timed)))
    for topic in (timed.source, timed.carts, timed.out):
        configure(timed.servers, topic, "retention.ms", "-1")
    begin_ms = (START_MS // DAY_MS - 365) * DAY_MS
    draw, sums = random.Random(1), dict[str, dict[str, int]]()
    with eos.transaction({"bootstrap.servers": timed.servers, "transactional.id": f"{timed.id}-load"}) as txn:
        for partition in range(PARTITIONS):
            for number in range(365 * 8):
                time_ms = begin_ms + number * DAY_MS // 8
                airline, delay = draw.choice(("AA", "BB", "CC")), draw.randrange(60)
                txn.send(timed.source, f"{airline} {delay}", key="k", partition=partition, timestamp_ms=time_ms)
                day = f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d}"
                days = sums.setdefault(airline, {})
                days[day] = days.get(day, 0) + delay
    for number in range(kills):
        timed.run(program=("-c", KILLED, "commit", "behind", str(10 + 5 * number)), ends=-signal.SIGKILL)
    timed.run()
    last = max(day for days in sums.values() for day in days)
    found = timed.outputs()
    for airline, days in sums.items():
        totals = [value for value in found[airline] if not value.startswith(last)]
        assert totals == [f"{day} {days[day]}" for day in sorted(days) if day < last]
    assert read_topic(timed.servers, timed.late).values == []
