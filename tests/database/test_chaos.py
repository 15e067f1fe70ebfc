"""Write 100,000 records while workers, the database and the broker are killed: each row is there once."""

from __future__ import annotations

import itertools
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


def load(producer: Producer, numbers: range) -> None:
    """Load these records, of which every tenth is a payment."""
    for number in numbers:
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

    def keep_running(self) -> None:
        """Start the worker again if it ended, also at the end of its input: more will come."""
        if self.is_done():
            self._start()


def load_and_kill(
    producer: Producer, workers: list[Worker], server: PostgresServer, kafka: LocalKafka, chosen: random.Random
) -> Counter[str]:
    """Load the records in parts. After each part, kill one participant while the workers handle it. Return how often
    each was killed."""
    victims = [*VICTIMS, *(chosen.choice(VICTIMS) for _ in range(KILLS - len(VICTIMS)))]
    bounds = [RECORDS * part // KILLS for part in range(KILLS + 1)]
    for victim, numbers in zip(victims, itertools.starmap(range, itertools.pairwise(bounds)), strict=True):
        load(producer, numbers)
        next_kill = time.monotonic() + chosen.uniform(0.1, 1.5)
        while time.monotonic() < next_kill:
            for worker in workers:
                worker.keep_running()
            time.sleep(0.05)
        if victim == "worker":
            chosen.choice(workers).kill()
        elif victim == "database":
            server.kill()
            server.start()
        else:
            kafka.kill(0)
            kafka.start(0)
    return Counter(victims)


def wait_for_the_end(workers: list[Worker]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while sum(worker.is_done() for worker in workers) < len(workers):
        assert time.monotonic() < deadline, f"not done after {DEADLINE_S} s"
        time.sleep(0.05)


def test_each_row_is_there_once_after_kills_of_everything(server: PostgresServer, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    with LocalKafka(nodes=1) as kafka:
        for topic in ("lines", "payments"):
            create_topic(kafka.bootstrap_servers, topic, partitions=PARTITIONS)
        for statement in (
            "create table lines (number integer)",
            "create table accounts (id integer primary key, balance bigint not null default 0)",
            "insert into accounts select n, 0 from generate_series(0, 9) n",
        ):
            server.execute("postgres", statement)
        (tmp_path / "chaos.py").write_text(APP.format(dsn=server.dsn()))
        environment = os.environ | {"KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "PYTHONPATH": str(tmp_path)}
        producer = Producer(
            {"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 50, "enable.idempotence": True, "log_level": 0}
        )
        workers = [Worker(instance, tmp_path, environment) for instance in ("one", "two")]
        try:
            print(load_and_kill(producer, workers, server, kafka, chosen))
            wait_for_the_end(workers)
        finally:
            for worker in workers:
                worker.kill()
        found = server.execute("postgres", "select count(*), count(distinct number) from lines")
        assert found == [(RECORDS * 9 // 10, RECORDS * 9 // 10)]
        balances = dict(server.execute("postgres", "select id, balance from accounts"))
        assert balances == {0: sum(range(0, RECORDS, 10))} | dict.fromkeys(range(1, 10), 0)
