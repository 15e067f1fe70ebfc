"""Runs a child process that is killed and paused on purpose, with its output in a file.

Owns the process and its end: after the `with` block it does not run, even if it was paused. It must never decide when
to inject a fault.
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
    """Runs `python -m ...` (or a program's file) in `directory`; `start` may be called repeatedly.

    `log_path` has the output of all its runs.
    """

    def __init__(self, name: str, arguments: list[str], directory: Path, module: bool = True) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._command = [sys.executable, *(["-m"] if module else []), *arguments]
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Settings for the user's own cluster must not reach the demo's workers.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("EOS_", "KAFKA_"))}
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._directory,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal must reach only the demo
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, None while the process runs, or the negative number of the signal that ended it."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.poll()

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        assert self._process is not None, f"{self.name} was not started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop the process with SIGTERM, as a supervisor does: it finishes its transaction and exits with 0."""
        assert self._process is not None, f"{self.name} was not started"
        self._process.terminate()

    def pause(self) -> None:
        """Pause the process with SIGSTOP: it stays in its group and keeps its connections, but does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process with SIGCONT."""
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
