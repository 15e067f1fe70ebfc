"""Run a real MariaDB from Debian's packages that a test may kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pymysql
import pytest

from tests.support.database_server import DatabaseServer
from tests.support.postgres import free_port
from tests.support.reading import wait_until

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
PROGRAM = shutil.which("mariadbd", path=_PATH)
needs_mariadb = pytest.mark.skipif(PROGRAM is None, reason="there is no MariaDB here: apt-get install mariadb-server")
_USER = ["--user=root"] if os.geteuid() == 0 else []


class MariaDBServer(DatabaseServer):
    module, mark = "eos.sql.dbapi", "%s"
    admin_database = "mysql"

    def __init__(self, directory: Path) -> None:
        assert PROGRAM is not None
        super().__init__(directory)
        self.port = free_port()
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

    def arguments(self, database: str, port: int | None = None) -> dict[str, Any]:
        login = {"user": "shop", "password": "secret-9f2c"}
        return {"host": "127.0.0.1", "port": port or self.port, "database": database, **login}

    def source(self, database: str, port: int | None = None) -> str:
        return f"DBAPI(lambda: __import__('pymysql').connect(**{self.arguments(database, port)!r}))"

    def execute(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        modes = "set sql_mode = concat(@@sql_mode, ',ANSI_QUOTES,NO_BACKSLASH_ESCAPES')"
        with (
            pymysql.connect(**self.arguments(database), init_command=modes, autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
            return list(cursor.fetchall())


mariadb_server = MariaDBServer.running
