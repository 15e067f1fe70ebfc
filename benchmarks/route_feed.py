"""What `Route.feed` itself costs per record: `python -m benchmarks.route_feed`.

No broker and no client: the records go into a produce() that does nothing, so that what is measured is what lies
between a function and the client. Best of many rounds, because everything else on the machine only adds.
"""

from __future__ import annotations

import time

import msgspec

from eos import App, Out, Record

COUNT, ROUNDS = 2_000, 400
VALUE = b'{"a":1,"b":"' + b"x" * 80 + b'"}'


class Value(msgspec.Struct):
    a: int
    b: str


def apps() -> dict[str, App]:
    made = {name: App(name) for name in ("bytes", "out", "typed", "batch")}

    @made["bytes"].process("in", to="out")
    def same(record: Record) -> bytes | None:
        return record.value

    @made["out"].process("in", to="out")
    def wrapped(record: Record) -> Out:
        return Out(record.value)

    @made["typed"].process("in", to="out")
    def typed(value: Value) -> Value:
        return value

    @made["batch"].process_batch("in", to="out")
    def batch(records: list[Record]) -> list[Out]:
        return [Out(record.value, record.key, timestamp=0) for record in records]

    return made


def main() -> None:
    records = [Record("in", 0, offset, 1_700_000_000_000, b"key", VALUE) for offset in range(COUNT)]
    feeds = {name: app.routes["in"].feed for name, app in apps().items()}
    best = dict.fromkeys(feeds, float("inf"))

    produce = "".format  # as the client's: C, and takes a tuple

    for _ in range(ROUNDS):
        for name, feed in feeds.items():
            began = time.perf_counter()
            fed = feed(records, produce, produce)
            took = time.perf_counter() - began
            assert (fed.sent, fed.handled, fed.error) == (COUNT, COUNT, None)
            best[name] = min(best[name], took)
    for name, seconds in best.items():
        print(f"{name:6} {seconds / COUNT * 1e9:7.1f} ns per record")


if __name__ == "__main__":
    main()
