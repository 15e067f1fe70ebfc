"""Defines the meaning of each broker error code for a transaction of the sink: data, no I/O.

Owns this one table; no other module of spark_connector may interpret a code. The codes come from Kafka's
org.apache.kafka.common.protocol.Errors; the choice of the retried codes, and the time of a retry, follow Kafka's
TransactionManager and Sender.
"""

from __future__ import annotations

from enum import Enum


class Answer(Enum):
    """Lists the consequences of a broker's answer."""

    DONE = "carried out"
    RETRY = "the same request again, byte for byte, to the broker that is responsible by then"
    FENCED = "the epoch is not ours any more: a newer instance, or the broker's transaction timeout"
    RESTART = "this transaction is lost, a new one repairs it"
    UNAUTHORISED = "stop: not authorised"
    REFUSED = "stop: the records or the settings are refused"


_ROWS: dict[Answer, tuple[int, ...]] = {
    # 46 DUPLICATE_SEQUENCE_NUMBER means that the batch was appended, but the broker no longer remembers its offset.
    Answer.DONE: (0, 46),
    Answer.RETRY: (
        3,  # UNKNOWN_TOPIC_OR_PARTITION: this broker does not know the topic yet
        5,  # LEADER_NOT_AVAILABLE
        6,  # NOT_LEADER_OR_FOLLOWER
        7,  # REQUEST_TIMED_OUT
        13,  # NETWORK_EXCEPTION
        14,  # COORDINATOR_LOAD_IN_PROGRESS
        15,  # COORDINATOR_NOT_AVAILABLE
        16,  # NOT_COORDINATOR
        19,  # NOT_ENOUGH_REPLICAS
        20,  # NOT_ENOUGH_REPLICAS_AFTER_APPEND
        51,  # CONCURRENT_TRANSACTIONS: the coordinator is still completing the previous transaction
        55,  # OPERATION_NOT_ATTEMPTED: the error belongs to another partition of the same request
        56,  # KAFKA_STORAGE_ERROR
        74,  # FENCED_LEADER_EPOCH
        75,  # UNKNOWN_LEADER_EPOCH
        78,  # OFFSET_NOT_AVAILABLE: a new leader does not know its high watermark yet (KIP-207)
        89,  # THROTTLING_QUOTA_EXCEEDED
    ),
    Answer.FENCED: (47, 90),  # INVALID_PRODUCER_EPOCH, PRODUCER_FENCED
    Answer.RESTART: (
        2,  # CORRUPT_MESSAGE
        45,  # OUT_OF_ORDER_SEQUENCE_NUMBER
        48,  # INVALID_TXN_STATE
        49,  # INVALID_PRODUCER_ID_MAPPING
        59,  # UNKNOWN_PRODUCER_ID
        120,  # TRANSACTION_ABORTABLE
    ),
    Answer.UNAUTHORISED: (29, 31, 53, 58),
}
_ANSWERS = {code: answer for answer, codes in _ROWS.items() for code in codes}


def judge(code: int) -> Answer:
    """Return the consequence of an error code; an unknown code stops the batch and never counts as success."""
    return _ANSWERS.get(code, Answer.REFUSED)


class Stopped(Exception):
    """Reports that a transaction cannot continue; `answer` says what its owner must do, `args[0]` is one sentence."""

    def __init__(self, answer: Answer, sentence: str) -> None:
        super().__init__(sentence)
        self.answer = answer
