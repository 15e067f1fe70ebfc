"""Converts between bytes and the values, keys and headers of outputs, dead letters and lineage.

Knows no App and no Kafka client.
"""
