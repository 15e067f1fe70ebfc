"""Run `eos spark run` in separate processes on Apps that a test writes to files; their JVMs end with them.

Owns these processes. It must never import PySpark, because tests judge by the contents of Kafka.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import confluent_kafka
import psutil
import pytest
from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from tests.support.pipeline import WorkerProcess
from tests.support.reading import create_topic, settled_records

SPARK_S = 240.0
_JVM_GONE_S = 60.0


class SparkRuns:
    """Own the Apps, topics and processes of one test; every name starts with `prefix`."""

    def __init__(self, servers: str, prefix: str, directory: Path) -> None:
        self.servers, self.prefix, self.directory = servers, prefix, directory
        self._processes: list[WorkerProcess] = []
        self._jvms: list[psutil.Process] = []

    def topic(self, name: str, partitions: int = 3) -> str:
        return create_topic(self.servers, f"{self.prefix}-{name}", partitions)

    def app(self, text: str, file: str = "app_of_test.py", **names: object) -> str:
        """Write the module of an App; `names` replace $name in the text."""
        text = textwrap.dedent(text)
        for name, value in names.items():
            text = text.replace(f"${name}", repr(value))
        path = self.directory / file
        path.write_text(text)
        return f"{path}:app"

    def spark(self, target: str, *arguments: str, environment: Mapping[str, str] | None = None) -> WorkerProcess:
        """Run `eos spark run`, with one checkpoint for all runs of the test unless `arguments` name another."""
        given = ["--bootstrap-servers", self.servers]
        if "--master" not in arguments:
            given += ["--master", "local[2]"]
        if "--checkpoint" not in arguments:
            given += ["--checkpoint", str(self.directory / "checkpoint")]
        return self.eos("spark", "run", target, *given, *arguments, environment=environment)

    def worker(self, target: str, *arguments: str) -> WorkerProcess:
        return self.eos("run", target, "--instance", "one", "--bootstrap-servers", self.servers, *arguments)

    def eos(self, *arguments: str, environment: Mapping[str, str] | None = None) -> WorkerProcess:
        name = f"eos-{arguments[0]}-{len(self._processes) + 1}"
        process = WorkerProcess(name, ["eos", *arguments], environment or {}, self.directory, end_s=SPARK_S)
        self._processes.append(process)
        return process

    def kill(self, process: WorkerProcess) -> None:
        """Send SIGKILL to the driver alone: its JVM and tasks notice and end a moment later, as stragglers do."""
        self._jvms += psutil.Process(process.pid).children(recursive=True)
        process.kill()

    def wait_for_jvms(self) -> None:
        """Wait until every JVM of a killed driver has ended."""
        _, alive = psutil.wait_procs(self._jvms, _JVM_GONE_S)
        assert not alive, f"still there {_JVM_GONE_S:.0f} s after their driver: {alive}"

    def loader(self, **settings: object) -> Producer:
        # A queue large enough for all records of a test, so that a slow broker does not make `produce` fail.
        room = {"queue.buffering.max.messages": 1_000_000}
        return Producer({"bootstrap.servers": self.servers, "linger.ms": 5, **room, **settings})

    def load(
        self, topic: str, values: list[bytes], keys: Callable[[int], bytes | None] = lambda n: b"%d" % (n % 50)
    ) -> None:
        """Write one record per value; its number decides the partition."""
        producer = self.loader()
        for number, value in enumerate(values):
            producer.produce(topic, value, keys(number), partition=number % 3)
            if number % 5_000 == 0:
                producer.poll(0)
        assert producer.flush(120) == 0

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Delete the records before an offset, as retention does."""
        place = confluent_kafka.TopicPartition(topic, partition, offset)
        admin = AdminClient({"bootstrap.servers": self.servers})  # must live until its answers have arrived
        admin.delete_records([place])[place].result(30)

    def settled(self, topic: str) -> dict[int, list[Message]]:
        """Return the committed records by partition, once no transaction is open on the topic."""
        return settled_records(self.servers, topic)

    def end(self) -> None:
        for process in self._processes:
            if process.running:
                self._jvms += psutil.Process(process.pid).children(recursive=True)
            process.end()
        _, alive = psutil.wait_procs(self._jvms, 20)
        for process in alive:
            process.kill()
        for process in self._processes:
            print(f"--- {process.name} (exit code {process.process.returncode}): {process.log_path}")
            print(process.log[-6_000:])


@pytest.fixture
def spark_runs(kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path) -> Iterator[SparkRuns]:
    runs = SparkRuns(kafka.bootstrap_servers, "-".join(names("s").split("-")[-2:]), tmp_path)
    try:
        yield runs
    finally:
        runs.end()
