"""Read histories from a real broker: they hold every committed record and no aborted one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from eos.broker import LocalKafka
from eos.errors import InputGone, Unavailable
from eos.testing import history
from eos.testing.checker import Ends, check, no_aborted_seen
from eos.testing.history import ConcurrentReader, committed_offsets, end_offsets, read_topic
from eos.testing.lineage import HEADER, stamp
from tests.support.reading import create_topic, settled_ends, wait_until

pytestmark = pytest.mark.takes(79)

Names = Callable[[str], str]


@pytest.fixture
def producer(kafka: LocalKafka, names: Names) -> Iterator[Callable[[str], Producer]]:
    """Create initialised transactional producers, and abort their open transactions after the test."""
    made: list[Producer] = []

    def make(name: str) -> Producer:
        one = Producer({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": names(name), "linger.ms": 0})
        one.init_transactions(30)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def write(producer: Producer, topic: str, partition: int, values: list[bytes], **more: Any) -> None:
    for value in values:
        producer.produce(topic, value, partition=partition, **more)
    assert producer.flush(30) == 0


@contextlib.contextmanager
def transaction(producer: Producer, commit: bool = True) -> Iterator[None]:
    producer.begin_transaction()
    yield
    producer.commit_transaction(30) if commit else producer.abort_transaction(30)


def values_of(log: Any, partition: int) -> list[bytes]:
    return [value for value, at in zip(log.values, log.partition, strict=True) if at == partition]


def test_isolation_level_decides_whether_aborted_records_are_read(kafka, names, producer):
    topic = create_topic(kafka.bootstrap_servers, names("mixed"), 4)
    one = producer("writer")
    with transaction(one):
        write(one, topic, 0, [b"a0", b"a1"], key=b"k")
        write(one, topic, 1, [b"b0"])
    with transaction(one, commit=False):
        write(one, topic, 0, [b"gone"])
        write(one, topic, 2, [b"only-aborted"])
    with transaction(one):
        write(one, topic, 0, [b"a2"])
    with transaction(one, commit=False):
        write(one, topic, 1, [b"aborted-tail"] * 3)

    committed = read_topic(kafka.bootstrap_servers, topic, config={"check.crcs": True})
    assert [values_of(committed, p) for p in range(4)] == [[b"a0", b"a1", b"a2"], [b"b0"], [], []]
    zero = committed.partition == 0
    assert committed.offset[zero].tolist() == [0, 1, 5]  # 2 and 4: markers, 3: aborted
    assert [k for k, at in zip(committed.keys, zero, strict=True) if at] == [b"k", b"k", None]
    assert (committed.timestamp > 0).all()

    everything = read_topic(kafka.bootstrap_servers, topic, "read_uncommitted")
    assert [len(values_of(everything, p)) for p in range(4)] == [4, 4, 1, 0]
    assert everything.offset[everything.partition == 0].tolist() == [0, 1, 3, 5]

    settled_ends(kafka.bootstrap_servers, [topic])
    ends = end_offsets(kafka.bootstrap_servers, topic)
    assert ends.stable == ends.log_end == {(topic, 0): 7, (topic, 1): 6, (topic, 2): 2, (topic, 3): 0}


def test_committed_read_ends_at_an_open_transaction(kafka, names, producer):
    topic = create_topic(kafka.bootstrap_servers, names("open"), 2)
    one, other = producer("open"), producer("behind")
    with transaction(one):
        write(one, topic, 0, [b"before"])
    one.begin_transaction()
    write(one, topic, 0, [b"undecided"])
    with transaction(other):
        write(other, topic, 0, [b"waits behind it"])

    # The marker of the second producer is last: the log does not grow after it.
    wait_until("both markers", lambda: end_offsets(kafka.bootstrap_servers, [topic]).log_end[topic, 0] == 5)
    ends = end_offsets(kafka.bootstrap_servers, [topic])
    assert (ends.stable[topic, 0], ends.log_end[topic, 0]) == (2, 5)
    assert (ends.stable[topic, 1], ends.log_end[topic, 1]) == (0, 0)
    assert read_topic(kafka.bootstrap_servers, topic).values == [b"before"]
    assert len(read_topic(kafka.bootstrap_servers, topic, "read_uncommitted")) == 3
    one.abort_transaction(30)
    settled_ends(kafka.bootstrap_servers, [topic])
    assert read_topic(kafka.bootstrap_servers, topic).values == [b"before", b"waits behind it"]


def test_read_ends_while_the_topic_keeps_growing(kafka, names):
    topic = create_topic(kafka.bootstrap_servers, names("growing"), 2)
    plain, stopping = Producer({"bootstrap.servers": kafka.bootstrap_servers}), threading.Event()
    write(plain, topic, 0, [b"x"] * 100)
    low = end_offsets(kafka.bootstrap_servers, topic).log_end[topic, 0]

    def keep_writing() -> None:
        while not stopping.is_set():
            write(plain, topic, 0, [b"y"] * 10)

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        log = read_topic(kafka.bootstrap_servers, topic)
    finally:
        stopping.set()
        thread.join()
    high = end_offsets(kafka.bootstrap_servers, topic).log_end[topic, 0]
    assert low <= len(log) < high
    assert log.offset.tolist() == list(range(len(log)))


def test_several_topics_are_read_as_one_log(kafka, names):
    servers = kafka.bootstrap_servers
    topics = [create_topic(servers, names("a")), create_topic(servers, names("b"), 2)]
    plain = Producer({"bootstrap.servers": servers})
    write(plain, topics[0], 0, [b"one", b"two", b"three"], headers=[(HEADER, stamp(0, 0, 8)), ("other", b"x")])
    write(plain, topics[1], 1, [b"four"], headers=[(HEADER, b"old"), (HEADER, stamp(1, 2, 9, 1))])
    admin = AdminClient({"bootstrap.servers": servers})
    for deleted in admin.delete_records([TopicPartition(topics[0], 0, 2)]).values():
        assert deleted.result(30).low_watermark == 2
    log = read_topic(servers, topics, header=HEADER)
    by_position = sorted(zip(log.topic, log.partition, log.offset, log.values, strict=True))
    assert by_position == [(0, 0, 2, b"three"), (1, 1, 0, b"four")]
    outputs = log.outputs()
    assert sorted(zip(outputs.source_topic, outputs.source_partition, outputs.source_offset, strict=True)) == [
        (0, 0, 8),
        (1, 2, 9),
    ]
    with pytest.raises(ValueError, match=r"\[\d\]@\d has no stamp"):
        read_topic(servers, topics).outputs()


def test_missing_topic_is_an_error_and_is_not_created(kafka, names):
    with pytest.raises(Unavailable, match=names("absent")):
        read_topic(kafka.bootstrap_servers, names("absent"))
    assert names("absent") not in AdminClient({"bootstrap.servers": kafka.bootstrap_servers}).list_topics().topics


def test_unreachable_cluster_is_an_error_within_its_timeout():
    with pytest.raises(Unavailable, match="partitions of t"):
        end_offsets("127.0.0.1:1", "t", {"log_level": 0}, timeout_s=1.0)


def run(kafka: LocalKafka, names: Names, worker: Producer, records: int, lose: int = -1) -> tuple[str, str, str, str]:
    """Copy records in transactions of ten, each aborted once and repeated, with two outputs per input."""
    servers = kafka.bootstrap_servers
    source, left, right = (create_topic(servers, names(n), 2) for n in ("in", "left", "right"))
    feeder = Producer({"bootstrap.servers": servers})
    for p in range(2):
        write(feeder, source, p, [b"%d" % i for i in range(records)])
    group = names("group")
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False})
    for p in range(2):
        for start in range(0, records, 10):
            for commit in (False, True):
                with transaction(worker, commit):
                    for offset in range(start, start + 10):
                        if offset != lose:
                            write(worker, left, p, [stamp(0, p, offset, 0) + b"l"])
                            write(worker, right, 1 - p, [stamp(0, p, offset, 1)])
                    metadata = consumer.consumer_group_metadata()
                    worker.send_offsets_to_transaction([TopicPartition(source, p, start + 10)], metadata, 30)
    consumer.close()
    return source, left, right, group


@pytest.mark.parametrize("lose", [-1, 15])
def test_checker_judges_a_real_run_by_its_records_in_kafka(kafka, names, producer, lose):
    servers = kafka.bootstrap_servers
    source, left, right, group = run(kafka, names, producer("worker"), 30, lose)
    settled_ends(servers, [source, left, right])
    ends = end_offsets(servers, [source, left, right])
    with ConcurrentReader(servers, [left, right]) as reader:
        reader.wait_for_ends({at: end for at, end in ends.stable.items() if at[0] != source})
        seen = reader.stop().outputs()
    report = check(
        read_topic(servers, source).inputs(),
        read_topic(servers, [left, right]).outputs(),
        fan_out=2,
        committed=committed_offsets(servers, group, source),
        complete=True,
        ends=ends,
        seen=seen,
    )
    if lose < 0:
        assert report.ok, str(report)
        assert report["no_losses"].examined == 120
    else:
        assert report.violated == ("no_losses", "offsets_match_outputs"), str(report)
        assert f"copy 0 of {source}[0]@15 is not visible" in report["no_losses"].sentence


def test_committed_offsets_are_stable_and_skip_empty_partitions(kafka, names, producer):
    servers = kafka.bootstrap_servers
    topic, group, one = create_topic(servers, names("in"), 3), names("group"), producer("worker")
    consumer = Consumer({"bootstrap.servers": servers, "group.id": group})
    metadata = consumer.consumer_group_metadata()
    assert committed_offsets(servers, group, topic) == {}
    with transaction(one):
        one.send_offsets_to_transaction([TopicPartition(topic, 0, 4)], metadata, 30)
    assert committed_offsets(servers, group, topic) == {(topic, 0): 4}
    one.begin_transaction()
    one.send_offsets_to_transaction([TopicPartition(topic, 0, 9), TopicPartition(topic, 1, 9)], metadata, 30)
    with pytest.raises(Unavailable, match=f"committed offsets of group {group}"):
        committed_offsets(servers, group, topic, timeout_s=5.0)  # The open transaction may still commit offsets.
    one.abort_transaction(30)
    assert committed_offsets(servers, group, topic) == {(topic, 0): 4}
    consumer.close()


def test_concurrent_reader_sees_only_final_records(kafka, names, producer):
    servers = kafka.bootstrap_servers
    topic, one = create_topic(servers, names("out"), 3), producer("writer")
    with ConcurrentReader(servers, topic) as reader:
        assert reader.records == 0
        for i in range(20):
            with transaction(one, commit=i % 2 == 0):
                write(one, topic, i % 3, [stamp(0, 0, i)])
            if i == 4:
                reader.wait_for_records(3)  # during the run, not after it
        settled_ends(servers, [topic])
        reader.wait_for_ends(end_offsets(servers, topic).stable)
        assert reader.positions == end_offsets(servers, topic).stable
        seen = reader.collect_outputs()
        with pytest.raises(Unavailable, match=r"waited 0\.1 s for 99 records, but has 10 records"):
            reader.wait_for_records(99, 0.1)
    assert sorted(seen.source_offset.tolist()) == list(range(0, 20, 2))
    verdict = no_aborted_seen(seen, read_topic(servers, topic).outputs())
    assert (verdict.holds, verdict.examined) == (True, 10)


def test_checker_finds_an_aborted_record_that_a_reader_saw(kafka, names, producer):
    servers = kafka.bootstrap_servers
    topic, one = create_topic(servers, names("out")), producer("writer")
    with ConcurrentReader(servers, topic, isolation="read_uncommitted") as reader:
        with transaction(one):
            write(one, topic, 0, [stamp(0, 0, 0)])
        with transaction(one, commit=False):
            write(one, topic, 0, [stamp(0, 0, 1)])
        reader.wait_for_records(2)
        seen = reader.stop().outputs()
    verdict = no_aborted_seen(seen, read_topic(servers, topic).outputs())
    assert verdict.violations == 1
    assert f"{topic}[0]@2 was delivered but no longer exists" in verdict.sentence


def test_records_deleted_during_a_read_are_an_error(kafka, names, monkeypatch):
    servers, topic = kafka.bootstrap_servers, create_topic(kafka.bootstrap_servers, names("cut"))
    write(Producer({"bootstrap.servers": servers}), topic, 0, [b"one", b"two", b"three"])
    admin = AdminClient({"bootstrap.servers": servers})
    for deleted in admin.delete_records([TopicPartition(topic, 0, 2)]).values():
        assert deleted.result(30).low_watermark == 2
    # Simulate records deleted between the query for the log's beginning and the first fetch.
    monkeypatch.setattr(
        history, "_beginnings", lambda admin, wanted: [TopicPartition(topic, at, 0) for topic, at in wanted]
    )
    with pytest.raises(InputGone, match="reading failed"):
        read_topic(servers, topic)
    with ConcurrentReader(servers, topic) as reader:
        with pytest.raises(InputGone, match="reading failed"):
            reader.wait_for_records(1)
        with pytest.raises(InputGone, match="reading failed"):
            reader.stop()


def test_large_topic_is_read_completely_and_in_order(kafka, names):
    servers = kafka.bootstrap_servers
    topic, count = create_topic(servers, names("large"), 4), 200_000
    plain = Producer({"bootstrap.servers": servers, "linger.ms": 20, "queue.buffering.max.messages": count + 1})
    for i in range(count):
        plain.produce(topic, stamp(0, 0, i), partition=i % 4)
    assert plain.flush(60) == 0
    log = read_topic(servers, topic)
    assert len(log) == count
    for p in range(4):
        assert (np.diff(log.offset[log.partition == p]) == 1).all()
    assert sorted(log.outputs().source_offset.tolist()) == list(range(count))
    assert Ends(*end_offsets(servers, topic)).stable[topic, 0] == count // 4
