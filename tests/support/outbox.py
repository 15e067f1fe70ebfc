"""Run an App that sends the rows of a table in a real PostgreSQL, and compare its records with the table."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from eos.broker import LocalKafka
from tests.support import forked
from tests.support.life import until_killed
from tests.support.postgres import PostgresServer
from tests.support.reading import create_topic, settled_records, visible_records, wait_until

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
