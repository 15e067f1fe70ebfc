"""Gives each row its Kafka partition and brings all rows of one share of the partitions to one task, in order.

Owns the DataFrame's columns: what they may be called and be of, which partition a row belongs to (Java's default
partitioner, as the worker's), and the order behind the shuffle. It must never compute a partition from anything but the
row: a lost shuffle file is made again, and a row must land where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eos.errors import ConfigurationError
from spark_connector.jvm import java_class, loaded_class
from spark_connector.packing import ORDER, PACKED, SHARE, TARGET, packer
from spark_connector.targets import Target
from spark_connector.task import REFUSAL

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_HEADERS = "array<struct<key:string,value:binary>>"
_COLUMNS = {
    "key": ("string", "binary"),
    "value": ("string", "binary"),
    "topic": ("string",),
    "partition": ("int", "smallint", "tinyint"),
    "headers": (_HEADERS,),
    "timestamp": ("timestamp", "timestamp_ntz"),
}
_ADAPTIVE = "spark.sql.adaptive.enabled"
_POSITIVE = 0x7FFFFFFF
_KAFKA_UTILS = "org.apache.kafka.common.utils.Utils"


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
    from pyspark.sql import functions as sf
    from pyspark.sql.pandas.types import from_arrow_schema

    names = _check(df, topic)
    routed = not isinstance(topic, str) and "topic" in names
    key = sf.expr("cast(key as binary)" if "key" in names else "cast(null as binary)")
    place = _place(df, key, targets, routed, "partition" in names)
    columns = [place.alias(TARGET), key.alias("key"), sf.expr("cast(value as binary) as value")]
    if "headers" in names:
        columns.append(sf.expr(f"cast(headers as {_HEADERS}) as headers"))
    if "timestamp" in names:
        columns.append(sf.expr("unix_millis(cast(`timestamp` as timestamp)) as `timestamp`"))
    where = [name for name, used in (("topic", routed), ("partition", "partition" in names)) if used]
    if where:
        said = ", ".join(f"coalesce(cast(`{name}` as string), 'null')" for name in where)
        columns.append(sf.when(place == len(targets), sf.expr(f"concat_ws('-', {said})")).alias(REFUSAL))
    # In one step, for Spark analyses a plan anew at each; and a type, for its text would be parsed in the JVM.
    rows = df.select(*columns)
    given = _given(df)
    if most_packers is not None and given is not None and given.rdd().getNumPartitions() > most_packers:
        # A stateful query has spark.sql.shuffle.partitions of them, 200 by default, and each would pay for a task in
        # Python. Partitions are read one behind the other, so what is ordered stays so.
        rows = rows.coalesce(most_packers)
    packed = rows.mapInArrow(packer(shares), from_arrow_schema(PACKED))
    # Sorted by Spark's partition and by the place in it, which is the source's order; a shuffle mixes its blocks.
    return packed.repartitionById(shares, SHARE).sortWithinPartitions(ORDER)


@contextlib.contextmanager
def as_planned(df: DataFrame) -> Iterator[None]:
    """What is run inside, on rows of `df`, is not planned again in mid-run if `df` is what foreachBatch was given.

    Adaptive execution has nothing to gain there: the user's part of a streaming query is a plan of its own, with
    adaptive execution if that is on, and ours has the partitions that it must have. It costs a second job and plans
    twice, tens of milliseconds of each batch.
    """
    from py4j.protocol import Py4JError

    # The session is the streaming query's own copy of the user's, and its one thread is here.
    conf = df.sparkSession.conf
    adaptive = conf.get(_ADAPTIVE)
    if adaptive != "true" or _given(df) is None:
        yield
        return
    conf.set(_ADAPTIVE, "false")
    try:
        yield
    finally:
        with contextlib.suppress(Py4JError, OSError):  # a JVM that is gone needs it no more
            conf.set(_ADAPTIVE, adaptive)


def _given(df: DataFrame) -> Any:
    """Spark's plan of `df` if that is rows which are made elsewhere, as what foreachBatch is given is; else None."""
    frame: Any = df
    plan = frame._jdf.queryExecution().analyzed()
    return plan if plan.getClass().getSimpleName() == "LogicalRDD" else None


def _place(df: DataFrame, key: Column, targets: Sequence[Target], routed: bool, asked: bool) -> Column:
    """The number of a row's target, `len(targets)` for none."""
    from pyspark.sql import functions as sf

    # Any partition will do for a row without a key, but always the same one.
    keyless = sf.expr("xxhash64(cast(value as binary))")
    number = sf.when(key.isNull(), keyless).otherwise(murmur2(df, key).cast("long")).bitwiseAND(sf.lit(_POSITIVE))
    none, chosen, first = sf.lit(len(targets)), None, 0
    while first < len(targets):
        topic = targets[first].topic
        count = sum(target.topic == topic for target in targets)
        within = (number % count).cast("int")
        if asked:
            within = sf.coalesce(sf.expr("cast(`partition` as int)"), within)
            within = sf.when(within.between(0, count - 1), within + first).otherwise(none)
        elif first:
            within = within + first
        if not routed:
            return within
        this = sf.col("topic") == topic
        chosen = sf.when(this, within) if chosen is None else chosen.when(this, within)
        first += count
    assert chosen is not None, "there is a topic"
    return chosen.otherwise(none)


def _check(df: DataFrame, topic: str | Sequence[str]) -> frozenset[str]:
    """The names of the columns."""
    types = dict(df.dtypes)
    if "value" not in types:
        raise ConfigurationError(f"the DataFrame needs a column value; its columns are {', '.join(types)}")
    if not isinstance(topic, str) and len(topic) > 1 and "topic" not in types:
        raise ConfigurationError(f"the DataFrame needs a column topic to choose among {', '.join(topic)}")
    for column, kinds in _COLUMNS.items():
        if column in types and types[column] not in kinds:
            raise ConfigurationError(f"column {column} is {types[column]}, it must be {' or '.join(kinds)}")
    return frozenset(types)


def murmur2(df: DataFrame, key: Column) -> Column:
    """Kafka's own murmur2 of a binary column, called in the JVM, or in Python where Kafka's client is not on the class
    path; null for null."""
    session: Any = df.sparkSession
    utils = loaded_class(session._jvm, _KAFKA_UTILS)
    if utils is not None:
        return _static_invoke(session._jvm, utils, "murmur2", key)
    from pyspark.sql import functions as sf

    from spark_connector.murmur2 import murmur2_column

    functions: Any = sf  # its stubs do not know arrow_udf yet
    in_python: Column = functions.arrow_udf(murmur2_column, "int")(key)
    return in_python


def _static_invoke(jvm: Any, owner: Any, method: str, argument: Column) -> Column:
    """A call of a static Java method in the generated code; SQL's reflect() cannot pass bytes."""
    from pyspark.sql.classic.column import Column as ClassicColumn

    expressions = java_class(jvm, "org.apache.spark.sql.classic.ExpressionUtils")
    to_seq = java_class(jvm, "PythonUtils").toSeq
    column: Any = argument
    call = java_class(jvm, "org.apache.spark.sql.catalyst.expressions.objects.StaticInvoke")(
        owner,
        java_class(jvm, "org.apache.spark.sql.types.DataTypes.IntegerType"),
        method,
        to_seq([expressions.expression(column._jc)]),
        to_seq([]),
        True,  # null for null
        True,
        True,
        java_class(jvm, "scala.Option").empty(),
    )
    return ClassicColumn(expressions.column(call))
