"""Archive the classes that Spark loads, as eos/broker/archive.py does for Kafka; a driver then costs a third.

The suites create it once. `options` are those of every driver's JVM that a test starts, with the archive or without.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from eos.broker.archive import move_into_place
from eos.broker.jars import locked
from eos.broker.node import class_archive_path
from eos.errors import Unavailable
from spark_connector.session import spark_java

# Use only the C1 compiler, because no driver of a test lives long enough for C2 to pay off. Hide the JVM's warnings
# about an unusable archive: they go to standard output, where tests read.
_QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xlog:cds*=off"
_PROGRAM = """
from spark_connector import spark_session, session

spark = spark_session("classes", master="local[2]", config={"spark.ui.enabled": "false"})
rows = spark.range(1000).selectExpr("id % 7 as key", "id as value")
rows.groupBy("key").count().collect()
rows.mapInArrow(lambda batches: batches, "key long, value long").repartition(2).collect()
query = spark.readStream.format("rate").load().writeStream.format("noop").trigger(once=True).start()
query.awaitTermination()
print("JVM", session._jvm_process(spark).pid)
"""


def _path() -> Path:
    import pyspark

    # Store the archive next to the jars, because a JVM refuses an archive of jars that were installed again.
    home = Path(pyspark.__file__).parent
    installed = f"{pyspark.__version__} {(home / 'jars').stat().st_mtime_ns}"
    return home / class_archive_path(spark_java() / "bin" / "java", [Path(installed)]).name


def options() -> str:
    """Return the value of SPARK_SUBMIT_OPTS."""
    path = _path()
    return f"{_QUICK} -XX:SharedArchiveFile={path}" if path.exists() else _QUICK


def make() -> None:
    """Create the archive if it is missing; raise Unavailable if Spark cannot run or its Java creates none."""
    path = _path()
    with locked(path.with_suffix(".lock")):
        if path.exists():
            return
        part = path.with_suffix(".part")
        variables = os.environ | {"SPARK_SUBMIT_OPTS": f"{_QUICK} -XX:ArchiveClassesAtExit={part}"}
        ran = subprocess.run([sys.executable, "-c", _PROGRAM], env=variables, capture_output=True, check=False)
        # The JVM writes the archive when it ends, which is after the end of its Python process.
        jvm = re.search(rb"^JVM (\d+)$", ran.stdout, re.MULTILINE)
        if jvm is None:
            raise Unavailable(f"Spark could not be run: {ran.stderr.decode(errors='replace')[-500:]}")
        try:
            psutil.Process(int(jvm[1])).wait(120)
        except psutil.NoSuchProcess:
            pass  # The JVM has written the whole archive.
        except psutil.TimeoutExpired:
            raise Unavailable("Spark's JVM did not end: what it wrote may not be whole") from None
        move_into_place(part, path)
