"""The job of count.py on the worker: `python -m benchmarks.peers.eos_count BOOTSTRAP SOURCE TARGET COUNT GROUP SHAPE
DIRECTORY ENGINE`, where the last are `eos.state.dir` ("": values in memory) and `eos.state.engine`. For restore.py
it is an App of `eos run`, whose names come from the environment."""

from __future__ import annotations

import os
import sys
from collections import Counter

from benchmarks.eos_loop import measure
from eos import App, Out, Record, State


def app_of(shape: str, group: str, source: str, target: str) -> App:
    app = App(group)
    if shape == "batch":

        @app.process_batch(source, to=target)
        def count_batch(records: list[Record], seen: dict[bytes, State[int]]) -> list[Out]:
            outs = []
            for record in records:
                assert record.key is not None
                state = seen[record.key]
                number = state.get(0) + 1
                state.set(number)
                outs.append(Out(str(number), record.key, timestamp=0))
            return outs

    elif shape == "keys":

        @app.process_batch(source, to=target)
        def count_keys(records: list[Record], seen: dict[bytes, State[int]]) -> list[Out]:
            outs = []
            for key, more in Counter(record.key for record in records).items():
                assert key is not None
                state = seen[key]
                state.set(state.get(0) + more)
                outs.append(Out(str(state.get()), key, timestamp=0))
            return outs

    else:

        @app.process(source, to=target)
        def count(record: Record, seen: State[int]) -> str:
            number = seen.get(0) + 1
            seen.set(number)
            return str(number)

    return app


if "EOS_BENCH_APP" in os.environ:
    app = app_of("record", *(os.environ[f"EOS_BENCH_{name}"] for name in ("APP", "SOURCE", "TARGET")))

if __name__ == "__main__":
    bootstrap, source, target, count, group, shape, directory, engine = sys.argv[1:]
    settings: dict[str, object] = {
        "bootstrap.servers": bootstrap,
        "eos.state.dir": directory,
        "eos.state.engine": engine,
    }
    if shape == "keys":
        settings |= {"eos.batch.max.records": 100_000}  # all that a transaction polls
    measure(app_of(shape, group, source, target), settings, int(count))
