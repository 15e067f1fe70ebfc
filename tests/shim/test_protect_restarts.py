"""Stop or kill a shim at any step of a transaction, with a journal, and run two shims for one cluster."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from kafka.errors import KafkaError

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from tests.shim.chaos import Ledger
from tests.shim.protected_clients import CLIENTS, Confluent, producer_of, send, texts
from tests.shim.shims import RunningShim, end_all, eventually, refused, running, start
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.raw import Background
from tests.support.reading import create_topic, transaction_of

Names = Callable[[str], str]
BOTH_CLIENTS = pytest.mark.parametrize("client_name", CLIENTS)
FENCED = (KafkaException, KafkaError, SystemError, AssertionError)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Stop the shims of a test that failed between two starts."""
    yield
    end_all()


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """Return the same local port and journal for each start."""
    (port,) = free_ports(1)
    return ("--listen", f"127.0.0.1:{port}", "--journal", str(tmp_path / "journal"))


def kill(shim: RunningShim) -> None:
    shim.process.send_signal(signal.SIGKILL)
    shim.process.wait()


@pytest.mark.deep_for("after an abort-confluent-kafka", "after a commit-kafka-python")
@BOTH_CLIENTS
@pytest.mark.parametrize("committed", [True, False], ids=["after a commit", "after an abort"])
def test_client_survives_killed_shim_with_a_journal(
    kafka: LocalKafka, names: Names, options: tuple[str, ...], client_name: str, committed: bool
) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out"), 2), names("id")
    wanted = list[str]()
    shim = start(kafka.bootstrap_servers, *options)
    client = CLIENTS[client_name](shim.bootstrap_servers, name)
    for number in range(4):
        client.begin()
        for partition in range(number % 2 + 1):
            client.send(topic, f"{number}-{partition}", partition=partition)
        ends = committed or number % 2 == 0
        client.end(ends)
        wanted += [f"{number}-{partition}" for partition in range(number % 2 + 1)] if ends else []
        kill(shim)
        shim = start(kafka.bootstrap_servers, *options)
    epoch = transaction_of(kafka.bootstrap_servers, name).producer_epoch
    client.begin()
    client.send(topic, "last")
    client.end(True)
    # The client sent no init in between: a new identity would be two epochs further.
    assert transaction_of(kafka.bootstrap_servers, name).producer_epoch == epoch + 1
    client.close()
    assert shim.stop() == 0
    assert sorted(texts(kafka.bootstrap_servers, topic)) == sorted([*wanted, "last"])


@BOTH_CLIENTS
def test_killed_shim_fences_clients_in_a_transaction(
    kafka: LocalKafka, names: Names, options: tuple[str, ...], client_name: str
) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    for round_, (inside, more) in enumerate([(True, options), (False, options[:2])]):
        name = names(f"id{round_}")
        shim = start(kafka.bootstrap_servers, *more)
        client = CLIENTS[client_name](shim.bootstrap_servers, name)
        client.begin()
        client.send(topic, f"open {round_}" if inside else "kept")
        if not inside:
            client.end(True)
        kill(shim)
        shim = start(kafka.bootstrap_servers, *more, "--log-level", "debug")
        with pytest.raises(FENCED):
            if not inside:
                client.begin()
                client.send(topic, "never")
            client.end(True)
        refusals = eventually(functools.partial(shim.named, "request refused"))  # the line may come after the response
        assert {event["error"] for event in refusals} == {"INVALID_PRODUCER_EPOCH"}
        with contextlib.suppress(*FENCED):
            client.close(1)
        successor = CLIENTS[client_name](shim.bootstrap_servers, name)
        successor.begin()
        successor.send(topic, f"next {round_}")
        successor.end(True)
        successor.close()
        assert shim.stop() == 0
    assert sorted(texts(kafka.bootstrap_servers, topic)) == ["kept", "next 0", "next 1"]


