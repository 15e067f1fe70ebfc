"""Defines the App that a user writes: functions from records to outputs. Pure: no I/O, no Kafka client."""
