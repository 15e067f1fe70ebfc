"""Query /livez, /readyz and /metrics of a running shim: they agree with its state."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from prometheus_client.parser import text_string_to_metric_families

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from tests.shim.shims import RunningShim, eventually, running
from tests.support.reading import create_topic, transaction_of

Names = Callable[[str], str]
_OPTIONS = ("--http", "127.0.0.1:0")


def ask(shim: RunningShim, path: str, timeout_s: float = 20.0) -> tuple[int, str]:
    (listening,) = shim.named("health server started")
    try:
        with urllib.request.urlopen(f"http://{listening['address']}{path}", timeout=timeout_s) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(shim: RunningShim) -> dict[tuple[str, ...], float]:
    """Return the metrics: (name, label values in the order of their names) -> value."""
    status, text = ask(shim, "/metrics")
    assert status == 200
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def transactions(servers: str, name: str, topic: str) -> None:
    """Commit two transactions and abort one."""
    producer = Producer({"bootstrap.servers": servers, "transactional.id": name, "log_level": 0})
    producer.init_transactions(30)
    for number in range(3):
        producer.begin_transaction()
        producer.produce(topic, bytes(1_000), partition=0)
        assert producer.flush(30) == 0
        if number == 1:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    producer.close()


@pytest.mark.parametrize("protection", ["--no-protect", "--protect"])
def test_metrics_count_forwarded_traffic(kafka: LocalKafka, names: Names, tmp_path: Path, protection: str) -> None:
    topic, plan = create_topic(kafka.bootstrap_servers, names("out")), tmp_path / "plan.toml"
    plan.write_text('[[rule]]\napi = "AddPartitionsToTxn"\naction = "error"\nerror = "NOT_COORDINATOR"\n')
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[[topic]]\nname = "{topic}"\ntransactional_only = true\n')
    options = ("--faults", str(plan), "--policy", str(policy), protection)
    with running(kafka.bootstrap_servers, *_OPTIONS, *options) as shim:
        assert ask(shim, "/livez") == (200, "ok\n")
        assert ask(shim, "/readyz") == (200, "ok\n")
        assert ask(shim, "/else")[0] == 404
        transactions(shim.bootstrap_servers, names("id"), topic)
        plain = Producer({"bootstrap.servers": shim.bootstrap_servers, "log_level": 0})
        plain.produce(topic, b"refused")
        plain.flush(30)
        found = metrics(shim)
        assert found["eos_shim_transactions_total", "commit"] == 2
        assert found["eos_shim_transactions_total", "abort"] == 1
        assert found["eos_shim_faults_total", "error"] == 1
        assert found["eos_shim_refusals_total", "TOPIC_AUTHORIZATION_FAILED"] == 1
        assert found["eos_shim_errors_total", "AddPartitionsToTxn", "NOT_COORDINATOR"] == 1
        assert found["eos_shim_errors_total", "Produce", "TOPIC_AUTHORIZATION_FAILED"] == 1
        assert [key for key in found if key[:2] == ("eos_shim_errors_total", "EndTxn")] == []
        assert found["eos_shim_frames_total", "EndTxn", "request"] == 3
        assert found["eos_shim_frames_total", "EndTxn", "answer"] == 3
        assert 3_000 < found["eos_shim_bytes_total", "Produce", "request"] < 10_000
        assert 1 <= found["eos_shim_connections",] <= found["eos_shim_connections_made_total",]
        plain.close()
        eventually(lambda: metrics(shim)["eos_shim_connections",] == 0)


def test_shim_is_not_live_if_hung_and_not_ready_without_brokers(names: Names) -> None:
    with LocalKafka() as kafka, running(kafka.bootstrap_servers, *_OPTIONS) as shim:
        assert ask(shim, "/readyz")[0] == 200
        kafka.kill(0)
        # The shim learns about the brokers from its clients' connections, so a client must connect first.
        client = Producer({"bootstrap.servers": shim.bootstrap_servers, "log_level": 0})
        eventually(lambda: client.poll(0.1) or ask(shim, "/readyz") == (503, "no broker can be reached\n"))
        assert ask(shim, "/livez")[0] == 200, "missing brokers must not make the shim restart"
        client.close()
        kafka.start(0)
        eventually(lambda: ask(shim, "/readyz")[0] == 200)
        shim.process.send_signal(signal.SIGSTOP)
        try:
            ask(shim, "/livez", 2.0)
            raise AssertionError("a stopped process answered")
        except (TimeoutError, urllib.error.URLError):
            shim.process.send_signal(signal.SIGCONT)
        eventually(lambda: ask(shim, "/livez")[0] == 200)


def test_required_protection_waits_until_brokers_support_it(
    names: Names,
) -> None:
    """Run Kafka 3.9.2, then no broker, then 4.4.0 at the same address."""
    (port,) = free_ports(1)
    topic = names("out")

    def producer(shim: RunningShim, name: str) -> Producer:
        return Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": name, "log_level": 0})

    with ExitStack() as stack:
        with LocalKafka(version="3.9.2", port=port) as old:
            plain = stack.enter_context(running(old.bootstrap_servers, *_OPTIONS))
            strict = stack.enter_context(running(old.bootstrap_servers, *_OPTIONS, "--require-protection"))
            assert [metrics(shim)["eos_shim_protecting",] for shim in (plain, strict)] == [0, 0]
            assert ask(plain, "/readyz")[0] == 200
            status, reason = ask(strict, "/readyz")
            assert status == 503
            assert "protection is unavailable (--require-protection)" in reason
            create_topic(old.bootstrap_servers, topic)
            transactions(plain.bootstrap_servers, names("id"), topic)
            waits = producer(strict, names("waits"))
            with pytest.raises(KafkaException) as error:
                waits.init_transactions(3)
            assert error.value.args[0].retriable()
            waits.close()
            idempotent = Producer({"bootstrap.servers": strict.bootstrap_servers, "enable.idempotence": True})
            idempotent.produce(topic, b"needs no protection")
            assert idempotent.flush(30) == 0
        with LocalKafka(port=port) as new:
            for shim in (plain, strict):
                eventually(lambda shim=shim: metrics(shim)["eos_shim_protecting",] == 1)
                assert ask(shim, "/readyz") == (200, "ok\n")
                create_topic(new.bootstrap_servers, topic := names(f"t{len(shim.events)}"))
                name = names(f"id{len(shim.events)}")
                transactions(shim.bootstrap_servers, name, topic)
                assert transaction_of(new.bootstrap_servers, name).producer_epoch >= 3, (
                    "each transaction must have its own epoch"
                )
                assert len([e for e in shim.events if e.get("event") == "protection unavailable"]) == 1
