"""Run a standalone Spark cluster, a master and two worker processes, and create Pythons for its executors.

Owns these processes and environments. It must never start a query.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Collection
from pathlib import Path

import psutil
import pyspark

from eos.broker.node import free_ports
from spark_connector.session import spark_java
from tests.support import spark_classes
from tests.support.reading import wait_until


class Standalone:
    """Own the cluster; `master` is its URL."""

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
            "SPARK_DAEMON_JAVA_OPTS": spark_classes.options(),
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [home / "bin/spark-class", f"org.apache.spark.deploy.{name.lower()}.{name}", *arguments]
        with (self._directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._processes.append(process)

    def _registered(self) -> set[str]:
        """Return the addresses of the workers; a worker that lost its connection registers a second time."""
        return set(re.findall(r"Registering worker (\S+)", self.log("Master")))

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(errors="replace")

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def python_without(names: Collection[str], directory: Path) -> str:
    """Create a Python like this one that cannot import this project or the named packages."""
    missing = ("eos", "_eos", "__editable__", *names)
    venv.EnvBuilder(symlinks=True).create(directory)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(directory), "platbase": str(directory)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(missing):
            (packages / entry.name).symlink_to(entry)
    return str(directory / "bin/python")