def test_late_end_from_before_a_restart_is_refused(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic = create_topic(kafka.bootstrap_servers, names("out"))
    advertised, own = free_ports(2)
    options = (
        "--listen",
        f"127.0.0.1:{own}",
        "--advertise",
        f"127.0.0.1:{advertised}",
        "--journal",
        str(tmp_path / "j"),
    )
    with HoldingProxy(advertised, ("127.0.0.1", own)) as proxy:
        shim = start(kafka.bootstrap_servers, *options)
        client = Confluent(f"127.0.0.1:{advertised}", names("id"))
        client.begin()
        client.send(topic, "first")
        late = proxy.on(ApiKey.EndTxn, Fault.LATE_COPY)
        client.end(True)
        late.wait()
        kill(shim)
        shim = start(kafka.bootstrap_servers, *options)
        client.begin()
        client.send(topic, "aborted")
        assert late.deliver_late().error == 51
        client.end(False)
        client.close()
        assert shim.stop() == 0
    assert texts(kafka.bootstrap_servers, topic) == ["first"]


STEPS = [
    ApiKey.InitProducerId,
    ApiKey.AddPartitionsToTxn,
    ApiKey.Produce,
    ApiKey.AddOffsetsToTxn,
    ApiKey.TxnOffsetCommit,
    ApiKey.EndTxn,
]


@pytest.mark.deep_for("*-before")
@pytest.mark.parametrize("when", [Fault.HOLD_REQUEST, Fault.HOLD_RESPONSE], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("client_name", ["confluent-kafka", pytest.param("kafka-python", marks=pytest.mark.long)])
def test_shim_killed_at_a_step_loses_nothing_with_journal(
    kafka: LocalKafka, names: Names, options: tuple[str, ...], client_name: str, step: ApiKey, when: Fault
) -> None:
    with HoldingProxy.before(kafka) as proxy:
        shim = start(kafka.proxied_servers, *options)
        ledger = Ledger(kafka, CLIENTS[client_name], shim.bootstrap_servers, names("x"), seed=1)
        # Hold the second request, because the first transaction is committed.
        held = proxy.on(step, when, nth=1 if step is ApiKey.InitProducerId else 2, transactional_id=ledger.name)
        work = Background(lambda: ledger.run(lambda: ledger.committed >= 4 and ledger.aborted >= 1))
        held.wait(30)
        kill(shim)
        held.release()
        shim = start(kafka.proxied_servers, *options)
        work.result(120)
        assert shim.stop() == 0
    assert ledger.judge() == []
    assert ledger.next >= 4


def test_client_is_fenced_by_successor_at_another_shim(kafka: LocalKafka, names: Names) -> None:
    topic, name = create_topic(kafka.bootstrap_servers, names("out")), names("id")
    (port,) = free_ports(1)
    fixed = ("--listen", f"127.0.0.1:{port}")
    with running(kafka.bootstrap_servers, "--log-level", "debug") as other:
        with running(kafka.bootstrap_servers, *fixed) as one:
            first = producer_of(one.bootstrap_servers, name)
            for value in ("0", "1"):
                first.begin_transaction()
                assert not send(first, topic, value)
                (first.commit_transaction if value == "0" else first.abort_transaction)(30)
            # A successor takes the transactional.id over through the other shim.
            second = producer_of(other.bootstrap_servers, name)
            second.begin_transaction()
            assert not send(second, topic, "2")
            with pytest.raises(FENCED):
                first.begin_transaction()
                send(first, topic, "never")
                first.commit_transaction(30)
            second.commit_transaction(30)
            second.close()
            moved = producer_of(one.bootstrap_servers, name)
            moved.begin_transaction()
            assert not send(moved, topic, "3")
            moved.commit_transaction(30)
        # The same port leads to a shim that did not issue this client's identity.
        with running(kafka.bootstrap_servers, *fixed, "--log-level", "debug") as other_shim:
            with pytest.raises(FENCED):
                moved.begin_transaction()
                send(moved, topic, "never")
                moved.commit_transaction(30)
            assert eventually(lambda: other_shim.named("request refused"))  # The line may come after the response.
    assert texts(kafka.bootstrap_servers, topic) == ["0", "2", "3"]


def test_invalid_journal_is_refused_with_one_sentence(kafka: LocalKafka, tmp_path: Path) -> None:
    servers, journal = kafka.bootstrap_servers, tmp_path / "journal"
    arguments = ("--listen", "127.0.0.1:0", "--upstream", servers, "--journal")
    with running(servers, "--journal", str(journal)):
        refused(78, "in use by another shim", *arguments, str(journal))
    journal.write_text("this is\nno journal\n")
    refused(78, "cannot be read at line 1", *arguments, str(journal))
    refused(78, "No such file", *arguments, str(tmp_path / "nowhere" / "journal"))
    refused(64, "eos: ", *arguments, str(journal), "--no-protect")


def test_journal_write_failure_does_not_stop_traffic(kafka: LocalKafka, names: Names, tmp_path: Path) -> None:
    topic, journal = create_topic(kafka.bootstrap_servers, names("out")), tmp_path / "journal"
    with running(kafka.bootstrap_servers, "--journal", str(journal)) as shim:
        client = Confluent(shim.bootstrap_servers, names("id"))
        # No file of this process may become larger than the journal is now.
        size = journal.stat().st_size
        assert size > 0
        subprocess.run(["prlimit", f"--pid={shim.process.pid}", f"--fsize={size}"], check=True)
        for number in range(3):
            client.begin()
            client.send(topic, str(number))
            client.end(True)
        client.close()
        (line,) = eventually(lambda: shim.named("journal disabled"))
        assert line["level"] == "warning"
        assert journal.stat().st_size == 0
    assert texts(kafka.bootstrap_servers, topic) == ["0", "1", "2"]
