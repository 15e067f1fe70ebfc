"""Write values of many types and shapes through the connections, without Kafka."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pg8000.dbapi
import pymysql
import pytest

from eos.errors import ConfigurationError
from eos.sql import DBAPI, DuckDB, Postgres, SQLite
from eos.sql.database import Connection, DatabaseError, Fault, Stored, Table
from eos.sql.mysql import MySQLConnection
from eos.sql.rows import Row, merge_by_key
from eos.sql.standard import Connection as StandardConnection
from tests.support.mariadb import MariaDBServer, mariadb_server, needs_mariadb
from tests.support.postgres import PostgresServer, PostgresThroughDBAPI
from tests.support.raw import Background
from tests.support.reading import wait_until

pytestmark = pytest.mark.takes(20)

TYPES = (
    "id integer primary key, amount numeric(20, 4), at timestamptz, doc jsonb, tags text[], raw bytea, ratio float8, "
    "note text, code uuid, big numeric"
)
MARIADB = pytest.param("mariadb", marks=needs_mariadb)
EVERY_TYPE: dict[str, Any] = {
    "id": 1,
    "amount": Decimal("12345678901234.5678"),
    "at": datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
    "doc": {"a": [1, None, "x"], "b": {"c": True}},
    "tags": ["a,b", 'quote"', "ü"],
    "raw": bytes(range(256)),
    "ratio": 0.1,
    "note": "line\nbreak \\x00 ü",
    "code": uuid.UUID(int=7),
    "big": 2**70,
}


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariaDBServer]:
    with mariadb_server() as running:
        running.create("shop")
        yield running


def through_dbapi(request: pytest.FixtureRequest) -> DBAPI:
    """Return the database "shop" in MariaDB, or one in PostgreSQL through pg8000."""
    if request.param == "mariadb":
        arguments = request.getfixturevalue("mariadb").arguments("shop")
        return DBAPI(lambda: pymysql.connect(**arguments))
    arguments = PostgresThroughDBAPI(request.getfixturevalue("server")).arguments("postgres")
    return DBAPI(lambda: pg8000.dbapi.connect(**arguments))


@pytest.fixture(params=["postgres", "sqlite", "duckdb", MARIADB, "pg8000"])
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connection]:
    if request.param == "sqlite":
        made: Connection = SQLite(str(tmp_path / "values.db")).connect()
    elif request.param == "duckdb":
        made = DuckDB(str(tmp_path / "values.duckdb")).connect()
    elif request.param == "postgres":
        made = Postgres(request.getfixturevalue("server").dsn()).connect()
    else:
        made = through_dbapi(request).connect()
    made.create_offsets()
    yield made
    made.close()


@pytest.fixture(params=[MARIADB, "pg8000"])
def database(request: pytest.FixtureRequest) -> DBAPI:
    return through_dbapi(request)


@pytest.fixture
def pair(database: DBAPI) -> Iterator[tuple[StandardConnection, StandardConnection]]:
    """Open two connections to one database through its DB-API driver."""
    one, two = database.connect(), database.connect()
    one.create_offsets()
    yield one, two
    one.close()
    two.close()


def write(connection: Connection, table: Table, *rows: Row) -> None:
    connection.begin("app", "owner")
    connection.write(table, merge_by_key(rows, table.key) if table.key else rows)
    connection.commit()


def select(connection: Connection, sql: str) -> list[tuple[Any, ...]]:
    connection.cursor().execute(sql)
    return [tuple(row) for row in connection.cursor().fetchall()]


def drop(connection: Connection, table: str) -> None:
    connection.begin("app", "owner")
    connection.cursor().execute(f"drop table {table}")
    with contextlib.suppress(DatabaseError):  # in MariaDB the statement has committed
        connection.commit()
    connection.roll_back()


def test_postgres_keeps_every_type_of_value(server: PostgresServer) -> None:
    connection = Postgres(server.dsn()).connect()
    connection.create_offsets()
    connection.cursor().execute(f"create table kinds ({TYPES})")
    row = EVERY_TYPE
    write(
        connection,
        Table("kinds", ("id",)),
        row,
        {"id": 2, "note": None, "ratio": math.nan},
        {"id": 3, "ratio": -math.inf},
    )
    found = select(connection, "select * from kinds order by id")
    assert found[0] == tuple(row.values())
    assert math.isnan(found[1][6])
    assert found[2][6] == -math.inf
    assert set(found[2][1:6]) == {None}
    connection.close()


@pytest.mark.parametrize(
    "row", [{"id": 9, "note": "zero \0 byte"}, {"id": "nine"}, {"id": None, "note": "x"}, {"id": 9, "amount": "much"}]
)
def test_refused_value_is_the_fault_of_its_row(server: PostgresServer, row: Row) -> None:
    connection = Postgres(server.dsn()).connect()
    connection.cursor().execute(f"create temporary table refusing ({TYPES})")
    with pytest.raises(DatabaseError) as refused:
        connection.write(Table("refusing"), [row])
    assert refused.value.fault is Fault.RECORD
    connection.close()


def test_upsert_changes_only_the_columns_of_its_row(connection: Connection) -> None:
    """D8, D9, D10: rows of other shapes, several rows of a key, and a key that is the whole row."""
    cursor = connection.cursor()
    cursor.execute("create table shapes (shop integer, id integer, a text, b text default 'b', primary key (shop, id))")
    table = Table("shapes", ("shop", "id"))
    write(connection, table, {"shop": 1, "id": 1, "a": "x"}, {"shop": 1, "id": 2, "b": "y"}, {"shop": 1, "id": 3})
    assert select(connection, "select id, a, b from shapes order by id") == [
        (1, "x", "b"),
        (2, None, "y"),
        (3, None, "b"),
    ]
    write(connection, table, {"shop": 1, "id": 1, "b": "new"}, {"shop": 1, "id": 3}, {"shop": 1, "id": 1, "a": "newer"})
    assert select(connection, "select id, a, b from shapes order by id") == [
        (1, "newer", "new"),
        (2, None, "y"),
        (3, None, "b"),
    ]
    drop(connection, "shapes")


def test_offsets_belong_to_one_owner(connection: Connection) -> None:
    places = [("orders", 0), ("orders", 1)]
    assert {stored.next_offset for stored in connection.claim("app", "one", places).values()} == {None}
    connection.begin("app", "one")
    connection.move("app", {("orders", 0): Stored(7, "one", {3: "ValueError: ü"})})
    connection.commit()
    assert connection.claim("app", "two", places)["orders", 0] == (7, "two", {3: "ValueError: ü"})
    assert connection.begin("app", "one") == {}
    connection.roll_back()
    assert connection.offsets("app") == {("orders", 0): 7}
    assert connection.offsets("other") == {}
    connection.begin("app", "two")
    connection.move("app", {place: Stored(None, "two", {}) for place in places})
    connection.commit()


def test_standard_upsert_finds_a_row_that_was_inserted_meanwhile(
    pair: tuple[StandardConnection, StandardConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, _ = pair
    connection.cursor().execute("create table stock (id integer primary key, a integer check (a >= 0))")
    connection.cursor().execute("insert into stock values (1, 1)")
    update, calls = StandardConnection._update, []

    def first_sees_nothing(self: StandardConnection, *arguments: Any) -> bool:
        calls.append(1)
        return update(self, *arguments) if len(calls) != 1 else False

    monkeypatch.setattr(StandardConnection, "_update", first_sees_nothing)
    StandardConnection._upsert(connection, Table("stock", ("id",)), ("id", "a"), [(1, 2)])
    assert (len(calls), select(connection, "select id, a from stock")) == (2, [(1, 2)])
    with pytest.raises(DatabaseError) as refused:
        StandardConnection._upsert(connection, Table("stock", ("id",)), ("id", "a"), [(2, -2)])
    assert refused.value.fault is Fault.RECORD
    connection.roll_back()
    if isinstance(connection, MySQLConnection):  # there, create table has committed
        drop(connection, "stock")


def test_own_offsets_are_locked_and_those_of_others_are_not(
    pair: tuple[StandardConnection, StandardConnection],
) -> None:
    one, two = pair
    one.claim("locks", "first", [("Orders", 0), ("orders", 0)])
    one.claim("locks", "second", [("orders", 1)])
    assert one.begin("locks", "first").keys() == {("Orders", 0), ("orders", 0)}
    assert two.begin("locks", "second").keys() == {("orders", 1)}
    limit = "set session innodb_lock_wait_timeout = 1" if two._is_mysql else "set lock_timeout = '300ms'"
    two.cursor().execute(limit)
    with pytest.raises(DatabaseError) as waited:
        two.begin("locks", "first")
    assert waited.value.fault in (Fault.AGAIN, Fault.AWAY)
    two.roll_back()
    one.move("locks", {("orders", 0): Stored(5, "first", {})})
    one.commit()
    assert two.begin("locks", "first")["orders", 0].next_offset == 5


def test_autocommit_is_turned_off(database: DBAPI) -> None:
    def opened() -> Any:
        connection = database.open_connection()
        if callable(connection.autocommit):
            connection.autocommit(True)
        else:
            connection.autocommit = True
        return connection

    connection = DBAPI(opened).connect()
    connection.create_offsets()
    connection.claim("autocommit", "owner", [("orders", 0)])
    connection.begin("autocommit", "owner")
    connection.move("autocommit", {("orders", 0): Stored(5, "owner", {})})
    connection.roll_back()
    assert connection.offsets("autocommit") == {}
    connection.close()


@pytest.mark.parametrize("statement", ["commit", "rollback"])
def test_function_that_ends_the_transaction_is_noticed(
    pair: tuple[StandardConnection, StandardConnection], statement: str
) -> None:
    connection, _ = pair
    connection.begin("app", "owner")
    connection.cursor().execute(statement)
    with pytest.raises(DatabaseError, match="the transaction ended before its commit") as noticed:
        connection.commit()
    assert noticed.value.fault is Fault.DEFINITION


@needs_mariadb
def test_mariadb_deadlock_that_a_function_ignored_is_noticed(mariadb: MariaDBServer) -> None:
    """InnoDB rolls the victim's transaction back, and its next statements would be committed without the others."""
    database = DBAPI(lambda: pymysql.connect(**mariadb.arguments("shop")))
    mariadb.execute("shop", "create table ring (id integer primary key, a integer)")
    mariadb.execute("shop", "insert into ring values (1, 0), (2, 0)")
    pair = [database.connect(), database.connect()]
    change = "update ring set a = a + 1 where id = %s"
    for number, connection in enumerate(pair, 1):
        connection.create_offsets()
        connection.begin("app", "owner")
        connection.cursor().execute(change, (number,))
    first = Background(lambda: pair[0].cursor().execute(change, (2,)))
    waiting = "select count(*) from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"
    wait_until("the lock", lambda: mariadb.execute("shop", waiting) == [(1,)], 30)
    victims = []
    for connection, call in ((pair[1], lambda: pair[1].cursor().execute(change, (1,))), (pair[0], first.result)):
        try:
            call()
        except pymysql.OperationalError as error:
            victims.append((connection, error.args[0]))
    ((victim, number),) = victims
    assert number == 1213
    with pytest.raises(DatabaseError, match="the transaction ended before its commit"):
        victim.commit()
    for connection in pair:
        connection.close()
    mariadb.execute("shop", "drop table ring")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("id integer primary key, mail varchar(20) unique", "another unique key, mail"),
        ("id integer, mail varchar(20), unique (id, mail)", "no primary key or unique constraint on id"),
        ("id varchar(20), unique (id(5))", "no primary key or unique constraint on id"),
        ("id integer primary key) engine = MyISAM comment = (''", "has the engine MyISAM"),
        ("number integer auto_increment primary key, id integer unique", None),
    ],
)
@needs_mariadb
def test_mariadb_tables_that_cannot_be_exact_are_refused(
    mariadb: MariaDBServer, columns: str, message: str | None
) -> None:
    definition = f"create table wrong ({columns})".replace("('')", "''")
    mariadb.execute("shop", "drop table if exists wrong")
    mariadb.execute("shop", definition)
    connection = DBAPI(lambda: pymysql.connect(**mariadb.arguments("shop"))).connect()
    refused = contextlib.nullcontext() if message is None else pytest.raises(DatabaseError, match=message)
    with refused as found:
        connection.check(Table("wrong", ("id",)))
    connection.close()
    assert message is None or found.value.fault is Fault.DEFINITION


