"""`eos ...` in a process of its own that has imported everything already: 60 ms instead of 350.

For tests of what a command says and exits with. What a process imports, and when, is tested with real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_SHOWN = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Of a program that a test starts: nothing of eos or Kafka but `more`, and a terminal of 200 columns."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EOS_", "KAFKA_"))}
    return inherited | _SHOWN | dict(more)


def _eos(arguments: list[str], here: str, variables: dict[str, str], output: str, errors: str) -> None:
    from eos import cli

    for stream, path in ((sys.stdout, output), (sys.stderr, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(here)
    sys.path.insert(0, here)
    sys.argv = ["eos", *arguments]
    sys.exit(cli.invoke(arguments))


def eos(here: Path, *arguments: str, timeout_s: float = 60, **more: str) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `eos ARGUMENTS` in the directory `here`."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["eos.cli.run", "eos.cli.broker", "typer.rich_utils", "pytest", __name__])
    output, errors = (here.parent / f"{here.name}.{name}" for name in ("out", "err"))
    for path in (output, errors):
        path.write_bytes(b"")
    given = (list(arguments), str(here), environment(more), str(output), str(errors))
    process = forks.Process(target=_eos, args=given)
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(["eos", *arguments], timeout_s)
    return subprocess.CompletedProcess(["eos", *arguments], process.exitcode, output.read_text(), errors.read_text())
