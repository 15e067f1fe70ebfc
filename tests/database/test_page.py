"""The programs of docs/howto/databases.md, as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from deltalake import DeltaTable

import eos
from eos.broker import LocalKafka
from tests.support import forked
from tests.support.mariadb import mariadb_server, needs_mariadb
from tests.support.postgres import PostgresServer
from tests.support.reading import create_topic

pytestmark = pytest.mark.takes(15)

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "databases.md"


def run_program(kafka: LocalKafka, folder: Path, file: str, topic: str, values: list[str], **texts: str) -> None:
    """Run the program of the page in this folder over the values, with its topic and id replaced by own ones."""
    (code,) = re.findall(rf"```python\n# {file}\n(.*?)```", PAGE.read_text(), re.S)
    for old, new in texts.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    (folder / file).write_text(code)
    with eos.transaction({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": topic}) as txn:
        for value in values:
            txn.send(topic, value, key="k")
    command = ["eos", "run", file, "--until-end", "--instance", "one", "--bootstrap-servers", kafka.bootstrap_servers]
    environment = os.environ | {"PGUSER": "postgres", "SHOP_PASSWORD": "secret-9f2c"}
    ended = forked.run(command, cwd=folder, env=environment)
    assert ended.returncode == 0, ended.stderr


def test_orders_example_upserts_rows(
    kafka: LocalKafka, server: PostgresServer, names: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("orders"))
    with server.connect() as connection:
        connection.execute("create table orders (id bigint primary key, customer text, cents bigint)")
        values = [f'{{"id": {i % 3}, "customer": "c{i}", "cents": {i}}}' for i in range(9)]
        program = {'"orders", Postgres': f'"{topic}", Postgres', "orders-to-postgres": names("app")}
        run_program(
            kafka, tmp_path, "orders.py", topic, values, **program, **{"postgresql://localhost/shop": server.dsn()}
        )
        assert connection.execute("select * from orders order by id").fetchall() == [
            (0, "c6", 6),
            (1, "c7", 7),
            (2, "c8", 8),
        ]


@needs_mariadb
def test_shop_example_upserts_rows_in_mariadb(kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("orders"))
    with mariadb_server() as mariadb:
        mariadb.create("shop")
        mariadb.execute("shop", "create table orders (id bigint primary key, customer text)")
        values = [f'{{"id": {i % 3}, "customer": "c{i}"}}' for i in range(9)]
        program = {'"orders", DBAPI': f'"{topic}", DBAPI', "orders-to-shop": names("app")}
        run_program(
            kafka, tmp_path, "shop.py", topic, values, **program, **{'"localhost"': f'"127.0.0.1", port={mariadb.port}'}
        )
        assert mariadb.execute("shop", "select * from orders order by id") == [(0, "c6"), (1, "c7"), (2, "c8")]


def test_lake_example_merges_rows(kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("orders"))
    schema = pyarrow.schema([("id", pyarrow.int64()), ("customer", pyarrow.string())])
    DeltaTable.create(str(tmp_path / "lake" / "orders"), schema=schema)
    values = [f'{{"id": {i % 3}, "customer": "c{i}"}}' for i in range(9)]
    program = {'"orders", Delta': f'"{topic}", Delta', "orders-to-lake": names("app")}
    run_program(kafka, tmp_path, "lake.py", topic, values, **program)
    found = DeltaTable(str(tmp_path / "lake" / "orders")).to_pyarrow_table().to_pylist()
    assert sorted(row["customer"] for row in found) == ["c6", "c7", "c8"]


def test_payments_example_books_each_payment_once(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("payments"))
    with contextlib.closing(sqlite3.connect(tmp_path / "bank.db", isolation_level=None)) as connection:
        connection.execute("create table accounts (id integer primary key, balance integer)")
        connection.execute("insert into accounts values (1, 100), (2, 0)")
        values = [f'{{"account": {1 + i % 2}, "cents": {i}}}' for i in range(10)]
        program = {'"payments", SQLite': f'"{topic}", SQLite', 'App("payments")': f'App("{names("app")}")'}
        run_program(kafka, tmp_path, "payments.py", topic, values, **program)
        assert connection.execute("select balance from accounts").fetchall() == [(120,), (25,)]
