"""Run an App that writes rows into a database, and compare the tables with a plain loop."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import eos
from eos.broker import LocalKafka
from tests.support import forked
from tests.support.life import until_killed
from tests.support.reading import create_topic, visible_records

Names = Callable[[str], str]
PARTITIONS = 3
SMALL = ("-X", "eos.transaction.max.records=50", "--until-end", "--instance", "one")
APP = """
import os
import eos
from eos.sql import DBAPI, Cursor, DuckDB, Postgres, SQLite

database = {database}
app = eos.App({id!r})

@app.sink({source!r}, database, table="orders", key="id", on_error={policy!r})
def row(order: dict) -> dict | None:
    if order["id"] % 17 == 5:
        return None
    return {{"id": order["id"], "amount": order["amount"], "partition": 0}}

@app.sink({payments!r}, database, on_error={policy!r})
def pay(payment: dict, db: Cursor) -> None:
    statement = "update accounts set balance = balance + %s where id = %s".replace("%s", {mark!r})
    db.execute(statement, (payment["cents"], payment["account"]))
    if payment["cents"] > 1000:
        raise ValueError("too much")
"""
TABLES = (
    'create table orders (id integer primary key, amount numeric check (amount >= 0), "partition" integer)',
    "create table accounts (id integer primary key, balance integer not null default 0)",
    "insert into accounts values (0, 0), (1, 0), (2, 0)",
)


class Server(Protocol):
    """Runs the databases of tests, and gives the text that describes one in an App."""

    module: str
    mark: str

    def create(self, database: str) -> None: ...

    def execute(self, database: str, sql: str) -> list[tuple[Any, ...]]: ...

    def source(self, database: str, port: int | None = None) -> str: ...

    @property
    def port(self) -> int: ...


class Sinks:
    """Run an App that upserts orders and books payments, and compare the tables with a plain loop."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path, server: Server) -> None:
        self.servers, self.folder, self.server, self.policy = kafka.bootstrap_servers, folder, server, "dlq"
        self.id, self.source, self.payments = names("app"), names("orders"), names("payments")
        for topic in (self.source, self.payments):
            create_topic(self.servers, topic, partitions=PARTITIONS)
            create_topic(self.servers, f"{topic}.dlq")
        self.database = names("db").replace("-", "_")[-60:]
        server.create(self.database)
        for statement in TABLES:
            self.execute(statement)
        self.define()
        self.sent: list[tuple[str, dict[str, int]]] = []

    def define(self, port: int | None = None) -> None:
        values = {"database": self.server.source(self.database, port), "mark": self.server.mark}
        (self.folder / "sinking.py").write_text(APP.format(**(vars(self) | values)))

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        return self.server.execute(self.database, sql)

    def load(self, count: int) -> None:
        """Load orders, of which some have a wrong amount, and payments, of which some are too large."""
        news = []
        for number in range(len(self.sent), len(self.sent) + count):
            if number % 2:
                news.append((self.payments, {"account": number % 3, "cents": 2000 if number % 101 == 3 else number}))
            else:
                news.append((self.source, {"id": number % 400, "amount": -1 if number % 120 == 50 else number}))
        with eos.transaction({"bootstrap.servers": self.servers, "transactional.id": f"{self.id}-load"}) as txn:
            for topic, value in news:
                txn.send(topic, json.dumps(value), key=str(value.get("id", value.get("account"))))
        self.sent += news

    def command(self, *arguments: str, program: tuple[str, ...] = ("eos",)) -> list[str]:
        return [*program, "run", "sinking:app", *SMALL, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"KAFKA_BOOTSTRAP_SERVERS": self.servers, "PYTHONPATH": str(self.folder)}

    def run(self, *arguments: str, program: tuple[str, ...] = ("eos",), ends: int | None = 0) -> str:
        ended = forked.run(self.command(*arguments, program=program), cwd=self.folder, env=self.environment)
        print(ended.stderr)  # shown if the test fails
        assert ends is None or ended.returncode == ends, ended.stderr
        assert "secret-9f2c" not in ended.stderr
        assert "error ignored" not in ended.stderr, "a pipeline of psycopg was not left"
        return ended.stderr

    def eos(self, *arguments: str, ends: int = 0) -> str:
        ended = forked.run(["eos", *arguments], cwd=self.folder, env=self.environment)
        assert ended.returncode == ends, ended.stderr + ended.stdout
        return ended.stdout

    def start(
        self, log: Path, *arguments: str, program: tuple[str, ...] = ("eos",), **variables: str
    ) -> contextlib.AbstractContextManager[Any]:
        command = self.command(*arguments, program=program)
        with log.open("wb") as stderr:
            environment = self.environment | variables
            return until_killed(forked.Popen(command, cwd=self.folder, env=environment, stderr=stderr))

    def expected(self) -> tuple[dict[int, int], dict[int, int]]:
        orders: dict[int, int] = {}
        balances = {0: 0, 1: 0, 2: 0}
        for topic, value in self.sent:
            if topic == self.payments and value["cents"] <= 1000:
                balances[value["account"]] += value["cents"]
            elif topic == self.source and value["amount"] >= 0 and value["id"] % 17 != 5:
                orders[value["id"]] = value["amount"]
        return orders, balances

    def require_exact(self) -> None:
        """Check the rows, the balances and the dead letters of everything that was sent."""
        orders, balances = self.expected()
        assert {int(i): int(amount) for i, amount in self.execute("select id, amount from orders")} == orders
        assert dict(self.execute("select id, balance from accounts")) == balances
        too_large = sorted(v["cents"] for topic, v in self.sent if topic == self.payments and v["cents"] > 1000)
        assert sorted(json.loads(v)["cents"] for v in self.dead_letters(self.payments)) == too_large
        wrong = sorted(
            v["id"] for topic, v in self.sent if topic == self.source and v["amount"] < 0 and v["id"] % 17 != 5
        )
        assert sorted(json.loads(v)["id"] for v in self.dead_letters(self.source)) == wrong
        offsets = self.execute(f"select sum(next_offset) from eos_offsets where app = '{self.id}'")
        assert int(offsets[0][0]) >= len(self.sent), "all records, and the markers of their transactions"

    def dead_letters(self, topic: str) -> list[bytes]:
        found = visible_records(self.servers, f"{topic}.dlq")
        return [record.value() or b"" for records in found.values() for record in records]
