"""The App of latency.py, restart.py and partitions.py; its id and topics come from the environment, so that each run
has its own."""

from __future__ import annotations

import os
import time

from eos import App, Record, State

app = App(os.environ["EOS_BENCH_APP"])
steady = app.process(os.environ["EOS_BENCH_SOURCE"], to=os.environ["EOS_BENCH_TARGET"])


def upper(record: Record) -> bytes | None:
    return record.value.upper() if record.value is not None else None


def count(record: Record, seen: State[bytes]) -> bytes | None:
    """Remembers each key's last value; what was loaded before (JSON) has no output."""
    if record.value is None:
        return None
    seen.set(record.value)
    return record.value if record.value[:1].isdigit() else None


def slow(record: Record) -> bytes | None:
    time.sleep(float(os.environ["EOS_BENCH_SLEEP_S"]))
    return upper(record)


if "EOS_BENCH_STATE" in os.environ:
    steady(count)
else:
    steady(slow if "EOS_BENCH_SLEEP_S" in os.environ else upper)
