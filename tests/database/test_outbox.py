"""Send rows of a real PostgreSQL to a real Kafka: each is there once and in order, whatever is killed or suspended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from tests.support import forked
from tests.support.killed import KILLED
from tests.support.life import until_killed
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.reading import create_topic, settled_records, visible_records, wait_until

pytestmark = pytest.mark.takes(45)

Names = Callable[[str], str]
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "outbox.md"
SMALL = ("-X", "eos.transaction.max.records=40")
APP = """
import time
from typing import Any
from eos import App, Out
from eos.sql import Postgres

app = App({id!r})

@app.source(Postgres({dsn!r}), table="outbox", to={topic!r}{options})
def event(row: dict[str, Any]) -> Out | None:
    {body}
    return Out(str(row["id"]), key=row["key"])
"""
TABLE, INDEX = re.findall(r"```sql\n(create table .*?;)\n(create index .*?;)\n```", PAGE.read_text(), re.S)[0]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


class Outbox:
    """Run an App that sends the ids of rows, and compare the records with the table."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path, server: PostgresServer) -> None:
        self.servers, self.folder, self.server = kafka.bootstrap_servers, folder, server
        self.id, self.topic = names("app"), create_topic(kafka.bootstrap_servers, names("events"), partitions=2)
        self.position_topic = f"{self.id}-outbox-position"
        self.database = names("db").replace("-", "_")[-60:]
        self.log_path = folder / "log"
        with server.connect() as admin:
            admin.execute(f'create database "{self.database}"')
        for statement in (TABLE, INDEX):
            self.execute(statement)
        self.sent: list[int] = []
        self.define()

    def define(self, body: str = "pass", options: str = "", database: str | None = None) -> None:
        values = {"dsn": self.server.dsn(database or self.database), "body": body, "options": options}
        (self.folder / "outbox.py").write_text(APP.format(**(vars(self) | values)))

    def connect(self) -> psycopg.Connection[Any]:
        return self.server.connect(self.database)

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            found = connection.execute(sql)
            return found.fetchall() if found.description else []

    def insert(self, count: int, connection: psycopg.Connection[Any] | None = None) -> None:
        """Insert rows of seven keys, by this connection or in a transaction of their own."""
        statement = (
            "insert into outbox (key, value) select 'k' || n %% 7, '{}' from generate_series(1, %s) n returning id"
        )
        if connection is not None:
            self.sent += [row[0] for row in connection.execute(statement, [count]).fetchall()]
            return
        with self.connect() as own:
            self.sent += [row[0] for row in own.execute(statement, [count]).fetchall()]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"KAFKA_BOOTSTRAP_SERVERS": self.servers, "PYTHONPATH": str(self.folder)}

    def command(self, *arguments: str, program: tuple[str, ...] = ("eos",)) -> list[str]:
        more = () if "--instance" in arguments else ("--instance", "one")
        return [*program, "run", "outbox:app", *SMALL, *more, *arguments]

    def eos(self, *arguments: str) -> str:
        ended = forked.run(["eos", *arguments], cwd=self.folder, env=self.environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def run(self, *arguments: str, program: tuple[str, ...] = ("eos",), ends: int = 0) -> str:
        command = self.command("--until-end", *arguments, program=program)
        ended = forked.run(command, cwd=self.folder, env=self.environment)
        print(ended.stderr)  # shown if the test fails
        assert ended.returncode == ends, ended.stderr
        assert "secret-9f2c" not in ended.stderr
        return ended.stderr

    def start(self, *arguments: str) -> contextlib.AbstractContextManager[Any]:
        with self.log_path.open("ab") as stderr:
            started = forked.Popen(self.command(*arguments), cwd=self.folder, env=self.environment, stderr=stderr)
        return until_killed(started)

    def stop(self, worker: Any) -> None:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0, self.log

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, text: str, times: int = 1) -> None:
        wait_until(text, lambda: self.log.count(text) >= times, 60)

    def arrived(self) -> int:
        return sum(map(len, visible_records(self.servers, self.topic).values()))

    def wait_for_records(self, count: int) -> None:
        wait_until(f"{count} records", lambda: self.arrived() >= count, 60)

    def wait_for_queries(self, count: int) -> None:
        """Wait until the worker has queried the table this many times."""
        seen: set[object] = set()

        def enough() -> bool:
            seen.update(self.execute("select query_start from pg_stat_activity where query like '%join lateral%'"))
            return len(seen) > count

        wait_until(f"{count} queries", enough, 30)

    def require_exact(self) -> None:
        """Check that each row is one record, and that the records of each key are in the order of transactions."""
        found = settled_records(self.servers, self.topic)
        ids = [int(record.value() or b"") for records in found.values() for record in records]
        assert sorted(ids) == sorted(self.sent), "each row once"
        assert len(ids) > 0
        order = dict(self.execute("select id, rank() over (order by xid, id) from outbox"))
        for records in found.values():
            by_key: dict[bytes | None, list[int]] = {}
            for record in records:
                by_key.setdefault(record.key(), []).append(order.get(int(record.value() or b""), 0))
            assert all(ranks == sorted(ranks) for ranks in by_key.values())


