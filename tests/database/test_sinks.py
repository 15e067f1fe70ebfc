"""Write rows into real databases: each record's row is there once, whatever is killed, cut or suspended.

The tests named D1 to D13 are the failures of other sinks that this one must not have.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import eos
from eos.broker import LocalKafka
from eos.errors import ConfigurationError
from eos.sql import Postgres
from tests.support.killed import KILLED
from tests.support.mariadb import MariaDBServer, mariadb_server, needs_mariadb
from tests.support.pgbouncer import PgBouncer, needs_pgbouncer, pgbouncer_of, pooled_server
from tests.support.postgres import CommitLoss, Loss, PostgresServer, PostgresThroughDBAPI, postgres_server
from tests.support.reading import create_topic, wait_until
from tests.support.sinks import PARTITIONS, Names, Sinks

pytestmark = pytest.mark.takes(100)


@pytest.fixture(scope="module")
def postgres(server: PostgresServer) -> PostgresServer:
    return server


@pytest.fixture(scope="module")
def pg8000(postgres: PostgresServer) -> PostgresThroughDBAPI:
    return PostgresThroughDBAPI(postgres)


@pytest.fixture(scope="module")
def pgbouncer(postgres: PostgresServer) -> Iterator[PgBouncer]:
    with pgbouncer_of(postgres) as running:
        yield running


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDBServer]:
    with mariadb_server() as running:
        yield running


@pytest.fixture
def duckdb(tmp_path: Path) -> DuckDBFolder:
    return DuckDBFolder(tmp_path)


@pytest.fixture
def sqlite(tmp_path: Path) -> SQLiteFolder:
    return SQLiteFolder(tmp_path)


class SQLiteFolder:
    module, mark = "eos.sql.sqlite", "?"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, database: str) -> None: ...

    def execute(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.folder / database, timeout=30)) as connection, connection:
            return connection.execute(sql).fetchall()

    def source(self, database: str, port: int | None = None) -> str:
        return f"SQLite({str(self.folder / database)!r})"


class DuckDBFolder(SQLiteFolder):
    module, mark = "eos.sql.duckdb", "?"

    def execute(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        import duckdb

        with duckdb.connect(self.folder / database) as connection:
            return connection.execute(sql).fetchall()

    def source(self, database: str, port: int | None = None) -> str:
        return f"DuckDB({str(self.folder / database)!r})"


MARIADB = pytest.param("mariadb", marks=needs_mariadb)
PGBOUNCER = pytest.param("pgbouncer", marks=needs_pgbouncer)


@pytest.fixture(params=["postgres", "sqlite", "duckdb", MARIADB, "pg8000", PGBOUNCER])
def sinks(request: pytest.FixtureRequest, kafka: LocalKafka, names: Names, tmp_path: Path) -> Sinks:
    return Sinks(kafka, names, tmp_path, request.getfixturevalue(request.param))


@pytest.fixture(params=["postgres", MARIADB, "pg8000", PGBOUNCER])
def on_server(request: pytest.FixtureRequest, kafka: LocalKafka, names: Names, tmp_path: Path) -> Sinks:
    return Sinks(kafka, names, tmp_path, request.getfixturevalue(request.param))


@pytest.mark.deep  # by default, test_kill_steps.py kills a worker
@pytest.mark.parametrize(
    ("step", "when"), [("move", "before"), ("commit", "behind"), ("send_offsets", "before"), ("flush", "behind")]
)
def test_rows_are_exact_after_kills_at_a_step(sinks: Sinks, step: str, when: str) -> None:
    """D1: the worker dies between the database's commit and Kafka's, and at other steps."""
    for number in (2, 4):
        sinks.load(300)
        where = f"{sinks.server.module}:{step}" if step in ("move", "commit") else step
        sinks.run(program=("-c", KILLED, where, when, str(number)), ends=-9)
    sinks.run()
    sinks.require_exact()


@pytest.mark.deep_for("postgres-lost", "postgres-done", "mariadb-*", "pg8000-*", "pgbouncer-late", "pgbouncer-lost")
@pytest.mark.parametrize("loss", ["done", "lost", "late"])
def test_commit_without_answer_is_settled(on_server: Sinks, loss: Loss) -> None:
    """D2, D3, D6: a COMMIT is done, not done, or done only after the worker has connected again."""
    sinks = on_server
    sinks.load(600)
    with CommitLoss(sinks.server.port, loss, (5, 9, 14)) as proxy:
        sinks.define(proxy.port)
        log = sinks.run()
        assert proxy.commits > 14
    assert log.count("transaction aborted") >= 3
    sinks.require_exact()


@needs_pgbouncer
def test_parameter_that_a_pooler_refuses_is_a_configuration_error(pgbouncer: PgBouncer) -> None:
    with pytest.raises(ConfigurationError, match="unsupported startup parameter: options"):
        Postgres(f"{pgbouncer.dsn(port=pgbouncer.port)} options=-csearch_path=sales").connect()


@pytest.mark.deep_for("mariadb", "pg8000", "pgbouncer")
def test_suspended_worker_writes_nothing_and_exits_with_79(on_server: Sinks, tmp_path: Path) -> None:
    """D4: another worker has taken over while this one was suspended before its commit in the database."""
    sinks = on_server
    sinks.load(400)
    program = sinks.folder / "suspended.py"
    program.write_text(
        f"import os, signal, sys\nfrom eos import cli\nfrom {sinks.server.module} import Connection\n"
        "begin, calls = Connection.begin, []\n"
        "def suspended(self, *arguments):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return begin(self, *arguments)\n"
        "Connection.begin = suspended\nsys.exit(cli.invoke(sys.argv[1:]))\n"
    )
    command = [sys.executable, str(program), *sinks.command("-X", "session.timeout.ms=6000")[1:]]
    with (tmp_path / "log").open("wb") as log:
        zombie = psutil.Popen(command, cwd=sinks.folder, env=sinks.environment, stderr=log)
    try:
        wait_until("the suspension", lambda: zombie.status() == psutil.STATUS_STOPPED, 60)
        sinks.run("--instance", "two")
        sinks.require_exact()
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(60) == 79, (tmp_path / "log").read_text()
    finally:
        if zombie.is_running():
            zombie.kill()
    assert "has taken over" in (tmp_path / "log").read_text()
    sinks.require_exact()


@pytest.mark.deep  # by default, test_kill_steps.py and test_outbox_faults.py wait for a killed PostgreSQL
@pytest.mark.parametrize(
    "database",
    [
        postgres_server,
        pytest.param(mariadb_server, marks=needs_mariadb),
        pytest.param(pooled_server, marks=needs_pgbouncer),
    ],
)
def test_worker_waits_for_a_killed_database(
    kafka: LocalKafka,
    names: Names,
    tmp_path: Path,
    database: Callable[[], contextlib.AbstractContextManager[PostgresServer | MariaDBServer | PgBouncer]],
) -> None:
    """D5: a commit in a database that is killed is no success. The worker waits, and gives up after a limit."""
    with database() as server:
        sinks = Sinks(kafka, names, tmp_path, server)
        sinks.load(2_000)
        log = tmp_path / "log"
        with sinks.start(log) as worker:
            wait_until("rows", lambda: (sinks.execute("select count(*) from orders")[0][0] or 0) > 20, 60)
            server.kill()
            wait_until("the wait", lambda: "database away, waiting" in log.read_text(), 60)
            server.start()
            assert worker.wait(120) == 0, log.read_text()
        assert "database back" in log.read_text()
        sinks.require_exact()
        sinks.load(3_000)
        with sinks.start(log, "-X", "eos.database.timeout.ms=1000") as worker:
            wait_until("rows", lambda: "partitions assigned" in log.read_text(), 60)
            server.kill()
            assert worker.wait(60) == 75, log.read_text()
        assert "the database has been away for" in log.read_text()
        sinks.run(ends=69)


@pytest.mark.deep_for("postgres", "duckdb", "mariadb", "pg8000", "pgbouncer")
def test_restored_backup_is_written_again_exactly(sinks: Sinks) -> None:
    """D11: the tables of an earlier moment come back; the group's offset is ahead of them."""
    sinks.load(200)
    sinks.run()
    kept = {table: sinks.execute(f"select * from {table}") for table in ("orders", "accounts", "eos_offsets")}
    sinks.load(200)
    sinks.run()
    sinks.require_exact()
    for table, rows in kept.items():
        sinks.execute(f"delete from {table}")
        for found in rows:
            values = ", ".join("null" if v is None else f"'{v}'" for v in found)
            sinks.execute(f"insert into {table} values ({values})")
    log = sinks.run()
    assert "group offset differs from the database's, which is used" in log
    orders, balances = sinks.expected()
    assert {int(i): int(amount) for i, amount in sinks.execute("select id, amount from orders")} == orders
    assert dict(sinks.execute("select id, balance from accounts")) == balances


