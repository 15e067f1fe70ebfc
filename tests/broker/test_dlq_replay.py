"""Replay dead letters with `eos dlq` on a real broker: each is handled exactly once, whenever the replay is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Message
from confluent_kafka.admin import AdminClient

import eos as package
from eos.broker import LocalKafka
from eos.encoding.dead_letters import make_dead_letter
from eos.errors import Fenced
from eos.kafka.client.settings import Settings
from eos.records import Record
from eos.session.producer.ownership import TransactionalIdOwnership
from eos.session.producer.producer import TransactionalProducer
from eos.testing.history import committed_offsets
from eos.worker import replay
from tests.support import forked
from tests.support.killed import KILLED
from tests.support.reading import configure, create_topic, settled_records, visible_records

pytestmark = pytest.mark.takes(65)

Names = Callable[[str], str]
APP = """
import os
import eos

app = eos.App({id!r})

@app.process({source!r}, to={out!r}, on_error=eos.dlq)
def upper(record: eos.Record) -> str:
    if record.value.startswith(b"bad") and "MENDED" not in os.environ:
        raise ValueError(f"not today: {{record.value!r}}")
    return record.value.decode().upper()

@app.process({other!r}, to={out!r})
def apologise(value: str) -> str:
    return f"sorry for {{value}}"

@app.process({large!r}, to={out!r})
def far_too_large(value: str) -> str:
    return value * (1_000_000 if value == "bad 1" else 1)
"""


class Shop:
    """Run one App on its own topics and read their contents."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path) -> None:
        self.servers, self.folder = kafka.bootstrap_servers, folder
        self.sent_ms = int(time.time() * 1000) - 60_000  # recent enough that retention does not remove it
        self.id, self.source, self.out = names("app"), names("in"), names("out")
        self.other, self.large, self.dlq = names("other"), names("large"), f"{self.source}.dlq"
        for topic in (self.source, self.out, self.other, self.large, self.dlq):
            create_topic(self.servers, topic, partitions=2)
        (folder / "shop.py").write_text(APP.format(**vars(self)))

    def eos(self, *arguments: str, program: tuple[str, ...] = ("eos",), **environment: str) -> Any:
        variables = os.environ | {"KAFKA_BOOTSTRAP_SERVERS": self.servers} | environment
        return forked.run([*program, *arguments], cwd=self.folder, env=variables)

    def replay(self, *arguments: str, **environment: str) -> str:
        ended = self.eos("dlq", "replay", "shop:app", *arguments, **environment)
        assert ended.returncode == 0, ended.stderr
        return str(ended.stdout).removeprefix(f"{self.dlq}: ").strip()

    def send(self, topic: str, records: list[tuple[Any, Any, list[Any]]]) -> None:
        with package.transaction({"bootstrap.servers": self.servers, "transactional.id": f"{self.id}-load"}) as txn:
            for number, (key, value, headers) in enumerate(records):
                txn.send(topic, value, key=key, headers=headers, timestamp_ms=self.sent_ms + number)

    def write_dead_letters(self, count: int) -> list[str]:
        """Write dead letters as a worker does, and return their values."""
        values = [f"bad {number}" for number in range(count)]
        records = [
            Record(self.source, 0, n, self.sent_ms, f"k{n}".encode(), value.encode()) for n, value in enumerate(values)
        ]
        sends = [make_dead_letter(record, ValueError("why"), app=self.id) for record in records]
        self.send(self.dlq, [(key, value, headers or []) for _, value, key, _, _, headers in sends])
        return values

    def listed(self, target: str = "shop:app") -> list[dict[str, Any]]:
        ended = self.eos("dlq", "list", target, "--json")
        assert ended.returncode == 0, ended.stderr
        return list(json.loads(ended.stdout))

    def read(self, topic: str, settled: bool = True) -> list[Message]:
        """Return the values of a topic. `settled` first waits until no transaction is open on it, because Kafka answers
        a commit before all partitions show it."""
        records = settled_records if settled else visible_records
        return [message for found in records(self.servers, topic).values() for message in found]

    def outputs(self, settled: bool = True) -> list[str]:
        return sorted((message.value() or b"").decode() for message in self.read(self.out, settled))


@pytest.fixture
def shop(kafka: LocalKafka, names: Names, tmp_path: Path) -> Shop:
    return Shop(kafka, names, tmp_path)


