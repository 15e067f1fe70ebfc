"""Give a worker's producer a quota, as managed clusters do: it still gets through its backlog."""

from __future__ import annotations

import os

import pytest
from confluent_kafka import Producer
from kafka.protocol.admin.client_quotas import AlterClientQuotasRequest, DescribeClientQuotasRequest

import eos
from eos import App, Record
from eos.broker import LocalKafka
from eos.worker.worker import Worker
from tests.support.reading import create_topic, visible_values, wait_until
from tests.support.wire import Wire

VALUE_BYTES = 1_000


def limit_producer(servers: str, client_id: str, bytes_per_s: float) -> None:
    entry = AlterClientQuotasRequest.EntryData
    request = AlterClientQuotasRequest(
        version=0,
        entries=[
            entry(
                entity=[entry.EntityData(entity_type="client-id", entity_name=client_id)],
                ops=[entry.OpData(key="producer_byte_rate", value=bytes_per_s, remove=False)],
            )
        ],
        validate_only=False,
    )
    client = DescribeClientQuotasRequest.ComponentData(entity_type="client-id", match_type=0, match=client_id)
    described = DescribeClientQuotasRequest(version=0, components=[client], strict=False)
    with Wire(servers) as wire:
        response = wire.ask(request)
        assert [one.error_code for one in response.entries] == [0], response
        # The controller has it now; the broker applies it a moment later.
        wait_until("the broker knows the quota", lambda: wire.ask(described).entries)


@pytest.mark.parametrize(
    ("window", "bytes_per_s", "count", "more"),
    [
        # A quota limits the average over its window, 10 s by default. One transaction may use this allowance
        # immediately. The broker delays the next request by up to a window, which is here longer than the timeout:
        # one full request (1 MB, also all that one fetch returns) is enough, however slow the machine is.
        pytest.param(
            4, 150_000, 1_500, {"transaction.timeout.ms": 3_000, "eos.transaction.interval.ms": 1_500}, id="small"
        ),
        pytest.param(11, 200_000, 30_000, {}, id="default", marks=[pytest.mark.long, pytest.mark.timeout(500)]),
    ],
)
def test_backlog_under_a_quota_uses_smaller_transactions(
    caplog: pytest.LogCaptureFixture, window: int, bytes_per_s: int, count: int, more: dict[str, int]
) -> None:
    """Load a backlog that takes longer to write than a transaction may last."""
    with LocalKafka(config={"quota.window.num": window}) as kafka:
        servers, source, target, client = kafka.bootstrap_servers, "in", "out", "limited"
        for topic in (source, target):
            create_topic(servers, topic)
        producer = Producer({"bootstrap.servers": servers})
        values = [os.urandom(VALUE_BYTES) for _ in range(count)]  # incompressible
        for value in values:
            producer.produce(source, value)
        assert producer.flush(30) == 0
        limit_producer(servers, client, bytes_per_s)
        app = App("app")

        @app.process(source, to=target)
        def copy(record: Record) -> bytes | None:
            return record.value

        settings = eos.Settings({"bootstrap.servers": servers, "eos.instance": "one", "client.id": client} | more)
        worker = Worker(app, settings, until_end=True)
        worker.run()
        assert visible_values(servers, target)[0] == values
    lines = [record.message for record in caplog.records if record.message.startswith("transaction timed out")]
    assert 1 <= len(lines) <= 6
    assert "sending the outputs of" in lines[0]
