"""Write rows into a Delta Lake table: each record's row is there once, whatever is killed or suspended."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
from deltalake import DeltaTable, write_deltalake

import eos
from eos.broker import LocalKafka
from eos.sql import Delta
from eos.sql.database import DatabaseError, Fault, Stored, Table
from eos.sql.delta import Connection
from tests.support import forked
from tests.support.killed import KILLED
from tests.support.reading import create_topic, visible_records, wait_until

pytestmark = pytest.mark.takes(40)

PLACES = [("orders", 0), ("orders", 1)]
SCHEMA = pyarrow.schema(
    [
        pyarrow.field("id", pyarrow.int64(), nullable=False),
        pyarrow.field("Amount %", pyarrow.decimal128(20, 4)),
        pyarrow.field("at", pyarrow.timestamp("us", "UTC")),
        pyarrow.field("tags", pyarrow.list_(pyarrow.string())),
        pyarrow.field("raw", pyarrow.binary()),
        pyarrow.field("note", pyarrow.string()),
    ]
)


@pytest.fixture
def database(tmp_path: Path) -> Delta:
    DeltaTable.create(str(tmp_path / "orders"), schema=SCHEMA)
    return Delta(str(tmp_path / "orders"))


def rows_of(database: Delta) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(database.uri).to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda row: row["id"])


def test_delta_merges_rows_and_keeps_values(database: Delta) -> None:
    connection, table = database.connect(), Table("orders", ("id",))
    row = {
        "id": 1,
        "Amount %": Decimal("1.5000"),
        "at": datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
        "tags": ["a,b", 'quote"'],
        "raw": bytes(range(256)),
        "note": "zero \0 ü",
    }
    connection.claim("app", "owner", PLACES)
    connection.begin("app", "owner")
    connection.write(table, [row, {"id": 2, "note": "x"}, {"id": 3}])
    connection.move("app", {PLACES[0]: Stored(3, "owner", {})})
    connection.commit()
    before = DeltaTable(database.uri).version()
    connection.begin("app", "owner")
    connection.write(
        table, [{"id": 2, "Amount %": Decimal(7)}, {"id": 3, "note": "y"}, {"id": 3, "Amount %": Decimal(8)}]
    )
    connection.write(table, [{"id": 4}])
    connection.move("app", {PLACES[0]: Stored(6, "owner", {4: "ValueError: ü"})})
    connection.commit()
    assert DeltaTable(database.uri).version() == before + 1
    found = rows_of(database)
    assert found[0] == row
    assert [(one["id"], one["Amount %"], one["note"]) for one in found[1:]] == [
        (2, Decimal(7), "x"),
        (3, Decimal(8), "y"),
        (4, None, None),
    ]
    assert connection.offsets("app") == {PLACES[0]: 6}
    assert database.connect().claim("app", "next", PLACES)[PLACES[0]] == (6, "next", {4: "ValueError: ü"})
    assert connection.begin("app", "owner") == {}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"id": "nine"}, Fault.RECORD),
        ({"id": 2**70}, Fault.RECORD),
        ({"note": "no id"}, Fault.RECORD),
        ({"id": 1, "Amount %": "much"}, Fault.RECORD),
        ({"id": 1, "missing": 1}, Fault.DEFINITION),
    ],
)
def test_delta_refuses_rows_when_they_are_added(database: Delta, row: dict[str, Any], fault: Fault) -> None:
    connection = database.connect()
    connection.claim("app", "owner", PLACES)
    connection.begin("app", "owner")
    connection.write(Table("orders"), [{"id": 1}])
    connection.savepoint()
    with pytest.raises(DatabaseError) as refused:
        connection.write(Table("orders"), [row])
    assert refused.value.fault is fault
    connection.roll_back_to_savepoint()
    connection.move("app", {PLACES[0]: Stored(2, "owner", {})})
    connection.commit()
    assert [one["id"] for one in rows_of(database)] == [1]


@pytest.mark.parametrize("key", [(), ("id",)])
@pytest.mark.parametrize("moment", ["before begin", "before commit", "after commit of another partition"])
def test_delta_refuses_the_commit_of_a_worker_that_lost_its_partition(
    database: Delta, key: tuple[str, ...], moment: str
) -> None:
    """D4: another worker takes the partition over, with a process and a Delta of its own."""
    zombie, other = database.connect(), Delta(database.uri).connect()
    zombie.claim("app", "zombie", PLACES)
    if moment == "before begin":
        other.claim("app", "newer", PLACES)
        assert zombie.begin("app", "zombie") == {}
        return
    assert zombie.begin("app", "zombie").keys() == set(PLACES)
    zombie.write(Table("orders", key), [{"id": 1}])
    zombie.move("app", {PLACES[0]: Stored(5, "zombie", {})})
    if moment == "before commit":
        other.claim("app", "newer", [PLACES[0]])
        with pytest.raises(DatabaseError) as refused:
            zombie.commit()
        assert refused.value.fault is Fault.AGAIN
        assert rows_of(database) == []
    else:  # a commit of another partition does not hinder appends
        other.claim("app", "newer", [PLACES[1]])
        zombie.commit()
        assert len(rows_of(database)) == 1
    assert zombie.begin("app", "zombie").keys() == {PLACES[1 if moment == "before commit" else 0]}


def test_delta_refuses_tables_that_forget_offsets_or_are_missing(database: Delta, tmp_path: Path) -> None:
    configuration = {"delta.setTransactionRetentionDuration": "interval 1 days"}
    DeltaTable.create(str(tmp_path / "forgets"), schema=SCHEMA, configuration=configuration)
    with pytest.raises(DatabaseError, match="would forget the offsets"):
        Delta(str(tmp_path / "forgets")).connect().check(Table("forgets"))
    with pytest.raises(DatabaseError, match="has no column missing") as refused:
        database.connect().check(Table("orders", ("missing",)))
    assert refused.value.fault is Fault.DEFINITION
    connection = database.connect()
    connection.check(Table("orders", ("id",)))
    with pytest.raises(DatabaseError, match="functions with different keys"):
        connection.check(Table("orders"))
    with pytest.raises(DatabaseError) as refused:
        Delta(str(tmp_path / "nowhere"), {"aws_secret_access_key": "hidden-7c1"}).connect()
    assert refused.value.fault is Fault.DEFINITION
    assert "hidden" not in f"{refused.value}"


APP = """
import eos
from eos.sql import Delta

