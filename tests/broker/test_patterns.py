"""Create topics that match a pattern while workers run: one worker reads each from its beginning, exactly once."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

import eos
from eos import App, TransactSession
from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.errors import Unavailable
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.session.outcomes import Listener
from eos.testing.online import run_on
from eos.worker.worker import Worker
from tests.support.life import POISON, Life
from tests.support.reading import create_topic, settled_values, visible_values, wait_until

pytestmark = pytest.mark.takes(310)

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipelines
pytest_plugins = ["tests.support.pipeline"]

Names = Callable[[str], str]
LATEST = {"auto.offset.reset": "latest"}
PROTOCOLS = {
    "cooperative-sticky": {"partition.assignment.strategy": "cooperative-sticky"},
    "roundrobin": {},  # the default for a pattern
    "consumer": {"group.protocol": "consumer"},
}
SOON = {"topic.metadata.refresh.interval.ms": "300"}
NEVER = {"topic.metadata.refresh.interval.ms": "600000"}
POLL = [part for name, value in SOON.items() for part in ("-X", f"{name}={value}")]
TAKEN = "topic taken in"


# ---- exactly once ----------------------------------------------------------------------------------------------------


@pytest.mark.deep_for("roundrobin", "cooperative*", "consumer", "latest")
@pytest.mark.parametrize(
    ("protocol", "more"),
    [
        ("cooperative-sticky", {}),
        ("roundrobin", {}),
        ("consumer", {}),
        ("cooperative-sticky", LATEST),
        ("consumer", LATEST),
    ],
    ids=["cooperative", "roundrobin", "consumer", "latest", "consumer and latest"],
)
def test_topic_created_during_a_run_is_read_from_its_beginning(
    protocol: str, more: dict[str, str], kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(kafka, 600)
    if more == LATEST:
        pipeline.skip_loaded()
    worker = pipeline.worker(settings=SOON | PROTOCOLS[protocol] | more, reads=[pipeline.pattern])
    wait_until("a commit of every partition", lambda: len(pipeline.committed()) == 6, 30)
    pipeline.load_transaction(3_000)  # records to handle while the topic is created
    # The worker is paused during these writes, so they precede its discovery of the topic.
    worker.pause()
    new = pipeline.add_source()
    pipeline.load_transaction(120, places=new)
    assert TAKEN not in worker.log
    worker.resume()
    pipeline.load_transaction(2_000)
    worker.wait_log(f"{TAKEN} topic={new[0][0]} function=copy")
    pipeline.load_transaction(600)
    pipeline.load_transaction(120, places=new)
    pipeline.wait_handled(pipeline.loaded)
    worker.terminate()
    assert worker.wait() == 0, worker.final_output
    pipeline.verify()


@pytest.mark.deep_for("roundrobin", "consumer")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_worker_killed_after_a_new_topic_is_exactly_once(
    protocol: str, kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = pipelines.on(kafka, 600)
    if protocol == "consumer":
        pipeline.set_group_session_timeout(3_000)
    settings = SOON | PROTOCOLS[protocol]
    workers = {name: pipeline.worker(name, settings=settings, reads=[pipeline.pattern]) for name in ("a", "b")}
    for worker in workers.values():
        worker.wait_log("partitions assigned")
    new = pipeline.add_source()
    pipeline.load_transaction(1_500)
    for worker in workers.values():
        worker.wait_log(TAKEN)
    pipeline.load_transaction(1_500)
    workers["b"].kill()
    pipeline.load_transaction(300, places=new)
    workers["b"] = pipeline.worker("b", settings=settings, reads=[pipeline.pattern])
    workers["b"].wait_log("partitions assigned")
    pipeline.load_transaction(900)
    pipeline.wait_handled(pipeline.loaded)
    for worker in workers.values():
        worker.terminate()
    assert [worker.wait() for worker in workers.values()] == [0, 0]
    pipeline.verify()


@pytest.mark.deep_for("cooperative-sticky")
@pytest.mark.parametrize("protocol", ["cooperative-sticky", "consumer"])
def test_new_topic_goes_only_to_workers_whose_metadata_has_it(
    protocol: str, kafka: LocalKafka, pipelines: Pipelines
) -> None:
    """Kill the worker that already knows a new topic, while another one has older metadata."""
    pipeline = pipelines.on(kafka, 600)
    if protocol == "consumer":
        pipeline.set_group_session_timeout(3_000)
    settings = PROTOCOLS[protocol] | LATEST
    pipeline.skip_loaded()
    deaf = pipeline.worker("deaf", settings=settings | NEVER, reads=[pipeline.pattern])
    hears = pipeline.worker("hears", settings=settings | SOON, reads=[pipeline.pattern])
    deaf.wait_log("session started")  # By now the worker has queried which topics exist.
    wait_until("a commit of every partition", lambda: len(pipeline.committed()) == 6, 30)
    new = pipeline.add_source()
    pipeline.load_transaction(1_500)
    hears.wait_log(TAKEN)
    pipeline.wait_handled(pipeline.loaded)
    assert new[0][0] not in deaf.log
    hears.kill()
    pipeline.load_transaction(900)
    hears = pipeline.worker("hears", settings=settings | SOON, reads=[pipeline.pattern])
    pipeline.wait_handled(pipeline.loaded)
    assert new[0][0] not in deaf.log
    for worker in (deaf, hears):
        worker.terminate()
    assert [deaf.wait(), hears.wait()] == [0, 0]
    pipeline.verify()


def test_topic_created_between_runs_is_read_from_its_beginning(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    pipeline.skip_loaded()
    first = pipeline.worker(settings=LATEST | SOON, reads=[pipeline.pattern])
    wait_until("a commit of every partition", lambda: len(pipeline.committed()) == 6, 30)
    first.kill()
    new = pipeline.add_source()
    pipeline.load_transaction(300)
    again = pipeline.worker(settings=LATEST | SOON, reads=[pipeline.pattern])
    again.wait_log("partitions assigned")
    pipeline.load_transaction(120, places=new)
    pipeline.wait_handled(pipeline.loaded)
    again.terminate()
    assert again.wait() == 0
    pipeline.verify()


@pytest.mark.deep
def test_new_topics_on_three_brokers_do_not_stop_workers(cluster: LocalKafka, pipelines: Pipelines) -> None:
    """Create topics on three brokers: each learns of them at its own time, and librdkafka reports early queries as
    unknown."""
    pipeline = pipelines.on(cluster, 600, replicas=3)
    often = {"topic.metadata.refresh.interval.ms": "50"}
    worker = pipeline.worker(settings=often, reads=[pipeline.pattern])
    worker.wait_log("partitions assigned")
    for number in range(1, 4):
        pipeline.add_source()
        pipeline.load_transaction(300)
        worker.wait_log(TAKEN, count=number)
    pipeline.wait_handled(pipeline.loaded)
    worker.terminate()
    assert worker.wait() == 0, worker.final_output
    pipeline.verify()


def test_cluster_reports_topics_that_every_broker_knows(kafka: LocalKafka, names: Names) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("in"), 2)
    with ClusterAdmin(Settings({"bootstrap.servers": kafka.bootstrap_servers})) as admin:
        assert topic in admin.topics()
        assert admin.known_to_all_brokers([topic, names("not-there")]) == {topic}


# ---- a sequence of versions of one App
# --------------------------------------------------------------------------------


@pytest.fixture
def life(kafka: LocalKafka, tmp_path: Path, names: Names) -> Life:
    app = names("app")
    return Life(kafka, tmp_path, app, pattern=f"^{app}-in.*")


def test_pattern_without_matching_topics_exits_with_69(kafka: LocalKafka, tmp_path: Path, names: Names) -> None:
    life = Life(kafka, tmp_path, names("app"), pattern=f"^{names('nothing')}-.*")
    sentence = f"no topic at {life.servers} matches '^{names('nothing')}-.*', and the App '{life.app}' names none"
    for ended in (life.run(), life.reset("--from", "earliest", "--yes")):
        assert ended.returncode == 69, ended.stderr
        assert f"eos: {sentence}\n" in ended.stderr
    shown = life.eos("doctor", "theapp.py:app", "--json")
    assert shown.returncode == 69, shown.stdout
    assert sentence in shown.stdout


def test_commands_run_doctor_and_reset_use_the_matching_topics(life: Life) -> None:
    second = create_topic(life.servers, f"{life.input}-2")
    life.load([b"a"])
    life.load([b"b"], topic=second)
    shown = life.eos("doctor", "theapp.py:app", "--json")
    assert shown.returncode == 0, shown.stdout
    assert f"{second}: 1 partitions" in shown.stdout
    assert life.run().returncode == 0
    assert life.settled() == [b"a", b"b"]
    moved = life.reset("--from", "earliest", "--yes", "--topic", second)
    assert moved.returncode == 0, moved.stderr
    assert life.run().returncode == 0
    assert life.settled() == [b"a", b"b", b"b"]
    refused = life.reset("--from", "earliest", "--yes", "--topic", f"{life.input}-3")
    assert refused.returncode == 64, refused.stderr


@pytest.mark.deep
def test_supervised_workers_read_a_new_topic(life: Life) -> None:
    life.load([b"a"])
    (port,) = free_ports(1)
    with life.running("--workers", "2", "--instance", "w", "--http-port", f"{port}", *POLL) as supervisor:
        wait_until("its output", lambda: life.outputs() == [b"a"], 60)
        second = create_topic(life.servers, f"{life.input}-2", 2)
        for partition in range(2):
            life.load([b"b", b"c"], partition, second)
        wait_until("the new topic's outputs", lambda: len(life.outputs()) >= 5, 60)
        wait_until("both workers know it", lambda: life.log.count(TAKEN) == 2, 60)
        for partition in range(2):
            life.load([b"d"], partition, second)
        wait_until("all outputs", lambda: len(life.outputs()) >= 7, 60)

        def lags() -> set[tuple[str, int]]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=10) as answer:
                workers = json.load(answer)["workers"]
            return {(lag["topic"], lag["partition"]) for worker in workers for lag in worker["lags"]}

        everything = {(topic, partition) for topic in (life.input, second) for partition in range(2)}
        wait_until("the page shows every partition", lambda: lags() == everything, 30)
        life.stop(supervisor)
    assert life.settled() == [b"a", b"b", b"b", b"c", b"c", b"d", b"d"]


def test_new_topic_is_read_only_after_its_dead_letter_topic_exists(
    kafka: LocalKafka, tmp_path: Path, names: Names
) -> None:
    app = names("app")
    life = Life(kafka, tmp_path, app, pattern=f"^{app}-in.*", on_error="dlq")
    create_topic(life.servers, f"{life.input}.dlq")
    life.load([b"a"])
    with life.running("--instance", "one", *POLL) as worker:
        wait_until("its output", lambda: life.outputs() == [b"a"], 60)
        second = create_topic(life.servers, f"{life.input}-2")
        life.load([b"b", POISON], topic=second)
        sentence = f"its dead-letter topic {second}.dlq does not exist"
        wait_until("the log names the missing topic", lambda: sentence in life.log, 60)
        assert sentence in life.eos("doctor", "theapp.py:app", "--json").stdout
        third = f"{life.input}-3"
        for topic in (f"{third}.dlq", third):  # in this order, so that the second topic is complete at once
            create_topic(life.servers, topic)
        life.load([b"c"], topic=third)
        # The third topic was checked after the second one, which still waits for its dead-letter topic.
        wait_until("the third topic's output", lambda: life.outputs() == [b"a", b"c"], 60)
        create_topic(life.servers, f"{second}.dlq")
        wait_until("the second topic's output", lambda: life.outputs() == [b"a", b"b", b"c"], 60)
        dead = f"{second}.dlq"
        wait_until("its dead letter", lambda: visible_values(life.servers, dead) == {0: [POISON]}, 60)
        life.stop(worker)
    assert life.log.count("does not exist") == 1


@pytest.mark.deep
def test_dead_letter_topics_of_new_topics_are_created_if_configured(
    kafka: LocalKafka, tmp_path: Path, names: Names
) -> None:
    app = names("app")
    life = Life(kafka, tmp_path, app, pattern=f"^{app}-in.*", on_error="dlq")
    life.load([b"a", POISON])
    with life.running("--instance", "one", "--create-topics", *POLL) as worker:
        wait_until("its output", lambda: life.outputs() == [b"a"], 60)
        second = create_topic(life.servers, f"{life.input}-2", 3)
        life.load([b"b", POISON], topic=second)
        wait_until("the new topic's output", lambda: life.outputs() == [b"a", b"b"], 60)
        for dead in (f"{life.input}.dlq", f"{second}.dlq"):
            values = wait_until("its dead letter", lambda dead=dead: _all(life, dead), 60)
            assert values == [POISON]
        life.stop(worker)
    assert "does not exist" not in life.log
    widths = AdminClient({"bootstrap.servers": life.servers}).list_topics(timeout=10).topics
    assert len(widths[f"{second}.dlq"].partitions) == 3


def _all(life: Life, topic: str) -> list[bytes | None]:
    return [value for values in visible_values(life.servers, topic).values() for value in values]


def test_deleted_topic_of_a_pattern_stops_only_one_worker(
    life: Life,
) -> None:
    life.load([b"a"])
    second = create_topic(life.servers, f"{life.input}-2")
    life.load([b"b"], topic=second)
    with life.running("--instance", "one", *POLL) as worker:
        wait_until("its outputs", lambda: life.outputs() == [b"a", b"b"], 60)
        admin = AdminClient({"bootstrap.servers": life.servers})  # must live until it has answered
        admin.delete_topics([second])[second].result(30)
        assert worker.wait(60) == 69, life.log
    assert second in life.log.splitlines()[-1]
    life.load([b"c"])
    assert life.run().returncode == 0
    assert life.settled() == [b"a", b"b", b"c"]


def test_eos_run_fixture_reads_only_the_topics_of_its_test(kafka: LocalKafka, names: Names) -> None:
    strange = create_topic(kafka.bootstrap_servers, names("in-strange"))
    app = App(names("app"))

    @app.process(f"^{names('in')}-.*", to=names("out"), on_error=eos.dlq)
    def copied(value: bytes) -> bytes:
        assert value != POISON
        return value

    ran = run_on(kafka.bootstrap_servers, app, [(names("in-1"), "a"), (names("in-2"), "b"), (names("in-2"), POISON)])
    assert sorted(ran.values(names("out")), key=str) == [b"a", b"b"]
    assert ran.values(f"{names('in-2')}.dlq") == [POISON]
    known = AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics(timeout=10).topics
    assert f"{strange}.dlq" not in known


def test_worker_started_by_a_program_finds_topics_of_a_pattern(kafka: LocalKafka, names: Names) -> None:
    app = App(names("app"))

    @app.process(f"^{names('in')}-.*", to=names("out"))
    def copied(value: bytes) -> bytes:
        return value

    settings = Settings({"bootstrap.servers": kafka.bootstrap_servers, "eos.instance": "one"})
    create_topic(kafka.bootstrap_servers, names("out"))
    with pytest.raises(Unavailable, match=f"no topic at .* matches '\\^{names('in')}-"):
        Worker(app, settings, until_end=True).run()
    for number in range(2):
        topic = create_topic(kafka.bootstrap_servers, names(f"in-{number}"))
        with eos.transaction(settings.with_values(**{"transactional.id": names("load")})) as txn:
            txn.send(topic, f"{number}".encode())
    Worker(app, settings, until_end=True).run()
    assert sorted(settled_values(kafka.bootstrap_servers, names("out"))[0], key=str) == [b"0", b"1"]


def test_session_checks_for_new_topics_between_transactions(kafka: LocalKafka, names: Names) -> None:
    """Check only between transactions: inside one, the group's new generation would refuse the offsets."""
    servers = kafka.bootstrap_servers
    first, second, out = (create_topic(servers, names(name)) for name in ("first", "second", "out"))
    settings = {"bootstrap.servers": servers, "group.id": names("group"), "eos.instance": "one"}
    with eos.transaction(settings | {"transactional.id": names("load")}) as load:
        for topic in (first, second):
            for value in (b"1", b"2"):
                load.send(topic, value)
    asked: list[bool] = []
    handled: list[tuple[str, bytes | None]] = []

    class Finds(Listener):
        def find_new_topics(self) -> list[str]:
            asked.append(session._loop._open is None)
            return [second] if handled and second not in session.topics else []

    session = TransactSession(settings | {"transactional.id": names("id")}, [first], listener=Finds())
    with session:
        for txn in session:
            for record in txn.records:
                handled.append((record.topic, record.value))
                txn.send(out, record.value)
            if len(handled) == 4:
                assert txn.commit()
                break
    assert len(asked) > 2
    assert all(asked)
    assert sorted(handled, key=str) == [(topic, value) for topic in sorted((first, second)) for value in (b"1", b"2")]
    assert sorted(settled_values(servers, out)[0], key=str) == [b"1", b"1", b"2", b"2"]
