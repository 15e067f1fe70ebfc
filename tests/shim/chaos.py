"""Run transactions of several clients through a shim with random faults on both of its sides, and judge Kafka.

    python -m tests.shim.chaos --transactions 20000 --faults 2000 --seed 1

    clients ──► Mischief ──► shim ──► Mischief ──► real broker

Every client keeps a ledger: its transaction n writes n to both partitions of its topic and moves its group's offset to
n + 1. One in five is aborted and repeated. After any exception the client does what the library's documentation asks
for: the same call again if it is retriable, else a new producer that continues from the group's stable offset. At the
end both partitions must hold 0, 1, 2, ... once each and in order, and the offset must be their number. A gap is a lost
record, a repetition a duplicate one, and a difference between the partitions a torn transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from kafka.errors import KafkaError

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.shim.wire import api
from tests.shim.protected_clients import CLIENTS, Client, Confluent, producer_of
from tests.shim.shims import RunningShim, start
from tests.support.proxy import proxied_port, read_frame
from tests.support.reading import create_topic, settled_values, stable_offset

TARGETS = {
    api.INIT_PRODUCER_ID: 0.3,
    api.ADD_PARTITIONS_TO_TXN: 1.0,
    api.ADD_OFFSETS_TO_TXN: 0.6,
    api.TXN_OFFSET_COMMIT: 1.0,
    api.PRODUCE: 1.0,
    api.END_TXN: 1.5,
}
ACTIONS = ("cut before", "cut after", "late", "late copy", "delay")
LONGEST_LATE_S = 0.4
KILL_EVERY_S = 20.0
_TARGETED_REQUESTS = 14.0  # seconds of a transaction, on both sides, weighted as above
FINISH_S = 120.0  # for unfinished transactions after enough have ended


class Mischief:
    """Proxy frames, and do `ACTIONS` to a share of the requests in `TARGETS`."""

    def __init__(self, name: str, port: int, upstream: tuple[str, int], rate: float, seed: int) -> None:
        self.name, self.port, self.upstream, self.rate = name, port, upstream, rate
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._keep(task)
        swallowed = set[int]()  # correlation ids whose response is the last one that the client does not get
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                back_reader, back_writer = await asyncio.open_connection(*self.upstream)
                try:
                    answers = asyncio.create_task(self._answers(back_reader, writer, swallowed))
                    self._keep(answers)
                    await self._requests(reader, back_writer, swallowed)
                    answers.cancel()
                finally:
                    back_writer.close()
        finally:
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter, swallowed: set[int]) -> None:
        while True:
            frame = await read_frame(reader)
            key, _, correlation_id = struct.unpack_from(">hhi", frame, 4)
            action = None
            if self._random.random() < self.rate * TARGETS.get(key, 0.0):
                action = self._random.choice(ACTIONS)
                self.done[f"{self.name}: {action} {api.api_name(key)}"] += 1
            if action in ("late", "late copy"):
                self._keep(asyncio.create_task(self._deliver(frame, self._random.uniform(0, LONGEST_LATE_S))))
            if action in ("cut before", "late"):
                return
            if action == "delay":
                await asyncio.sleep(self._random.uniform(0, LONGEST_LATE_S))
            if action == "cut after":
                swallowed.add(correlation_id)
            back.write(frame)
            await back.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallowed: set[int]) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                frame = await read_frame(reader)
                if int.from_bytes(frame[4:8], "big", signed=True) in swallowed:
                    break
                writer.write(frame)
                await writer.drain()
        writer.close()

    async def _deliver(self, frame: bytes, after_s: float) -> None:
        """Deliver a request that was in transit, on its own connection, without waiting for its response."""
        await asyncio.sleep(after_s)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*self.upstream)
            try:
                writer.write(frame)
                await asyncio.wait_for(read_frame(reader), 10)
            finally:
                writer.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Ledger:
    """Run one client with its topic and group; `run` returns when `over` returns True."""

    def __init__(
        self, kafka: LocalKafka, kind: type[Client], servers: str, name: str, seed: int, copies: int = 1
    ) -> None:
        self._kafka, self._kind, self._servers, self.name = kafka, kind, servers, name
        self._random = random.Random(seed)
        self.topic = create_topic(kafka.bootstrap_servers, f"{name}-out", 2, copies)
        self.source = create_topic(kafka.bootstrap_servers, f"{name}-in", 1, copies)
        self._client: Client | None = None
        self.committed = self.aborted = self.replaced = self.next = 0
        self.errors: Counter[str] = Counter()

    def run(self, over: Callable[[], bool]) -> None:
        while not over():
            try:
                if self._client is None:
                    self._client = self._kind(self._servers, self.name, 20)
                    self.replaced += 1
                    self.next = max(0, stable_offset(self._kafka.bootstrap_servers, self.name, self.source))
                self._transaction(self._client)
            except (KafkaException, KafkaError, AssertionError, SystemError, TimeoutError) as error:
                # After any error, a new producer fences the old one and continues from the committed offset.
                self.errors[str(error)[:120]] += 1
                self._drop()
        self._drop()

    def _transaction(self, client: Client) -> None:
        client.begin()
        client.send(self.topic, str(self.next))
        commits = self._random.random() > 0.2
        if commits or self._random.random() > 0.5:
            client.send(self.topic, str(self.next), partition=1)
            client.send_offset(self.name, self.source, self.next + 1)
        self._end(client, commits)
        if commits:
            self.committed += 1
            self.next += 1
        else:
            self.aborted += 1

    def _end(self, client: Client, commits: bool) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                return client.end(commits)
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        with contextlib.suppress(KafkaException, KafkaError, SystemError):
            client.close(5)

    def judge(self) -> list[str]:
        """Return the violations found in Kafka."""
        servers = self._kafka.bootstrap_servers
        producer_of(servers, self.name).close()  # its init ends a transaction that the last client may have left open
        values = settled_values(servers, self.topic)
        found = {partition: [int(value or b"-1") for value in each] for partition, each in values.items()}
        count = max(0, stable_offset(servers, self.name, self.source))
        wrong = []
        for partition, each in found.items():
            times = Counter(each)
            lost = [n for n in range(count) if n not in times]
            doubled = [n for n, many in times.items() if many > 1]
            unknown = [n for n in times if not 0 <= n < count]
            if lost or doubled or unknown or each != sorted(each):
                wrong.append(f"{self.topic}-{partition}: lost {lost} doubled {doubled} past the offset {unknown}")
        torn = set(found[0]) ^ set(found[1])
        if torn:
            wrong.append(f"{self.topic}: torn {sorted(torn)}")
        if count < self.committed:
            wrong.append(f"{self.topic}: {self.committed} commits returned, {count} are there")
        return wrong


class Run:
    """Run the chaos once, and report the results."""

    def __init__(
        self,
        transactions: int,
        faults: int,
        seed: int,
        option: str,
        clients: int,
        kills: bool,
        at_most_s: float = 3600.0,
    ) -> None:
        self.transactions, self.faults, self.seed, self.option, self.kills = transactions, faults, seed, option, kills
        self.clients = clients
        self.at_most_s = at_most_s
        self.killed = 0
        self.wrong: list[str] = []
        self.ledgers: list[Ledger] = []
        self.mischief: list[Mischief] = []

    @property
    def ended(self) -> int:
        return sum(ledger.committed + ledger.aborted for ledger in self.ledgers)

    @property
    def done(self) -> int:
        return self.killed + sum(each.done.total() for each in self.mischief)

    def execute(self) -> None:
        told, own = free_ports(2)
        rate = 1.2 * self.faults / self.transactions / _TARGETED_REQUESTS
        with (
            LocalKafka(proxied_port=free_ports(1, taken=[told, own])[0]) as kafka,
            tempfile.TemporaryDirectory() as home,
        ):
            port = proxied_port(kafka)
            self.mischief = [
                Mischief("client side", told, ("127.0.0.1", own), rate, self.seed),
                Mischief("broker side", port, kafka.proxied_upstream, rate, self.seed + 1),
            ]
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, daemon=True)
            thread.start()
            for each in self.mischief:
                asyncio.run_coroutine_threadsafe(each.listen(), loop).result(10)
            options = [self.option, "--listen", f"127.0.0.1:{own}", "--advertise", f"127.0.0.1:{told}"]
            options += ["--journal", str(Path(home) / "journal")] if self.option == "--protect" else []
            try:
                self._with(kafka, lambda: start(kafka.proxied_servers, *options), f"127.0.0.1:{told}")
            finally:
                for each in self.mischief:
                    asyncio.run_coroutine_threadsafe(each.close(), loop).result(10)
                loop.call_soon_threadsafe(loop.stop)
                thread.join(10)
                loop.close()

    def _with(self, kafka: LocalKafka, launch: Callable[[], RunningShim], servers: str) -> None:
        shim = launch()
        kinds = [CLIENTS["kafka-python"] if number % 4 == 3 else Confluent for number in range(self.clients)]
        self.ledgers = [Ledger(kafka, kind, servers, f"c{i}", self.seed + i) for i, kind in enumerate(kinds)]
        began = told = killed = time.monotonic()

        def enough() -> bool:
            # Check every client, because the sum of all may come from the fast ones.
            both = all(each.committed and each.aborted for each in self.ledgers)
            reached = both and self.ended >= self.transactions and self.done >= self.faults
            return reached or time.monotonic() - began > self.at_most_s

        threads = [threading.Thread(target=each.run, args=(enough,), daemon=True) for each in self.ledgers]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(0.2)
                now = time.monotonic()
                if self.kills and not enough() and now - killed > KILL_EVERY_S:
                    shim.process.send_signal(signal.SIGKILL)
                    shim.process.wait()
                    self.killed, killed = self.killed + 1, now
                    shim = launch()
                if now - told > 15:
                    told = now
                    print(f"{now - began:5.0f} s  {self.summary()}", flush=True)
                if enough():
                    for thread in threads:
                        thread.join(FINISH_S)
                    stuck = [each.name for each, t in zip(self.ledgers, threads, strict=True) if t.is_alive()]
                    assert not stuck, f"still in a call: {stuck}"
            assert shim.process.poll() is None, "the shim ended by itself"
            unreadable = shim.named("unreadable")
            assert not unreadable, unreadable
            assert shim.stop() == 0
        finally:
            shim.process.kill()
        for ledger in self.ledgers:
            self.wrong += ledger.judge()

    def summary(self) -> str:
        committed, aborted = (sum(getattr(each, name) for each in self.ledgers) for name in ("committed", "aborted"))
        replaced = sum(each.replaced for each in self.ledgers) - len(self.ledgers)
        return (
            f"{self.ended} transactions ({committed} committed, {aborted} aborted), {self.done} faults "
            f"({self.killed} of them kills of the shim), {replaced} producers replaced"
        )

    def report(self) -> str:
        counts: Counter[str] = sum((each.done for each in self.mischief), Counter())
        lines = [f"  {many:6} {what}" for what, many in sorted(counts.items())]
        errors: Counter[str] = sum((each.errors for each in self.ledgers), Counter())
        lines += [f"  {many:6} replaced after {what}" for what, many in errors.most_common(12)]
        verdict = self.wrong or ["0 lost, 0 doubled, 0 torn"]
        return "\n".join([self.summary(), *lines, *verdict])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transactions", type=int, default=20_000)
    parser.add_argument("--faults", type=int, default=2_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--at-most-s", type=float, default=3600.0, help="fail if the numbers are not reached by then")
    parser.add_argument("--no-protect", action="store_true", help="run without protection, to see the losses")
    given: Any = parser.parse_args()
    option = "--no-protect" if given.no_protect else "--protect"
    print(f"seed {given.seed}, {option}", flush=True)
    run = Run(given.transactions, given.faults, given.seed, option, given.clients, True, given.at_most_s)
    run.execute()
    print(run.report(), flush=True)
    reached = run.ended >= run.transactions and run.done >= run.faults
    if not reached:
        print("NOT REACHED: fewer transactions or faults than asked for")
    return 1 if run.wrong or not reached else 0


if __name__ == "__main__":
    sys.exit(main())