app = eos.App({id!r})

@app.sink({source!r}, Delta({uri!r}), key={key!r}, on_error="dlq")
def row(order: dict) -> dict:
    if order["id"] % 50 == 7:
        raise ValueError("refused")
    return {{"id": order["id"], "note": "x" if order["id"] % 60 else 1}}
"""


class DeltaRun:
    """Run an App that writes orders into a Delta table, and compare the table with what was sent."""

    def __init__(
        self, kafka: LocalKafka, names: Callable[[str], str], folder: Path, database: Delta, key: object
    ) -> None:
        self.servers, self.folder, self.database, self.sent = kafka.bootstrap_servers, folder, database, 0
        self.source = create_topic(self.servers, names("orders"), partitions=3)
        create_topic(self.servers, f"{self.source}.dlq")
        text = APP.format(id=names("app"), source=self.source, uri=database.uri, key=key)
        (folder / "sinking.py").write_text(text)

    def load(self, count: int) -> None:
        with eos.transaction({"bootstrap.servers": self.servers, "transactional.id": f"{self.source}-load"}) as txn:
            for number in range(self.sent, self.sent + count):
                txn.send(self.source, json.dumps({"id": number}), key=str(number))
        self.sent += count

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"KAFKA_BOOTSTRAP_SERVERS": self.servers, "PYTHONPATH": str(self.folder)}

    def command(self, *program: str, instance: str = "one") -> list[str]:
        return [
            *(program or ("eos",)),
            *("run", "sinking:app", "-X", "eos.transaction.max.records=50", "-X", "session.timeout.ms=6000"),
            *("--until-end", "--instance", instance),
        ]

    def run(self, *program: str, instance: str = "one", ends: int = 0) -> str:
        ended = forked.run(self.command(*program, instance=instance), cwd=self.folder, env=self.environment)
        print(ended.stderr)
        assert ended.returncode == ends, ended.stderr
        return ended.stderr

    def require_rows(self) -> set[int]:
        """Check the rows of everything that was sent, and return the ids of refused records."""
        refused = {number for number in range(self.sent) if number % 50 == 7 or number % 60 == 0}
        assert [row["id"] for row in rows_of(self.database)] == [n for n in range(self.sent) if n not in refused]
        return refused

    def require_exact(self) -> None:
        refused = self.require_rows()
        letters = [
            one.value() for records in visible_records(self.servers, f"{self.source}.dlq").values() for one in records
        ]
        assert sorted(json.loads(letter or b"{}")["id"] for letter in letters) == sorted(refused)


@pytest.mark.deep_for("move-before", "send_offsets-before", "flush-behind")
@pytest.mark.parametrize(
    ("step", "when"), [("commit", "behind"), ("move", "before"), ("send_offsets", "before"), ("flush", "behind")]
)
def test_delta_rows_are_exact_after_kills_at_a_step(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path, database: Delta, step: str, when: str
) -> None:
    """D1: the worker dies between Delta's commit and Kafka's, and at other steps."""
    key = "id" if step == "commit" else ()
    run = DeltaRun(kafka, names, tmp_path, database, key)
    where = f"eos.sql.delta:{step}" if step in ("move", "commit") else step
    for number in (2, 4):
        run.load(200)
        run.run("-c", KILLED, where, when, str(number), ends=-9)
    run.run()
    run.require_exact()


@pytest.mark.deep
def test_delta_worker_that_was_suspended_in_its_transaction_writes_nothing(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path, database: Delta
) -> None:
    """D4: another worker has taken over while this one was suspended between its comparison and its commit."""
    run = DeltaRun(kafka, names, tmp_path, database, ())
    run.load(400)
    program = tmp_path / "suspended.py"
    program.write_text(
        "import os, signal, sys\nfrom eos import cli\nfrom eos.sql.delta import Connection\n"
        "move, calls = Connection.move, []\n"
        "def suspended(self, *arguments):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return move(self, *arguments)\n"
        "Connection.move = suspended\nsys.exit(cli.invoke(sys.argv[1:]))\n"
    )
    with (tmp_path / "log").open("wb") as log:
        # On a slow machine the broker would abort the transaction at its timeout before this worker goes on.
        command = [*run.command(sys.executable, str(program)), "-X", "transaction.timeout.ms=120000"]
        zombie = psutil.Popen(command, cwd=tmp_path, env=run.environment, stderr=log)
    try:
        wait_until("the suspension", lambda: zombie.status() == psutil.STATUS_STOPPED, 60)
        run.run(instance="two")
        run.require_rows()  # the open transaction of the suspended worker still hides the dead letters
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(60) in (0, 79), (tmp_path / "log").read_text()
    finally:
        if zombie.is_running():
            zombie.kill()
    assert "Concurrent transaction" in (tmp_path / "log").read_text()
    run.require_exact()


def test_delta_merge_starts_again_after_a_foreign_append(database: Delta) -> None:
    """A job that appends to the table meanwhile makes a merge start again, and loses nothing."""
    connection = database.connect()
    connection.claim("app", "owner", PLACES)
    for _ in range(2):
        connection.begin("app", "owner")
        connection.write(Table("orders", ("id",)), [{"id": 1}])
        connection.move("app", {PLACES[0]: Stored(5, "owner", {})})
        if len(rows_of(database)) == 0:
            write_deltalake(database.uri, pyarrow.Table.from_pylist([{"id": 2}], schema=SCHEMA), mode="append")
            with pytest.raises(DatabaseError) as conflict:
                connection.commit()
            assert conflict.value.fault is Fault.AGAIN
        else:
            connection.commit()
    assert [row["id"] for row in rows_of(database)] == [1, 2]
    assert isinstance(connection, Connection)
