"""Let Spark run tasks a second time: the sink ends the epoch and restarts the batch within the same call."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import KafkaError

from eos.broker import LocalKafka
from spark_connector.attempt import Attempt
from tests.support.proxy import ApiKey, Fault, HoldingProxy, Rule
from tests.support.reading import wait_until
from tests.support.spark_query import BY_TASKS, Query

RECORDS = 3000
PARTITIONS = 8
Queries = Callable[..., Query]


@contextmanager
def answer_held(kafka: LocalKafka, query: Query, spark: Any) -> Any:
    """Run the query until one task of its second batch waits for the response of a broker that has its records."""
    with HoldingProxy.before(kafka) as proxy:
        steps: list[str] = []
        rules: list[Rule] = []
        raised: list[BaseException] = []
        hold = partial(proxy.on, ApiKey.Produce, Fault.HOLD_RESPONSE, transactional_id=query.transactional_id)

        def on_step(step: str) -> None:
            # Hold by the step and not by a number of requests, because a task may send its records in several requests.
            steps.append(step)
            if steps.count("add") == 2 and not rules:
                rules.append(hold())

        def run() -> None:
            try:
                query.run(spark, on_step)
            except BaseException as error:  # noqa: BLE001 - raised again below
                raised.append(error)

        running = threading.Thread(target=run, daemon=True)
        running.start()
        wait_until("the second batch begins", lambda: rules or raised, 120)
        if raised:
            raise raised[0]
        rules[-1].wait(120)
        while rules[-1].answer().error == KafkaError.NOT_ENOUGH_REPLICAS:
            # Two tasks at the same time: a broker that already queries its coordinator about a transaction refuses the
            # first query, and that task sends its records again.
            rules.append(hold())
            rules[-2].release()
            rules[-1].wait(120)
        assert rules[-1].answer().error == 0
        yield rules[-1]
        running.join(240)
        assert not running.is_alive()
    if raised:
        raise raised[0]


def python_workers() -> list[psutil.Process]:
    """Return the processes that run Python functions of this process's Spark."""
    workers = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # The process has ended in the meantime.
            parent = process.parent()
            if parent is not None and all("pyspark.daemon" in p.cmdline() for p in (process, parent)):
                workers.append(process)
    assert workers
    return workers


def restart_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "batch begins anew" in record.getMessage()]


@pytest.fixture
def sink_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("eos")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, "eos")
    return caplog


@pytest.mark.deep_for("counted")
@pytest.mark.parametrize("plan", ["stamped", "counted"])
def test_task_killed_after_its_records_does_not_duplicate_them(
    plan: str, kafka: LocalKafka, queries: Queries, spark: Any, sink_log: pytest.LogCaptureFixture
) -> None:
    query = queries(kafka.bootstrap_servers, sink_servers=kafka.proxied_servers, plan=plan, settings=BY_TASKS).create(
        PARTITIONS
    )
    query.load(RECORDS)
    with answer_held(kafka, query, spark):
        for worker in python_workers():
            worker.kill()
    assert "was claimed by" in restart_lines(sink_log)[0]
    if plan == "stamped":
        assert query.written() > RECORDS  # The aborted records of the dead attempt are in the log.
        query.verify(RECORDS)
    else:
        query.verify_counts(RECORDS)


def test_lost_shuffle_files_cause_no_lost_and_no_duplicate_record(
    kafka: LocalKafka,
    queries: Queries,
    spark: Any,
    sink_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Delete shuffle files: Spark writes them again and repeats the unfinished tasks as attempt 0 of a new stage
    attempt.

    The waiting task of the first attempt is still running then.
    """
    # Start more tasks than can run at the same time, as with dynamic allocation, so that some have not read their files
    # yet.
    monkeypatch.setattr(Attempt, "_cores", lambda _: None)
    query = queries(kafka.bootstrap_servers, sink_servers=kafka.proxied_servers, settings=BY_TASKS).create(PARTITIONS)
    query.load(RECORDS)
    held: Rule
    with answer_held(kafka, query, spark) as held:
        files = list(Path(spark.conf.get("spark.local.dir")).glob("**/shuffle_*"))
        assert files
        for file in files:
            file.unlink()
        # The second attempt at the held partition ends the epoch, unless all files were read before they were deleted.
        wait_until("the sink ends the epoch", lambda: restart_lines(sink_log), 90)
        held.release()
    query.verify(RECORDS)