@pytest.mark.deep_for("postgres", "duckdb", "mariadb", "pg8000", "pgbouncer")
def test_partition_that_was_empty_in_the_first_run_is_read_in_the_second(sinks: Sinks) -> None:
    """D7: under `latest` the second run must not skip what was written between the two."""
    latest = ("-X", "auto.offset.reset=latest")
    sinks.run(*latest)
    sinks.load(60)
    sinks.run(*latest)
    sinks.require_exact()


@pytest.mark.deep_for("postgres", "duckdb", "mariadb", "pg8000", "pgbouncer")
def test_rewound_group_writes_no_row_again_but_a_reset_does(sinks: Sinks) -> None:
    """D12, D13: a group that was rewound by hand, `eos reset`, and a second App with the same table of offsets."""
    sinks.load(100)
    sinks.run()
    sinks.require_exact()
    sinks.execute("update accounts set balance = 0")
    sinks.eos("reset", "--group", sinks.id, "--topic", sinks.payments, "--from", "earliest", "--yes")
    assert "group offset differs from the database's, which is used" in sinks.run()
    assert dict(sinks.execute("select id, balance from accounts")) == {0: 0, 1: 0, 2: 0}
    printed = sinks.eos("reset", "sinking:app", "--topic", sinks.payments, "--from", "earliest", "--yes")
    assert f"database: {PARTITIONS} offsets set" in printed
    sinks.run()
    _, balances = sinks.expected()
    assert dict(sinks.execute("select id, balance from accounts")) == balances
    sinks.id += "-second"
    sinks.define()
    sinks.run()
    assert dict(sinks.execute("select id, balance from accounts")) == {i: 2 * b for i, b in balances.items()}


