"""The job of windows.py on the worker: `python -m benchmarks.peers.eos_windows BOOTSTRAP SOURCE TARGET COUNT GROUP
SHAPE DIRECTORY ENGINE [WORKERS]`, where the last are `eos.state.dir` ("": values in memory) and `eos.state.engine`.

Shapes: `windows` counts in tumbling windows of a minute, `once` drops duplicates within an hour, and `plain` is the
function of `once` without deduplication.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from benchmarks.eos_loop import measure, measure_workers
from eos import App, State, Window, tumbling


def app_of(shape: str, group: str, source: str, target: str) -> App:
    app = App(group)
    if shape == "windows":

        @app.process(source, to=target, window=tumbling(minutes=1), grace=timedelta(0))
        def count(value: bytes, seen: State[int]) -> None:
            seen.set(seen.get(0) + 1)

        @app.on_close(count)
        def close(window: Window, seen: State[int]) -> str:
            return str(seen.get())

    elif shape == "once":

        @app.process(source, to=target, once=lambda value: value[5:15], within=timedelta(hours=1))
        def unique(value: bytes) -> bytes:
            return value

    else:

        @app.process(source, to=target)
        def plain(value: bytes) -> bytes:
            return value

    return app


if __name__ == "__main__":
    bootstrap, source, target, count, group, shape, directory, engine, *workers = sys.argv[1:]
    settings = {"bootstrap.servers": bootstrap, "eos.state.dir": directory, "eos.state.engine": engine}
    if workers:
        measure_workers(app_of, (shape, group, source, target), settings, int(workers[0]))
    else:
        measure(app_of(shape, group, source, target), settings, int(count))
