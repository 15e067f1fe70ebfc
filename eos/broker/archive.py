"""Create an archive of Kafka's classes and a copy of its formatted storage, which save most of a node's start time.

The archive is the JVM's class data sharing for the classes that a Kafka version loads. The copy is the storage that its
StorageTool formats. They are created only on request (`create`, called by the test suites). A node uses those of its
Java and its jars if they exist (eos/broker/node.py).
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
from eos.broker.node import JVM_OPTIONS, Node, class_archive_path, format_all, random_id, storage_copy_path
from eos.errors import Unavailable


def create(version: str) -> Path:
    """Return the archive of this version for this machine's Java, and create it and the storage copy if necessary.

    To create the archive, a node is started, used and stopped. Raises Unavailable if no node can run or this Java
    writes no archive.
    """
    java, jars = find_java(), kafka_jars(version)
    path, storage = class_archive_path(java, jars), storage_copy_path(java, jars)
    with locked(path.with_suffix(".lock")):
        if not storage.exists():
            _format(version, java, jars, storage)
        if not path.exists():
            part = path.with_suffix(".part")
            _write_archive(version, part)
            _verify(java, jars, part)
            move_into_place(part, path)
    return path


def _format(version: str, java: Path, jars: Sequence[Path], storage: Path) -> None:
    with tempfile.TemporaryDirectory(dir=storage.parent) as directory:
        node = Node(0, Path(directory), version, java, jars)
        node.configure(choose_ports(1, None), {})
        format_all([node], random_id())
        (node.directory / "data").replace(storage)


def move_into_place(part: Path, path: Path) -> None:
    """Move the archive that a JVM wrote at its end into place. Raises Unavailable if it wrote none."""
    if not part.exists():
        raise Unavailable("the JVM wrote no class archive: this Java may lack its own default archive")
    part.replace(path)


def _verify(java: Path, jars: Sequence[Path], part: Path) -> None:
    """Delete an incomplete archive and raise Unavailable, because a JVM would crash on it.

    An archive is incomplete if its writer was killed or had no disk space.
    """
    if not part.exists():
        return
    command = [str(java), "-Xshare:on", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={part}"]
    command += ["-cp", os.pathsep.join(map(str, jars)), "-version"]
    with tempfile.TemporaryDirectory() as crash:  # receives the report if the JVM crashes
        whole = subprocess.run(command, cwd=crash, capture_output=True, check=False).returncode == 0
    if not whole:
        part.unlink()
        raise Unavailable("the archive of Kafka's classes is incomplete: the JVM ended while it wrote the file")


@contextmanager
def _jvm_options(options: str) -> Iterator[None]:
    """Set the JVM options of nodes that are started inside the block."""
    before = os.environ.get(JVM_OPTIONS)
    os.environ[JVM_OPTIONS] = options
    try:
        yield
    finally:
        os.environ.pop(JVM_OPTIONS)
        if before is not None:
            os.environ[JVM_OPTIONS] = before


def _write_archive(version: str, part: Path) -> None:
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
        # Stop the node cleanly, because the JVM writes the archive when it ends.
        kafka.stop(0)
