"""The App of latency.py and restart.py; its id and topics come from the environment, so that each run has its own."""

from __future__ import annotations

import os

from eos import App, Record

app = App(os.environ["EOS_BENCH_APP"])


@app.process(os.environ["EOS_BENCH_SOURCE"], to=os.environ["EOS_BENCH_TARGET"])
def upper(record: Record) -> bytes | None:
    return record.value.upper() if record.value is not None else None