@pytest.fixture
def outbox(kafka: LocalKafka, names: Names, tmp_path: Path, server: PostgresServer) -> Outbox:
    return Outbox(kafka, names, tmp_path, server)


@pytest.mark.parametrize(
    ("step", "when"),
    [("eos.sql.postgres:roll_back", "behind"), ("flush", "behind"), ("send_offsets", "behind"), ("commit", "behind")],
)
def test_rows_are_exact_after_kills_at_a_step(outbox: Outbox, step: str, when: str) -> None:
    for number in (2, 4) if ":" not in step else (5, 6):
        outbox.insert(200)
        outbox.run(program=("-c", KILLED, step, when, str(number)), ends=-9)
    outbox.run()
    outbox.require_exact()


def test_row_of_a_late_commit_is_neither_lost_nor_reordered(outbox: Outbox) -> None:
    """A transaction draws its numbers first, and commits after rows with higher numbers were visible."""
    with outbox.connect() as late:
        late.autocommit = False
        outbox.insert(3)
        outbox.insert(5, late)
        outbox.insert(100)
        with outbox.start("--until-end") as worker:
            outbox.wait_for_records(3)
            outbox.wait_for_queries(3)
            assert outbox.arrived() == 3, "rows after an open transaction were read"
            assert worker.poll() is None, "the rows that were visible at the start are not all sent"
            late.commit()
            assert worker.wait(30) == 0, outbox.log
    outbox.require_exact()


def test_second_worker_takes_over(outbox: Outbox) -> None:
    outbox.insert(50)
    with outbox.start("--instance", "one") as one:
        outbox.wait_for_log("table assigned")
        outbox.wait_for_records(50)
        with outbox.start("--instance", "two") as two:
            outbox.wait_for_log("session started", 2)
            outbox.insert(100)
            outbox.stop(one)
            outbox.insert(100)
            outbox.wait_for_records(250)
            outbox.stop(two)
    outbox.insert(10)
    outbox.run()
    outbox.require_exact()


@pytest.mark.parametrize(("successor", "code"), [("one", 79), ("two", 0)])
def test_suspended_worker_sends_nothing_after_a_takeover(outbox: Outbox, successor: str, code: int) -> None:
    """A worker of the same name has fenced it. Otherwise the group refuses its transaction, and it stands by."""
    outbox.insert(200)
    program = outbox.folder / "suspended.py"
    program.write_text(
        "import os, signal, sys\nfrom eos import cli\nfrom eos.session.producer.producer import TransactionalProducer\n"
        "send_offsets, calls = TransactionalProducer.send_offsets, []\n"
        "def suspended(self, *arguments):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return send_offsets(self, *arguments)\n"
        "TransactionalProducer.send_offsets = suspended\nsys.exit(cli.invoke(sys.argv[1:]))\n"
    )
    short = ("-X", "session.timeout.ms=6000", "-X", "transaction.timeout.ms=6000")
    command = [sys.executable, str(program), *outbox.command("--until-end", *short)[1:]]
    with outbox.log_path.open("wb") as log:
        zombie = psutil.Popen(command, cwd=outbox.folder, env=outbox.environment, stderr=log)
    try:
        wait_until("the suspension", lambda: zombie.status() == psutil.STATUS_STOPPED, 60)
        outbox.run("--instance", successor, *short)
        outbox.require_exact()
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(60) == code, outbox.log
    finally:
        if zombie.is_running():
            zombie.kill()
    outbox.require_exact()