@needs_mariadb
def test_mariadb_keeps_every_type_of_value(mariadb: MariaDBServer) -> None:
    connection = DBAPI(lambda: pymysql.connect(**mariadb.arguments("shop"))).connect()
    types = "id integer primary key, `100%?` decimal(20, 4), at datetime(6), stamp timestamp(6), doc json, raw blob"
    connection.cursor().execute(f"create table kinds ({types}, ratio double, note text, code char(36))")
    at = datetime(2026, 3, 29, 1, 30, 0, 5, tzinfo=timezone(timedelta(hours=2)))
    row = {
        "id": 1,
        "100%?": Decimal("12345678901234.5678"),
        "at": at,
        "stamp": at,
        "doc": {"a": [1, None, "x"], "at": at},
        "raw": bytes(range(256)),
        "ratio": 0.1,
        "note": "line\nbreak \\x00 zero \0 ü 😀",
        "code": uuid.UUID(int=7),
    }
    write(connection, Table("kinds", ("id",)), row, {"id": 2, "note": None})
    utc = datetime(2026, 3, 28, 23, 30, 0, 5)
    found = select(connection, "select * from kinds order by id")
    doc = '{"a":[1,null,"x"],"at":"2026-03-29T01:30:00.000005+02:00"}'
    expected = row | {"at": utc, "stamp": utc, "doc": doc, "code": str(row["code"])}
    assert found[0] == tuple(expected.values())
    assert set(found[1][1:3] + found[1][4:]) == {None}
    for wrong in ({"id": 9, "100%?": "much"}, {"id": None}, {"id": 9, "ratio": math.nan}, {"id": 2**40}, {"id": [1]}):
        with pytest.raises(DatabaseError) as refused:
            connection.write(Table("kinds"), [wrong])
        assert refused.value.fault is Fault.RECORD, wrong
    connection.close()


