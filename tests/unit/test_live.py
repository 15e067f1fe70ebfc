"""The live display on a terminal: one line for one worker, a table for several, drawn on a real terminal."""

from __future__ import annotations

import codecs
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console, RenderableType

import eos
from eos.cli.live import Rates, line, table
from eos.health.status import PartitionLag, Status

ROOT = Path(eos.__file__).resolve().parents[1]


def status(**more: object) -> Status:
    values: dict[str, object] = {"app": "hello", "instance": "w-0", "pid": 1, "started_at": 100.0, "at": 100.0}
    return Status(**{**values, "live": True, "ready": True, "reason": "running", **more})  # type: ignore[arg-type]


def text(shown: RenderableType) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_text()


def test_rate_restarts_with_a_restarted_worker() -> None:
    rates = Rates()
    assert rates.of(status(at=102.0, records_in=1_000)) == 500, "since its start"
    assert rates.of(status(at=102.1, records_in=1_100)) == 500, "too soon to tell"
    assert rates.of(status(at=104.0, records_in=1_400)) == 200
    assert rates.of(status(at=105.0, records_in=300)) == 300


def test_line_shows_counts_and_why_worker_is_not_ready() -> None:
    lags = [PartitionLag("in", 0, 1_200), PartitionLag("in", 1, 34)]
    seen = status(
        at=102.0, records_in=10_000, transactions=1_234, lags=lags, aborts={"rebalance": 2}, rebuilds={"t": 1}
    )
    assert " ".join(text(line([seen], Rates())).split()) == (
        "hello 5,000 records/s 1,234 transactions lag 1,234 aborts 3"
    )
    waiting = status(ready=False, reason="waiting for the cluster for 4 s (commit)")
    assert (
        text(line([waiting], Rates())).rstrip().endswith("lag -   aborts 0   waiting for the cluster for 4 s (commit)")
    )
    unknown = status(lags=[PartitionLag("in", 0, 5), PartitionLag("in", 1, None)])
    assert " lag ? " in text(line([unknown], Rates()))


def test_table_has_a_row_for_each_worker() -> None:
    workers = [
        status(at=102.0, records_in=400),
        status(instance="w-1", live=False, ready=False, reason="stuck", restarts=2),
    ]
    rows = [re.split(r"\s*[│┃]\s*", row)[1:-1] for row in text(table(workers, Rates())).splitlines() if "w" in row]
    assert rows == [
        ["worker", "records/s", "transactions", "lag", "aborts", "restarts", "state"],
        ["w-0", "200", "0", "-", "0", "0", "running"],
        ["w-1", "0", "0", "-", "0", "2", "stuck"],
    ]


def test_supervisor_shows_workers_live_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(100)\n")
    ours, theirs = pty.openpty()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("EOS_", "KAFKA_"))}
    shown = subprocess.Popen(
        [sys.executable, "-m", "eos", "run", "slow:app", "--workers", "2", "--instance", "w"],
        cwd=tmp_path,
        env=inherited | {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen, deadline = "", time.monotonic() + 60
    # One read may end in the middle of a character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while not re.search(r"w-0.*starting(.|\n)*w-1.*starting", seen):
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 1)[0]:
                seen += decoder.decode(os.read(ours, 65_536))
        assert "transactions" in seen
        shown.send_signal(signal.SIGTERM)
        assert shown.wait(60) == 0
    finally:
        shown.kill()
        shown.wait()
        os.close(ours)
