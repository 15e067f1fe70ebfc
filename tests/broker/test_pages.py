"""Run the programs and tests of docs/howto as a reader does: each page's files in a folder, with a real broker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import LocalKafka
from tests.support.pages import DOCS, SERVERS, files_of
from tests.support.reading import configure, create_topics, visible_values, wait_until

HOWTO = DOCS / "howto"
TOPICS = [
    "items",
    "returns",
    "refunds",
    "visits",
    "visits-by-hour",
    "orders",
    "order-totals",
    "orders.dlq",
    "totals",
    "words",
    "loud-words",
    "words.dlq",
]  # topics of the programs on the pages


@pytest.fixture
def servers(kafka: LocalKafka) -> Iterator[str]:
    """Return the address of the shared broker, and keep the topics of these pages only during the test."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    create_topics(kafka.bootstrap_servers, [NewTopic(topic, 1, 1) for topic in TOPICS])
    yield kafka.bootstrap_servers
    for deleted in admin.delete_topics(TOPICS).values():
        deleted.result(30)
    wait_until("the topics are deleted", lambda: not admin.list_topics(timeout=10).topics.keys() & {*TOPICS})


def written(page: str, folder: Path, servers: str) -> list[str]:
    """Write the files of a page; return their names."""
    folder.mkdir(exist_ok=True)
    files = files_of(HOWTO / f"{page}.md")
    for name, text in files.items():
        (folder / name).write_text(text.replace(SERVERS, servers))
    return list(files)


def environment(servers: str) -> dict[str, str]:
    return os.environ | {"KAFKA_BOOTSTRAP_SERVERS": servers}


def done(folder: Path, servers: str, *command: str) -> str:
    """Run Python with these arguments; return what it prints."""
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(servers),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def send(servers: str, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": servers})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(15) == 0


def values_of(servers: str, topic: str) -> list[bytes | None]:
    return visible_values(servers, topic).get(0, [])


def test_tests_shown_on_pages_pass(kafka: LocalKafka, tmp_path: Path) -> None:
    servers = kafka.bootstrap_servers  # has none of these topics, because eos_run creates its own
    pages = ("functions", "state", "time", "joins", "own-loop")
    for page in pages:
        assert any(name.startswith("test_") for name in written(page, tmp_path / page, servers))
    arguments = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--eos-kafka={servers}")
    assert " passed" in done(tmp_path, servers, "-m", "pytest", *arguments, *pages)


def test_programs_shown_on_pages_run(servers: str, tmp_path: Path) -> None:
    for page in ("functions", "own-loop"):
        written(page, tmp_path, servers)
    send(servers, "items", b'{"cents": 5, "quantity": 2}')
    done(tmp_path, servers, "shop.py")
    assert values_of(servers, "totals") == [b"10"]

    partition, offset = map(int, done(tmp_path, servers, "nightly_load.py").split())
    assert (partition, offset) == (0, 2)  # after the record before and the marker of its transaction
    assert values_of(servers, "totals") == [b"10", b'{"day":"mon"}', b'{"day":"tue"}']

    send(servers, "words", b"to", b"be")
    loop = subprocess.Popen([sys.executable, "hello_loop.py"], cwd=tmp_path, env=environment(servers))
    try:
        wait_until("the loop has handled the words", lambda: values_of(servers, "loud-words") == [b"TO", b"BE"])
        loop.send_signal(signal.SIGTERM)
        assert loop.wait(30) == 0
    finally:
        loop.kill()
        loop.wait()


def test_loop_continues_after_it_rejects_a_refused_record(servers: str, tmp_path: Path) -> None:
    written("own-loop", tmp_path, servers)
    (tmp_path / "main.py").write_text(
        "import eos\n"
        "from hello_again import shout_all\n"
        'settings = {"group.id": "again", "transactional.id": "again-1"}\n'
        'topics = ["loud-words", "words.dlq"]\n'
        'with eos.TransactSession(settings, ["words"], destinations=topics, until_end=True) as session:\n'
        "    shout_all(session)\n"
    )
    configure(servers, "loud-words", "max.message.bytes", "500")
    send(servers, "words", b"a", b"b" * 1_000, b"c")
    done(tmp_path, servers, "main.py")
    assert values_of(servers, "loud-words") == [b"a", b"c"]
    assert values_of(servers, "words.dlq") == [b"b" * 1_000]
