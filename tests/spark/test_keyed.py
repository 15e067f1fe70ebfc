"""Run functions with state on Spark: their state and outputs equal those of a worker on the same records."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.reading import wait_until

if TYPE_CHECKING:
    from tests.support.spark import SparkRuns
pytest_plugins = ["tests.support.spark"]

pytestmark = [pytest.mark.takes(175), pytest.mark.timeout(560)]

SPARK_S = 240.0

# Every kind of state and function; one function has no state, and one source has no keys or failing records.
REMEMBERING = """
    import asyncio, os, time
    import eos
    from eos import App, ListState, MapState, Out, Record, State

    app = App($app)
    started = []


    @app.on_start
    def start() -> None:
        started.append(1)


    @app.process($counted, to=$to, on_error=eos.dlq)
    def count(record: Record, seen: State[int], last: State[bytes]) -> Out | None:
        before, was = seen.get(0), last.get()
        seen.set(before + bool(started))
        last.set(record.value)
        if before % 40 == 39:
            seen.delete()
        number = int(record.value)
        while number == 1_700 and not os.path.exists($go_on):
            open(os.path.join(os.path.dirname($go_on), "held"), "w").close()
            time.sleep(0.05)
        if number % 17 == 0:
            raise ValueError("remembers nothing")
        return Out(f"{seen.get()} {was}", headers={"place": f"{record.partition}/{record.offset}"})


    @app.process($pages, to=$to)
    async def visit(page: str, pages: MapState[str, int], last: ListState[str]) -> str:
        await asyncio.sleep(0)
        page = page[-1]
        pages[page] = pages.get(page, 0) + 1
        last.append(page)
        while len(last) > 3:
            last.popleft()
        return f"{dict(pages)} {list(last)}"


    @app.process_batch($sales, to=$to)
    def total(sales: list[Record], sold: dict[bytes, State[int]]) -> list[Out]:
        outs = []
        for sale in sales:
            state = sold[sale.key]
            state.set(state.get(0) + int(sale.value))
            outs.append(sale.out(str(state.get())))
        return outs


    @app.process($plain, to=$to)
    def plain(record: Record) -> bytes:
        return b"as it was: " + record.value
"""


def test_outputs_on_spark_with_killed_driver_equal_those_of_a_worker(
    spark_runs: SparkRuns,
) -> None:
    inputs = {name: spark_runs.topic(name) for name in ("counted", "pages", "sales", "plain")}
    spark_runs.topic("counted.dlq")
    values = [b"%d" % number for number in range(2_400)]
    for name, topic in inputs.items():
        if name == "counted":  # Each key is in every partition, and is a different key in each.
            spark_runs.load(topic, values, lambda number: b"%d" % (number % 50))
        else:
            spark_runs.load(topic, values, lambda number, of=name: b"%s %d" % (of.encode(), number % 60))
    found = {}
    for engine in ("worker", "spark"):
        to = spark_runs.topic(f"to-{engine}")
        go_on = spark_runs.directory / f"go-on-{engine}"
        names = {"app": f"{spark_runs.prefix}-{engine}", "to": to, "go_on": str(go_on), **inputs}
        target = spark_runs.app(REMEMBERING, f"on_{engine}.py", **names)
        if engine == "worker":
            go_on.touch()
            assert spark_runs.worker(target, "--until-end", "-X", "eos.state.dir=").wait() == 0
        else:
            run_killed_in_a_batch(spark_runs, target, go_on)
        found[engine] = by_input(spark_runs, to)
    assert found["spark"] == found["worker"]
    assert sum(map(len, found["worker"].values())) == 4 * 2_400 - len(range(0, 2_400, 17))
    assert len(found["worker"]) == 3 * 50 + 3 * 60


def run_killed_in_a_batch(runs: SparkRuns, target: str, go_on: Path) -> None:
    arguments = ("--until-end", "-X", "eos.transaction.max.records=4000", "--conf", "spark.sql.shuffle.partitions=2")
    run = runs.spark(target, *arguments)
    run.wait_log("batch committed", SPARK_S, count=2)
    wait_until("a function is waiting", lambda: (go_on.parent / "held").exists(), SPARK_S)
    runs.kill(run)
    go_on.touch()
    runs.wait_for_jvms()
    run = runs.spark(target, *arguments)
    assert run.wait() == 0, run.log[-3_000:]
    assert run.log.count("batch committed") > 1


def by_input(runs: SparkRuns, to: str) -> dict[tuple[bytes, bytes], list[tuple[bytes, int]]]:
    """Return the outputs of each key per source partition, in order and with timestamps, because both engines order
    them."""
    outputs: defaultdict[tuple[bytes, bytes], list[tuple[bytes, int]]] = defaultdict(list)
    for messages in runs.settled(to).values():
        for message in messages:
            place = dict(message.headers() or ()).get("place", b"only one")
            found = message.value() or b"", message.timestamp()[1]
            outputs[message.key() or b"", place.partition(b"/")[0]].append(found)
    return dict(outputs)
