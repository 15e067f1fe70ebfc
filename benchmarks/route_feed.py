"""What the worker's loop over records costs, and the same work by hand: `python -m benchmarks.route_feed [SHAPE ...]`.

No broker and no queue: each round turns the client's messages into records, feeds them to a function, and passes its
outputs to a produce() that does nothing. So the figures are nanoseconds of processor time between the client's message
and the client's produce(). Best of many rounds, because everything else on the machine only adds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Message

from benchmarks.shapes import SHAPES, Shape, app_of
from benchmarks.straight_loop import SENDERS, next_offsets
from eos import Record, hotloop

COUNT, ROUNDS = 1_000, 300


class Sink:
    produce = on_produce_error = "".format  # as the client's: C, and takes a tuple


def messages() -> list[Message]:
    value = b'{"n":1%09d,"text":"' + b"x" * 74 + b'"}'
    return [
        Message("in", 0, n, b"key-%08d" % n, value % n, None, None, (1, 1_700_000_000_000 + n)) for n in range(COUNT)
    ]


def worker_of(shape: Shape, given: list[Message]) -> Callable[[], None]:
    route, sink = app_of(shape, "app", "in", "out").routes["in"], Sink()
    feed, records_of = route.feed, hotloop.fetched_of if route.takes_values else hotloop.records_of

    def run() -> None:
        records = records_of(given, Record, _raise)
        hotloop.runs_of(records)
        fed = feed(records, sink)
        assert (fed.handled, fed.error) == (COUNT, None)

    return run


def _raise(message: Message, error: Exception) -> Any:
    raise error


def by_hand(sender: str, given: list[Message]) -> Callable[[], None]:
    send, sink = SENDERS[sender], Sink()

    def run() -> None:
        next_offsets(given, {})
        send(given, "out", sink)  # type: ignore[arg-type]

    return run


def main() -> None:
    names, given = sys.argv[1:] or list(SHAPES), messages()
    runs = {name: worker_of(SHAPES[name], given) for name in names}
    runs |= {f"by hand: {sender}": by_hand(sender, given) for sender in {SHAPES[name].by_hand: 0 for name in names}}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - began)
    ns = {name: seconds / COUNT * 1e9 for name, seconds in best.items()}
    for name in names:
        hand = ns[f"by hand: {SHAPES[name].by_hand}"]
        print(f"{name:18} {ns[name]:6.0f} ns per record, by hand {hand:6.0f}, more {ns[name] - hand:+6.0f}")


if __name__ == "__main__":
    main()
