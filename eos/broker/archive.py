"""What spares a node's start most of its processor time: an archive of the classes that a Kafka version loads (the
JVM's class data sharing), and a copy of the storage that its StorageTool formats.

Owns how both are made, which is only done on request (`make`; the test suites ask). A node takes those of its Java and
its jars where they are (eos/broker/node.py).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker.jars import kafka_jars, locked
from eos.broker.java import find_java
from eos.broker.local import LocalKafka, choose_ports
from eos.broker.node import JVM_OPTIONS, Node, archive_of, format_all, random_id, storage_of
from eos.errors import Unavailable


def make(version: str) -> Path:
    """The archive of this version on this machine's Java; if it is not there a node is started, used and stopped. The
    storage is beside it.

    Raises Unavailable where no node can run, or this Java makes none.
    """
    java, jars = find_java(), kafka_jars(version)
    path, storage = archive_of(java, jars), storage_of(java, jars)
    with locked(path.with_suffix(".lock")):
        if not storage.exists():
            _format(version, java, jars, storage)
        if not path.exists():
            part = path.with_suffix(".part")
            _record(version, part)
            _check(java, jars, part)
            keep(part, path)
    return path


def _format(version: str, java: Path, jars: Sequence[Path], storage: Path) -> None:
    with tempfile.TemporaryDirectory(dir=storage.parent) as directory:
        node = Node(0, Path(directory), version, java, jars)
        node.configure(choose_ports(1, None), {})
        format_all([node], random_id())
        (node.directory / "data").replace(storage)


def keep(part: Path, path: Path) -> None:
    """What a JVM wrote at its end; Unavailable if it wrote nothing."""
    if not part.exists():
        raise Unavailable("the JVM wrote no archive of its classes: this Java may lack the one of its own")
    part.replace(path)


def _check(java: Path, jars: Sequence[Path], part: Path) -> None:
    """A JVM crashes on an archive that is not whole: its writer was killed, or had no room on the disk."""
    if not part.exists():
        return
    command = [str(java), "-Xshare:on", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={part}"]
    command += ["-cp", os.pathsep.join(map(str, jars)), "-version"]
    with tempfile.TemporaryDirectory() as crash:  # where it leaves its report
        whole = subprocess.run(command, cwd=crash, capture_output=True, check=False).returncode == 0
    if not whole:
        part.unlink()
        raise Unavailable("the archive of Kafka's classes is not whole: the JVM did not come to the end of writing it")


@contextmanager
def _jvm_options(options: str) -> Iterator[None]:
    """Those of nodes that are started meanwhile; everything else that this process starts has its own."""
    before = os.environ.get(JVM_OPTIONS)
    os.environ[JVM_OPTIONS] = options
    try:
        yield
    finally:
        os.environ.pop(JVM_OPTIONS)
        if before is not None:
            os.environ[JVM_OPTIONS] = before


def _record(version: str, part: Path) -> None:
    options = f"-XX:+UseSerialGC -XX:ArchiveClassesAtExit={part}"
    with _jvm_options(options), LocalKafka(version=version) as kafka:
        client: dict[str, str | int | float | bool] = {"bootstrap.servers": kafka.bootstrap_servers, "log_level": 0}
        admin = AdminClient(client)
        admin.create_topics([NewTopic("words", 1, 1)])["words"].result(30)
        producer = Producer(client | {"transactional.id": "writer"})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce("words", b"be")
        producer.commit_transaction()
        consumer = Consumer(client | {"group.id": "readers", "auto.offset.reset": "earliest"})
        consumer.subscribe(["words"])
        assert consumer.consume(1, 30), "nothing was read"
        producer.begin_transaction()
        read = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(read, consumer.consumer_group_metadata())
        producer.commit_transaction()
        consumer.close()
        # In good order: the JVM writes the archive at its end.
        kafka.stop(0)
