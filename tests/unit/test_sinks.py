"""Rows, definitions and commands of functions that write into a database, without a broker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest

from eos import App
from eos.app.routes.sink import make_sink_target
from eos.cli.doctor import _database_findings
from eos.errors import ConfigurationError
from eos.sql import DBAPI, Cursor, Delta, DuckDB, Postgres, SQLite
from eos.sql.columns import Column, Kind, columns_of
from eos.sql.database import Database, Fault, Table
from eos.sql.faults import fault_of
from eos.sql.rows import check_key, merge_by_key, split_by_columns, to_row
from eos.sql.standard import Connection as StandardConnection
from eos.testing import run
from tests.support import forked

DATABASES: list[Database] = [
    Postgres("host=localhost"),
    SQLite("shop.db"),
    DuckDB("shop.duckdb"),
    Delta("file:///lake/orders"),
    DBAPI(lambda: None),
]


class Order(msgspec.Struct):
    id: int
    cents: int = 0


@dataclass
class Payment:
    account: int


@pytest.mark.parametrize(
    ("result", "row"),
    [
        (None, None),
        ({"id": 1}, {"id": 1}),
        (Order(1, 2), {"id": 1, "cents": 2}),
        (Payment(7), {"account": 7}),
    ],
)
def test_results_become_rows(result: object, row: object) -> None:
    assert to_row(result, "f") == row


@pytest.mark.parametrize("result", ["text", 1, [1], Order, {}, {1: 2}, {"a": 1, b"b": 2}])
def test_other_results_are_refused_with_the_function(result: object) -> None:
    with pytest.raises(TypeError, match=r"^f returned "):
        to_row(result, "f")


def test_row_without_its_key_is_refused() -> None:
    check_key({"shop": 0, "id": ""}, ("shop", "id"), "f")
    for row in ({"shop": 1}, {"shop": 1, "id": None}):
        with pytest.raises(ValueError, match="without a value for id"):
            check_key(row, ("shop", "id"), "f")


def test_rows_with_the_same_key_merge_like_consecutive_upserts() -> None:
    rows = [{"id": 1, "a": 1}, {"id": 2, "a": 2}, {"id": 1, "b": 3}, {"id": 2, "a": 4}]
    assert merge_by_key(rows, ("id",)) == [{"id": 1, "a": 1, "b": 3}, {"id": 2, "a": 4}]


def test_rows_are_split_where_their_columns_change() -> None:
    rows = [{"a": 1}, {"a": 2}, {"a": 1, "b": 2}, {"b": 1, "a": 2}, {"a": 3}]
    assert [(columns, len(run)) for columns, run in split_by_columns(rows)] == [
        (("a",), 2),
        (("a", "b"), 2),
        (("a",), 1),
    ]
    assert list(split_by_columns([])) == []


def returns_row(order: Order) -> Order:
    return order


def gets_cursor(order: Order, db: Cursor) -> None: ...


async def is_async(order: Order) -> Order:
    return order


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (returns_row, {}, "two parameters, the value and a cursor"),
        (returns_row, {"key": "id"}, "has key= but no table="),
        (gets_cursor, {"table": "orders"}, "remove its other parameters, or table="),
        (returns_row, {"table": ""}, "must be the name of a table"),
        (returns_row, {"table": "orders", "key": [1]}, "must be the name of a column"),
        (is_async, {"table": "orders"}, "must be an ordinary def"),
    ],
)
def test_wrong_definition_is_refused(function: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    app = App("rows")
    with pytest.raises(ConfigurationError, match=message):
        app.sink("orders", SQLite("rows.db"), **options)(function)
    assert app.functions == []


def test_pattern_of_topics_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is a pattern"):
        App("rows").sink("^orders.*", SQLite("rows.db"), table="orders")


@pytest.mark.parametrize("database", DATABASES, ids=lambda one: type(one).__name__)
def test_each_database_can_be_a_target(database: Database) -> None:
    target = make_sink_target(returns_row, database, "orders", ("id",))
    assert (target.database, target.table) == (database, Table("orders", ("id",)))


def test_object_that_is_no_database_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="is no database"):
        make_sink_target(returns_row, "postgresql://localhost", "orders", ())


def test_delta_names_its_table_itself() -> None:
    database = Delta("s3://lake/orders/", {"aws_secret_access_key": "hidden-7c1"})
    assert make_sink_target(returns_row, database, None, ("id",))[:2] == (database, Table("orders", ("id",)))
    with pytest.raises(ConfigurationError, match="leave out table=") as refused:
        make_sink_target(returns_row, database, "payments", ())
    assert "hidden" not in str(refused.value)


def test_offline_run_of_a_function_that_writes_rows_is_refused() -> None:
    app = App("rows")
    app.sink("orders", SQLite("rows.db"), table="orders")(returns_row)
    with pytest.raises(ConfigurationError, match="opens no database"):
        run(app, [("orders", b'{"id": 1}')])


def test_doctor_checks_the_tables(tmp_path: Path) -> None:
    app, database = App("rows"), SQLite(str(tmp_path / "rows.db"))
    app.sink("orders", database, table="orders", key="id")(returns_row)
    (finding,) = _database_findings(app)
    assert (finding.check, finding.level.value) == ("database", "failed")
    assert "no such table: orders" in finding.sentence
    connection = database.connect()
    connection.cursor().execute("create table orders (id integer primary key)")
    (finding,) = _database_findings(app)
    assert "no such column: t.cents" in finding.sentence
    assert finding.remedy is not None
    connection.cursor().execute(finding.remedy.partition("run it: ")[2])
    connection.close()
    (finding,) = _database_findings(app)
    assert finding.level.value == "ok"


def test_topology_shows_where_rows_go(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "from eos import App\nfrom eos.sql import SQLite\napp = App('rows')\n"
        "@app.sink('orders', SQLite('rows.db'), table='orders', key='id')\n"
        "def row(order: dict) -> dict:\n    return order\n"
    )
    printed = forked.run(["eos", "topology", "rows.py"], cwd=tmp_path).stdout
    assert "writes  table orders in SQLite(path='rows.db')" in printed


class OperationalError(Exception): ...


class UniqueViolation(Exception):
    pgcode = "23505"


class ProgrammingError(Exception): ...


class ClientError(ProgrammingError):
    pgcode = None


@pytest.mark.parametrize(
    ("error", "is_mysql", "fault"),
    [
        (OperationalError("gone"), False, Fault.AWAY),
        (ProgrammingError("no such table"), False, Fault.DEFINITION),
        (RuntimeError("other"), False, Fault.RECORD),
        (UniqueViolation(), False, Fault.RECORD),
        (ClientError("cannot send this value"), False, Fault.RECORD),
        (OperationalError({"C": "40001", "M": "could not serialize"}), False, Fault.AGAIN),
        (OperationalError("42S02", "missing"), False, Fault.DEFINITION),
        (OperationalError(1213, "deadlock"), True, Fault.AGAIN),
        (OperationalError(1142, "denied"), True, Fault.DENIED),
        (OperationalError(3819, "check"), True, Fault.RECORD),
        (OperationalError(1054, "unknown column"), True, Fault.DEFINITION),
        (OperationalError(2013, "lost"), True, Fault.AWAY),
        (OperationalError(9999, "unknown to the table"), True, Fault.RECORD),
        (ProgrammingError("nan can not be used with MySQL"), True, Fault.RECORD),
        (OperationalError("closed"), True, Fault.AWAY),
    ],
)
def test_errors_of_drivers_have_a_meaning(error: Exception, is_mysql: bool, fault: Fault) -> None:
    assert fault_of(error, is_mysql) is fault


@pytest.mark.parametrize(
    ("paramstyle", "sql", "bound"),
    [
        ("qmark", 'insert into "a%?" ("b", "c") values (?, ?)', (7, 8)),
        ("format", 'insert into "a%%?" ("b", "c") values (%s, %s)', (7, 8)),
        ("pyformat", 'insert into "a%%?" ("b", "c") values (%(p1)s, %(p2)s)', {"p1": 7, "p2": 8}),
        ("numeric", 'insert into "a%?" ("b", "c") values (:1, :2)', (7, 8)),
        ("named", 'insert into "a%?" ("b", "c") values (:p1, :p2)', {"p1": 7, "p2": 8}),
    ],
)
def test_parameters_are_marked_as_the_driver_says(paramstyle: str, sql: str, bound: object) -> None:
    executed: list[object] = []
    cursor = SimpleNamespace(executemany=lambda *arguments: executed.extend(arguments))
    driver = SimpleNamespace(paramstyle=paramstyle, Error=OperationalError)
    connection = StandardConnection("database", SimpleNamespace(cursor=lambda: cursor), driver)
    connection.write(Table("a%?"), [{"b": 7, "c": 8}])
    assert executed == [sql, [bound]]


class Visit(msgspec.Struct):
    place: str
    at: datetime | None
    cents: int = 0
    weight: Decimal | None = None
    kind: Literal["new", "old"] = "new"
    tags: list[str] = []


@pytest.mark.parametrize("annotation", [Visit, Visit | None])
def test_columns_come_from_the_class_of_the_rows(annotation: object) -> None:
    assert columns_of(annotation) == (
        Column("place", Kind.TEXT, nullable=False),
        Column("at", Kind.TIMESTAMP, nullable=True),
        Column("cents", Kind.INTEGER, nullable=False),
        Column("weight", Kind.DECIMAL, nullable=True),
        Column("kind", Kind.TEXT, nullable=False),
        Column("tags", Kind.JSON, nullable=False),
    )
    assert columns_of(Payment) == (Column("account", Kind.INTEGER, nullable=False),)


@pytest.mark.parametrize("annotation", [None, dict, dict[str, int], int, "Missing", Order | Payment])
def test_annotation_without_fields_gives_no_columns(annotation: object) -> None:
    assert columns_of(annotation) == ()
