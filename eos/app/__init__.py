"""The App that a user writes, and its meaning: functions from records to outputs. Pure: no I/O, no Kafka client."""
