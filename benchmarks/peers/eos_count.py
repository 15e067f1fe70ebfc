"""The job of count.py on the worker: `python -m benchmarks.peers.eos_count BOOTSTRAP SOURCE TARGET COUNT GROUP SHAPE
DIRECTORY`, where DIRECTORY is `eos.state.dir` ("": values in memory)."""

from __future__ import annotations

import sys

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

    else:

        @app.process(source, to=target)
        def count(record: Record, seen: State[int]) -> str:
            number = seen.get(0) + 1
            seen.set(number)
            return str(number)

    return app


if __name__ == "__main__":
    bootstrap, source, target, count, group, shape, directory = sys.argv[1:]
    measure(
        app_of(shape, group, source, target), {"bootstrap.servers": bootstrap, "eos.state.dir": directory}, int(count)
    )
