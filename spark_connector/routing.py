"""Brings the rows of each share of the Kafka partitions to one task, or the rows of a small batch to the driver.

Owns the allowed columns and types of the DataFrame, and the order after the shuffle. placing.py owns the choice of the
partition for a row. It must never request an order or a distribution that a second run could not repeat.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from eos.errors import ConfigurationError
from spark_connector.packing import ORDER, PACKED, SHARE, SLICE_BYTES, pack_partition, packer, together
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
_TOO_LARGE = -1  # in place of a Spark partition's number
_ROW_BITS = 33  # of monotonically_increasing_id: a row's number in its Spark partition
_ADAPTIVE = "spark.sql.adaptive.enabled"
_BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
# Less than SLICE_BYTES: Spark ends a batch after the row that reaches the limit, and a batch should still fit one
# slice.
_BATCH_BYTES_HERE = str(SLICE_BYTES * 7 // 8)


def route(
    df: DataFrame, targets: Sequence[Target], topic: str | Sequence[str], shares: int, most_packers: int | None = None
) -> DataFrame:
    """Return packed rows (packing.py) with TARGET (int), `key` and `value` (binary), `headers` and `timestamp` (ms).

    `headers` and `timestamp` are present if `df` has them. Spark partition i holds the rows of share i, which are those
    of every `targets[n]` with n % `shares` = i, in the order of their source. Target `len(targets)` has the rows
    without a target, with the reason in REFUSAL.

    `topic` a string: all rows go there, and a `topic` column is ignored (as in Spark's own sink). A list: the `topic`
    column chooses among them. `most_packers`: the maximum number of tasks that pack rows, if that can be known in
    advance. Raises ConfigurationError.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    rows = _select_columns(df, topic, most_packers)
    # Pass a type object, because the JVM would have to parse a string.
    packed = rows.mapInArrow(packer(shares, _places(targets)), from_arrow_schema(PACKED))
    # Sort by Spark partition and by position in it, which is the order of the source. A shuffle mixes its blocks.
    return packed.repartitionById(shares, SHARE).sortWithinPartitions(ORDER)


def fetch(
    df: DataFrame, topic: str | Sequence[str], most_packers: int | None, most_rows: int, most_bytes: int
) -> pa.Table | None:
    """Return all rows of a small batch in order, with the columns that `route` reads.

    Spark's JVM brings them to the driver: with Python workers, as for `route`, that would take longer than everything
    else that the sink does for such a batch. Returns None if a task has more than `most_rows` rows, or a row so large
    that all rows together might have more than `most_bytes`. It also returns None if the number of tasks is unknown.
    """
    existing_plan = _find_existing_plan(df)
    if existing_plan is not None:
        tasks = int(existing_plan.rdd().getNumPartitions())
    elif most_packers is not None:
        df, tasks = df.coalesce(most_packers), most_packers  # coalesce changes nothing if there are fewer partitions
    else:
        return None
    tasks = max(1, min(tasks, most_packers or tasks))
    rows = _limit(_select_columns(df, topic, most_packers), most_rows, most_bytes // (tasks * most_rows)).toArrow()
    of_tasks = rows.column(SHARE).to_numpy()
    if len(of_tasks) and (of_tasks.min() == _TOO_LARGE or np.bincount(of_tasks).max() > most_rows):
        return None
    return rows.drop_columns([SHARE])


def pack(rows: pa.Table, targets: Sequence[Target]) -> pa.RecordBatch:
    """Return rows of `fetch` as one share, as `route` packs them."""
    placed = (_places(targets).place(batch) for batch in rows.to_batches() if batch.num_rows)
    packed = list(pack_partition(chain.from_iterable(placed), 1, 0))
    return together(packed) if packed else pa.RecordBatch.from_pylist([], PACKED)


def _limit(rows: DataFrame, most_rows: int, most_bytes: int) -> DataFrame:
    """Return the first `most_rows` + 1 rows of each Spark partition, with the partition's number in SHARE.

    A row with more than `most_bytes` has no values, and _TOO_LARGE in SHARE."""
    types = dict(rows.dtypes)
    sizes = [f"octet_length({name})" for name in (KEY, VALUE, TOPIC) if name in types]
    if "headers" in types:
        sizes.append(
            "aggregate(headers, 0, (n, h) -> n + ifnull(octet_length(h.key), 0) + ifnull(octet_length(h.value), 0))"
        )
    too_large = " + ".join(f"ifnull({size}, 0)" for size in sizes) + f" > {most_bytes}"
    columns = [f"if({too_large}, null, {name}) as {name}" for name in types]
    # A limit has other generated code in each plan, which takes 20 ms to compile, and this filter has not.
    first = rows.where(f"monotonically_increasing_id() & {(1 << _ROW_BITS) - 1} <= {most_rows}")
    return first.selectExpr(*columns, f"if({too_large}, {_TOO_LARGE}, spark_partition_id()) as {SHARE}")


def _select_columns(df: DataFrame, topic: str | Sequence[str], most_packers: int | None) -> DataFrame:
    """Return the rows with only the columns to write, in the Spark partitions that pack them."""
    types = _check(df, topic)
    routed = not isinstance(topic, str) and TOPIC in types
    # Select only the needed columns: Spark's conversion to Arrow costs for each. Select them in one step: Spark
    # re-analyses the plan at each step.
    columns = {name: f"cast({name} as binary) as {name}" for name in (KEY, VALUE) if name in types}
    if "headers" in types:
        columns["headers"] = f"cast(headers as {_HEADERS}) as headers"
    if "timestamp" in types:
        columns["timestamp"] = "unix_millis(cast(`timestamp` as timestamp)) as `timestamp`"
    columns |= {name: f"`{name}`" for name, used in ((TOPIC, routed), (PARTITION, PARTITION in types)) if used}
    as_they_are = columns.keys() == types.keys() and all(types[name] in _AS_THEY_ARE for name in columns)
    rows = df if as_they_are else df.selectExpr(*columns.values())
    existing_plan = _find_existing_plan(df)
    if most_packers is not None and existing_plan is not None and existing_plan.rdd().getNumPartitions() > most_packers:
        # A stateful query has spark.sql.shuffle.partitions partitions, 200 by default, and each would pay for a Python
        # task. Merged partitions are read one after the other, so order within them stays.
        rows = rows.coalesce(most_packers)
    return rows


def _places(targets: Sequence[Target]) -> Places:
    """Return the rule that assigns rows to targets."""
    counts = Counter(target.topic for target in targets)  # in the order of the targets
    return Places(tuple(counts.items()))


@contextlib.contextmanager
def planned_for_the_sink(df: DataFrame) -> Iterator[None]:
    """Turn off adaptive execution and use small Arrow batches inside the block, if foreachBatch was given `df`.

    Adaptive execution gains nothing for the sink's part of the plan, which needs fixed partitions. It would cost a
    second job and a second planning, which take tens of milliseconds per batch. The user's part of the query is a
    separate plan and keeps the user's setting.

    The size of Arrow batches changes only if the user has not set it. With small batches a writing task reads one batch
    while the JVM makes the next one, in memory that is in use already. With Spark's batches of 64 MB the task would
    have to wait, and the kernel would have to clear new memory first. The setting applies to the whole job, so the
    user's own functions over Arrow get small batches too.
    """
    if _find_existing_plan(df) is None:
        yield
        return
    from py4j.protocol import Py4JError

    # The session is the streaming query's own copy of the user's, but two sinks may use it at once: restore only the
    # settings that this call has set.
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
            with contextlib.suppress(Py4JError, OSError):  # a JVM that has ended needs no restored settings
                if (was := before[name]) is None:
                    conf.unset(name)
                else:
                    conf.set(name, was)


def _find_existing_plan(df: DataFrame) -> Any:
    """Return Spark's plan of `df` if `df` only wraps existing rows, as in foreachBatch, or None otherwise."""
    frame: Any = df
    plan = frame._jdf.queryExecution().analyzed()
    return plan if plan.getClass().getSimpleName() == "LogicalRDD" else None


def _check(df: DataFrame, topic: str | Sequence[str]) -> dict[str, str]:
    """Return the types of the columns by name. Raise ConfigurationError for missing or wrong columns."""
    types = dict(df.dtypes)
    if "value" not in types:
        raise ConfigurationError(f"the DataFrame needs a column value; its columns are {', '.join(types)}")
    if not isinstance(topic, str) and len(topic) > 1 and "topic" not in types:
        raise ConfigurationError(f"the DataFrame needs a column topic to choose among {', '.join(topic)}")
    for column, kinds in _COLUMNS.items():
        if column in types and types[column] not in kinds:
            raise ConfigurationError(f"column {column} is {types[column]}, it must be {' or '.join(kinds)}")
    return types
