"""A standalone cluster, a master and two worker processes of the same PySpark: executors die, not the query."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyspark
import pytest

from eos.broker import LocalKafka
from eos.broker.node import free_ports
from spark_connector.session import spark_java
from tests.spark.conftest import Driver
from tests.support.proxy import ApiKey, Fault, HoldingProxy
from tests.support.reading import wait_until
from tests.support.spark_query import BY_TASKS, Query

RECORDS = 3000
pytestmark = pytest.mark.timeout(400)


class Standalone:
    """`master` is its URL."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._processes = directory, list[subprocess.Popen[bytes]]()
        port, web = free_ports(2)
        self.master = f"spark://127.0.0.1:{port}"
        try:
            self._launch("Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web))
            wait_until("the master is up", lambda: "Starting Spark master" in self.log("Master"), 90)
            for i in range(2):
                where = ["--host", "127.0.0.1", "--webui-port", "0", "-c", "1", "-m", "700m"]
                self._launch("Worker", *where, "-d", str(directory / f"work-{i}"), self.master)
            wait_until("two workers", lambda: len(self._registered()) == 2, 90)
        except BaseException:
            self.end()
            raise

    def _launch(self, name: str, *arguments: str) -> None:
        home = Path(pyspark.__file__).parent
        environment = os.environ | {
            "SPARK_HOME": str(home),
            "JAVA_HOME": str(spark_java()),
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [home / "bin/spark-class", f"org.apache.spark.deploy.{name.lower()}.{name}", *arguments]
        with (self._directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._processes.append(process)

    def _registered(self) -> set[str]:
        """The addresses of the workers; one that lost its connection registers a second time."""
        return set(re.findall(r"Registering worker (\S+)", self.log("Master")))

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(errors="replace")

    def processes(self, what: str) -> list[psutil.Process]:
        """Those below the workers whose command line has this."""
        found: list[psutil.Process] = []
        for process in self._processes:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    if what in " ".join(child.cmdline()):
                        found.append(child)
        return found

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    cluster = Standalone(tmp_path)
    yield cluster
    cluster.end()


def test_an_executor_killed_in_mid_batch_loses_and_doubles_nothing(
    kafka: LocalKafka, standalone: Standalone, queries: Callable[..., Query], drivers: Callable[..., Driver]
) -> None:
    # Several tasks read one source partition each, on two executors: what a writing task fetches comes in any order.
    query = queries(kafka.bootstrap_servers, sink_servers=kafka.proxied_servers, min_partitions=11, settings=BY_TASKS)
    query.create(4).load(RECORDS)
    port = int(kafka.proxied_servers.rpartition(":")[2])
    with HoldingProxy(port, kafka.proxied_upstream) as proxy:
        rule = proxy.on(ApiKey.Produce, Fault.HOLD_RESPONSE, nth=7, transactional_id=query.transactional_id)
        config = {"spark.executor.memory": "512m", "spark.executor.cores": "1"}
        driver = drivers(query, master=standalone.master, config=config)
        rule.wait(200)
        executors = standalone.processes("CoarseGrainedExecutorBackend")
        assert len(executors) == 2
        for executor in executors:
            # The one whose Python worker waits for the answer, or both.
            if any(c.raddr and c.raddr.port == port for p in executor.children(True) for c in p.net_connections()):
                executor.kill()
        assert driver.wait() == 0, driver.tail()
    assert "begins anew" in driver.log.read_text()
    query.verify(RECORDS)
