"""Define the numbers of the protocol that the shim needs: API keys and first flexible versions.

The tables follow Kafka 4.4.0's message definitions (`common/message/*.json` in kafka-clients).
"""

from __future__ import annotations

from functools import cache

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

# UNKNOWN_PRODUCER_ID. No broker answers EndTxn with it. Protection answers with it after an abort, for clients that
# then request their next identity themselves. Readers of EndTxn responses must treat it as an end of the transaction,
# not an error.
ABORTED_UNKNOWN_PRODUCER_ID = 59

# The newest version of each API that clients are offered: those of Kafka 4.4.0, including an unstable one
# (InitProducerId v6), and APIs 4 to 7, which 3.9 was the last to have. Newer versions may contain addresses and
# identities in fields unknown here. TxnOffsetCommit v6 is not offered, because it names topics only by id.
# fmt: off
NEWEST = {
    0: 13, 1: 18, 2: 11, 3: 13, 4: 7, 5: 4, 6: 8, 7: 3, 8: 10, 9: 10, 10: 6, 11: 9,
    12: 4, 13: 5, 14: 5, 15: 6, 16: 5, 17: 1, 18: 5, 19: 7, 20: 6, 21: 2, 22: 6, 23: 4,
    24: 5, 25: 4, 26: 5, 27: 2, 28: 5, 29: 3, 30: 3, 31: 3, 32: 4, 33: 2, 34: 2, 35: 5,
    36: 2, 37: 3, 38: 3, 39: 2, 40: 2, 41: 3, 42: 3, 43: 2, 44: 1, 45: 1, 46: 0, 47: 0,
    48: 1, 49: 1, 50: 0, 51: 0, 52: 2, 53: 1, 54: 1, 55: 2, 56: 3, 57: 2, 58: 0, 59: 1,
    60: 2, 61: 0, 62: 4, 63: 2, 64: 0, 65: 0, 66: 2, 67: 0, 68: 1, 69: 1, 70: 0, 71: 0,
    72: 0, 73: 0, 74: 1, 75: 0, 76: 1, 77: 1, 78: 2, 79: 2, 80: 1, 81: 0, 82: 0, 83: 0,
    84: 0, 85: 1, 86: 0, 87: 1, 88: 1, 89: 1, 90: 1, 91: 0, 92: 0, 93: 0, 94: 0,
}
# fmt: on

# APIs with a higher key are unknown here, and are counted together as UNKNOWN.
NEWEST_KNOWN = max(NEWEST)
UNKNOWN = 32_767

# From this version on a message and its header have compact lengths and tagged fields (KIP-482).
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
    """Return whether messages of this API and version are flexible. Works only for the APIs of the table."""
    return version >= FIRST_FLEXIBLE[api_key]


@cache
def api_name(api_key: int) -> str:
    if api_key == UNKNOWN:
        return "unknown"
    try:
        return str(ApiKey(api_key).name)
    except ValueError:
        return f"api {api_key}"
