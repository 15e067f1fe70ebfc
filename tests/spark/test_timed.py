"""Run functions that use time on Spark: windows, timers, deduplication and expiry give the outputs of a worker."""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.test_keyed import SPARK_S
from tests.support.reading import wait_until

if TYPE_CHECKING:
    from tests.support.spark import SparkRuns
pytest_plugins = ["tests.support.spark"]

pytestmark = [pytest.mark.takes(60), pytest.mark.timeout(560)]

MINUTE_MS = 60_000
# An hour ago: records of long ago would be deleted by retention during the test.
START_MS = (int(time.time() * 1000) // MINUTE_MS - 60) * MINUTE_MS
RECORDS = 1_500
PARTITIONS = 2
FUNCTIONS = ("sales", "rides", "clicks", "carts", "pays", "seen", "many", "plain")

# The first letter of an output names its function.
TIMED = """
    import json, os, time
    from datetime import timedelta
    import eos
    from eos import ListState, MapState, Out, Record, State, Timer, Timers, Window

    app = eos.App($app)
    MINUTE = timedelta(minutes=1)
    started = []


    @app.on_start
    def start() -> None:
        started.append(1)


    def hold(number: int) -> None:
        while number == 700 and not os.path.exists($go_on):
            open(os.path.join(os.path.dirname($go_on), "held"), "w").close()
            time.sleep(0.05)


    @app.process($sales, to=$to, window=eos.tumbling(minutes=1), grace=timedelta(seconds=10), late=$late)
    def add(number: int, total: State[int]) -> str:
        hold(number)
        total.set(total.get(0) + number * bool(started))
        return f"a {total.get()}"


    @app.on_close(add)
    def added(window: Window, total: State[int]) -> Out:
        return Out(f"a {window.start_ms} {total.get()}", headers={"h": "x"})


    @app.process($rides, to=$to, window=eos.hopping(MINUTE, timedelta(seconds=20)), grace=timedelta(0), late=$late,
                 time=lambda ride: ride["at"], ahead=timedelta(minutes=5), on_error=eos.dlq)
    def ride(ride: dict, longest: MapState[str, int]) -> None:
        longest[str(ride["n"] % 3)] = max(longest.get(str(ride["n"] % 3), 0), ride["n"])


    @app.on_close(ride)
    def rode(window: Window, longest: MapState[str, int]) -> str:
        return f"b {window.start_ms} {dict(longest)}"


    @app.process($clicks, to=$to, window=eos.sessions(seconds=20), grace=timedelta(seconds=10), late=$late)
    def click(page: str, pages: ListState[str]) -> None:
        pages.append(page)


    @app.on_merge(click)
    def merge(pages: ListState[str], others: ListState[str]) -> None:
        pages.extend(others)


    @app.on_close(click)
    def left(window: Window, pages: ListState[str]) -> str:
        return f"c {window.start_ms} {window.end_ms} {','.join(pages)}"


    @app.process($carts, to=$to, on_error=eos.skip)
    def cart(number: int, items: ListState[int], due: Timers) -> str | None:
        items.append(number)
        due.set("abandoned", after=1.5 * MINUTE)  # later than now, whenever the record comes
        due.set("passed", at=1_000 + number)
        if number % 10 == 0:
            due.clear("abandoned")
        if number % 50 == 0:
            raise ValueError("remembers nothing")
        return f"d {list(items)}"


    @app.on_timer(cart, "abandoned")
    def abandoned(timer: Timer, items: ListState[int], due: Timers) -> str:
        listed = list(items)
        items.clear()
        if len(listed) > 2:
            due.set("abandoned", after=2 * MINUTE)
        return f"d {timer.due_ms} {timer.now_ms} {listed}"


    @app.on_timer(cart, "passed")
    def passed(timer: Timer, items: ListState[int]) -> str:
        if len(items) % 7 == 6:
            raise ValueError("a timer fails")
        return f"d passed {timer.due_ms}"


    @app.process($pays, to=$to, once=lambda number: number % 100, within=timedelta(minutes=2), duplicates=$late)
    def pay(number: int) -> str:
        return f"e {number}"


    @app.process($seen, to=$to, ttl={"count": timedelta(seconds=30), "pages": timedelta(minutes=1)})
    def see(number: int, count: State[int], pages: MapState[int, int], first: State[int]) -> str:
        count.set(count.get(0) + 1)
        pages[number % 5] = number
        first.set(first.get(number))
        return f"f {count.get()} {dict(pages)} {first.get()}"


    @app.process_batch($many, to=$to, ttl=timedelta(seconds=30))
    def many(records: list[Record], sums: dict[bytes, State[int]]) -> list[Out]:
        outs = []
        for record in records:
            state = sums[record.key]
            state.set(state.get(0) + int(record.value))
            outs.append(record.out(f"g {state.get()}"))
        return outs


    @app.process($plain, to=$to)
    def count(number: int, seen: State[int]) -> str:
        seen.set(seen.get(0) + 1)
        return f"h {number} {seen.get()}"
"""


def load(runs: SparkRuns, topics: dict[str, str]) -> None:
    """Load two records per second, up to a minute out of order, and at the end one in each partition that closes all.

    Each key is in one partition, because the outputs of a key are compared in order.
    """
    draw, producer = random.Random(1), runs.loader()
    for number in range(RECORDS):
        time_ms = START_MS + number * 500 - draw.choice((0, 0, 0, 5_000, MINUTE_MS))
        key = f"k{draw.randrange(20)}"
        for name, topic in topics.items():
            value = str(number)
            if name == "rides":
                at = time_ms + (86_400_000 if number % 100 == 99 else 0)
                value = f'{{"n": {number}, "at": {at}}}'
            producer.produce(topic, value, key, timestamp=time_ms, headers={"of": name})
    producer.flush(60)
    end_ms = START_MS + RECORDS * 500 + 10 * MINUTE_MS
    for name, topic in topics.items():
        for partition in range(PARTITIONS):
            value = f'{{"n": 0, "at": {end_ms}}}' if name == "rides" else "1"
            producer.produce(topic, value, f"last {partition}", partition=partition, timestamp=end_ms)
    producer.flush(60)


def outputs_of(runs: SparkRuns, *topics: str) -> dict[tuple[str, str, str], list[tuple[bytes | None, int]]]:
    """Return the outputs of each topic, function and key, in order and with timestamps."""
    outputs: defaultdict[tuple[str, str, str], list[tuple[bytes | None, int]]] = defaultdict(list)
    for topic in topics:
        for messages in runs.settled(topic).values():
            for message in messages:
                value = message.value() or b""
                # A late record and a duplicate have the headers of the input.
                function = dict(message.headers() or ()).get("of") or value[:1]
                place = topic.rpartition("-")[2], function.decode(), (message.key() or b"").decode()
                outputs[place].append((value, message.timestamp()[1]))
    return dict(outputs)


@pytest.mark.deep_for("in a batch", "after a commit")
@pytest.mark.parametrize("killed", ["never", "in a batch", "after a commit"])
def test_functions_with_time_give_the_outputs_of_a_worker(spark_runs: SparkRuns, killed: str) -> None:
    topics = {name: spark_runs.topic(name, PARTITIONS) for name in FUNCTIONS}
    letters = spark_runs.topic("rides.dlq")
    load(spark_runs, topics)
    found = {}
    for engine in ("worker", "spark"):
        to, late = spark_runs.topic(f"{engine}-to"), spark_runs.topic(f"{engine}-late")
        go_on = spark_runs.directory / f"go-on-{engine}"
        names = {"app": f"{spark_runs.prefix}-{engine}", "to": to, "late": late, "go_on": str(go_on)}
        target = spark_runs.app(TIMED, f"on_{engine}.py", **names, **topics)
        if engine == "worker" or killed != "in a batch":
            go_on.touch()
        if engine == "worker":
            assert spark_runs.worker(target, "--until-end", "-X", "eos.state.dir=").wait() == 0
        else:
            run_on_spark(spark_runs, target, killed, go_on)
        found[engine] = outputs_of(spark_runs, to, late)
    assert found["spark"] == found["worker"]
    functions = {function for _, function, _ in found["worker"]}
    assert functions == {*"abcdefgh", "sales", "rides", "clicks", "pays"}
    assert sum(map(len, spark_runs.settled(letters).values())) == 2 * (RECORDS // 100)


def run_on_spark(runs: SparkRuns, target: str, killed: str, go_on: Path) -> None:
    arguments = ("--until-end", "-X", "eos.transaction.max.records=3000", "--conf", "spark.sql.shuffle.partitions=2")
    run = runs.spark(target, *arguments)
    if killed != "never":
        run.wait_log("batch committed", SPARK_S, count=2 if killed == "after a commit" else 1)
        if killed == "in a batch":
            wait_until("a function is waiting", lambda: (runs.directory / "held").exists(), SPARK_S)
        runs.kill(run)
        go_on.touch()
        runs.wait_for_jvms()
        if killed == "after a commit":
            forget_last_commit(runs.directory / "checkpoint", run.log.count("batch committed") - 1)
        run = runs.spark(target, *arguments)
    assert run.wait() == 0, run.log[-3_000:]
    assert run.log.count("batch committed") > 1
    assert killed != "after a commit" or "batch is in Kafka already" in run.log


def forget_last_commit(checkpoint: Path, batch: int) -> None:
    """Make the checkpoint that of a driver killed between the commit in Kafka and Spark's own one."""
    for folder, first in (("commits", batch), ("offsets", batch + 1)):
        for file in (checkpoint / folder).iterdir():
            if int(re.findall(r"\d+", file.name)[0]) >= first:
                file.unlink()


CHANGING = """
    from datetime import timedelta
    import eos
    from eos import State, Timers

    app = eos.App($app)


    @app.process($source, to=$to, window=eos.tumbling(minutes=$minutes), grace=timedelta(0))
    def add(number: int, total: State[int]) -> None:
        total.set(total.get(0) + number)


    @app.process($other, to=$to)
    def wait(number: int, due: Timers) -> None:
        due.set("late", at=1, clock=True)


    @app.on_timer(wait, "late")
    def late(key: str) -> str:
        return key
"""


@pytest.mark.deep
def test_changed_window_and_any_clock_timer_are_refused(spark_runs: SparkRuns) -> None:
    source, other, to = (spark_runs.topic(name) for name in ("in", "other", "to"))
    spark_runs.load(source, [b"1"] * 100)
    names = {"app": spark_runs.prefix, "source": source, "other": other, "to": to}
    run = spark_runs.spark(spark_runs.app(CHANGING, minutes=1, **names), "--until-end")
    assert run.wait() == 0, run.log[-3_000:]
    changed = spark_runs.spark(spark_runs.app(CHANGING, "changed.py", minutes=2, **names), "--until-end")
    changed.assert_ended(78, "the state total of add was a State per tumbling window of 0:01:00", "--checkpoint")
    unusable = spark_runs.spark(spark_runs.app(CHANGING, minutes=1, **names), "--checkpoint", "/proc/none")
    unusable.assert_ended(69, "the checkpoint /proc/none cannot be read or written: ")
    spark_runs.load(other, [b"1"])
    clock = spark_runs.spark(spark_runs.app(CHANGING, minutes=1, **names), "--until-end")
    clock.assert_ended(
        78, "the timer 'late' of b'0' was set with clock=True, but on Spark nothing runs for a partition"
    )
