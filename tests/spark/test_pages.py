"""Run the query of docs/howto/spark.md unchanged except for the address of its broker and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import eos
from eos.broker import LocalKafka
from tests.support.pages import DOCS, files_of
from tests.support.reading import create_topic, visible_values


def test_query_of_the_page_counts_correctly(
    kafka: LocalKafka, spark: Any, names: Callable[[str], str], tmp_path: Path
) -> None:
    orders, totals = (create_topic(kafka.bootstrap_servers, names(topic)) for topic in ("orders", "totals"))
    with eos.transaction({"bootstrap.servers": kafka.bootstrap_servers, "transactional.id": names("load")}) as txn:
        for key in ("a", "b", "a"):
            txn.send(orders, "1", key=key)
    program = files_of(DOCS / "howto" / "spark.md")["totals.py"]
    changes = {
        "broker:9092": kafka.bootstrap_servers,
        "/shared/totals": str(tmp_path / "checkpoint"),
        '"orders"': repr(orders),
        '"totals"': repr(totals),
    }
    for written, here in changes.items():
        assert written in program
        program = program.replace(written, here)
    spark.conf.set(
        "spark.sql.shuffle.partitions", "2"
    )  # Fixed by the first batch of the checkpoint; the default is 200 tasks per batch.
    exec(compile(program, "totals.py", "exec"), {})
    (query,) = spark.streams.active
    try:
        query.processAllAvailable()
    finally:
        query.stop()
        spark.conf.unset("spark.sql.shuffle.partitions")
    assert sorted(visible_values(kafka.bootstrap_servers, totals)[0]) == [b"1", b"2"]