@pytest.mark.deep
def test_record_that_stopped_the_worker_can_be_skipped(on_server: Sinks) -> None:
    sinks = on_server
    sinks.policy = "stop"
    sinks.define()
    sinks.load(100)
    skips = 0
    while "skips it" in (log := sinks.run("-X", "session.timeout.ms=6000", ends=None)):
        (record,) = re.findall(r"--skip '([^']+)'", log)
        sinks.eos("reset", "sinking:app", "--skip", record, "--yes", "--wait", "30")
        skips += 1
    orders, balances = sinks.expected()
    assert dict(sinks.execute("select id, balance from accounts")) == balances
    assert {int(i): int(amount) for i, amount in sinks.execute("select id, amount from orders")} == orders
    assert skips == 2


@pytest.mark.deep_for("postgres", "duckdb", "mariadb", "pg8000", "pgbouncer")
def test_missing_table_or_column_or_key_exits_with_78(sinks: Sinks) -> None:
    sinks.load(10)
    sinks.execute("alter table orders rename to orders_old")
    assert "orders" in (log := sinks.run(ends=78))
    assert "create what is missing" in log
    sinks.execute('create table orders (id integer, amount numeric, "partition" integer)')
    assert "create unique index" in sinks.run(ends=78)
    sinks.execute("drop table orders")
    sinks.execute("create table orders (id integer primary key, amount numeric)")
    assert "partition" in sinks.run(ends=78)
    sinks.execute("drop table orders")
    sinks.execute("alter table orders_old rename to orders")
    sinks.run()
    sinks.require_exact()


