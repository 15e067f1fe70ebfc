"""Run real workers with `--http-port` and `--workers`: their reports are true, and nothing is lost.

eos.testing.verify judges the outputs by their lineage: each committed input must have exactly its outputs.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from eos.health.status import Status
from eos.testing.verify import verify
from tests.support.reading import wait_until

if TYPE_CHECKING:
    from tests.support.pipeline import Pipeline, Pipelines, WorkerProcess
pytest_plugins = ["tests.support.pipeline"]

TEMPORARY = 75
APP = """
import os, signal, time
from eos import App, Out, Record

app = App({app!r})


@app.process({sources!r}, to={destinations!r})
def twice(record: Record) -> list[Out]:
    if os.path.exists({folder!r} + "/stuck"):
        time.sleep(1000)
    return [Out(record.value, topic=topic) for topic in {destinations!r}]
"""
QUICK = ("session.timeout.ms=6000", "heartbeat.interval.ms=500", "eos.transaction.interval.ms=20", "eos.lineage=true")
SHORT_LIMITS = ("transaction.timeout.ms=3000", "eos.call.timeout.ms=500", "eos.liveness.timeout.ms=1000")


class Running:
    """Run `eos run` with a health port on the topics of a pipeline."""

    def __init__(self, pipeline: Pipeline, *arguments: str, settings: tuple[str, ...] = QUICK) -> None:
        self.pipeline, self.folder = pipeline, Path(pipeline.directory)
        self.port = free_ports(1)[0]
        names = {"app": pipeline.app, "sources": pipeline.sources, "destinations": pipeline.destinations}
        (self.folder / "app.py").write_text(APP.format(**names, folder=str(self.folder)))
        options = ["--bootstrap-servers", pipeline.servers, "--instance", "w", "--http-port", f"127.0.0.1:{self.port}"]
        for setting in settings:
            options += ["-X", setting]
        self.process: WorkerProcess = pipeline.eos("run", f"{self.folder}/app.py:app", *options, *arguments)

    def ask(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError as error:
            assert self.process.running, self.process.log
            return 0, str(error)
        finally:
            connection.close()

    def wait(self, path: str, code: int, says: str = "", timeout_s: float = 60.0) -> str:
        """Wait until this path answers with the code and text, and return the body."""

        def answered() -> str | None:
            found, body = self.ask(path)
            return body if found == code and says in body else None

        return wait_until(f"{path} answers {code} {says!r}", answered, timeout_s)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with these labels; at least one must exist."""
        found = self._samples(name, labels)
        assert found, f"{name} {labels} is not in the scrape"
        return sum(found)

    def _samples(self, name: str, labels: dict[str, str]) -> list[float]:
        code, text = self.ask("/metrics")
        return [
            sample.value
            for family in (text_string_to_metric_families(text) if code == 200 else ())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def wait_metric(self, name: str, value: float, timeout_s: float = 60.0, **labels: str) -> None:
        def reached() -> bool:
            found = self._samples(name, labels)  # no sample at first: a lag is known a second after the start
            return bool(found) and sum(found) == value

        wait_until(f"{name} {labels} is {value}", reached, timeout_s)

    def statuses(self) -> list[Status]:
        raw = msgspec.json.decode(self.ask("/status.json")[1])["workers"]
        return msgspec.convert(raw, list[Status])

    def worker_pids(self) -> list[int]:
        return [status.pid for status in self.statuses() if status.pid]


def assert_holds(pipeline: Pipeline) -> None:
    """Check that each loaded input is committed and has exactly its outputs."""
    found = verify(pipeline.servers, pipeline.sources, pipeline.destinations, pipeline.app)
    assert found.inputs == pipeline.loaded
    assert found.report.ok, found.report.violated


def wait_until_all_handled(pipeline: Pipeline) -> None:
    wait_until(
        "all records are handled", lambda: pipeline.delivered == pipeline.loaded * len(pipeline.destinations), 60
    )


@pytest.fixture
def own_kafka() -> Iterator[LocalKafka]:
    """Start a Kafka that a test may pause."""
    with LocalKafka() as kafka:
        yield kafka


# ---- metrics -----------------------------------------------------------------------------------------------


def test_metrics_agree_with_kafka_and_lag_ends_at_stable_offset(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    run = Running(pipeline, settings=(*QUICK[:-1], "eos.lineage=true"))
    run.wait("/readyz", 200)
    run.wait_metric("eos_records_in_total", 600)
    assert run.metric("eos_records_out_total") == 1200
    run.wait_metric("eos_lag_records", 0)  # Markers and aborted records after the last committed record are not lag.
    # Records after the last stable offset cannot be read, so they are not lag and `delivered` does not count them.
    producer = pipeline._input_producer()
    producer.begin_transaction()
    for partition in range(3):
        for _ in range(100):
            producer.produce(pipeline.sources[0], b"input", partition=partition)
    assert producer.flush(30) == 0
    run.statuses()
    before = [status.at for status in run.statuses()]
    wait_until("three seconds of statistics", lambda: run.statuses()[0].at > before[0] + 3, 30)
    assert run.metric("eos_lag_records") == 0
    producer.abort_transaction(30)
    pipeline.load(60)
    run.wait_metric("eos_records_in_total", 660)
    committed = run.metric("eos_transactions_committed_total")
    assert committed > 0
    assert run.metric("eos_commit_seconds_count") == committed
    assert 0 < run.metric("eos_end_to_end_seconds_count") <= committed
    assert run.metric("eos_rebalances_total", kind="assigned") == 1
    assert run.metric("eos_live") == run.metric("eos_ready") == 1
    wait_until_all_handled(pipeline)
    run.process.terminate()
    assert run.process.wait() == 0
    assert_holds(pipeline)


# ---- probes ------------------------------------------------------------------------------------------------


def test_worker_stuck_in_a_function_is_not_live_and_reports_the_line(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 60)
    run = Running(pipeline, settings=QUICK + SHORT_LIMITS)
    run.wait("/readyz", 200)
    wait_until_all_handled(pipeline)
    (run.folder / "stuck").touch()
    pipeline.load(60)
    body = run.wait("/livez", 503)
    line = next(i for i, text in enumerate((run.folder / "app.py").read_text().splitlines(), 1) if "sleep" in text)
    assert re.match(rf"NOT OK w: stuck for \d+ s while handling records at twice \(app.py:{line}\)", body), body
    assert run.ask("/readyz")[0] == 503
    assert "worker stuck" in run.process.log


@pytest.mark.takes(83)
def test_worker_without_its_broker_is_live_but_not_ready(own_kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(own_kafka, 60)
    run = Running(pipeline, settings=QUICK + SHORT_LIMITS)
    run.wait("/readyz", 200)
    wait_until_all_handled(pipeline)
    own_kafka.pause(0)
    try:
        run.wait("/readyz", 503)
        # Longer than the time after which a worker that makes no progress is not live.
        since = run.statuses()[0].at
        limit_s = run.statuses()[0].stuck_after_s
        wait_until("more than the liveness timeout", lambda: run.statuses()[0].at > since + limit_s + 3, 60)
        assert run.ask("/livez")[0] == 200
        assert run.ask("/readyz")[0] == 503
    finally:
        own_kafka.resume(0)
    run.wait("/readyz", 200, timeout_s=90)
    pipeline.load(60)
    wait_until_all_handled(pipeline)
    run.process.terminate()
    assert run.process.wait() == 0
    assert_holds(pipeline)


# ---- a supervisor ------------------------------------------------------------------------------------------


def test_supervisor_restarts_a_killed_worker_under_its_name(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    run = Running(pipeline, "--workers", "2")
    run.wait("/readyz", 200, "ok w-1")
    before = run.worker_pids()
    pipeline.load(300)
    os.kill(before[0], signal.SIGKILL)
    pipeline.load(300)
    run.wait_metric("eos_worker_restarts_total", 1, worker="w-0")
    run.wait("/readyz", 200, "ok w-0")
    after = run.worker_pids()
    assert after[1] == before[1]
    assert after[0] != before[0]
    wait_until_all_handled(pipeline)
    run.process.terminate()
    assert run.process.wait() == 0
    assert "w-0 | " in run.process.log
    assert "w-1 | " in run.process.log
    assert not [pid for pid in after if psutil.pid_exists(pid)]
    assert_holds(pipeline)


def test_workers_of_a_killed_supervisor_commit_and_end(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    run = Running(pipeline, "--workers", "2")
    run.wait("/readyz", 200, "ok w-1")
    orphans = [psutil.Process(pid) for pid in run.worker_pids()]
    assert len(orphans) == 2
    pipeline.load(300)
    run.process.kill()
    _, alive = psutil.wait_procs(orphans, timeout=60)
    for orphan in alive:
        orphan.kill()
    assert not alive, "a worker outlived its supervisor"
    assert run.process.log.count("supervisor ended, stopping") == 2
    assert run.process.log.count(" stopped records_in=") == 2, "the workers must stop as after a SIGTERM"
    again = Running(pipeline, "--workers", "1", "--until-end")
    assert again.process.wait() == 0
    assert_holds(pipeline)


def test_supervisor_notices_a_stopped_worker(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 60)
    run = Running(pipeline, "--workers", "2", settings=QUICK + SHORT_LIMITS)
    run.wait("/readyz", 200, "ok w-1")
    paused = run.worker_pids()[0]
    os.kill(paused, signal.SIGSTOP)
    try:
        body = run.wait("/readyz", 503, "NOT OK w-0: has not reported")
        assert "ok w-1" in body
        assert run.ask("/livez")[0] == 200
        run.wait("/livez", 503, "NOT OK w-0: has not reported")
    finally:
        os.kill(paused, signal.SIGCONT)
    run.wait("/livez", 200)
    run.wait("/readyz", 200, timeout_s=90)
    run.process.terminate()
    assert run.process.wait() == 0
    assert_holds(pipeline)


@pytest.mark.deep
def test_reload_restarts_the_workers_when_the_source_changes(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 60)
    run = Running(pipeline, "--reload")
    run.wait("/readyz", 200, "ok w:")
    wait_until_all_handled(pipeline)
    (first,) = run.worker_pids()
    source = run.folder / "app.py"
    good = source.read_text()
    source.write_text("this is no Python")
    run.process.wait_log("ended reason=exit code 64")
    source.write_text(good + "\n# changed\n")
    run.wait("/readyz", 200, "ok w:")
    pipeline.load(60)
    wait_until_all_handled(pipeline)
    assert run.worker_pids() != [first]
    run.process.terminate()
    assert run.process.wait() == 0
    assert_holds(pipeline)
