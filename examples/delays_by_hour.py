"""Keep delays per airport and hour up to date in a compacted topic, exactly once:

    python examples/delays_by_hour.py SERVERS CHECKPOINT [MOST_RECORDS_OF_A_BATCH]

A stateful query on Spark: departures (of examples/departures.py) -> groupBy(window) -> upserts by key.
"""

import sys

from pyspark.sql import functions as sf

from eos import log
from spark_connector import exactly_once_sink, read_committed, spark_session

SOURCE, TARGET = "departures", "delays-by-hour"


def main(servers: str, checkpoint: str, max_records: str = "60000") -> None:
    config = {
        # Partitions of the state; a checkpoint keeps its initial number.
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
    }
    spark = spark_session("delays-by-hour", config=config)
    departures = read_committed(spark, SOURCE, bootstrap_servers=servers, max_records=int(max_records)).select(
        sf.from_json(sf.col("value").cast("string"), "airport string, hour timestamp, minutes int, late boolean").alias(
            "d"
        )
    )
    # No watermark: a year of hours at three airports is 20,000 rows of state, and no flight comes too late to count.
    delays = departures.groupBy(sf.window("d.hour", "1 hour"), "d.airport").agg(
        sf.count("*").alias("flights"), sf.sum("d.minutes").alias("minutes"), sf.count_if("d.late").alias("late")
    )
    hour = sf.date_format("window.start", "yyyy-MM-dd'T'HH:mm'Z'")
    upserts = delays.select(
        sf.concat_ws(" ", "airport", hour).alias("key"),
        sf.to_json(sf.struct("flights", "minutes", "late")).alias("value"),
    )
    sink = exactly_once_sink(topic=TARGET, transactional_id="delays-by-hour", bootstrap_servers=servers)
    query = upserts.writeStream.outputMode("update").foreachBatch(sink).option("checkpointLocation", checkpoint)
    query.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    log.configure()
    main(*sys.argv[1:])
