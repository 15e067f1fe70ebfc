"""Definitions, commands and runs without a broker of Apps that read the rows of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import eos
from eos import App, Out
from eos.cli.doctor import _database_findings
from eos.errors import CallFailed, ConfigurationError, PoisonRecord, UsageError
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import World
from eos.sql import Postgres, SQLite
from eos.sql.outbox import At, Held, Read, TableRow
from eos.testing import run
from eos.worker.positions import Position, sources_to_reset
from eos.worker.sources import RowSource
from eos.worker.worker import Worker
from tests.support import forked

DATABASE = Postgres("host=127.0.0.1 port=1 connect_timeout=1")


def shop(**options: Any) -> App:
    app = App("shop")
    app.source(DATABASE, table="outbox", to=["events", "others"], **options)
    return app


class Order(msgspec.Struct):
    id: int
    cents: int = 0


def test_columns_of_a_row_make_the_record() -> None:
    rows = [{"key": "a", "value": {"b": 1}, "headers": {"h": "1"}}, {"value": b"\xff", "topic": "others", "key": None}]
    ran = run(shop(), [("outbox", row) for row in rows])
    assert [(one.topic, one.key, one.value, one.headers) for one in ran.sent] == [
        ("events", b"a", b'{"b":1}', [("h", b"1")]),
        ("others", None, b"\xff", []),
    ]


def test_function_gets_annotated_rows_and_feeds_another_function() -> None:
    app = App("shop")

    @app.source(DATABASE, table="orders", to="placed")
    def placed(order: Order) -> int:
        return order.cents

    @app.process("placed", to="doubled")
    def double(cents: int) -> int:
        return 2 * cents

    ran = run(app, [("orders", {"id": 4, "cents": 3, "key": "k", "more": None}), ("orders", {"cents": 5})])
    assert [(one.key, one.value) for one in ran.to("doubled")] == [(b"k", b"6"), (None, b"10")]
    assert [route.name for route in app.functions] == ["orders", "double"]


def test_row_that_does_not_fit_is_a_failure_of_that_row() -> None:
    app = App("shop")

    @app.source(DATABASE, table="orders", to="placed", on_error=eos.stop)
    def placed(order: Order) -> Out:
        return Out(order)

    with pytest.raises(PoisonRecord, match="orders failed on the row with id 7 of table orders: DecodeError: the row"):
        run(app, [("orders", {"id": 7, "cents": "x"})])


def test_skipped_and_retried_rows_do_not_affect_other_rows() -> None:
    app, calls = App("shop"), list[int]()

    @app.source(DATABASE, table="orders", to="placed", on_error=eos.retry(2, then=eos.skip, backoff_ms=0))
    def placed(row: dict[str, Any]) -> int:
        calls.append(row["id"])
        assert row["id"] != 2
        return int(row["id"])

    ran = run(app, [("orders", {}) for _ in range(3)])
    assert (ran.values("placed"), ran.skipped, calls) == ([b"1", b"3"], 1, [1, 2, 2, 2, 3])


@pytest.mark.parametrize(
    ("database", "options", "message"),
    [
        (SQLite("rows.db"), {}, "only eos.sql.Postgres can"),
        (DATABASE, {"on_error": eos.dlq}, "no dead-letter topic"),
        (DATABASE, {"to": ()}, "need a destination"),
        (DATABASE, {"table": "a..b"}, "must be the name of a table"),
        (DATABASE, {"name": "a/b"}, "the name of a source"),
    ],
)
def test_wrong_definition_is_refused(database: Any, options: dict[str, Any], message: str) -> None:
    app = App("shop")
    with pytest.raises(ConfigurationError, match=message):
        app.source(database, **{"table": "outbox", "to": "events", **options})
    assert app.functions == []


def test_function_with_more_parameters_is_refused_and_changes_nothing() -> None:
    app = App("shop")
    source = app.source(DATABASE, table="outbox", to="events")
    with pytest.raises(ConfigurationError, match="exactly one positional argument"):
        source(lambda row, more: None)
    assert [route.name for route in app.functions] == ["outbox"]


def test_two_sources_of_one_table_need_names() -> None:
    app = shop()
    with pytest.raises(ConfigurationError, match="two functions"):
        app.source(DATABASE, table="outbox", to="events")
    app.source(DATABASE, table="outbox", to="events", name="again")
    assert list(app.sources) == ["shop-outbox-position", "shop-again-position"]


def test_position_survives_its_encoding() -> None:
    position = Position(At(2**40, 17), "7/shop")
    topic, value, key, partition, _, _ = position.send("t")
    assert (topic, key, partition) == ("t", b"position", 0)
    assert value is not None
    assert Position.decode("t", value) == position
    for wrong in (value.replace(b'"v": 1', b'"v": 2'), b"{}", b"x"):
        with pytest.raises(ConfigurationError, match="cannot read"):
            Position.decode("t", wrong)


class FakeTable:
    """Stands for a table, and for its database, with rows that an open transaction holds back."""

    def table_reader(self, table: str) -> FakeTable:
        return self

    def identity(self) -> str:
        return "1/shop"

    def last(self) -> At:
        return At(9, 2)

    def read(self, after: At, most: int) -> Read:
        rows = [TableRow({"xid": "9", "id": number}, "outbox") for number in (1, 2)]
        return Read([row for row in rows if row.at > after], 10, 20)

    def held(self) -> Held:
        return Held(3, 4711, 61.4)

    def check(self, *, columns: tuple[str, ...], delete: bool) -> None: ...
    def delete(self, until: At) -> None: ...
    def close(self) -> None: ...


def test_rows_given_back_come_again_and_held_rows_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    app, now = App("shop"), [0.0]
    app.source(FakeTable(), table="outbox", to="events")
    (topic, route), world = next(iter(app.sources.items())), World(now=lambda: now[0])
    source = RowSource(app, topic, route, Settings({}), world)
    source.prepare()
    assert not source.has_rows(), "the position's partition is not assigned"
    source._own(None)
    assert (source.changed_partitions(), source.has_caught_up()) == ([(topic, 0)], False)
    now[0] = 11.0
    taken = source.take(5)
    assert "rows held back by an open transaction table=outbox rows=3 pid=4711 open_s=61" in caplog.text
    source.give_back(taken, 1)
    sent: list[Any] = []
    source.before_flush(sent.extend, {(topic, 0): 0})
    source.committed()
    assert [Position.decode(topic, value).at for _, value, *_ in sent] == [At(9, 1)]
    assert [record.value["id"] for record in source.take(5)] == [2]
    with pytest.raises(CallFailed, match="was revoked"):
        source.before_flush(sent.extend, {})
    source.aborted()
    assert [record.value["id"] for record in source.take(5)] == [2]
    source.before_flush(sent.extend, {(topic, 0): 3})
    source.committed()
    assert (source.has_caught_up(), source.changed_partitions(), len(sent)) == (True, [], 2)


def test_source_restarts_only_at_earliest() -> None:
    app = shop()
    assert sources_to_reset(app, ["shop-outbox-position", "x"], "earliest") == ["shop-outbox-position"]
    assert sources_to_reset(app, ["x"], "latest") == []
    with pytest.raises(UsageError, match="`earliest` only"):
        sources_to_reset(app, ["shop-outbox-position"], "latest")


def test_lineage_of_rows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not cover the rows"):
        Worker(shop(), Settings({"bootstrap.servers": "127.0.0.1:1", "eos.lineage": True}))


def test_doctor_and_topology_show_the_table_of_a_source(tmp_path: Path) -> None:
    (finding,) = _database_findings(shop())
    assert (finding.check, finding.level.value, finding.error.exit_code) == ("database", "failed", 69)
    (tmp_path / "shop.py").write_text(
        "from eos import App\nfrom eos.sql import Postgres\napp = App('shop')\n"
        "app.source(Postgres('host=db dbname=shop password=secret'), table='outbox', to='events')\n"
    )
    printed = forked.run(["eos", "topology", "shop.py"], cwd=tmp_path).stdout
    assert "reads   table outbox in Postgres(host=db dbname=shop)" in printed
    assert "writes  events" in printed
