"""What an error of confluent-kafka's asks for: one table, measured or from librdkafka's sources, and its one reader.

Owns what error codes mean; no other module may look at one to decide what to do. Beside it, which resource an error of
authorisation is about.
"""

from __future__ import annotations

from typing import Literal

from confluent_kafka import KafkaError, KafkaException

from eos.errors import Action, Call, CallFailed, missing_right
from eos.records import is_topic_name

_K = KafkaError
ANY: Literal["*"] = "*"

# What the coordinator answers to a member of before the last rebalance.
GROUP_MOVED_ON = frozenset(
    {_K.UNKNOWN_MEMBER_ID, _K.ILLEGAL_GENERATION, _K.REBALANCE_IN_PROGRESS, _K.STALE_MEMBER_EPOCH}
)

# (call, code) -> action; a row for the call wins over a row for any call. Each row is measured or from librdkafka's
# transaction manager; what has no row is decided by its flags in `classify`.
TABLE: dict[tuple[Call | Literal["*"], int], Action] = {
    # A newer init, or the broker timed our transaction out: both look the same (KIP-360, KIP-447).
    (ANY, _K._FENCED): Action.SETTLE,
    (ANY, _K._FATAL): Action.SETTLE,
    (ANY, _K.INVALID_PRODUCER_EPOCH): Action.SETTLE,
    (ANY, _K.PRODUCER_FENCED): Action.SETTLE,
    # The transactional.id expired (transactional.id.expiration.ms), or the coordinator lost it: nobody's fault.
    (ANY, _K.INVALID_PRODUCER_ID_MAPPING): Action.REBUILD,
    (ANY, _K.UNKNOWN_PRODUCER_ID): Action.REBUILD,
    # The group moved on without us.
    ("send_offsets", _K.UNKNOWN_MEMBER_ID): Action.ABORT,
    ("send_offsets", _K.ILLEGAL_GENERATION): Action.ABORT,
    ("send_offsets", _K.REBALANCE_IN_PROGRESS): Action.ABORT,
    ("send_offsets", _K.STALE_MEMBER_EPOCH): Action.ABORT,
    ("commit", _K.UNKNOWN_MEMBER_ID): Action.ABORT,
    ("commit", _K.ILLEGAL_GENERATION): Action.ABORT,
    # Static membership: another consumer joined with our group.instance.id, after us.
    ("send_offsets", _K.FENCED_INSTANCE_ID): Action.REJOIN,
    ("commit", _K.FENCED_INSTANCE_ID): Action.REJOIN,
    ("consume", _K.FENCED_INSTANCE_ID): Action.REJOIN,
    ("consume", _K._FATAL): Action.REJOIN,
    # A call that was left for another one; the session never does so, a replaced producer clears it.
    (ANY, _K._CONFLICT): Action.REBUILD,
    (ANY, _K._STATE): Action.BUG,
    (ANY, _K._NOT_CONFIGURED): Action.BUG,
    ("init", _K.INVALID_TRANSACTION_TIMEOUT): Action.MISCONFIGURED,
    ("send_offsets", _K.OFFSET_METADATA_TOO_LARGE): Action.MISCONFIGURED,
    # Nobody to ask: a newer instance initialised while this init aborted what a predecessor left open.
    ("init", _K._FENCED): Action.FENCED,
    (ANY, _K._INVALID_ARG): Action.MISCONFIGURED,
    # One record is refused, by the client before it left or by the broker.
    ("produce", _K.MSG_SIZE_TOO_LARGE): Action.POISON,
    ("produce", _K._UNKNOWN_PARTITION): Action.POISON,
    ("produce", _K._INVALID_ARG): Action.POISON,
    # Our own guard lets it through inside a transaction only: the client's own has failed since, and takes no more.
    ("produce", _K._STATE): Action.ABORT,
    ("delivery", _K.MSG_SIZE_TOO_LARGE): Action.POISON,
    ("delivery", _K.INVALID_MSG): Action.POISON,
    ("delivery", _K.INVALID_TIMESTAMP): Action.POISON,
    ("delivery", _K.INVALID_RECORD): Action.POISON,
    ("delivery", _K._UNKNOWN_PARTITION): Action.POISON,
    ("produce", _K._UNKNOWN_TOPIC): Action.UNAVAILABLE,
    ("produce", _K.UNKNOWN_TOPIC_OR_PART): Action.UNAVAILABLE,
    ("delivery", _K.UNKNOWN_TOPIC_OR_PART): Action.UNAVAILABLE,
    ("delivery", _K._UNKNOWN_TOPIC): Action.UNAVAILABLE,
    ("consume", _K.UNKNOWN_TOPIC_OR_PART): Action.UNAVAILABLE,
    ("consume", _K._UNKNOWN_TOPIC): Action.UNAVAILABLE,
    ("consume", _K._AUTO_OFFSET_RESET): Action.INPUT_GONE,
    ("consume", _K.OFFSET_OUT_OF_RANGE): Action.INPUT_GONE,
    # A batch with a wrong checksum, or that cannot be decompressed or understood: librdkafka reads it again and again.
    ("consume", _K._BAD_MSG): Action.DAMAGED,
    ("consume", _K._BAD_COMPRESSION): Action.DAMAGED,
    ("consume", _K._NOT_IMPLEMENTED): Action.DAMAGED,
    ("consume", _K.INVALID_SESSION_TIMEOUT): Action.MISCONFIGURED,
    ("consume", _K.INCONSISTENT_GROUP_PROTOCOL): Action.MISCONFIGURED,
    ("consume", _K.INVALID_GROUP_ID): Action.MISCONFIGURED,
    ("consume", _K.UNSUPPORTED_ASSIGNOR): Action.MISCONFIGURED,
    (ANY, _K.UNSUPPORTED_VERSION): Action.MISCONFIGURED,
    (ANY, _K._UNSUPPORTED_FEATURE): Action.MISCONFIGURED,
    (ANY, _K.TOPIC_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (ANY, _K.GROUP_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (ANY, _K.CLUSTER_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (ANY, _K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (ANY, _K.SASL_AUTHENTICATION_FAILED): Action.UNAUTHORISED,
    (ANY, _K._AUTHENTICATION): Action.UNAUTHORISED,
}

# code -> action for a record of a changelog, a topic that the session keeps for itself. Only a value that is too large
# is an input record's. What has no row is decided as for any other topic.
TABLE_OF_CHANGELOGS: dict[int, Action] = {
    _K.MSG_SIZE_TOO_LARGE: Action.POISON,
    # The topic may have been deleted or recreated, or the client's metadata are older than its partitions.
    _K._UNKNOWN_PARTITION: Action.LOOK,
    _K._UNKNOWN_TOPIC: Action.LOOK,
    _K.UNKNOWN_TOPIC_OR_PART: Action.LOOK,
    _K.UNKNOWN_TOPIC_ID: Action.LOOK,
    _K.INCONSISTENT_TOPIC_ID: Action.LOOK,
    # The broker refuses every record like it.
    _K._INVALID_ARG: Action.MISCONFIGURED,
    _K.INVALID_MSG: Action.MISCONFIGURED,
    _K.INVALID_RECORD: Action.MISCONFIGURED,
    _K.INVALID_TIMESTAMP: Action.MISCONFIGURED,
    _K.INVALID_REQUIRED_ACKS: Action.MISCONFIGURED,
    _K.POLICY_VIOLATION: Action.MISCONFIGURED,
    _K.TOPIC_EXCEPTION: Action.MISCONFIGURED,
    _K.UNSUPPORTED_COMPRESSION_TYPE: Action.MISCONFIGURED,
}


# Without flags these calls change nothing by failing, so trying again is safe.
_DEFAULTS: dict[Call, Action] = {
    "delivery": Action.ABORT,
    "consume": Action.RETRY,
    "committed": Action.RETRY,
}


def classify(call: Call, error: KafkaError, of_changelog: bool = False) -> Action:
    """Return the action for `error` raised by (or, for "delivery", reported after) `call`. `of_changelog`: the error is
    about a record of a changelog.

    Order: the table; what the call defaults to; librdkafka's flags; and an error without any flag ends this
    producer, whose successor starts from what is committed.
    """
    code = error.code()
    if of_changelog and code in TABLE_OF_CHANGELOGS:
        return TABLE_OF_CHANGELOGS[code]
    row = TABLE.get((call, code)) or TABLE.get((ANY, code))
    if row is not None:
        return row
    if call in _DEFAULTS:
        return _DEFAULTS[call]
    if error.txn_requires_abort():
        return Action.ABORT
    if error.retriable() and not error.fatal():
        return Action.RETRY
    return Action.REBUILD


def rebalanced(failure: CallFailed) -> str:
    """Why an abort is an ordinary rebalance, which costs an interval of work and needs nobody; "" where it is not."""
    if failure.call not in ("send_offsets", "commit") or failure.action is not Action.ABORT:
        return ""
    error = failure.error.args[0] if isinstance(failure.error, KafkaException) else failure.error
    if isinstance(error, RuntimeError):
        return str(error)  # found by ourselves, before the broker could refuse it
    moved = not isinstance(error, BaseException) and error.code() in GROUP_MOVED_ON
    return "the group rebalances" if moved else ""


def _code(error: BaseException | KafkaError) -> int | None:
    """Of Kafka's errors; None for another one."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    return error.code() if isinstance(error, KafkaError) else None


def denied(error: BaseException | KafkaError, *, group: str = "", transactional_id: str = "", topic: str = "") -> str:
    """The resource that an error of authorisation is about, among those that the call was about; "" for another error.

    A topic is written to by a call with a transactional.id and read by one without.
    """
    rights = {
        _K.GROUP_AUTHORIZATION_FAILED: (f"group {group}", group, "READ"),
        _K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (f"transactional.id {transactional_id}", transactional_id, "WRITE"),
        _K.TOPIC_AUTHORIZATION_FAILED: (f"topic {topic}", topic, "WRITE" if transactional_id else "READ"),
    }
    resource, name, operation = rights.get(_code(error) or KafkaError.NO_ERROR, ("", "", ""))
    return ": ".join(missing_right(resource, operation)) if name else ""


def missing(error: BaseException | KafkaError, topic: str) -> str:
    """What to do about an output's topic that is not there; "" for another error."""
    if _code(error) not in (_K.UNKNOWN_TOPIC_OR_PART, _K._UNKNOWN_TOPIC) or not is_topic_name(topic):
        return ""
    return f"topic {topic} does not exist: `eos topic create {topic}` makes it"


def too_large(error: BaseException | KafkaError, call: Call, topic: str, size: int, limit: object) -> str:
    """Say how large a refused record of `size` bytes is and which setting refuses it; "" for another error. `limit`:
    the producer's message.max.bytes, None for its default."""
    if _code(error) != _K.MSG_SIZE_TOO_LARGE or not size:
        return ""
    if call == "produce":
        limit = 1_000_000 if limit is None else limit
        return f"a record of {size} bytes for topic {topic} exceeds message.max.bytes={limit} of the producer: raise it"
    return f"a record of {size} bytes, or its batch, exceeds max.message.bytes of topic {topic}: raise it there"


def refused_timestamp(error: BaseException | KafkaError) -> str:
    """Why a topic refuses an output's timestamp; "" for another error."""
    if _code(error) != _K.INVALID_TIMESTAMP:
        return ""
    return (
        "a timestamp is too far ahead of the broker's clock, by default more than an hour "
        "(message.timestamp.after.max.ms), or too old for the topic (message.timestamp.before.max.ms)"
    )


def other_strategy(error: KafkaError, group: str) -> str:
    """What to do about members that share a group's partitions in another way; "" for another error."""
    if error.code() != _K.INCONSISTENT_GROUP_PROTOCOL:
        return ""
    return (
        f"group {group} has members that share its partitions by another strategy: stop those consumers first, or set "
        "partition.assignment.strategy to theirs"
    )
