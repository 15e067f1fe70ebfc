"""Brings all rows of one share of the Kafka partitions to one task, in order; or the few rows of a small batch to the
driver.

Owns the DataFrame's columns, what they may be called and be of, and the order behind the shuffle. Which partition a row
belongs to is placing.py's. It must never ask for an order or a distribution that a second run could not repeat.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from eos.errors import ConfigurationError
from spark_connector.packing import ORDER, PACKED, SHARE, SLICE_BYTES, TOO_MUCH, packer
from spark_connector.placing import KEY, PARTITION, TOPIC, VALUE, Places
from spark_connector.targets import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_HEADERS = "array<struct<key:string,value:binary>>"
_COLUMNS = {
    "key": ("string", "binary"),
    "value": ("string", "binary"),
    "topic": ("string",),
    "partition": ("int", "smallint", "tinyint"),
    "headers": (_HEADERS,),
    "timestamp": ("timestamp", "timestamp_ntz"),
}
_AS_THEY_ARE = ("binary", "int", "smallint", "tinyint", _HEADERS)
_ADAPTIVE = "spark.sql.adaptive.enabled"
_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
# Spark ends a batch behind the row that reaches it, and one slice should hold that.
_BATCH_BYTES_HERE = str(SLICE_BYTES * 7 // 8)


def route(
    df: DataFrame, targets: Sequence[Target], topic: str | Sequence[str], shares: int, most_packers: int | None = None
) -> DataFrame:
    """Packed rows (packing.py) with TARGET (int), `key` and `value` (binary), and `headers` and `timestamp` (ms) if
    they were there.

    Spark partition i holds the rows of share i, which are those of every `targets[n]` with n % `shares` = i, in the
    order of their source. Target `len(targets)` has the rows without one, with the reason in REFUSAL.

    `topic` a string: all rows go there, a `topic` column counts for nothing (as in Spark's own sink). A list: the
    `topic` column chooses among them. `most_packers`: in how many tasks rows are packed at most, where that can be
    known beforehand. Raises ConfigurationError.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    rows, places = _placed(df, targets, topic, most_packers)
    # A type, for the text of one would be parsed in the JVM.
    packed = rows.mapInArrow(packer(shares, places), from_arrow_schema(PACKED))
    # Sorted by Spark's partition and by the place in it, which is the source's order; a shuffle mixes its blocks.
    return packed.repartitionById(shares, SHARE).sortWithinPartitions(ORDER)


def gather(
    df: DataFrame,
    targets: Sequence[Target],
    topic: str | Sequence[str],
    most_packers: int | None,
    most_bytes: int,
    most_in_all: int,
) -> pa.RecordBatch | None:
    """All rows, packed as one share, in order: for a batch so small that a second stage of tasks would cost more than
    its writing. None: a task has more than `most_bytes` of them, or than its share of `most_in_all`, and stopped there;
    or nobody knows how many tasks there would be."""
    from pyspark.sql.pandas.types import from_arrow_schema

    given = _given(df)
    if given is not None:
        tasks = int(given.rdd().getNumPartitions())
    elif most_packers is not None:
        df, tasks = df.coalesce(most_packers), most_packers  # or fewer: these stay as they are
    else:
        return None
    of_each = min(most_bytes, most_in_all // max(1, min(tasks, most_packers or tasks)))
    rows, places = _placed(df, targets, topic, most_packers)
    found = rows.mapInArrow(packer(1, places, of_each), from_arrow_schema(PACKED)).collect()
    if any(row[SHARE] == TOO_MUCH for row in found):
        return None
    found.sort(key=itemgetter(ORDER))
    values = [pa.array([row[field.name] for row in found], field.type) for field in PACKED]
    return pa.RecordBatch.from_arrays(values, schema=PACKED)


def _placed(
    df: DataFrame, targets: Sequence[Target], topic: str | Sequence[str], most_packers: int | None
) -> tuple[DataFrame, Places]:
    """The columns that are written, in the partitions in which they are packed; and where the packers put the rows."""
    types = _check(df, topic)
    routed = not isinstance(topic, str) and TOPIC in types
    # No column that is not needed, for Spark's way to Arrow costs for each; and all in one step, or in none, for Spark
    # analyses a plan anew at each.
    columns = {name: f"cast({name} as binary) as {name}" for name in (KEY, VALUE) if name in types}
    if "headers" in types:
        columns["headers"] = f"cast(headers as {_HEADERS}) as headers"
    if "timestamp" in types:
        columns["timestamp"] = "unix_millis(cast(`timestamp` as timestamp)) as `timestamp`"
    columns |= {name: f"`{name}`" for name, used in ((TOPIC, routed), (PARTITION, PARTITION in types)) if used}
    as_they_are = columns.keys() == types.keys() and all(types[name] in _AS_THEY_ARE for name in columns)
    rows = df if as_they_are else df.selectExpr(*columns.values())
    given = _given(df)
    if most_packers is not None and given is not None and given.rdd().getNumPartitions() > most_packers:
        # A stateful query has spark.sql.shuffle.partitions of them, 200 by default, and each would pay for a task in
        # Python. Partitions are read one behind the other, so what is ordered stays so.
        rows = rows.coalesce(most_packers)
    counts = Counter(target.topic for target in targets)  # in the targets' order
    return rows, Places(tuple(counts.items()))


@contextlib.contextmanager
def planned_for_the_sink(df: DataFrame) -> Iterator[None]:
    """What is run inside, on rows of `df`, is not planned again in mid-run and has small Arrow batches, if `df` is what
    foreachBatch was given.

    Adaptive execution has nothing to gain there: the user's part of a streaming query is a plan of its own, with
    adaptive execution if that is on, and ours has the partitions that it must have. It costs a second job and plans
    twice, tens of milliseconds of each batch.

    With small batches, unless the user set their size, a writing task reads one while the JVM makes the next, into
    memory that is in use already. One of Spark's 64 MB it would have to wait for, and the kernel to clear the memory
    first. Tasks learn the size from the job, so the user's own functions over Arrow get such batches too.
    """
    if _given(df) is None:
        yield
        return
    from py4j.protocol import Py4JError

    # The session is the streaming query's own copy of the user's, but two sinks may be at work in it at once: what
    # another one has set is not ours to restore.
    conf = df.sparkSession.conf
    before: dict[str, str | None] = {name: conf.get(name, None) for name in (_ADAPTIVE, _BATCH_BYTES)}
    ours: dict[str, str] = {}
    if before[_ADAPTIVE] != "false":
        ours[_ADAPTIVE] = "false"
    if before[_BATCH_BYTES] is None:
        ours[_BATCH_BYTES] = _BATCH_BYTES_HERE
    try:
        for name, value in ours.items():
            conf.set(name, value)
        yield
    finally:
        for name in ours:
            with contextlib.suppress(Py4JError, OSError):  # a JVM that is gone needs it no more
                if (was := before[name]) is None:
                    conf.unset(name)
                else:
                    conf.set(name, was)


def _given(df: DataFrame) -> Any:
    """Spark's plan of `df` if that is rows which are made elsewhere, as what foreachBatch is given is; else None."""
    frame: Any = df
    plan = frame._jdf.queryExecution().analyzed()
    return plan if plan.getClass().getSimpleName() == "LogicalRDD" else None


def _check(df: DataFrame, topic: str | Sequence[str]) -> dict[str, str]:
    """The types of the columns, by name."""
    types = dict(df.dtypes)
    if "value" not in types:
        raise ConfigurationError(f"the DataFrame needs a column value; its columns are {', '.join(types)}")
    if not isinstance(topic, str) and len(topic) > 1 and "topic" not in types:
        raise ConfigurationError(f"the DataFrame needs a column topic to choose among {', '.join(topic)}")
    for column, kinds in _COLUMNS.items():
        if column in types and types[column] not in kinds:
            raise ConfigurationError(f"column {column} is {types[column]}, it must be {' or '.join(kinds)}")
    return types
