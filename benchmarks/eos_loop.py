"""The worker, same load:
`python -m benchmarks.eos_loop BOOTSTRAP SOURCE TARGET COUNT GROUP record|batch|typed|filter [NAME=VALUE...]`, which are
settings."""

from __future__ import annotations

import sys
import time

import msgspec

from eos import App, Out, Record, Settings
from eos.worker import Worker
from eos.world import World


class Row(msgspec.Struct):
    n: int
    text: str


def main(bootstrap: str, source: str, target: str, count: int, group: str, kind: str, *settings: str) -> None:
    app = App(group)
    if kind == "batch":
        # As the straight loop: the key is kept, the timestamp is the time of producing. `record.out(value)` would keep
        # the timestamp too, and costs a call more.
        @app.process_batch(source, to=target)
        def upper_all(records: list[Record]) -> list[Out]:
            return [Out(r.value.upper(), r.key, timestamp=0) for r in records if r.value is not None]

    elif kind == "typed":
        # JSON decoded into a struct and encoded again: what none of the other loops does.
        @app.process(source, to=target)
        def upper_typed(row: Row) -> Row:
            return Row(row.n, row.text.upper())

    elif kind == "filter":

        @app.process(source, to=target)
        def no_output(record: Record) -> bytes | None:
            return None

    else:

        @app.process(source, to=target)
        def upper(record: Record) -> bytes | None:
            return record.value.upper() if record.value is not None else None

    # From the first begin to the last commit: the same span that the straight loop measures.
    marks: dict[str, float] = {}

    def note(step: str) -> None:
        if step == "begin":
            marks.setdefault(step, time.monotonic())
        marks["last"] = time.monotonic()

    def stop_when_done() -> None:
        session.stop_requested = session.counters.records_in + session.taken >= count

    loaded = Settings({"bootstrap.servers": bootstrap} | dict(one.split("=") for one in settings))
    worker = Worker(app, loaded, world=World(step=note))
    session = worker.session
    worker.on_tick = stop_when_done
    worker.run()
    counters = session.counters
    replaced = sum(counters.replacements.values())
    seconds = marks["last"] - marks["begin"]
    print(f"{counters.records_in} {seconds:.4f} {counters.transactions} {replaced} {counters.aborts}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
