"""Run executors in separate processes: the query survives their death, and they see none of the driver's files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from eos.broker import LocalKafka
from tests.shim.test_tls_and_sasl import pki  # noqa: F401 - a fixture
from tests.spark.conftest import Driver
from tests.support import spark_classes
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.secure import secure_kafka
from tests.support.spark_query import BY_TASKS, Query
from tests.support.spark_standalone import Standalone, python_without

RECORDS = 3000
pytestmark = [pytest.mark.takes(107), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path_factory.mktemp("standalone"))
    yield cluster
    cluster.end()


def small() -> dict[str, str]:
    """Set the size of an executor."""
    return {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": spark_classes.options(),
    }


def executors_of(driver: Driver) -> Iterator[psutil.Process]:
    for process in psutil.Process(driver.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # The process has ended in the meantime.
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                yield process


def test_executor_killed_during_a_batch_is_exactly_once(
    kafka: LocalKafka, queries: Callable[..., Query], drivers: Callable[..., Driver]
) -> None:
    # Several tasks read one source partition each on two executors, so a writing task fetches rows in any order.
    query = queries(kafka.bootstrap_servers, sink_servers=kafka.proxied_servers, min_partitions=11, settings=BY_TASKS)
    query.create(4).load(RECORDS)
    with HoldingProxy.before(kafka) as proxy:
        rule = proxy.on(ApiKey.Produce, Fault.HOLD_RESPONSE, nth=7, transactional_id=query.transactional_id)
        driver = drivers(query, master="local-cluster[2,1,700]", config=small())
        rule.wait(200)
        executors = list(executors_of(driver))
        assert len(executors) == 2
        for executor in executors:
            # Kill each executor with a Python worker that waits for the held response.
            if any(
                c.raddr and c.raddr.port == proxy.listen_port
                for p in executor.children(True)
                for c in p.net_connections()
            ):
                executor.kill()
        assert driver.wait() == 0, driver.tail()
    assert "begins anew" in driver.log.read_text()
    query.verify(RECORDS)


@pytest.mark.deep
def test_executors_need_neither_the_package_nor_setting_files(
    pki: Path,  # noqa: F811
    standalone: Standalone,
    queries: Callable[..., Query],
    drivers: Callable[..., Driver],
    tmp_path: Path,
) -> None:
    python = python_without(["confluent_kafka"], tmp_path / "python")
    # The directory is relative to the driver's working directory, which executors do not share.
    settings = {
        "security.protocol": "ssl",
        "ssl.ca.location": "ca.pem",
        "ssl.certificate.location": "client.pem",
        "ssl.key.location": "client.key",
    }
    with secure_kafka(pki, {"super.users": "User:ANONYMOUS;User:alice"}) as secure:
        query = queries(secure.servers["PLAINTEXT"], sink_servers=secure.servers["TLS"], settings=settings | BY_TASKS)
        query.create(4).load(RECORDS)
        driver = drivers(query, python=python, cwd=pki, master=standalone.master, config=small())
        assert driver.wait() == 0, driver.tail()
        query.verify(RECORDS)
