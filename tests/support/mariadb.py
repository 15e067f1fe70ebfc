"""Run a real MariaDB from Debian's packages that a test may kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymysql
import pytest

from tests.support.postgres import free_port
from tests.support.reading import wait_until

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
PROGRAM = shutil.which("mariadbd", path=_PATH)
needs_mariadb = pytest.mark.skipif(PROGRAM is None, reason="there is no MariaDB here: apt-get install mariadb-server")
_USER = ["--user=root"] if os.geteuid() == 0 else []


class MariaDBServer:
    """Own one server in a directory of its own. Each test creates a database there."""

    module, mark = "eos.sql.dbapi", "%s"

    def __init__(self, directory: Path) -> None:
        assert PROGRAM is not None
        self.directory, self.port = directory, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._data = directory / "data"
        install = shutil.which("mariadb-install-db", path=_PATH) or "mariadb-install-db"
        options = [f"--datadir={self._data}", "--auth-root-authentication-method=normal", "--skip-test-db", *_USER]
        subprocess.run([install, "--no-defaults", *options], cwd="/", check=True, capture_output=True)

    def start(self) -> None:
        options = [f"--datadir={self._data}", f"--port={self.port}", f"--socket={self.directory / 'socket'}", *_USER]
        options += ["--bind-address=127.0.0.1", "--skip-name-resolve", "--innodb-flush-log-at-trx-commit=2"]
        options += [
            f"--pid-file={self.directory / 'pid'}",
            "--innodb-buffer-pool-size=32M",
            "--character-set-server=utf8mb4",
        ]
        with (self.directory / "log").open("ab") as log:
            command = [PROGRAM or "", "--no-defaults", *options]
            self._process = subprocess.Popen(command, cwd="/", stdout=log, stderr=log)
        wait_until("MariaDB", self._answers, 60)

    def _answers(self) -> bool:
        with contextlib.suppress(pymysql.OperationalError):
            root = pymysql.connect(unix_socket=str(self.directory / "socket"), user="root")
            with root, root.cursor() as cursor:
                cursor.execute("create user if not exists 'shop'@'127.0.0.1' identified by 'secret-9f2c'")
                cursor.execute("grant all on *.* to 'shop'@'127.0.0.1'")
            return True
        return False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)

    def arguments(self, database: str, port: int | None = None) -> dict[str, Any]:
        login = {"user": "shop", "password": "secret-9f2c"}
        return {"host": "127.0.0.1", "port": port or self.port, "database": database, **login}

    def source(self, database: str, port: int | None = None) -> str:
        return f"DBAPI(lambda: __import__('pymysql').connect(**{self.arguments(database, port)!r}))"

    def create(self, database: str) -> None:
        self.execute("mysql", f'create database "{database}"')

    def execute(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        modes = "set sql_mode = concat(@@sql_mode, ',ANSI_QUOTES,NO_BACKSLASH_ESCAPES')"
        with (
            pymysql.connect(**self.arguments(database), init_command=modes, autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
            return list(cursor.fetchall())


@contextlib.contextmanager
def mariadb_server() -> Iterator[MariaDBServer]:
    directory = Path(tempfile.mkdtemp(prefix="eos-mariadb-"))
    server = MariaDBServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)
