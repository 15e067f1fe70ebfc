"""Use time on a real broker: final results follow from the input alone, whatever kills and rebalances happen."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import eos
from eos.broker import LocalKafka
from eos.testing.history import read_topic
from tests.state.test_state import PARTITIONS, Counting
from tests.support.killed import KILLED
from tests.support.reading import create_topic, settled_records

Names = Callable[[str], str]
APP = """
from datetime import timedelta
import eos
from eos import ListState, State, Timers, Window, tumbling

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, window=tumbling(minutes=1), grace=timedelta(seconds=10), late={late!r})
def add(value: int, total: State[int]) -> None:
    total.set(total.get(0) + value)

@app.on_close(add)
def close(window: Window, total: State[int]) -> str:
    return f"{{window.start_ms}} {{total.get()}}"

@app.process({carts!r}, to={out!r})
def cart(item: str, items: ListState[str], due: Timers) -> None:
    items.append(item)
    due.set("abandoned", after=timedelta(minutes=2))
    if item.endswith("9"):
        due.clear("abandoned")

@app.on_timer(cart, "abandoned")
def abandoned(key: str, items: ListState[str]) -> str:
    listed = ",".join(items)
    items.clear()
    return f"{{key}} {{listed}}"
"""
MINUTE_MS = 60_000
# An hour ago: records of long ago would be deleted by retention during the test.
START_MS = (int(time.time() * 1000) // MINUTE_MS - 60) * MINUTE_MS


class Timed(Counting):
    """Run an App with windows and timers, and compare it with a plain function of the input."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path) -> None:
        self.late, self.carts = names("late"), names("carts")
        super().__init__(kafka, names, folder)
        for topic in (self.late, self.carts):
            create_topic(self.servers, topic, partitions=PARTITIONS)
        (folder / "counting.py").write_text(APP.format(**vars(self)))

    def load_times(self, records: int, seed: int = 1) -> None:
        """Load records of about two per second, up to a minute out of order, and at the end one that closes all."""
        draw = random.Random(seed)
        with eos.transaction({"bootstrap.servers": self.servers, "transactional.id": f"{self.id}-load"}) as txn:
            for number in range(records):
                time_ms = START_MS + number * 500 - draw.choice((0, 0, 0, 5_000, 60_000))
                key = f"k{draw.randrange(20)}"
                txn.send(self.source, str(number), key=key, timestamp_ms=time_ms)
                txn.send(self.carts, f"i{number}", key=key, timestamp_ms=time_ms)
            for topic in (self.source, self.carts):
                for partition in range(PARTITIONS):
                    end_ms = START_MS + records * 500 + 10 * MINUTE_MS
                    txn.send(topic, "0", key="last", partition=partition, timestamp_ms=end_ms)

    def expected_times(self) -> tuple[dict[str, list[str]], int]:
        """Return the outputs by key, in order, and the number of late records: by a plain loop over each partition."""
        outputs: defaultdict[str, list[str]] = defaultdict(list)
        late = 0
        for messages in settled_records(self.servers, self.source).values():
            now = 0
            sums: dict[tuple[int, str], int] = {}

            def close(now: int, sums: dict[tuple[int, str], int] = sums) -> None:
                for start, key in sorted(sums):
                    if start + 70_000 <= now:
                        outputs[key].append(f"{start} {sums.pop((start, key))}")

            for message in messages:
                key, value, time_ms = message.key().decode(), int(message.value()), message.timestamp()[1]
                now = max(now, time_ms)
                close(now)
                start = time_ms // MINUTE_MS * MINUTE_MS
                if start + 70_000 <= now:
                    late += 1
                else:
                    sums[start, key] = sums.get((start, key), 0) + value
        for messages in settled_records(self.servers, self.carts).values():
            now = 0
            items: defaultdict[str, list[str]] = defaultdict(list)
            timers: dict[str, int] = {}

            def fire(now: int, items: dict[str, list[str]] = items, timers: dict[str, int] = timers) -> None:
                for due, key in sorted((due, key) for key, due in timers.items()):
                    if due <= now:
                        outputs[key].append(f"{key} {','.join(items.pop(key))}")
                        del timers[key]

            for message in messages:
                key, item, time_ms = message.key().decode(), message.value().decode(), message.timestamp()[1]
                now = max(now, time_ms)
                fire(now)
                items[key].append(item)
                timers[key] = time_ms + 2 * MINUTE_MS
                if item.endswith("9"):
                    del timers[key]
                fire(now)
        return dict(outputs), late

    def check_times(self) -> None:
        expected, late = self.expected_times()
        found = self.outputs()
        for of in ("1", "k"):  # the two functions write to one topic, in no common order
            for key in expected.keys() | found.keys():
                assert [value for value in found.get(key, ()) if value.startswith(of)] == [
                    value for value in expected.get(key, ()) if value.startswith(of)
                ]
        assert len(read_topic(self.servers, self.late).values) == late > 0


@pytest.fixture
def timed(kafka: LocalKafka, names: Names, tmp_path: Path) -> Timed:
    return Timed(kafka, names, tmp_path)


@pytest.mark.parametrize("where", ["memory", "lmdb", "rocksdb"])
def test_windows_and_timers_equal_a_plain_loop_after_kills(timed: Timed, where: str) -> None:
    if where == "memory":
        timed.state_dir = ""
    else:
        timed.engine = where
    timed.load_times(3_000)
    for step, when, number in (
        ("before_flush", "behind", "3"),
        ("send_offsets", "behind", "3"),
        ("commit", "behind", "4"),
        ("committed", "before", "3"),
    ):
        timed.run(program=("-c", KILLED, step, when, number), ends=-signal.SIGKILL)
    timed.run()
    timed.check_times()
