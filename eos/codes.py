"""Names Kafka's error codes as Kafka spells them, and lists the codes after which a client repeats its request."""

from __future__ import annotations

from functools import cache

from kafka import errors as kafka_errors

# Codes for which kafka-python has an older Kafka's name, or no name. From `Errors.java` of Kafka 4.4.0.
_NAMES = {
    -1: "UNKNOWN_SERVER_ERROR",
    0: "ok",
    6: "NOT_LEADER_OR_FOLLOWER",
    10: "MESSAGE_TOO_LARGE",
    17: "INVALID_TOPIC_EXCEPTION",
    39: "INVALID_REPLICA_ASSIGNMENT",
    128: "INVALID_REGULAR_EXPRESSION",
}


@cache
def error_name(code: int) -> str:
    """Return `ok`, the protocol's name of the code (NOT_COORDINATOR), or `error 999`."""
    name = _NAMES.get(code) or str(kafka_errors.for_code(code).message)
    return f"error {code}" if name == "UNKNOWN" else name


CODES = range(-1, 200)
RETRIABLE: frozenset[str] = frozenset(error_name(code) for code in CODES if kafka_errors.for_code(code).retriable)