INSERTS = """

@app.sink({log!r}, database, table="log")
def line(text: str) -> dict:
    return {{"word": text, "length": len(text)}} if text != "nothing" else None
"""


@pytest.mark.deep_for("sqlite", "duckdb", "mariadb", "pg8000", "pgbouncer")
def test_verify_finds_missing_changed_and_doubled_rows(sinks: Sinks) -> None:
    words = f"{sinks.id}-words"
    create_topic(sinks.servers, words, partitions=2)
    with (sinks.folder / "sinking.py").open("a") as program:
        program.write(INSERTS.format(log=words))
    sinks.execute("create table log (word varchar(20), length numeric)")
    with eos.transaction({"bootstrap.servers": sinks.servers, "transactional.id": f"{sinks.id}-words"}) as txn:
        for number in range(50):
            txn.send(words, ["a", "b", "it's", "nothing", "\u00e9, \\"][number % 5], key=str(number))
    sinks.load(300)
    sinks.run()
    if isinstance(sinks.server, PostgresThroughDBAPI):
        sinks.eos("verify", "sinking:app", ends=65)
        return
    printed = sinks.eos("verify", "sinking:app")
    assert re.search(r"table orders in \S+.*: 1\d\d rows of 150 committed records examined: holds", printed), printed
    assert re.search(r"table log in .*: 40 rows of 50 committed records examined: holds", printed), printed

    ids = [row[0] for row in sinks.execute("select id from orders order by id")]
    sinks.execute(f"delete from orders where id = {ids[0]}")
    sinks.execute(f"update orders set amount = null where id = {ids[1]}")
    sinks.execute("insert into log (word, length) values ('a', 1)")
    sinks.execute("delete from log where word = 'b'")
    for _ in range(9):
        sinks.execute("insert into log (word, length) values ('b', 1)")
    printed = sinks.eos("verify", "sinking:app", ends=1)
    assert "VIOLATED: 2 rows are wrong" in printed
    assert f"id={ids[0]} is missing" in printed
    assert f"id={ids[1]} has other values" in printed
    assert "is there 11 times instead of 10" in printed
    assert "is there 9 times instead of 10" in printed


TYPED = """

import datetime
import decimal
import msgspec

class Visit(msgspec.Struct):
    place: str
    number: int
    paid: decimal.Decimal
    at: datetime.datetime
    left: bool
    weight: float
    note: str | None = None
    tags: list[str] = []

@app.sink({visits!r}, database, table="visits", key=["place", "number"])
def visit(visit: Visit) -> Visit | None:
    return visit
"""


@pytest.mark.deep_for("postgres", "sqlite", "mariadb", "pg8000", "pgbouncer")
def test_tables_are_created_from_the_annotation(sinks: Sinks) -> None:
    visits = f"{sinks.id}-visits"
    create_topic(sinks.servers, visits)
    with (sinks.folder / "sinking.py").open("a") as program:
        program.write(TYPED.format(visits=visits))
    value = {"paid": "12.50", "at": "2026-11-28T10:00:00Z", "left": True, "weight": 0.5, "tags": ["a", "b"]}
    with eos.transaction({"bootstrap.servers": sinks.servers, "transactional.id": f"{sinks.id}-visits"}) as txn:
        for number in range(20):
            txn.send(visits, json.dumps(value | {"place": f"p{number % 3}", "number": number % 10}))
    refused = sinks.run(ends=78)
    if isinstance(sinks.server, PostgresThroughDBAPI):
        assert "create table" not in refused
        sinks.run("--create-tables", ends=78)
        return
    (statement,) = re.findall(r"let `eos run --create-tables` run it: (create table .*)", refused)
    assert "visits" in statement
    log = sinks.run("--create-tables")
    assert log.count("table changed") == 1
    assert len(sinks.execute("select * from visits")) == 20, "by place and number"
    sinks.execute("alter table visits drop column note")
    (statement,) = re.findall(r"run it: (alter table .*)", sinks.run(ends=78))
    sinks.execute(statement)
    sinks.run()
    sinks.eos("verify", "sinking:app")
