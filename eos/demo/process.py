"""A child process that is killed and paused on purpose, and whose output is kept in a file.

Owns the process and its end: after the `with` block it is gone, paused or not. It must never decide when to fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self


class Child:
    """`python -m ...` (or a program's file) in `directory`, started by `start` as often as wanted; `log_path` has the
    output of all lives."""

    def __init__(self, name: str, arguments: list[str], directory: Path, module: bool = True) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._command = [sys.executable, *(["-m"] if module else []), *arguments]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Settings of the user's own cluster must not reach the demo's workers.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("EOS_", "KAFKA_"))}
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._directory,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is the demo's to handle
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        assert self._process is not None, f"{self.name} was not started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, as a supervisor stops it: it finishes what it is at and ends with 0."""
        assert self._process is not None, f"{self.name} was not started"
        self._process.terminate()

    def pause(self) -> None:
        """SIGSTOP: it stays in its group and keeps its connections, and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()  # SIGKILL ends a paused process too
