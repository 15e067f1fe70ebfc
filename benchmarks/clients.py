"""The benchmarks' broker and plain confluent-kafka clients: straight loops are tuned alike, readers read alike."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from typing import Any

import psutil
from confluent_kafka import Consumer, Producer

BROKER = {"log.segment.delete.delay.ms": 1_000}
"""For a broker whose topics are deleted after each run: it keeps their files for a minute otherwise, and the runs of
that minute are more than a directory in memory holds."""


def describe_run(module: str, *more: str) -> str:
    """The day, the machine with its load, and the command: the first line that `python -m benchmarks.<module>` prints.
    `more`: other facts about the run."""
    command = f"command: python -m benchmarks.{module} {' '.join(sys.argv[1:])}"
    facts = [time.strftime("%Y-%m-%d"), platform.machine(), f"{psutil.cpu_count()} cores"]
    facts += [f"Python {platform.python_version()}", f"load {os.getloadavg()[0]:.1f}", *more, command]
    return ", ".join(facts)


def cpu_s_of_children() -> float:
    """Return the processor seconds of this process's children that have ended, from their start to their end."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def straight(bootstrap: str, group: str, linger_ms: str = "5", **more: Any) -> tuple[Consumer, Producer]:
    """What a careful person sets by hand for speed; the producer is initialised, its transactional.id is the group.
    `linger_ms`: 5 is librdkafka's own. `more`: further settings of both clients."""
    producer = _producer(bootstrap, linger_ms, {"transactional.id": group, **more})
    producer.init_transactions()
    return straight_consumer(bootstrap, group, **more), producer


def at_least_once(bootstrap: str, group: str) -> tuple[Consumer, Producer]:
    """The same without transactions; `linger_ms` is the worker's. Idempotent, as every careful producer is."""
    return straight_consumer(bootstrap, group), _producer(bootstrap, "10", {"enable.idempotence": True})


def straight_consumer(bootstrap: str, group: str, **more: Any) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.queue.backoff.ms": 5,
            **more,
        }
    )


def _producer(bootstrap: str, linger_ms: str, more: dict[str, Any]) -> Producer:
    return Producer(
        {
            "bootstrap.servers": bootstrap,
            "partitioner": "murmur2_random",
            "delivery.report.only.error": True,
            "linger.ms": linger_ms,
        }
        | more
    )


def reader(bootstrap: str, topic: str) -> Consumer:
    """Reads `topic` from its beginning, as committed."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-reader",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    return consumer
