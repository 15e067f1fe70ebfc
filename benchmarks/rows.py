"""`make bench-rows`: rows per second into PostgreSQL, by the worker and by hand, in turns; and the age of rows.

All write the same upserts by key into an empty table, with the offsets in the same transaction, every 100 ms. By hand
with psycopg: `executemany`, and COPY into a temporary table that is merged. The server is a local PostgreSQL without
fsync, so what is compared is processor time. The age of a row is the time from the moment at which its record was due
until another connection sees it. Nothing here asserts.

`python -m benchmarks.rows LOOP BOOTSTRAP DSN SOURCE COUNT GROUP` is the process of one loop.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition
from rich.console import Console
from rich.table import Table

from benchmarks.clients import BROKER, straight_consumer
from benchmarks.eos_loop import measure
from benchmarks.shapes import Row
from benchmarks.worker_speed import create, load
from eos import App
from eos.broker import LocalKafka
from eos.sql import Postgres

COPY, MANY, EACH = "by hand: COPY and merge", "by hand: executemany", "by hand: execute for each record"
TABLE, OWN_SQL = "eos, table=", "eos, own SQL"
YARDSTICKS = {COPY: COPY, MANY: COPY, TABLE: COPY, EACH: EACH, OWN_SQL: EACH}
"""The loops, each with the one to which its rate is compared."""
LOOPS = tuple(YARDSTICKS)
ONE_BY_ONE = (EACH, OWN_SQL)  # a round trip for each record, so these get a tenth of the records
INTERVAL_S, CHUNK, POLL_S, AGE_INTERVAL_MS = 0.1, 2_000, 0.002, 50
TABLES = (
    "drop table if exists lines, places",
    "create table lines (n bigint primary key, text text) with (autovacuum_enabled = off)",
    "create table places (part integer primary key, next_offset bigint)",
)
UPSERT = "insert into lines (n, text) values (%s, %s) on conflict (n) do update set text = excluded.text"
MERGE = "insert into lines select * from staging on conflict (n) do update set text = excluded.text"
PLACE = """insert into places values (%s, %s) on conflict (part) do update set next_offset = excluded.next_offset"""


def write_many(cursor: psycopg.Cursor[Any], rows: list[tuple[int, str]]) -> None:
    cursor.executemany(UPSERT, rows)


def write_each(cursor: psycopg.Cursor[Any], rows: list[tuple[int, str]]) -> None:
    for row in rows:
        cursor.execute(UPSERT, row)


def write_copy(cursor: psycopg.Cursor[Any], rows: list[tuple[int, str]]) -> None:
    cursor.execute("create temporary table if not exists staging (n bigint, text text) on commit delete rows")
    with cursor.copy("copy staging from stdin") as copy:
        for row in rows:
            copy.write_row(row)
    cursor.execute(MERGE)


def loop_by_hand(
    consumer: Consumer,
    topic: str,
    dsn: str,
    count: int,
    write: Callable[[psycopg.Cursor[Any], list[tuple[int, str]]], None],
) -> tuple[int, float]:
    """Return the number of records and the seconds from the first record to the last commit.

    Single statements are executed as records are read, so that their transactions take the interval too. They take 20
    times as long as reading."""
    one_by_one = write is write_each
    decode = msgspec.json.Decoder(Row).decode
    handled, began, last = 0, 0.0, 0.0
    with psycopg.connect(dsn) as connection, connection.cursor() as cursor:
        while handled < count:
            rows: list[tuple[int, str]] = []
            places: dict[int, int] = {}
            until = time.monotonic() + INTERVAL_S
            while time.monotonic() < until and handled + len(rows) < count:
                messages = consumer.consume(min(10 if one_by_one else CHUNK, count - handled - len(rows)), 0.05)
                new = []
                for message in messages:
                    row = decode(message.value())
                    new.append((row.n, row.text.upper()))
                    places[message.partition()] = message.offset() + 1
                rows += new
                if one_by_one:
                    write(cursor, new)
                if rows and not began:
                    began, until = time.monotonic(), time.monotonic() + INTERVAL_S
            if not rows:
                continue
            if not one_by_one:
                write(cursor, rows)
            cursor.executemany(PLACE, list(places.items()))
            connection.commit()
            consumer.commit(offsets=[TopicPartition(topic, *place) for place in places.items()])
            handled, last = handled + len(rows), time.monotonic()
    return handled, last - began


def app_of(group: str, source: str, dsn: str, own_sql: bool) -> App:
    app = App(group)
    if own_sql:

        @app.sink(source, Postgres(dsn))
        def write(row: Row, db: Any) -> None:
            db.execute(UPSERT, (row.n, row.text.upper()))

    else:

        @app.sink(source, Postgres(dsn), table="lines", key="n")
        def line(row: Row) -> Row:
            return Row(row.n, row.text.upper())

    return app


def run_loop(loop: str, bootstrap: str, dsn: str, source: str, count: int, group: str) -> None:
    if loop.startswith("eos"):
        measure(app_of(group, source, dsn, loop == OWN_SQL), {"bootstrap.servers": bootstrap}, count)
        return
    consumer = straight_consumer(bootstrap, group)
    consumer.subscribe([source])
    write = {COPY: write_copy, MANY: write_many, EACH: write_each}[loop]
    handled, seconds = loop_by_hand(consumer, source, dsn, count, write)
    print(f"{handled} {seconds:.4f}", flush=True)
    consumer.close()


def rate(loop: str, bootstrap: str, dsn: str, source: str, count: int) -> float:
    """Return the records per second of one run into empty tables."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in TABLES:
            connection.execute(statement.encode())
    command = [
        sys.executable,
        "-m",
        "benchmarks.rows",
        loop,
        bootstrap,
        dsn,
        source,
        str(count),
        f"rows-{uuid.uuid4()}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=280)
    with psycopg.connect(dsn) as connection:
        found = connection.execute("select count(*) from lines").fetchone()
    if found != (count,):
        raise RuntimeError(f"{loop} wrote {found} of {count} rows")
    handled, seconds = done.stdout.split()[:2]
    return float(handled) / float(seconds)


def ages(bootstrap: str, dsn: str, per_second: int, seconds: float) -> Any:
    """Return the ages in milliseconds of the rows of a steady source, those of the first 5 seconds left out."""
    group = f"rows-{uuid.uuid4().hex[:8]}"
    create(bootstrap, group)
    count = int(per_second * seconds)
    with psycopg.connect(dsn, autocommit=True) as reader, tempfile.TemporaryDirectory() as folder:
        for statement in TABLES:
            reader.execute(statement.encode())
        (Path(folder) / "steady.py").write_text(
            "import eos\nfrom eos.sql import Postgres\n"
            f"app = eos.App({group!r})\n"
            f"@app.sink({group!r}, Postgres({dsn!r}), table='lines', key='n')\n"
            "def line(value: bytes) -> dict:\n    return {'n': int(value[:19]), 'text': ''}\n"
        )
        worker = [sys.executable, "-m", "eos", "run", "steady:app", "--bootstrap-servers", bootstrap]
        worker += ["--log-level", "warning", "-X", f"eos.transaction.interval.ms={AGE_INTERVAL_MS}"]
        running = subprocess.Popen(worker, env=os.environ | {"PYTHONPATH": folder})
        try:
            probe = Producer({"bootstrap.servers": bootstrap})
            probe.produce(group, b"%019d" % 0, b"probe")
            probe.flush()
            while not reader.execute("select 1 from lines").fetchall():
                time.sleep(0.01)
            feed = [sys.executable, "-m", "benchmarks.steady_source", bootstrap, group, str(per_second), str(seconds)]
            feeding = subprocess.Popen(feed, stdout=subprocess.DEVNULL)
            found: list[float] = []
            deadline = time.monotonic() + seconds + 60
            while len(found) < count and time.monotonic() < deadline:
                rows = reader.execute("delete from lines where n > 0 returning n").fetchall()
                now_ns = time.monotonic_ns()
                found += [(now_ns - n) / 1e6 for (n,) in rows]
                time.sleep(POLL_S)
            feeding.wait(60)
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(60)
    if len(found) < count:
        raise RuntimeError(f"{len(found)} of {count} rows came")
    return np.array(found[int(per_second * 5) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--rate", type=int, default=1_000, help="records per second while ages are measured")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--only", choices=("rate", "age"))
    options = parser.parse_args()
    console = Console(width=120)
    from tests.support.postgres import postgres_server

    with LocalKafka(nodes=1, config=BROKER) as kafka, postgres_server() as server:
        dsn = server.dsn()
        if options.only != "age":
            load(kafka.bootstrap_servers, "in", options.records, 100)
            load(kafka.bootstrap_servers, "few", options.records // 10, 100)
            rates: dict[str, list[float]] = {loop: [] for loop in LOOPS}
            for turn in range(options.rounds):
                for loop in LOOPS[turn % len(LOOPS) :] + LOOPS[: turn % len(LOOPS)]:
                    count = options.records // 10 if loop in ONE_BY_ONE else options.records
                    source = "few" if loop in ONE_BY_ONE else "in"
                    rates[loop].append(rate(loop, kafka.bootstrap_servers, dsn, source, count))
                console.print(
                    f"  round {turn + 1}: " + ", ".join(f"{one} {of[-1]:,.0f}/s" for one, of in rates.items())
                )
            table = Table("loop", "median rows/s", "ratio", "to")
            for loop, of in rates.items():
                ratios = [one / its for one, its in zip(of, rates[YARDSTICKS[loop]], strict=True)]
                table.add_row(
                    loop, f"{statistics.median(of):,.0f}", f"{statistics.median(ratios):.2f}", YARDSTICKS[loop]
                )
            console.print(table)
        if options.only != "rate":
            found = ages(kafka.bootstrap_servers, dsn, options.rate, options.seconds)
            figures = ", ".join(f"p{p} {np.percentile(found, p):.0f} ms" for p in (50, 90, 99, 99.9))
            console.print(
                f"age of a row at {options.rate:,} records/s, transactions of {AGE_INTERVAL_MS} ms: {figures}, "
                f"max {found.max():.0f} ms"
            )


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in LOOPS:
        loop, bootstrap, dsn, source, count, group = sys.argv[1:]
        run_loop(loop, bootstrap, dsn, source, int(count), group)
    else:
        main()