def test_next_replay_handles_only_failures_of_the_previous_replay(
    shop: Shop,
) -> None:
    shop.send(shop.source, [("a", "good", []), ("b", "bad 1", [("trace", b"t")]), ("c", "bad 2", [])])
    ran = shop.eos("run", "shop:app", "--until-end", "--instance", "i")
    assert ran.returncode == 0, ran.stderr
    (kind,) = shop.listed()
    assert (kind["exception"], kind["letters"], kind["most_replays"]) == ("ValueError", 2, 0)
    assert kind["message"].startswith("not today: b'bad ")
    for times in (1, 2):
        assert shop.replay() == "2 replayed, 0 handled (0 outputs), 2 failed again"
        (kind,) = shop.listed()
        assert (kind["letters"], kind["most_replays"]) == (2, times)
    assert shop.outputs() == ["GOOD"]
    assert shop.replay("--limit", "1", MENDED="1") == "1 replayed, 1 handled (1 outputs), 0 failed again"
    assert shop.replay(MENDED="1") == "1 replayed, 1 handled (1 outputs), 0 failed again"
    assert shop.replay(MENDED="1") == "0 replayed, 0 handled (0 outputs), 0 failed again"
    assert shop.outputs() == ["BAD 1", "BAD 2", "GOOD"]
    assert shop.listed() == []
    (all_of_it,) = shop.listed(shop.dlq)
    assert all_of_it["letters"] == 2, "the topic keeps replayed dead letters, and the newest of each counts"
    assert len(shop.read(shop.source)) == 3, "another reader of the source received a record twice"
    back = next(m for m in shop.read(shop.out) if m.value() == b"BAD 1")
    assert (back.key(), back.timestamp()[1]) == (b"b", shop.sent_ms + 1), (
        "the replayed record must look as if it had not failed"
    )


