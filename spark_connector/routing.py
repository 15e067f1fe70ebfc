"""Gives each row its Kafka partition and brings all rows of one share of the partitions to one task, in order.

Owns the DataFrame's columns: what they may be called and be of, which partition a row belongs to (Java's default
partitioner, as the worker's), and the order behind the shuffle. It must never compute a partition from anything but the
row: a lost shuffle file is made again, and a row must land where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eos.errors import ConfigurationError
from spark_connector.jvm import java_class, loaded_class
from spark_connector.packing import ORDER, PACKED, SHARE, TARGET, packer
from spark_connector.targets import Target
from spark_connector.task import REFUSAL

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_HASH = "__eos_hash"
_HEADERS = "array<struct<key:string,value:binary>>"
_COLUMNS = {
    "key": ("string", "binary"),
    "value": ("string", "binary"),
    "topic": ("string",),
    "partition": ("int", "smallint", "tinyint"),
    "headers": (_HEADERS,),
    "timestamp": ("timestamp", "timestamp_ntz"),
}
_POSITIVE = 0x7FFFFFFF
_KAFKA_UTILS = "org.apache.kafka.common.utils.Utils"


def route(df: DataFrame, targets: Sequence[Target], topic: str | Sequence[str], shares: int) -> DataFrame:
    """Packed rows (packing.py) with TARGET (int), `key` and `value` (binary), and `headers` and `timestamp` (ms) if
    they were there.

    Spark partition i holds the rows of share i, which are those of every `targets[n]` with n % `shares` = i, in the
    order of their source. Target `len(targets)` has the rows without one, with the reason in REFUSAL.

    `topic` a string: all rows go there, a `topic` column counts for nothing (as in Spark's own sink). A list: the
    `topic` column chooses among them. Raises ConfigurationError.
    """
    from pyspark.sql import functions as sf

    names = _check(df, topic)
    routed = not isinstance(topic, str) and "topic" in names
    place = _place(targets, routed, "partition" in names)
    rows = ["cast(key as binary) as key" if "key" in names else "cast(null as binary) as key"]
    rows.append("cast(value as binary) as value")
    kept = ["key", "value"]
    if "headers" in names:
        rows.append(f"cast(headers as {_HEADERS}) as headers")
        kept.append("headers")
    if "timestamp" in names:
        rows.append("unix_millis(cast(`timestamp` as timestamp)) as `timestamp`")
        kept.append("`timestamp`")
    where = [name for name, used in (("topic", routed), ("partition", "partition" in names)) if used]
    if where:
        said = ", ".join(f"coalesce(cast(`{name}` as string), 'null')" for name in where)
        kept.append(f"if({place} = {len(targets)}, concat_ws('-', {said}), null) as {REFUSAL}")
    hashed = df.selectExpr(*rows, *(f"`{name}`" for name in where)).withColumn(_HASH, murmur2(df, sf.col("key")))
    placed = hashed.selectExpr(f"{place} as {TARGET}", *kept)
    packed = placed.mapInArrow(packer(shares), PACKED)
    # Sorted by Spark's partition and by the place in it, which is the source's order; a shuffle mixes its blocks.
    return packed.repartitionById(shares, SHARE).sortWithinPartitions(ORDER)


def _place(targets: Sequence[Target], routed: bool, asked: bool) -> str:
    """SQL for the number of a row's target, `len(targets)` for none."""
    # Any partition will do for a row without a key, but always the same one.
    number = f"if(key is null, xxhash64(value), cast({_HASH} as long)) & {_POSITIVE}"
    branches = []
    first = 0
    while first < len(targets):
        topic = targets[first].topic
        count = sum(target.topic == topic for target in targets)
        within = f"cast(({number}) % {count} as int)"
        if asked:
            within = f"coalesce(cast(`partition` as int), {within})"
            within = f"if({within} between 0 and {count - 1}, {within} + {first}, {len(targets)})"
        elif first:
            within = f"{within} + {first}"
        if not routed:
            return within
        branches.append(f"when topic = '{topic}' then {within}")  # topics have no quotes
        first += count
    return f"case {' '.join(branches)} else {len(targets)} end"


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
