"""Write 100,000 records while workers, the database and the broker are killed: each row is there once."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Producer

from eos.broker import LocalKafka
from tests.support import forked
from tests.support.postgres import PostgresServer
from tests.support.reading import create_topic

pytestmark = [pytest.mark.takes(60), pytest.mark.deep]

RECORDS, PARTITIONS, KILLS, DEADLINE_S = 100_000, 6, 12, 240
LINES = RECORDS * 9 // 10  # every tenth record is a payment
VICTIMS = ("worker", "database", "broker")
APP = """
import eos
from eos.sql import Cursor, Postgres

database = Postgres({dsn!r})
app = eos.App("chaos")

@app.sink("lines", database, table="lines")
def line(value: dict) -> dict:
    return {{"number": value["number"]}}

@app.sink("payments", database)
def pay(value: dict, db: Cursor) -> None:
    db.execute("update accounts set balance = balance + %s where id = %s", (value["number"], value["number"] % 10))
"""


def load(servers: str) -> None:
    """Load the records into two topics."""
    for topic in ("lines", "payments"):
        create_topic(servers, topic, partitions=PARTITIONS)
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "enable.idempotence": True})
    for number in range(RECORDS):
        topic = "lines" if number % 10 else "payments"
        producer.produce(topic, json.dumps({"number": number}), str(number))
        producer.poll(0)
    assert producer.flush(60) == 0


class Worker:
    """Run a worker until the end of its input. It starts again whenever it was killed."""

    def __init__(self, instance: str, folder: Path, environment: dict[str, str]) -> None:
        settings = ["-X", "eos.transaction.max.records=200", "-X", "session.timeout.ms=6000"]
        self._command = ["eos", "run", "chaos:app", "--until-end", "--instance", instance, *settings]
        self._folder, self._environment, self._log = folder, environment, folder / f"{instance}.log"
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = forked.Popen(self._command, cwd=self._folder, env=self._environment, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def is_done(self) -> bool:
        """Return whether the worker has read everything. Start it again if it ended in another way."""
        code = self._process.poll()
        if code is not None and code != 0:
            # Killed; or the broker or the database was away at the start or for too long.
            assert code in (-9, 69, 75), self._log.read_text()[-5_000:]
            self._start()
        return code == 0


def kill_until_the_end(
    workers: list[Worker], server: PostgresServer, kafka: LocalKafka, chosen: random.Random
) -> Counter[str]:
    """Kill the participants one after the other, each after some number of rows. Return how often each was killed."""
    victims = [*VICTIMS, *(chosen.choice(VICTIMS) for _ in range(KILLS - len(VICTIMS)))]
    # At least a fifth of the rows is missing at each kill, so that no machine is too fast for the last ones.
    rows = sorted(chosen.sample(range(LINES * 4 // 5), KILLS))
    plan = [*zip(rows, victims, strict=True)]
    kills = Counter[str]()
    deadline = time.monotonic() + DEADLINE_S
    while sum(worker.is_done() for worker in workers) < len(workers):
        assert time.monotonic() < deadline, f"not done after {DEADLINE_S} s; {kills}"
        time.sleep(0.05)
        if not plan or server.execute("postgres", "select count(*) from lines")[0][0] < plan[0][0]:
            continue
        _, victim = plan.pop(0)
        kills[victim] += 1
        if victim == "worker":
            chosen.choice(workers).kill()
        elif victim == "database":
            server.kill()
            server.start()
        else:
            kafka.kill(0)
            kafka.start(0)
    return kills


def test_each_row_is_there_once_after_kills_of_everything(server: PostgresServer, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    with LocalKafka(nodes=1) as kafka:
        load(kafka.bootstrap_servers)
        for statement in (
            "create table lines (number integer)",
            "create table accounts (id integer primary key, balance bigint not null default 0)",
            "insert into accounts select n, 0 from generate_series(0, 9) n",
        ):
            server.execute("postgres", statement)
        (tmp_path / "chaos.py").write_text(APP.format(dsn=server.dsn()))
        environment = os.environ | {"KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "PYTHONPATH": str(tmp_path)}
        workers = [Worker(instance, tmp_path, environment) for instance in ("one", "two")]
        try:
            kills = kill_until_the_end(workers, server, kafka, chosen)
        finally:
            for worker in workers:
                worker.kill()
        print(kills)
        assert set(kills) == set(VICTIMS), "the run was long enough for each kind of kill"
        found = server.execute("postgres", "select count(*), count(distinct number) from lines")
        assert found == [(LINES, LINES)]
        balances = dict(server.execute("postgres", "select id, balance from accounts"))
        assert balances == {0: sum(range(0, RECORDS, 10))} | dict.fromkeys(range(1, 10), 0)
