"""Provide one Spark session for the test process, and driver programs in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eos.errors import Unavailable
from tests.support import spark_classes
from tests.support.reading import TooSlow
from tests.support.spark_query import Query

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def java() -> None:
    """Configure the environment of every driver; without a JDK the tests are skipped."""
    try:
        os.environ["SPARK_SUBMIT_OPTS"] = spark_classes.options()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start Spark with two task slots; as on a cluster, a job fails after three failed attempts of a task."""
    from spark_connector import spark_session

    directory = tmp_path_factory.mktemp("spark")
    config = {
        "spark.ui.enabled": "false",
        "spark.local.dir": str(directory),
        "spark.log.level": "ERROR",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.streaming.metricsEnabled": "true",
    }
    session = spark_session("tests", master="local[2,4]", config=config)
    yield session
    session.stop()


class Driver:
    """Run a driver program. `kill` also ends its JVM and its Python workers. `python`: the Python of its executors."""

    def __init__(self, query: Query, how: dict[str, Any], log: Path, python: str, cwd: Path) -> None:
        self.log = log
        command = [sys.executable, "-u", "-m", "tests.support.spark_driver", query.to_json(), json.dumps(how)]
        environment = os.environ | {"PYSPARK_PYTHON": python, "PYTHONPATH": str(ROOT)}
        # The driver has its own session, so that the JVM and the Python workers die with its process group.
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, line: str, timeout_s: float = 180) -> str:
        """Return the first line that starts with `line`."""
        deadline = time.monotonic() + timeout_s
        while True:
            for found in self.log.read_text(errors="replace").splitlines():
                # Spark's progress bar may be in the same line.
                if (at := found.rfind(line)) >= 0:
                    return found[at:]
            assert self.process.poll() is None, f"the driver ended before {line!r}: {self.tail()}"
            if time.monotonic() >= deadline:
                raise TooSlow(f"no {line!r} within {timeout_s} s: {self.tail()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Send SIGKILL to the process, its JVM and its workers at the same time."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def wait(self, timeout_s: float = 240) -> int:
        return self.process.wait(timeout_s)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def start(query: Query, *, python: str = sys.executable, cwd: Path = ROOT, **how: Any) -> Driver:
        started.append(Driver(query, how, tmp_path / f"driver-{len(started)}.log", python, cwd))
        return started[-1]

    yield start
    for driver in started:
        driver.kill()
        print(f"--- {driver.log}\n{driver.tail()}")


@pytest.fixture
def queries(names: Callable[[str], str], tmp_path: Path) -> Callable[..., Query]:
    def make(servers: str, targets: int = 1, **options: Any) -> Query:
        outputs = [names(f"out-{i}") for i in range(targets)]
        return Query(servers, names("in"), outputs, names("sink"), str(tmp_path / "checkpoint"), **options)

    return make
