"""Run a real database server in a directory of its own, which a test may kill."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self


class DatabaseServer(ABC):
    """Own one server. Each test creates a database there."""

    admin_database: str
    stop_signal = signal.SIGTERM
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Self]:
        directory = Path(tempfile.mkdtemp(prefix="eos-database-"))
        directory.chmod(0o755)
        server = cls(directory)
        try:
            server.start()
            yield server
        finally:
            server.stop()
            shutil.rmtree(directory, ignore_errors=True)

    @abstractmethod
    def start(self) -> None: ...

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the main process; its children end themselves."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self.is_running():
            self._process.send_signal(self.stop_signal)
            self._process.wait(60)

    def create(self, database: str) -> None:
        self.execute(self.admin_database, f'create database "{database}"')

    @abstractmethod
    def execute(self, database: str, sql: str) -> list[tuple[Any, ...]]: ...
