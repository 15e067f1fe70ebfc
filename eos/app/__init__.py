"""What a user writes and what it means: functions from records to outputs. Pure: no I/O, no Kafka client."""
