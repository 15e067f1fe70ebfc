"""Run a driver program in a process and JVM that a test can kill: `python -m tests.support.spark_driver`.

The arguments are a Query as JSON, and its run options as JSON. It prints one line per event for the test: `at STEP
BATCH`, `done`, or `failed CLASS: SENTENCE`.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from pyspark.errors import StreamingQueryException

from eos import log
from spark_connector import spark_session
from tests.support.spark_query import Query


def main(query_json: str, how_json: str) -> int:
    query, how = Query.from_json(query_json), json.loads(how_json)
    log.configure()
    if how.get("mutation"):
        from tests.support import spark_mutations

        getattr(spark_mutations, how["mutation"])()
    config = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"} | how.get("config", {})
    spark = spark_session("driver", master=how.get("master", "local[2]"), config=config)
    running: Any = query.start(spark, _holder(how.get("hold")))
    try:
        running.awaitTermination()
    except StreamingQueryException as error:
        print(f"failed {error}".replace("\n", " ")[:2000], flush=True)
        return 1
    print("done", flush=True)
    return 0


def _holder(hold: list[Any] | None) -> Any:
    batches = -1

    def on_step(step: str) -> None:
        nonlocal batches
        if step == "init":
            batches += 1
        if hold == [step, batches]:
            print(f"at {step} {batches}", flush=True)
            threading.Event().wait()  # until the test kills this process

    return on_step


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
