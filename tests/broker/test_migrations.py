"""Run the migrations of docs/howto/migrate: an old program, then ours under the same group, and back again.

The code of the pages runs unchanged except for the broker's address. SIGTERM stops the old program after a burst of
orders, and more orders follow. Each order has its own product, so the test names each missing or duplicate order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.peers.installed import python_of, streams_command
from eos.broker import LocalKafka
from eos.errors import Unavailable
from tests.support.migrations import OURS, SETTINGS, THEIRS, programs_of
from tests.support.pages import SERVERS
from tests.support.reading import create_topics, settled_records, stable_offset, visible_records, wait_until

PARTITIONS = 4
PART = 300  # orders per burst
BROKEN_EVERY = 50
CUSTOMERS = 20
START_S, STOP_S, LEAVE_S = 60.0, 60.0, 90.0


def streams(directory: Path) -> list[str]:
    """Return the command of the Kafka Streams program, with its state below java.io.tmpdir."""
    command = streams_command(directory / "OrdersStreams.java", directory / "classes")
    return [command[0], f"-Djava.io.tmpdir={directory}", *command[1:]]


@dataclass(frozen=True)
class Move:
    """Describe one page: `command` returns the old program's command in its directory, or raises Unavailable.

    `may_double`: the old program may write duplicates even after an orderly stop, as its page says; the way back is
    then not tested.
    """

    page: str
    command: Callable[[Path], list[str]]
    stateful: bool = False
    may_double: bool = False


MOVES = [
    Move("from-a-loop", lambda directory: [sys.executable, "orders_loop.py"]),
    Move("from-quix", lambda directory: [str(python_of("quix")), "orders_quix.py"], stateful=True),
    Move("from-kafka-streams", streams, stateful=True),
    Move(
        "from-faststream",
        lambda directory: [str(python_of("faststream")), "-m", "faststream", "run", "orders_faststream:app"],
    ),
    Move(
        "from-faust",
        lambda directory: [str(python_of("faust")), "-m", "faust", "-A", "orders_faust", "worker", "-l", "info"],
        stateful=True,
        may_double=True,
    ),
]


class Orders:
    """Send the input and keep the expected results, which come from the sent orders and never from a topic."""

    def __init__(self, servers: str) -> None:
        self.servers, self.sent = servers, 0
        self.totals: Counter[tuple[str, int]] = Counter()
        self.broken: dict[tuple[int, int], bytes] = {}
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 1})

    def send(self, count: int) -> None:
        for number in range(self.sent, self.sent + count):
            if number % BROKEN_EVERY == BROKEN_EVERY - 1:
                self._producer.produce("orders", b"no JSON %d" % number, str(number), on_delivery=self._placed)
                continue
            order = {"id": number, "customer": f"c{number % CUSTOMERS}", "cents": 10_000 + number}
            order["quantity"] = quantity = 1 + number % 3
            self._producer.produce("orders", json.dumps(order), str(number))
            self.totals[order["customer"], order["cents"] * quantity] += 1
        self.sent += count
        assert self._producer.flush(30) == 0
        assert set(self.totals.values()) == {1}, "two orders have the same total"

    def _placed(self, error: object, message: Message) -> None:
        assert error is None, error
        self.broken[message.partition(), message.offset()] = message.value()

    def check(self, may_double: bool) -> dict[str, int]:
        """Check that each order has its total once (or more often if `may_double`); return the sum of each customer."""
        found = Counter(read(self.servers, "order-totals"))
        if may_double:
            assert set(found) == set(self.totals)
        else:
            assert found == self.totals
        sums: Counter[str] = Counter()
        for customer, cents in found.elements():
            sums[customer] += cents
        return dict(sums)


def read(servers: str, topic: str) -> list[tuple[str, int]]:
    """Return customer and cents of each committed record; a customer's records must all be in one partition."""
    found, at = [], {}
    for partition, messages in settled_records(servers, topic).items():
        for message in messages:
            value = json.loads(message.value())
            assert set(value) == {"customer", "cents"}
            assert message.key().decode() == value["customer"]
            assert at.setdefault(value["customer"], partition) == partition
            found.append((value["customer"], value["cents"]))
    return found


