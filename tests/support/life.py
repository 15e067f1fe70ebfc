"""Run one App over several versions on real Kafka: its file, its topics, and a user's commands.

Every command is a separate process, as a user's are. This module must never import the worker.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import LocalKafka
from tests.support import forked
from tests.support.reading import create_topic, settled_ends, visible_values, wait_known, wait_until

POISON = b"poison"


def write_app(path: Path, app: str, source: str, to: str, on_error: str = "stop") -> None:
    """Write `theapp.py` into the directory: it copies values, and raises at POISON."""
    (path / "theapp.py").write_text(
        f"from eos import App\napp = App({app!r})\n"
        f"@app.process({source!r}, to={to!r}, on_error={on_error!r})\n"
        f"def copy(value: bytes) -> bytes:\n    assert value != {POISON!r}\n    return value\n"
    )


class Life:
    """Own one App: a directory, an input of two partitions, an output, and a poison record on which it raises.

    `pattern`: replaces the source topic in the App's definition.
    """

    def __init__(
        self, kafka: LocalKafka, path: Path, app: str, pattern: str | None = None, on_error: str = "stop"
    ) -> None:
        self.servers, self.path, self.app = kafka.bootstrap_servers, path, app
        self.input, self.output = f"{app}-in", f"{app}-out"
        create_topic(self.servers, self.input, 2)
        create_topic(self.servers, self.output)
        write_app(path, app, pattern or self.input, self.output, on_error)

    def load(self, values: Sequence[bytes], partition: int = 0, topic: str | None = None) -> None:
        producer = Producer({"bootstrap.servers": self.servers})
        for value in values:
            producer.produce(topic or self.input, value, partition=partition)
        assert producer.flush(30) == 0

    def eos(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return forked.run(["eos", *arguments, "--bootstrap-servers", self.servers], cwd=self.path)

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.eos("run", "theapp.py:app", "--instance", "one", "--until-end", *more)

    def start(self, *more: str, stderr: IO[bytes] | int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        """Start a worker that runs until it is stopped."""
        command = ["eos", "run", "theapp.py:app", *more, "--bootstrap-servers", self.servers]
        return forked.Popen(command, cwd=self.path, stderr=stderr)

    @contextmanager
    def running(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start a worker as `start` does, log its output to `log`, and kill it if it still runs at the end."""
        with (self.path / "worker.log").open("wb") as stderr, until_killed(self.start(*more, stderr=stderr)) as worker:
            yield worker

    @property
    def log(self) -> str:
        return (self.path / "worker.log").read_text()

    def stop(self, worker: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM, and check that the worker exits with 0."""
        worker.terminate()
        assert worker.wait(60) == 0, self.log

    def recreate_input(self, values: Sequence[bytes]) -> None:
        admin = AdminClient({"bootstrap.servers": self.servers})

        def id_now() -> str | None:
            try:
                return str(admin.describe_topics(TopicCollection([self.input]))[self.input].result(10).topic_id)
            except KafkaException:
                return None

        def create() -> bool:
            try:
                admin.create_topics([NewTopic(self.input, 2, 1)])[self.input].result(30)
            except KafkaException as error:
                # The controller may take a moment to delete the old topic.
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
                return False
            return True

        was = id_now()
        assert was is not None
        # Use one connected client, without a pause. A worker that checks between the two requests would find no topic,
        # and exit with 69 instead of 66.
        admin.delete_topics([self.input])[self.input].result(30)
        wait_until("the creation", create, 30)
        wait_until("the new topic", lambda: id_now() not in (None, was), 30)
        wait_known(self.servers, {self.input: 2})
        self.load(values)

    def reset(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.eos("reset", "theapp.py:app", *more)

    def settled(self) -> list[bytes | None]:
        """Return its outputs once no transaction is open, because Kafka answers a commit before all partitions show
        it."""
        settled_ends(self.servers, [self.output])
        return self.outputs()

    def outputs(self) -> list[bytes | None]:
        return sorted(v for values in visible_values(self.servers, self.output).values() for v in values if v)

    def committed(self) -> list[int]:
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": self.app})
        found = consumer.committed([TopicPartition(self.input, p) for p in range(2)], timeout=15)
        consumer.close()
        return [max(tp.offset, -1) for tp in found]


@contextmanager
def until_killed(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill the process at the end if it still runs."""
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
