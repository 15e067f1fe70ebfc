"""The job of count.py on Quix Streams with exactly-once; runs in a virtual environment of its own, without eos.

`python quix_count.py BOOTSTRAP SOURCE TARGET COUNT GROUP DIRECTORY [WINDOW_MS]` prints records, seconds from
the first record to the end of run() (which commits what is left), seconds of the second half.
"""

import sys
import time
from typing import Any

from quixstreams import Application


def main(bootstrap: str, source: str, target: str, count: int, group: str, directory: str, window_ms: str = "") -> None:
    app = Application(
        broker_address=bootstrap,
        consumer_group=group,
        processing_guarantee="exactly-once",
        commit_interval=0.1,
        auto_offset_reset="earliest",
        state_dir=directory,
        loglevel="WARNING",
        consumer_extra_config={"fetch.queue.backoff.ms": 5},
    )
    inputs = app.topic(source, key_deserializer="bytes", value_deserializer="bytes")
    outputs = app.topic(target, key_serializer="bytes", value_serializer="bytes")
    marks: list[float] = []
    handled = 0

    def mark(value: bytes) -> None:
        nonlocal handled
        handled += 1
        if handled == 1 or handled == count // 2:
            marks.append(time.monotonic())

    def counted(value: bytes, state: Any) -> bytes:
        mark(value)
        seen: int = state.get("seen", 0) + 1
        state.set("seen", seen)
        return str(seen).encode()

    if window_ms:
        windows = app.dataframe(inputs).update(mark).tumbling_window(int(window_ms)).count()
        windows.final(closing_strategy="partition").apply(lambda found: str(found["value"]).encode()).to_topic(outputs)
    else:
        app.dataframe(inputs).apply(counted, stateful=True).to_topic(outputs)
    app.run(count=count, collect=False)
    end = time.monotonic()
    print(f"{handled} {end - marks[0]:.4f} {end - marks[-1]:.4f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