@pytest.mark.parametrize(
    ("step", "when", "limit"),
    [
        ("send_offsets", "behind", ("--limit", "150")),
        ("commit", "behind", ()),
        pytest.param("flush", "before", (), marks=pytest.mark.long),
        pytest.param("commit", "before", (), marks=pytest.mark.long),
    ],
)
def test_replay_killed_in_a_transaction_continues_exactly_once(
    shop: Shop, step: str, when: str, limit: tuple[str, ...]
) -> None:
    values = shop.write_dead_letters(250)
    program = ("-c", KILLED, step, when, "3" if step == "flush" else "2")
    killed = shop.eos("dlq", "replay", "shop:app", *limit, program=program, MENDED="1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = len(shop.outputs(settled=step == "commit"))  # A later kill would leave a transaction open.
    assert 0 < before < 250, "the kill came before or after the replay"
    printed = shop.replay(MENDED="1")
    left = 250 - before
    assert printed == f"{left} replayed, {left} handled ({left} outputs), 0 failed again"
    assert shop.outputs() == sorted(value.upper() for value in values)
    assert shop.listed() == []


def test_replay_without_committed_offsets_needs_a_start_option(shop: Shop) -> None:
    """Delete the group, as brokers forget it `offsets.retention.minutes` after its last commit."""
    admin = AdminClient({"bootstrap.servers": shop.servers})
    for topic in (shop.dlq, shop.out):
        configure(shop.servers, topic, "retention.ms", "-1")
    shop.sent_ms -= 8 * 86_400_000
    shop.write_dead_letters(2)
    assert shop.eos("dlq", "replay", "shop:app").returncode == 64, "a first replay cannot be told from a repeated one"
    assert shop.replay("--from", "earliest", MENDED="1").startswith("2 replayed, 2 handled")
    group = f"{shop.id}-dlq-replay"
    assert {offset[1] for offset in committed_offsets(shop.servers, group, [shop.dlq])} == {0, 1}, (
        "the offsets of partitions with and without dead letters"
    )
    admin.delete_consumer_groups([group])[group].result()
    again = shop.eos("dlq", "replay", "shop:app", MENDED="1")
    assert again.returncode == 64
    assert "dead letters there are older than the 7 days" in again.stderr
    assert "`--from earliest` takes all of them" in again.stderr
    assert "may have been replayed before" in shop.eos("dlq", "list", "shop:app").stderr
    assert shop.outputs() == ["BAD 0", "BAD 1"]


def test_dead_letters_can_be_dropped_and_repaired_individually(shop: Shop) -> None:
    shop.write_dead_letters(4)
    dropped = shop.eos("dlq", "drop", "shop:app", "--letter", f"{shop.source}[0]@1")
    assert (dropped.returncode, dropped.stdout) == (0, f"{shop.dlq}: 1 dropped\n"), dropped.stderr
    exported = shop.eos("dlq", "export", "shop:app")
    rows = {row["source"][-1]: row for row in map(json.loads, exported.stdout.splitlines())}
    assert sorted(rows) == ["0", "2", "3"]
    (shop.folder / "mended").write_text(
        json.dumps(rows["2"] | {"value": "good"}) + "\n" + json.dumps(rows["3"] | {"value": "bad still"}) + "\n"
    )
    assert shop.replay("--file", "mended") == "2 replayed, 1 handled (1 outputs), 1 failed again"
    twice = shop.eos("dlq", "replay", "shop:app", "--file", "mended")
    assert twice.returncode == 64
    assert twice.stderr.startswith(f"eos: no pending dead letter of {shop.dlq}[")
    assert twice.stderr.endswith(", nor of 1 other records\n")
    assert [kind["letters"] for kind in shop.listed()] == [2]
    last = shop.replay("--letter", f"{shop.source}[0]@3", "--letter", "nowhere[0]@0", MENDED="1")
    assert last == "1 replayed, 1 handled (1 outputs), 0 failed again"
    assert shop.replay(MENDED="1") == "1 replayed, 1 handled (1 outputs), 0 failed again"
    assert shop.outputs() == ["BAD 0", "BAD STILL", "GOOD"]
    assert shop.listed() == []
    for offset in committed_offsets(shop.servers, f"{shop.id}-dlq-replay", [shop.dlq]).values():
        assert offset > 0
    shop.write_dead_letters(3)
    assert shop.eos("dlq", "drop", "shop:app").returncode == 64, "an id needs its topic"
    assert shop.eos("dlq", "drop", "shop:app", "--exception", "KeyError").returncode == 64, (
        "the dead letter does not exist"
    )
    earliest = shop.eos("dlq", "replay", "shop:app", "--letter", f"{shop.source}[0]@1", "--from", "earliest")
    assert (earliest.returncode, "takes all dead letters" in earliest.stderr) == (64, True)
    assert shop.eos("dlq", "drop", "shop:app", "--all").stdout == f"{shop.dlq}: 3 dropped\n"
    assert shop.listed() == []


def test_output_refused_by_the_client_fails_only_its_dead_letter(shop: Shop) -> None:
    shop.write_dead_letters(3)
    printed = shop.replay("--function", "far_too_large")
    assert printed == "3 replayed, 2 handled (2 outputs), 1 failed again"
    assert shop.outputs() == ["bad 0", "bad 2"]
    (kind,) = shop.listed()
    assert (kind["letters"], kind["exception"]) == (1, "eos.handling.RecordRefused")
    assert kind["first"] == f"{shop.source}[0]@1"


def test_invalid_replay_command_is_refused_with_one_sentence(shop: Shop) -> None:
    for arguments, code, sentence in (
        (
            ("replay", "shop:app", "--function", "nope"),
            64,
            "has no such function, it has upper, apologise, far_too_large",
        ),
        (("replay", "shop:app", "--topic", "nope"), 64, f"--topic nope: not a source of {shop.id}"),
        (("replay", "shop:app", "-X", "group.id=mine"), 64, "group.id cannot be set for `eos dlq replay`"),
        (("replay", "shop:app", "--topic", shop.large), 69, f"topic {shop.large}.dlq does not exist at "),
        (("list", "no such"), 64, "eos dlq list needs MODULE:APP"),
        (("list", "nowhere"), 69, "topic nowhere.dlq does not exist at "),
    ):
        ended = shop.eos("dlq", *arguments)
        assert (ended.returncode, ended.stdout) == (code, ""), ended.stderr
        assert sentence in ended.stderr
        assert "Traceback" not in ended.stderr


def test_fenced_replay_repeats_nothing_and_exits_with_79(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a newer replay, which fences the older one only by its offsets: the older producer would take the id
    back."""
    values = shop.write_dead_letters(4)
    settings = Settings({"bootstrap.servers": shop.servers})
    monkeypatch.setattr(TransactionalProducer, "decide_replacement", lambda self: "retry: asked by the test")
    monkeypatch.setattr(TransactionalIdOwnership, "confirm", lambda self, producer, reason: None)
    monkeypatch.setattr(replay, "_MOST", 1)
    handled: list[bytes] = []
    app = package.App(shop.id)

    @app.process(shop.source, to=shop.out, on_error=package.dlq)
    def upper(value: bytes) -> bytes:
        handled.append(value)
        if len(handled) == 2:
            with replay.Replay(app, settings) as newer:
                assert newer.topic(shop.source).handled == 3
        return value.upper()

    with (
        replay.Replay(app, settings) as older,
        pytest.raises(Fenced, match="another `eos dlq replay` or `drop` has moved group"),
    ):
        older.topic(shop.source)
    assert shop.outputs() == sorted(value.upper() for value in values)


def test_dead_letters_of_another_app_are_replayed_only_on_request(shop: Shop) -> None:
    """Give two Apps one source topic and so one dead-letter topic; no function handles dead letters of the other
    App."""
    now_ms = int(time.time() * 1000)  # Retention removes old records immediately.
    record = Record(shop.source, 0, 0, now_ms, b"k", b"bad other")
    _, value, key, _, _, headers = make_dead_letter(record, ValueError("why"), app="billing", function="bill")
    shop.send(shop.dlq, [(key, value, headers or [])])
    shop.write_dead_letters(1)
    (kind,) = shop.listed()
    assert (kind["app"], kind["letters"]) == (shop.id, 1)
    assert {kind["app"]: kind["letters"] for kind in shop.listed(shop.dlq)} == {"billing": 1, shop.id: 1}
    ended = shop.eos("dlq", "replay", "shop:app", MENDED="1")
    assert "2 replayed" not in ended.stdout
    assert "1 handled (1 outputs), 0 failed again" in ended.stdout
    assert "skipped 1 of App billing (--letters-of billing takes them)" in ended.stderr
    assert shop.outputs() == ["BAD 0"]
    assert "1 handled" in shop.replay("--letters-of", "billing", MENDED="1")
    assert "BAD OTHER" in shop.outputs()
