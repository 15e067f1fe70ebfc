"""The numbers of the protocol the shim needs to know: API keys, first flexible versions, error names.

Owns these tables only. They follow Kafka 4.3.1's message definitions (`common/message/*.json` in kafka-clients).
"""

from __future__ import annotations

from functools import cache

from kafka import errors as kafka_errors
from kafka.protocol.api_key import ApiKey

PRODUCE = 0
FETCH = 1
METADATA = 3
OFFSET_COMMIT = 8
FIND_COORDINATOR = 10
SASL_HANDSHAKE = 17
API_VERSIONS = 18
INIT_PRODUCER_ID = 22
ADD_PARTITIONS_TO_TXN = 24
ADD_OFFSETS_TO_TXN = 25
END_TXN = 26
TXN_OFFSET_COMMIT = 28
SASL_AUTHENTICATE = 36
DESCRIBE_CLUSTER = 60
DESCRIBE_TRANSACTIONS = 65
SHARE_FETCH = 78
SHARE_ACKNOWLEDGE = 79

# UNKNOWN_PRODUCER_ID. No broker answers an EndTxn with it; protection does once an abort is done, to clients that then
# take their next identity by themselves. Whoever reads EndTxn's answers takes it for an end, not for an error.
ABORTED_TAKE_THE_NEXT_IDENTITY = 59

# The newest API of Kafka 4.3.1; what lies beyond is unknown here.
NEWEST_KNOWN = 92

# From this version on a message has compact lengths and tagged fields, and so has its header (KIP-482).
FIRST_FLEXIBLE = {
    PRODUCE: 9,
    FETCH: 12,
    METADATA: 9,
    FIND_COORDINATOR: 3,
    API_VERSIONS: 3,
    INIT_PRODUCER_ID: 2,
    ADD_PARTITIONS_TO_TXN: 3,
    ADD_OFFSETS_TO_TXN: 3,
    END_TXN: 3,
    TXN_OFFSET_COMMIT: 3,
    DESCRIBE_CLUSTER: 0,
    DESCRIBE_TRANSACTIONS: 0,
    SHARE_FETCH: 0,
    SHARE_ACKNOWLEDGE: 0,
}


def is_flexible(api_key: int, version: int) -> bool:
    """Whether messages of this API and version are flexible; only for the APIs of the table."""
    return version >= FIRST_FLEXIBLE[api_key]


@cache
def api_name(api_key: int) -> str:
    try:
        return str(ApiKey(api_key).name)
    except ValueError:
        return f"api {api_key}"


# Names of errors that a client answers by asking again.
RETRIABLE_ERRORS: frozenset[str] = frozenset(
    str(kind.message) for kind in map(kafka_errors.for_code, range(200)) if kind.retriable
)


def error_name(code: int) -> str:
    """`ok`, the protocol's name (NOT_COORDINATOR), or the number."""
    if code == 0:
        return "ok"
    name = str(getattr(kafka_errors.for_code(code), "message", "UNKNOWN"))
    return f"error {code}" if name == "UNKNOWN" else name