def test_worker_waits_for_a_killed_database(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    with postgres_server() as server:
        outbox = Outbox(kafka, names, tmp_path, server)
        outbox.insert(300)
        with outbox.start() as worker:
            outbox.wait_for_records(50)
            server.kill()
            outbox.wait_for_log("database away, waiting")
            server.start()
            outbox.insert(100)
            outbox.wait_for_records(400)
            outbox.stop(worker)
        assert "database back" in outbox.log
        outbox.require_exact()
        with outbox.start("-X", "eos.database.timeout.ms=1000") as worker:
            outbox.wait_for_log("table assigned", 2)
            server.kill()
            assert worker.wait(60) == 75, outbox.log
        assert "the database has been away for" in outbox.log
        outbox.run(ends=69)


def test_restored_backup_and_other_database_are_refused(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    with postgres_server() as server:
        outbox = Outbox(kafka, names, tmp_path, server)
        outbox.insert(10)
        outbox.run()
        server.stop()
        backup = server.directory / "backup"
        shutil.copytree(server.directory / "data", backup)
        for folder in (backup, *backup.rglob("*")):
            shutil.chown(folder, (server.directory / "data").owner(), (server.directory / "data").group())
        server.start()
        outbox.insert(10)
        outbox.run()
        outbox.require_exact()
        server.stop()
        shutil.rmtree(server.directory / "data")
        backup.rename(server.directory / "data")
        server.start()
        outbox.define(options=", delete=True")
        printed = outbox.run("-X", "session.timeout.ms=6000", ends=66)
        assert "was restored from a backup" in printed
        assert outbox.execute("select count(*) from outbox") == [(10,)], "rows of a wrong database were deleted"
        outbox.execute("delete from outbox")
        (remedy,) = re.findall(r"`eos (reset) MODULE:APP (--topic \S+ --from earliest)`", printed)
        assert "1 set before the first row" in outbox.eos(
            remedy[0], "outbox:app", *remedy[1].split(), "--yes", "--wait", "30"
        )
        outbox.insert(5)
        outbox.run()
        with server.connect() as admin:
            admin.execute('create database "other"')
        with server.connect("other") as other:
            other.execute(TABLE)
        outbox.define(database="other")
        assert "belongs to the database" in outbox.run(ends=66)


def test_position_outlives_the_offsets_of_the_group(outbox: Outbox) -> None:
    """The brokers delete the offsets of a group that has no member for a week. A lost position is noticed."""
    outbox.insert(100)
    outbox.run()
    admin = AdminClient({"bootstrap.servers": outbox.servers})

    def deleted() -> bool:
        with contextlib.suppress(Exception):
            admin.delete_consumer_groups([outbox.id])[outbox.id].result(10)
        return not any(group.group_id == outbox.id for group in admin.list_consumer_groups().result(10).valid)

    wait_until("the deletion of the group", deleted, 30)
    outbox.insert(100)
    outbox.run()
    outbox.require_exact()
    admin.delete_topics([outbox.position_topic])[outbox.position_topic].result(30)
    wait_until("the deletion", lambda: outbox.position_topic not in admin.list_topics(timeout=10).topics, 30)
    printed = outbox.run(ends=66)
    assert "the position of this source is gone" in printed
    outbox.require_exact()


def test_wrong_table_exits_with_78_and_the_statement(outbox: Outbox) -> None:
    outbox.insert(20)
    outbox.execute("alter table outbox drop column xid")
    printed = outbox.run(ends=78)
    (statement,) = re.findall(r"(alter table .*); create index", printed)
    outbox.execute(statement.replace('\\"', '"'))
    outbox.define(options=", delete=True")
    assert "without an index on xid" in outbox.run()
    outbox.sent.sort()
    assert outbox.execute("select count(*) from outbox") == [(0,)], "delete=True deletes what is in Kafka"
    outbox.require_exact()
    outbox.execute("create role reader login; grant select on outbox to reader")
    outbox.insert(5)
    outbox.define(options=", delete=True")
    program = (outbox.folder / "outbox.py").read_text()
    (outbox.folder / "outbox.py").write_text(program.replace("user=postgres", "user=reader"))
    outbox.run(ends=77)
    (outbox.folder / "outbox.py").write_text(
        program.replace("user=postgres", "user=reader").replace(", delete=True", "")
    )
    outbox.run()
    outbox.require_exact()
    outbox.execute("drop owned by reader; drop role reader")


def test_failing_row_follows_the_policy(outbox: Outbox) -> None:
    body = "assert row['id'] != 30, 'the thirtieth'"
    outbox.define(body)
    outbox.insert(50)
    assert "failed on the row with id 30 of table outbox: AssertionError: the thirtieth" in outbox.run(ends=65)
    assert outbox.arrived() == 29
    outbox.define(body, ', on_error="skip"')
    outbox.run("-X", "session.timeout.ms=6000")
    outbox.sent.remove(30)
    outbox.require_exact()


def test_programs_of_the_page_send_rows(outbox: Outbox) -> None:
    """The default columns, a function with a Struct, and a function of the App that reads the records."""
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.S):
        changed = code.replace("postgresql://localhost/shop", outbox.server.dsn(outbox.database))
        for old, new in {'App("shop")': outbox.id, 'App("orders")': f"{outbox.id}-2"}.items():
            changed = changed.replace(old, f"App({new!r})")
        for old in ('to="events"', 'to="orders-placed"'):
            changed = changed.replace(old, f'to="{outbox.topic}"')
        (outbox.folder / name).write_text(changed)
    outbox.execute("alter table outbox add column headers jsonb")
    outbox.execute("""insert into outbox (key, value, headers) values ('a', '{"b": [1, null]}', '{"type": "x"}')""")
    outbox.run()
    outbox.execute(
        "create table orders (id bigint, customer text, cents bigint, xid xid8 not null default pg_current_xact_id())"
    )
    outbox.execute("insert into orders values (1, 'Ann', 5), (2, 'Bob', 0)")
    command = ["eos", "run", "orders.py", "--until-end", "--instance", "one"]
    ended = forked.run(command, cwd=outbox.folder, env=outbox.environment)
    assert ended.returncode == 0, ended.stderr
    found = [one for records in settled_records(outbox.servers, outbox.topic).values() for one in records]
    assert {(one.key(), one.value(), str(one.headers())) for one in found} == {
        (b"a", b'{"b":[1,null]}', "[('type', b'x')]"),
        (b"Ann", json.dumps({"id": 1, "customer": "Ann", "cents": 5}, separators=(",", ":")).encode(), "None"),
    }