@contextmanager
def running(command: list[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    log = directory / "theirs.log"
    with log.open("ab") as out:
        process = subprocess.Popen(command, cwd=directory, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    except BaseException:
        print(log.read_text(errors="replace")[-6_000:])
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)


def stop(process: subprocess.Popen[bytes]) -> None:
    assert process.poll() is None, f"the program ended early with {process.returncode}"
    process.send_signal(signal.SIGTERM)
    process.wait(STOP_S)


def eos_cli(servers: str, directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "eos", *arguments, "--bootstrap-servers", servers]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def eos_run(servers: str, directory: Path, app: str) -> None:
    more = ["--instance", "one", "--create-topics", "--until-end", "-X", f"eos.state.dir={directory / 'state-of-eos'}"]
    eos_cli(servers, directory, "run", f"{OURS}:{app}", *more)


def wait_for_empty_group(servers: str, group: str) -> None:
    """Wait until the group has no members: a program that does not leave stays a member until its session expires."""
    admin = AdminClient({"bootstrap.servers": servers})

    def empty() -> bool:
        return not admin.describe_consumer_groups([group], request_timeout=10)[group].result(10).members

    wait_until(f"{group} has no members", empty, LEAVE_S)


def marked(move: Move) -> object:
    """Mark programs that take minutes as long and the others as deep, so that they do not block changes to eos."""
    return pytest.param(move, id=move.page, marks=pytest.mark.long if move.stateful else pytest.mark.deep)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("move", [marked(move) for move in MOVES])
def test_each_order_counts_once_after_migrating_there_and_back(move: Move, tmp_path: Path) -> None:
    with LocalKafka() as kafka:
        servers = kafka.bootstrap_servers
        for name, code in programs_of(move.page).items():
            (tmp_path / name).write_text(code.replace(SERVERS, servers))
        assert {THEIRS[move.page], OURS} == {path.name for path in tmp_path.iterdir()} - {SETTINGS}
        try:
            command = move.command(tmp_path)
        except Unavailable as unavailable:
            pytest.skip(f"not run: {unavailable}")
        create_topics(servers, [NewTopic(t, PARTITIONS, 1) for t in ("orders", "order-totals", "customer-totals")])
        orders = Orders(servers)

        def totals(at_least: int) -> bool:
            return sum(map(len, visible_records(servers, "order-totals").values())) >= at_least

        # The old program, stopped while orders arrive.
        orders.send(PART)
        with running(command, tmp_path) as theirs:
            wait_until("the old program's first totals", lambda: totals(PART // 2), START_S)
            orders.send(2 * PART)
            wait_until("more of them", lambda: totals(PART + 1), START_S)
            orders.send(PART)
            stop(theirs)
        orders.send(PART)
        stopped = time.monotonic()
        wait_for_empty_group(servers, "orders")
        left_s = time.monotonic() - stopped
        taken_over = {p: stable_offset(servers, "orders", "orders", p) for p in range(PARTITIONS)}
        seen = len(read(servers, "order-totals"))
        print(f"{move.page}: no members after {left_s:.0f} s, {seen} of {len(orders.totals)} totals, {taken_over}")

        # Our program.
        eos_run(servers, tmp_path, "app")
        sums = orders.check(move.may_double)
        dead_letters = [m.value() for found in settled_records(servers, "orders.dlq").values() for m in found]
        left = [value for (partition, offset), value in orders.broken.items() if offset >= taken_over[partition]]
        assert sorted(dead_letters) == sorted(left)
        assert dead_letters
        if move.stateful:
            eos_run(servers, tmp_path, "sums")
            steps = read(servers, "customer-totals-2")
            assert len(steps) == len(read(servers, "order-totals"))
            assert dict(steps) == sums
            exported = eos_cli(servers, tmp_path, "state", "export", f"{OURS}:sums").splitlines()
            assert len(exported) == CUSTOMERS

        if move.may_double:
            return

        # The old program again.
        orders.send(PART)

        def summed() -> bool:
            return dict(read(servers, "customer-totals")) == orders.check(may_double=False)

        with running(command, tmp_path) as theirs:
            wait_until("all totals", lambda: totals(len(orders.totals)), START_S)
            if move.stateful:
                wait_until("all sums", summed, START_S)
            stop(theirs)
        orders.check(may_double=False)
