"""Write values of many types and shapes through the connections, without Kafka."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from eos.sql import Postgres, SQLite
from eos.sql.database import Connection, DatabaseError, Fault, Stored, Table
from eos.sql.rows import Row, merge_by_key
from tests.support.postgres import PostgresServer, postgres_server

pytestmark = pytest.mark.takes(10)

TYPES = (
    "id integer primary key, amount numeric(20, 4), at timestamptz, doc jsonb, tags text[], raw bytea, ratio float8, "
    "note text, code uuid, big numeric"
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture(params=["postgres", "sqlite"])
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connection]:
    if request.param == "sqlite":
        made: Connection = SQLite(str(tmp_path / "values.db")).connect()
    else:
        made = Postgres(request.getfixturevalue("server").dsn()).connect()
    made.create_offsets()
    yield made
    made.close()


def write(connection: Connection, table: Table, *rows: Row) -> None:
    connection.begin("app", "owner")
    connection.write(table, merge_by_key(rows, table.key) if table.key else rows)
    connection.commit()


def select(connection: Connection, sql: str) -> list[tuple[Any, ...]]:
    connection.cursor().execute(sql)
    return connection.cursor().fetchall()


def test_postgres_keeps_every_type_of_value(server: PostgresServer) -> None:
    connection = Postgres(server.dsn()).connect()
    connection.create_offsets()
    connection.cursor().execute(f"create table kinds ({TYPES})")
    row = {
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


def test_rows_of_other_columns_change_only_these(connection: Connection) -> None:
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
    connection.begin("app", "owner")
    cursor.execute("drop table shapes")
    connection.commit()


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


def test_password_is_in_no_message() -> None:
    for conninfo in ("postgresql://me:hidden-7c1@127.0.0.1:1/db", "host=127.0.0.1 port=1 password=hidden-7c1"):
        with pytest.raises(DatabaseError) as away:
            Postgres(conninfo).connect()
        assert away.value.fault is Fault.AWAY
        assert "hidden" not in f"{away.value} {Postgres(conninfo)!r}"