def test_pg8000_keeps_values_of_common_types(server: PostgresServer) -> None:
    arguments = PostgresThroughDBAPI(server).arguments("postgres")
    connection = DBAPI(lambda: pg8000.dbapi.connect(**arguments)).connect()
    connection.create_offsets()
    types = 'id integer primary key, "100?" numeric, at timestamptz, doc jsonb, raw bytea, note text, code uuid'
    connection.cursor().execute(f"create temporary table plain ({types})")
    row = {
        "id": 1,
        "100?": Decimal("1.50"),
        "at": datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
        "doc": {"a": [1, None]},
        "raw": bytes(range(256)),
        "note": None,
        "code": uuid.UUID(int=7),
    }
    connection.write(Table("plain", ("id",)), [row, {"id": 2, "note": "x"}, row])
    assert select(connection, "select * from plain where id = 1") == [tuple(row.values())]
    with pytest.raises(DatabaseError) as refused:
        connection.write(Table("plain"), [{"id": 9, "note": "zero \0 byte"}])
    assert refused.value.fault is Fault.RECORD
    connection.close()


@needs_mariadb
def test_dbapi_messages_contain_no_password(mariadb: MariaDBServer, server: PostgresServer) -> None:
    arguments = mariadb.arguments("shop") | {"password": "hidden-7c1"}
    closed = PostgresThroughDBAPI(server).arguments("postgres") | {"password": "hidden-7c1", "port": 1}
    for call, fault in (
        (functools.partial(pymysql.connect, **arguments), Fault.DENIED),
        (functools.partial(pymysql.connect, **(arguments | {"port": 1})), Fault.AWAY),
        (functools.partial(pymysql.connect, **mariadb.arguments("missing")), Fault.DEFINITION),
        (functools.partial(pg8000.dbapi.connect, **closed), Fault.AWAY),
    ):
        with pytest.raises(DatabaseError) as refused:
            DBAPI(call).connect()
        assert refused.value.fault is fault, refused.value
        assert not re.search("hidden|secret", f"{refused.value} {DBAPI(call)!r}")


