"""Let members of the group join, leave, die and pause during transactions: nothing is lost or duplicated.

A worker polls its consumer only between transactions, so a rebalance waits for the open transaction or takes its
partitions away. These tests cause both, with every assignment strategy and group protocol.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from eos.broker import LocalKafka
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.reading import TooSlow, wait_until

if TYPE_CHECKING:  # pytest must import the module first, as a plugin: its failed asserts then show values.
    from tests.support.pipeline import Pipeline, Pipelines, WorkerProcess
pytest_plugins = ["tests.support.pipeline"]

SESSION_MS = 3_000
PROTOCOLS = {
    **{
        strategy: {"session.timeout.ms": str(SESSION_MS), "partition.assignment.strategy": strategy}
        for strategy in ("cooperative-sticky", "roundrobin")
    },
    "consumer": {"group.protocol": "consumer"},
}
INSTANCES = ("a", "b", "c")
CHANGES = 6
PROGRESS_RECORDS = 600
LONG_MS, SHORT_MS = 30_000, 3_000
REPETITIONS = [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 21))]


@pytest.fixture(params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prepared(pipelines: Pipelines, kafka: LocalKafka, records: int, protocol: str) -> Pipeline:
    pipeline = pipelines.on(kafka, records)
    if protocol == "consumer":
        pipeline.set_group_session_timeout(SESSION_MS)
    return pipeline


@pytest.mark.deep_for("roundrobin*", "cooperative*")
@pytest.mark.parametrize("repetition", REPETITIONS)
def test_joins_and_leaves_lose_and_duplicate_nothing(
    protocol: str, repetition: int, kafka: LocalKafka, pipelines: Pipelines, chance: random.Random
) -> None:
    join_and_leave(prepared(pipelines, kafka, 2_000, protocol), protocol, chance)


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["cooperative-sticky", "roundrobin"])
@pytest.mark.parametrize("repetition", range(1, 6))
def test_joins_and_leaves_before_kip_890_are_exactly_once(
    protocol: str, repetition: int, kafka392: LocalKafka, pipelines: Pipelines, chance: random.Random
) -> None:
    join_and_leave(prepared(pipelines, kafka392, 2_000, protocol), protocol, chance)


def join_and_leave(pipeline: Pipeline, protocol: str, chance: random.Random) -> None:
    settings = PROTOCOLS[protocol]
    alive: dict[str, WorkerProcess] = {"a": pipeline.worker("a", settings=settings)}
    changes = []
    for _ in range(CHANGES):
        pipeline.load_transaction(2_000)
        progress(pipeline)
        changes.append(change_one_member(pipeline, alive, chance, settings))
    print(f"{protocol}: {', '.join(changes)}")
    pipeline.wait_handled(pipeline.loaded)
    for worker in alive.values():
        worker.terminate()
    assert [worker.wait() for worker in alive.values()] == [0] * len(alive)
    pipeline.verify()


def progress(pipeline: Pipeline) -> None:
    """Wait until the group handles some more records."""
    before = pipeline.delivered
    wait_until("progress", lambda: pipeline.delivered >= before + 2 * PROGRESS_RECORDS, 45)


def change_one_member(
    pipeline: Pipeline, alive: dict[str, WorkerProcess], chance: random.Random, settings: dict[str, str]
) -> str:
    """Start, stop or kill one member; at least one always runs."""
    missing = [name for name in INSTANCES if name not in alive]
    if missing and (len(alive) == 1 or chance.random() < 0.5):
        name = chance.choice(missing)
        alive[name] = pipeline.worker(name, settings=settings)
        alive[name].wait_log("partitions assigned")
        return f"+{name}"
    name = chance.choice(sorted(alive))
    worker = alive.pop(name)
    if chance.random() < 0.5:
        worker.kill()
        return f"kill {name}"
    worker.terminate()
    assert worker.wait() == 0, worker.final_output
    return f"stop {name}"


@pytest.mark.deep_for("roundrobin", "consumer")
def test_rebalance_waits_for_the_transaction_of_a_slow_member(
    protocol: str, kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = prepared(pipelines, kafka, 3_000, protocol)
    settings = PROTOCOLS[protocol] | {"transaction.timeout.ms": str(LONG_MS)}
    slow = pipeline.worker("slow", settings=settings, holds=[("flush", 3), ("offsets sent", 5)])
    slow.wait_at("flush", 3)
    joining = pipeline.worker("joining", settings=settings)
    pipeline.wait_members(2)
    if protocol == "cooperative-sticky":
        # Here librdkafka joins again in the background: the generation changes during the open transaction, and again
        # after the revocation. A change while offsets are being sent would refuse them (ILLEGAL_GENERATION), so the
        # test waits for it.
        pipeline.wait_stable()
    slow.release()
    slow.wait_at("offsets sent", 5)
    slow.release()
    joining.wait_log("partitions assigned")
    slow.wait_log("partitions revoked")
    pipeline.wait_handled(pipeline.loaded)
    before = slow.log.partition("partitions revoked")[0]
    assert "transaction aborted" not in before or protocol == "consumer", "the group did not wait for the transaction"
    stop_all(pipeline, slow, joining)


@pytest.mark.parametrize(
    "protocol",
    ["cooperative-sticky", *(pytest.param(name, marks=pytest.mark.long) for name in ("roundrobin", "consumer"))],
)
def test_revoked_partitions_end_their_transaction(protocol: str, kafka: LocalKafka, pipelines: Pipelines) -> None:
    """Revoke partitions during the transaction of a backlog, which still polls."""
    pipeline = prepared(pipelines, kafka, 3_600, protocol)
    # The backlog alone takes more than seven seconds of work, so the revocation comes before the transaction's end.
    long = {"eos.transaction.interval.ms": "60000", "eos.transaction.max.records": "100000"}
    if protocol != "consumer":
        long["heartbeat.interval.ms"] = "500"
    settings = PROTOCOLS[protocol] | {"transaction.timeout.ms": "120000"} | long
    position = pipeline.record((pipeline.sources[0], 1), 20)
    slow = pipeline.worker("slow", settings=settings, hold_at=position, work_ms=2.0)
    slow.wait_at("record", 1)
    joining = pipeline.worker("joining", settings=PROTOCOLS[protocol])
    pipeline.wait_members(2)
    pipeline.wait_state("Ongoing", instance="slow")
    slow.release()
    slow.wait_log("transaction aborted")
    first_end = next(line for line in slow.log.splitlines() if "committed" in line or "transaction aborted" in line)
    if (
        "partitions of this transaction were revoked" not in first_end
    ):  # The rebalance may take longer than the transaction was open.
        raise TooSlow(f"no revocation reached the first transaction: {first_end}")
    slow.terminate()  # Otherwise the slow worker would collect records for a minute.
    assert slow.wait() == 0, slow.final_output
    pipeline.wait_handled(pipeline.loaded)
    stop_all(pipeline, joining)


def test_member_that_rejoined_unnoticed_commits_no_old_records(kafka: LocalKafka, pipelines: Pipelines) -> None:
    """Let librdkafka join again under a new member id without any event and with its partitions of before.

    A JoinGroup that finds the member unknown causes it, and the broker accepts offsets of the new member. Found by the
    failure matrix: 2,628 duplicate outputs.
    """
    pipeline = prepared(pipelines, kafka, 3_000, "cooperative-sticky")
    settings = PROTOCOLS["cooperative-sticky"] | {"transaction.timeout.ms": str(LONG_MS)}
    with HoldingProxy.before(kafka) as proxy:
        disconnected = pipeline.worker("away", servers=kafka.proxied_servers, settings=settings, holds=[("flush", 3)])
        disconnected.wait_at("flush", 3)
        pipeline.wait_state("Ongoing", instance="away")
        joining_again = proxy.on(ApiKey.JoinGroup, Fault.HOLD_REQUEST)
        taker = pipeline.worker("taker", settings=settings)
        joining_again.wait(timeout=30)
        pipeline.wait_members(1)
        taker.wait_log("committed taken", count=3)
        joining_again.release()
        taker.wait_log("partitions revoked")  # the worker learns of the revocation, but not yet of the new assignment
        disconnected.release()
        pipeline.wait_handled(pipeline.loaded)
        stop_all(pipeline, disconnected, taker)
        assert "rejoined the group" in disconnected.log


def stop_all(pipeline: Pipeline, *workers: WorkerProcess) -> None:
    for worker in workers:
        worker.terminate()
    assert [worker.wait() for worker in workers] == [0] * len(workers), [worker.final_output for worker in workers]
    pipeline.verify()


@pytest.mark.deep_for("cooperative-sticky-flushed*", "consumer-offsets*")
@pytest.mark.parametrize(
    ("protocol", "step", "timeout_ms"),
    [
        ("cooperative-sticky", "flushed", LONG_MS),
        ("cooperative-sticky", "offsets sent", SHORT_MS),
        ("consumer", "flushed", SHORT_MS),
        ("consumer", "offsets sent", LONG_MS),
        pytest.param("cooperative-sticky", "flushed", SHORT_MS, marks=pytest.mark.long),
        pytest.param("cooperative-sticky", "offsets sent", LONG_MS, marks=pytest.mark.long),
        pytest.param("roundrobin", "flushed", LONG_MS, marks=pytest.mark.long),
        pytest.param("consumer", "flushed", LONG_MS, marks=pytest.mark.long),
        pytest.param("consumer", "offsets sent", SHORT_MS, marks=pytest.mark.long),
    ],
)
def test_member_that_lost_partitions_in_a_transaction_continues(
    protocol: str, step: str, timeout_ms: int, kafka: LocalKafka, pipelines: Pipelines
) -> None:
    pipeline = prepared(pipelines, kafka, 3_000, protocol)
    settings = PROTOCOLS[protocol] | {"transaction.timeout.ms": str(timeout_ms)}
    loser = pipeline.worker("loser", settings=settings, holds=[(step, 3)])
    loser.wait_at(step, 3)
    # The transaction was open during the pause, so the broker may have ended it at its timeout.
    pipeline.wait_state("Ongoing", "CompleteAbort", instance="loser")
    # Query the members before another one joins. A member that learns of a rebalance before its pause has partitions
    # revoked, not lost.
    before = pipeline.members()
    loser.pause()
    taker = pipeline.worker("taker", settings=settings)
    wait_until("another member has its partitions", lambda: len(now := pipeline.members()) == 1 and now != before, 30)
    if timeout_ms == SHORT_MS:
        pipeline.wait_not_open("loser")
    if step == "flushed" or timeout_ms == SHORT_MS:
        # By now the taker has committed these records, so the loser's transaction must not commit.
        taker.wait_log("committed taken", count=3)
    loser.resume()
    loser.release()
    pipeline.wait_handled(pipeline.loaded)
    # The loser is a member again and has half of the partitions.
    loser.wait_log("partitions lost")
    loser.wait_log("partitions assigned", count=2)
    pipeline.load_transaction(600)
    pipeline.wait_handled(pipeline.loaded)
    stop_all(pipeline, loser, taker)
