"""Lose the changelog of a running worker: it exits with 66, and no input record is blamed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import LocalKafka
from tests.state.test_state import PARTITIONS, Counting
from tests.support.brokers import local_kafka
from tests.support.reading import configure, create_topic, settled_records, wait_until

Names = Callable[[str], str]
KEYS = 30
SHORT = ("-X", "transaction.timeout.ms=4000")


@pytest.fixture(scope="module")
def creating(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Start a broker that creates topics automatically with one partition, as Kafka's default is."""
    yield from local_kafka(request, config={"auto.create.topics.enable": True, "num.partitions": 1})


class Losing(Counting):
    """Run a worker that counts, and delete its changelog."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path, policy: str) -> None:
        super().__init__(kafka, names, folder)
        self.admin = AdminClient({"bootstrap.servers": self.servers})
        self.dead_letters = create_topic(self.servers, f"{self.source}.dlq", PARTITIONS)
        app = folder / "counting.py"
        app.write_text(app.read_text().replace("on_error=eos.skip", f"on_error=eos.{policy}"))

    def count(self) -> None:
        """Write one record of each key, an hour old."""
        producer = Producer({"bootstrap.servers": self.servers})
        at = round((time.time() - 3_600) * 1000)
        for number in range(KEYS):
            producer.produce(self.source, b"v", b"k%d" % number, number % PARTITIONS, timestamp=at)
        assert producer.flush(30) == 0

    def delete(self) -> None:
        self.admin.delete_topics([self.changelog])[self.changelog].result(30)

    def create(self, partitions: int) -> None:
        def created() -> bool:
            try:
                self.admin.create_topics([NewTopic(self.changelog, partitions, 1)])[self.changelog].result(30)
            except KafkaException:
                return False  # until the controller has removed the old topic
            return True

        wait_until("the new changelog", created, 30)

    def let_another_program_create(self) -> None:
        """Let another producer write to the changelog once, where brokers create topics automatically."""
        producer = Producer({"bootstrap.servers": self.servers})

        def created() -> bool:
            producer.produce(self.changelog, b"v", b"k")
            producer.poll(0.1)
            return self.exists()

        wait_until("the new changelog", created, 30)

    def exists(self) -> bool:
        (found,) = self.admin.describe_topics(TopicCollection([self.changelog])).values()
        return found.exception(10) is None

    def ends(self, worker: subprocess.Popen[bytes], code: int = 66) -> str:
        """Send records until the worker ends. No record may be skipped, become a dead letter or be counted twice."""

        def ended() -> bool:
            self.count()
            return worker.poll() is not None

        wait_until("the worker's end", ended, 60)
        log = self.log("one")
        assert worker.returncode == code, log
        for blamed in ("record skipped", "dead letter", "failed on", "--skip"):
            assert blamed not in log
        assert not any(settled_records(self.servers, self.dead_letters).values())
        for counts in self.counted().values():
            assert counts == list(range(1, len(counts) + 1))
        return log


CASES = [
    *[("kafka", "stop"), ("creating", "skip"), ("creating", "dlq")],
    *[pytest.param("kafka", policy, marks=pytest.mark.long) for policy in ("skip", "dlq", "retry(1, then=eos.skip)")],
    pytest.param("creating", "stop", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("broker", "policy"), CASES)
def test_deleted_changelog_stops_its_worker(
    request: pytest.FixtureRequest, names: Names, tmp_path: Path, broker: str, policy: str
) -> None:
    losing = Losing(request.getfixturevalue(broker), names, tmp_path, policy)
    with losing.worker("one", *SHORT) as worker:
        losing.count()
        wait_until("all records are counted", lambda: losing.visible() == KEYS, 60)
        losing.delete()
        log = losing.ends(worker)
    assert f"eos: state is gone: the changelog {losing.changelog} was deleted while this worker ran: " in log
    assert not losing.exists(), "none of our clients recreated it"


@pytest.mark.parametrize("policy", ["skip", "dlq", "stop"])
def test_recreated_changelog_stops_its_worker(creating: LocalKafka, names: Names, tmp_path: Path, policy: str) -> None:
    """Recreate the changelog with one partition, so that the other partitions cannot be written."""
    losing = Losing(creating, names, tmp_path, policy)
    with losing.worker("one", *SHORT) as worker:
        losing.count()
        wait_until("all records are counted", lambda: losing.visible() == KEYS, 60)
        losing.delete()
        losing.let_another_program_create()
        log = losing.ends(worker)
    assert f"eos: state is gone: the changelog {losing.changelog} was deleted and recreated while this worker" in log


def test_recreated_changelog_with_as_many_partitions_is_noticed(
    kafka: LocalKafka, names: Names, tmp_path: Path
) -> None:
    """Recreate the changelog with as many partitions: no request fails, and only the topic id differs. An idle worker
    notices this too."""
    losing = Losing(kafka, names, tmp_path, "skip")
    with losing.worker("one", *SHORT) as worker:
        losing.count()
        wait_until("all records are counted", lambda: losing.visible() == KEYS, 60)
        losing.delete()
        losing.create(PARTITIONS)
        assert worker.wait(60) == 66, losing.log("one")
    assert f"the changelog {losing.changelog} was deleted and recreated while this worker ran" in losing.log("one")


@pytest.mark.parametrize("policy", ["skip", "dlq", "stop"])
def test_changelog_that_refuses_old_timestamps_exits_with_78(
    kafka: LocalKafka, names: Names, tmp_path: Path, policy: str
) -> None:
    """Set a limit for old timestamps: a value with a time-to-live has the timestamp of its record.

    A limit below a second would make brokers refuse their own markers.
    """
    losing = Losing(kafka, names, tmp_path, policy)
    app = tmp_path / "counting.py"
    ttl = "import datetime\n" + app.read_text().replace("on_error=", "ttl=datetime.timedelta(days=9e4), on_error=")
    app.write_text(ttl)
    with losing.worker("one", *SHORT) as worker:
        losing.count()
        wait_until("all records are counted", lambda: losing.visible() == KEYS, 60)
        configure(losing.servers, losing.changelog, "message.timestamp.before.max.ms", "600000")
        log = losing.ends(worker, 78)
    assert f"eos: the changelog {losing.changelog} cannot be written: its settings, or the brokers', refuse a" in log