def test_connections_of_other_kinds_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"use eos\.sql\.SQLite"):
        DBAPI(lambda: sqlite3.connect(":memory:")).connect()
    with pytest.raises(ConfigurationError, match="is no connection of a DB-API driver"):
        DBAPI(dict).connect()
    with pytest.raises(ConfigurationError, match=r"DBAPI\(shop\) raised ZeroDivisionError"):
        DBAPI(lambda: 1 / 0, name="shop").connect()


def test_password_is_in_no_message() -> None:
    for conninfo in ("postgresql://me:hidden-7c1@127.0.0.1:1/db", "host=127.0.0.1 port=1 password=hidden-7c1"):
        with pytest.raises(DatabaseError) as away:
            Postgres(conninfo).connect()
        assert away.value.fault is Fault.AWAY
        assert "hidden" not in f"{away.value} {Postgres(conninfo)!r}"


@pytest.fixture
def duck(tmp_path: Path) -> Iterator[Connection]:
    connection = DuckDB(str(tmp_path / "values.duckdb")).connect()
    connection.create_offsets()
    connection.claim("app", "owner", [("orders", 0)])
    connection.cursor().execute("create table stock (id integer primary key, a integer check (a >= 0))")
    yield connection
    connection.close()


def test_duckdb_keeps_every_type_of_value(duck: Connection) -> None:
    types = (
        TYPES.replace("at timestamptz", '"at" timestamptz')
        .replace("jsonb", "json")
        .replace("big numeric", "big int128")
    )
    duck.cursor().execute(f"create table kinds ({types})")
    row = EVERY_TYPE | {"doc": {"a": [1, None]}, "note": "line\nbreak \\x00 zero \0 ü"}
    many = ({"id": number, "note": None, "ratio": math.nan} for number in range(2, 3_000))
    write(duck, Table("kinds", ("id",)), row, *many)
    assert select(duck, "select * from kinds where id = 1") == [tuple((row | {"doc": '{"a":[1,null]}'}).values())]
    assert select(duck, "select count(*) from kinds where isnan(ratio) and note is null") == [(2998,)]
    for wrong in (
        {"id": "nine"},
        {"id": None},
        {"id": 2**40},
        {"id": 9, "amount": "much"},
        {"id": 9, "note": object()},
    ):
        duck.begin("app", "owner")
        with pytest.raises(DatabaseError) as refused:
            duck.write(Table("kinds", ("id",)), [wrong])
        assert refused.value.fault is Fault.RECORD, wrong
        duck.roll_back()
    for columns in ({"missing": 1}, {"id": 1, "missing": 1}):
        with pytest.raises(DatabaseError) as refused:
            duck.write(Table("kinds", ("id",)), [columns])
        assert refused.value.fault is Fault.DEFINITION


