"""The worker, same load: `python -m benchmarks.eos_loop BOOTSTRAP SOURCE TARGET COUNT GROUP SHAPE [NAME=VALUE...]`, a
shape of benchmarks/shapes.py and settings."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor

from benchmarks.shapes import SHAPES, app_of
from eos import App, Settings
from eos.kafka.client.world import World
from eos.worker.worker import Worker


def main(bootstrap: str, source: str, target: str, count: int, group: str, shape: str, *settings: str) -> None:
    app = app_of(SHAPES[shape], group, source, target)
    measure(app, {"bootstrap.servers": bootstrap} | dict(one.split("=") for one in settings), count)


def measure(app: App, settings: Mapping[str, object], count: int) -> None:
    """Runs it until so many records are handled, and prints what it took."""
    # From the first begin to the last commit: the same span that the straight loop measures.
    marks: dict[str, float] = {}

    def note(step: str) -> None:
        if step == "begin":
            marks.setdefault(step, time.monotonic())
        marks["last"] = time.monotonic()

    def stop_when_done() -> None:
        session.stop_requested = session.counters.records_in + session.taken >= count

    worker = Worker(app, Settings(dict(settings)), world=World(step=note))
    session = worker.session
    worker.on_tick = stop_when_done
    worker.run()
    counters = session.counters
    replaced = sum(counters.replacements.values())
    seconds = marks["last"] - marks["begin"]
    print(f"{counters.records_in} {seconds:.4f} {counters.transactions} {replaced} {counters.aborts}", flush=True)


def measure_workers(
    make_app: Callable[..., App], names: tuple[str, ...], settings: Mapping[str, object], workers: int
) -> None:
    """Run as many worker processes until the end of the input, and print how long they took together."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_run_to_end, make_app, names, {**settings, "eos.instance": str(n)}) for n in range(workers)]
        spans = [job.result() for job in jobs]
    seconds = max(last for _, last, _ in spans) - min(begin for begin, _, _ in spans)
    print(f"{sum(handled for _, _, handled in spans)} {seconds:.4f}", flush=True)


def _run_to_end(
    make_app: Callable[..., App], names: tuple[str, ...], settings: Mapping[str, object]
) -> tuple[float, float, int]:
    """Run a worker until the end of the input. Return when it began its first transaction, when it committed its last,
    and the number of its records."""
    marks: list[float] = []

    def note(step: str) -> None:
        if marks or step == "begin":
            marks.append(time.monotonic())

    worker = Worker(make_app(*names), Settings(dict(settings)), until_end=True, world=World(step=note))
    worker.run()
    return marks[0], marks[-1], worker.session.counters.records_in


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
