"""Exactly-once for Kafka."""
