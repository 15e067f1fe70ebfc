"""Run pgbouncer's transaction pooling in front of a real PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

import psycopg
import pytest

from tests.support.postgres import USER, PostgresServer, free_port, postgres_server
from tests.support.reading import wait_until

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason="there is no pgbouncer here: apt-get install pgbouncer")
# With this lifetime, each transaction gets a new connection to the server.
_SETTINGS = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = transaction
server_lifetime = 0
server_login_retry = 1
query_wait_timeout = 3
"""


class PgBouncer:
    """Own one pgbouncer. `port` is its port; databases are created and read without it."""

    module, mark = "eos.sql.postgres", "%s"

    def __init__(self, server: PostgresServer) -> None:
        self.create, self.execute, self.dsn = server.create, server.execute, server.dsn
        self.kill, self.start = server.kill, server.start
        self.port = free_port()
        self._settings = server.directory / f"pgbouncer-{self.port}.ini"
        users = self._settings.with_suffix(".users")
        users.write_text('"postgres" ""\n')
        self._settings.write_text(_SETTINGS.format(server=server.port, port=self.port, users=users))

    def source(self, database: str, port: int | None = None) -> str:
        return f"Postgres({self.dsn(database, port or self.port)!r})"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        command = [PROGRAM or "", str(self._settings)]
        with self._settings.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(command, user=USER, cwd="/", stdout=log, stderr=log)
        try:
            wait_until("pgbouncer", self._answers, 30)
            yield
        finally:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.dsn(port=self.port)):
            return True
        return False


@contextlib.contextmanager
def pgbouncer_of(server: PostgresServer) -> Iterator[PgBouncer]:
    pooler = PgBouncer(server)
    with pooler.running():
        yield pooler


@contextlib.contextmanager
def pooled_server() -> Iterator[PgBouncer]:
    """Run another PostgreSQL server with a pgbouncer in front of it."""
    with postgres_server() as server, pgbouncer_of(server) as pooler:
        yield pooler
