"""Kill the worker, PostgreSQL or the broker at each step of a sink's transaction: each record's row is there once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eos.broker import LocalKafka
from tests.support.brokers import local_kafka
from tests.support.killed import KILLED
from tests.support.postgres import PostgresServer
from tests.support.reading import wait_until
from tests.support.sinks import Names, Sinks

pytestmark = pytest.mark.takes(60)

# The steps of a transaction in their order: a method of the connection to the database, or of the Kafka producer.
STEPS = (
    ("kafka-begin", "before"),
    ("database-begin", "before"),
    ("database-send", "before"),  # the rows
    ("database-move", "before"),  # the next offsets
    ("database-commit", "before"),
    ("database-commit", "during"),
    ("database-commit", "behind"),
    ("kafka-flush", "behind"),  # the dead letters
    ("kafka-send_offsets", "before"),
    ("kafka-commit", "before"),
    ("kafka-commit", "during"),
    ("kafka-commit", "behind"),
)


# Notes each write of an order. An upsert that is repeated would not show in the table itself.
NOTED = (
    "create table writes (id integer)",
    "create function note() returns trigger language plpgsql as "
    "'begin insert into writes values (new.id); return new; end'",
    "create trigger note after insert or update on orders for each row execute function note()",
)


@pytest.fixture(scope="module")
def mortal_kafka(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Start a broker for the kills. With 4.x, a single node may forget a commit right before a kill (KAFKA-20734)."""
    yield from local_kafka(request, nodes=1, version="3.9.2")


@pytest.mark.deep_for(
    *("*-before", "*-flush-*", "*-kafka-commit-*"),
    *("worker-*-during", "database-*-behind", "broker-*-during"),
)
@pytest.mark.parametrize(("step", "when"), STEPS, ids=["-".join(step) for step in STEPS])
@pytest.mark.parametrize("victim", ["worker", "database", "broker"])
def test_rows_are_exact_after_a_kill_at_each_step(
    request: pytest.FixtureRequest,
    names: Names,
    tmp_path: Path,
    server: PostgresServer,
    victim: str,
    step: str,
    when: str,
) -> None:
    kafka: LocalKafka = request.getfixturevalue("mortal_kafka" if victim == "broker" else "kafka")
    sinks = Sinks(kafka, names, tmp_path, server)
    for statement in NOTED:
        sinks.execute(statement)
    sinks.load(300)  # each order once
    where, method = step.split("-")
    # The first two commits create the offsets table and take over the partitions. Some transactions send no rows.
    number = {"database-commit": "5", "database-send": "1"}.get(step, "3")
    program = ("-c", KILLED, f"{server.module}:{method}" if where == "database" else method, when, number)
    if victim == "worker":
        sinks.run(program=program, ends=-9)
        sinks.run()
    else:
        pid, is_running = (
            (server.pid, server.is_running) if victim == "database" else (kafka.pid(0), lambda: kafka.running(0))
        )
        log = tmp_path / "log"
        with sinks.start(log, program=program, VICTIM=str(pid)) as worker:
            wait_until(f"the end of the {victim}", lambda: not is_running() or worker.poll() is not None, 30)
            assert not is_running(), log.read_text()
            server.start() if victim == "database" else kafka.start(0)
            assert worker.wait(75) == 0, log.read_text()
    sinks.require_exact()
    orders, _ = sinks.expected()
    assert sinks.execute("select id from writes order by id") == [(number,) for number in sorted(orders)]
