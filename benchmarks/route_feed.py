"""What `Route.feed` itself costs per record: `python -m benchmarks.route_feed`.

No broker and no client: the records go into a produce() that does nothing, so that what is measured is what lies
between a function and the client. Best of many rounds, because everything else on the machine only adds.
"""

from __future__ import annotations

import time

from benchmarks.shapes import SHAPES, app_of
from eos import Record

COUNT, ROUNDS = 2_000, 400
VALUE = b'{"n":1,"text":"' + b"x" * 80 + b'"}'


class Sink:
    produce = refused = "".format  # as the client's: C, and takes a tuple


def main() -> None:
    records = [Record("in", 0, offset, 1_700_000_000_000, b"key", VALUE) for offset in range(COUNT)]
    feeds = {name: app_of(shape, "app", "in", "out").routes["in"].feed for name, shape in SHAPES.items()}
    best = dict.fromkeys(feeds, float("inf"))

    sink = Sink()
    for _ in range(ROUNDS):
        for name, feed in feeds.items():
            began = time.perf_counter()
            fed = feed(records, sink)
            took = time.perf_counter() - began
            assert (fed.handled, fed.error) == (COUNT, None)
            best[name] = min(best[name], took)
    for name, seconds in best.items():
        print(f"{name:18} {seconds / COUNT * 1e9:7.1f} ns per record")


if __name__ == "__main__":
    main()