def test_duckdb_repeats_accepted_statements_after_a_refused_one(duck: Connection) -> None:
    duck.begin("app", "owner")
    for number in range(9):
        duck.savepoint()
        try:
            duck.write(Table("stock", ("id",)), [{"id": number % 4, "a": -1 if number % 3 == 2 else number}])
            cursor = duck.cursor()
            cursor.execute("update stock set a = a + ? where id = ? returning a", [1, number % 4])
            assert cursor.fetchone() == (number + 1,)
            if number == 7:
                raise ValueError("a function's own error")
            duck.release_savepoint()
        except (DatabaseError, ValueError):
            duck.roll_back_to_savepoint()
    duck.move("app", {("orders", 0): Stored(9, "owner", {})})
    duck.commit()
    assert select(duck, "select id, a from stock order by id") == [(0, 5), (1, 2), (2, 7), (3, 4)]
    assert duck.offsets("app") == {("orders", 0): 9}


def test_duckdb_refuses_statements_that_return_something_else(duck: Connection) -> None:
    duck.begin("app", "owner")
    duck.savepoint()
    duck.cursor().execute("insert into stock select 1, cast(random() * 1e9 as integer) returning a")
    duck.release_savepoint()
    duck.savepoint()
    with pytest.raises(DatabaseError) as changed:
        duck.roll_back_to_savepoint()
    assert changed.value.fault is Fault.DEFINITION


def test_duckdb_error_that_a_function_ignored_fails_its_record(duck: Connection) -> None:
    duck.begin("app", "owner")
    duck.savepoint()
    with pytest.raises(Exception, match="CHECK constraint"):
        duck.cursor().execute("insert into stock values (1, -1)")
    for call in (duck.release_savepoint, duck.commit):
        with pytest.raises(DatabaseError, match="transaction is aborted") as ignored:
            call()
        assert ignored.value.fault is Fault.RECORD
    duck.roll_back()
    duck.begin("app", "owner")
    duck.cursor().execute("commit")
    with pytest.raises(DatabaseError, match="must not commit") as committed:
        duck.commit()
    assert committed.value.fault is Fault.DEFINITION


def test_duckdb_file_locked_by_another_process_is_reported(duck: Connection, tmp_path: Path) -> None:
    program = f"from eos.sql import DuckDB\nDuckDB({str(tmp_path / 'values.duckdb')!r}).connect()"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "Could not set lock on file" in ended.stderr


def test_duckdb_transaction_fails_if_its_owner_changes_meanwhile(duck: Connection, tmp_path: Path) -> None:
    """D4: another connection of this process takes the partition over between the comparison and the commit."""
    other = DuckDB(str(tmp_path / "values.duckdb")).connect()
    assert duck.begin("app", "owner").keys() == {("orders", 0)}
    duck.write(Table("stock", ("id",)), [{"id": 1, "a": 1}])
    other.claim("app", "newer", [("orders", 0)])
    with pytest.raises(DatabaseError) as changed:
        duck.move("app", {("orders", 0): Stored(9, "owner", {})})
    assert changed.value.fault is Fault.AGAIN
    duck.roll_back()
    assert duck.begin("app", "owner") == {}
    other.close()


def test_prepared_statement_of_an_altered_table_asks_for_a_new_connection(server: PostgresServer) -> None:
    server.execute("postgres", "create table prices (id integer)")
    connection = Postgres(server.dsn()).connect()
    for _ in range(10):
        connection.cursor().execute("select * from prices")
        connection.commit()
    server.execute("postgres", "alter table prices add column cents integer")
    with pytest.raises(Exception, match="cached plan must not change") as refused:
        connection.cursor().execute("select * from prices")
    translated = connection.translate(refused.value)
    assert translated is not None
    assert translated.fault is Fault.AGAIN
    connection.close()
