"""Maps confluent-kafka's errors to actions: one table, measured or taken from librdkafka's sources, and its reader.

Owns the meaning of error codes: no other module may interpret one. Also explains an error to the user, for example
which resource an authorisation error is about.
"""

from __future__ import annotations

from typing import Literal

from confluent_kafka import KafkaError, KafkaException

from eos.errors import Action, Call, CallFailed, missing_right
from eos.records import is_topic_name

_K = KafkaError
ANY: Literal["*"] = "*"

# The coordinator's errors for a member whose generation is older than the last rebalance.
STALE_MEMBER_CODES = frozenset(
    {_K.UNKNOWN_MEMBER_ID, _K.ILLEGAL_GENERATION, _K.REBALANCE_IN_PROGRESS, _K.STALE_MEMBER_EPOCH}
)

# (call, code) -> action; a row for the call takes precedence over a row for any call. Each row was measured, or comes
# from librdkafka's transaction manager. `classify` decides an error without a row by its flags.
TABLE: dict[tuple[Call | Literal["*"], int], Action] = {
    # A newer instance initialised the id, or the broker aborted our transaction at its timeout. Both cause the same
    # error (KIP-360, KIP-447).
    (ANY, _K._FENCED): Action.SETTLE,
    (ANY, _K._FATAL): Action.SETTLE,
    (ANY, _K.INVALID_PRODUCER_EPOCH): Action.SETTLE,
    (ANY, _K.PRODUCER_FENCED): Action.SETTLE,
    # The transactional.id expired (transactional.id.expiration.ms), or the coordinator lost it.
    (ANY, _K.INVALID_PRODUCER_ID_MAPPING): Action.REBUILD,
    (ANY, _K.UNKNOWN_PRODUCER_ID): Action.REBUILD,
    # The group rebalanced without us.
    ("send_offsets", _K.UNKNOWN_MEMBER_ID): Action.ABORT,
    ("send_offsets", _K.ILLEGAL_GENERATION): Action.ABORT,
    ("send_offsets", _K.REBALANCE_IN_PROGRESS): Action.ABORT,
    ("send_offsets", _K.STALE_MEMBER_EPOCH): Action.ABORT,
    ("commit", _K.UNKNOWN_MEMBER_ID): Action.ABORT,
    ("commit", _K.ILLEGAL_GENERATION): Action.ABORT,
    # Static membership: another consumer joined with our group.instance.id after us.
    ("send_offsets", _K.FENCED_INSTANCE_ID): Action.REJOIN,
    ("commit", _K.FENCED_INSTANCE_ID): Action.REJOIN,
    ("consume", _K.FENCED_INSTANCE_ID): Action.REJOIN,
    ("consume", _K._FATAL): Action.REJOIN,
    # An unfinished call was followed by a different one, which the session never does. A new producer ends this state.
    (ANY, _K._CONFLICT): Action.REBUILD,
    (ANY, _K._STATE): Action.BUG,
    (ANY, _K._NOT_CONFIGURED): Action.BUG,
    ("init", _K.INVALID_TRANSACTION_TIMEOUT): Action.MISCONFIGURED,
    ("send_offsets", _K.OFFSET_METADATA_TOO_LARGE): Action.MISCONFIGURED,
    # A newer instance initialised while this init aborted its predecessor's transaction: no need to ask the
    # coordinator.
    ("init", _K._FENCED): Action.FENCED,
    (ANY, _K._INVALID_ARG): Action.MISCONFIGURED,
    # The client (before sending) or the broker refuses one record.
    ("produce", _K.MSG_SIZE_TOO_LARGE): Action.POISON,
    ("produce", _K._UNKNOWN_PARTITION): Action.POISON,
    ("produce", _K._INVALID_ARG): Action.POISON,
    # The client has no open transaction. eos produces only inside one, so the transaction has failed since it began.
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
    # A batch has a wrong checksum, or cannot be decompressed or parsed: librdkafka would read it forever.
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

# code -> action for a record of a changelog. Only a value that is too large is caused by an input record. An error
# without a row here is treated as for any other topic.
CHANGELOG_TABLE: dict[int, Action] = {
    _K.MSG_SIZE_TOO_LARGE: Action.POISON,
    # The topic may have been deleted or recreated, or the client's metadata is older than its partitions.
    _K._UNKNOWN_PARTITION: Action.CHECK_TOPICS,
    _K._UNKNOWN_TOPIC: Action.CHECK_TOPICS,
    _K.UNKNOWN_TOPIC_OR_PART: Action.CHECK_TOPICS,
    _K.UNKNOWN_TOPIC_ID: Action.CHECK_TOPICS,
    _K.INCONSISTENT_TOPIC_ID: Action.CHECK_TOPICS,
    # The broker refuses every record of this kind, so a retry is useless.
    _K._INVALID_ARG: Action.MISCONFIGURED,
    _K.INVALID_MSG: Action.MISCONFIGURED,
    _K.INVALID_RECORD: Action.MISCONFIGURED,
    _K.INVALID_TIMESTAMP: Action.MISCONFIGURED,
    _K.INVALID_REQUIRED_ACKS: Action.MISCONFIGURED,
    _K.POLICY_VIOLATION: Action.MISCONFIGURED,
    _K.TOPIC_EXCEPTION: Action.MISCONFIGURED,
    _K.UNSUPPORTED_COMPRESSION_TYPE: Action.MISCONFIGURED,
}


# These calls change nothing when they fail.
_DEFAULTS: dict[Call, Action] = {
    "delivery": Action.ABORT,
    "consume": Action.RETRY,
    "committed": Action.RETRY,
}


def classify(call: Call, error: KafkaError, of_changelog: bool = False) -> Action:
    """Return the action for `error` raised by (or, for "delivery", reported after) `call`.

    `of_changelog`: the error is about a record of a changelog. Looks in the table, then at the call's default, then at
    librdkafka's flags. An error without any flag replaces the producer; the new one starts from the committed offsets.
    """
    code = error.code()
    if of_changelog and code in CHANGELOG_TABLE:
        return CHANGELOG_TABLE[code]
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


def describe_rebalance(failure: CallFailed) -> str:
    """Return the reason if an abort was caused by an ordinary rebalance, which needs no attention; "" otherwise."""
    if failure.call not in ("send_offsets", "commit") or failure.action is not Action.ABORT:
        return ""
    error = failure.error.args[0] if isinstance(failure.error, KafkaException) else failure.error
    if isinstance(error, RuntimeError):
        return str(error)  # the session noticed the rebalance before the broker refused the offsets
    moved = not isinstance(error, BaseException) and error.code() in STALE_MEMBER_CODES
    return "the group is rebalancing" if moved else ""


def _error_code(error: BaseException | KafkaError) -> int | None:
    """Return the code of a Kafka error; None for another error."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    return error.code() if isinstance(error, KafkaError) else None


def explain_denied(
    error: BaseException | KafkaError, *, group: str = "", transactional_id: str = "", topic: str = ""
) -> str:
    """Return the resource that the call may not use and the ACL that would allow it; "" for any other kind of error.

    Assumes that a call with a transactional.id writes to the topic, and that one without reads it.
    """
    rights = {
        _K.GROUP_AUTHORIZATION_FAILED: (f"group {group}", group, "READ"),
        _K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (f"transactional.id {transactional_id}", transactional_id, "WRITE"),
        _K.TOPIC_AUTHORIZATION_FAILED: (f"topic {topic}", topic, "WRITE" if transactional_id else "READ"),
    }
    resource, name, operation = rights.get(_error_code(error) or KafkaError.NO_ERROR, ("", "", ""))
    return ": ".join(missing_right(resource, operation)) if name else ""


def explain_missing_topic(error: BaseException | KafkaError, topic: str) -> str:
    """Return advice on how to create a missing output topic; "" for any other error."""
    if _error_code(error) not in (_K.UNKNOWN_TOPIC_OR_PART, _K._UNKNOWN_TOPIC) or not is_topic_name(topic):
        return ""
    return f"topic {topic} does not exist: `eos topic create {topic}` creates it"


def explain_too_large(error: BaseException | KafkaError, call: Call, topic: str, size: int, limit: object) -> str:
    """Return the size of a refused record and the setting that refuses it; "" for any other error.

    `size` in bytes. `limit`: the producer's message.max.bytes, None for its default."""
    if _error_code(error) != _K.MSG_SIZE_TOO_LARGE or not size:
        return ""
    if call == "produce":
        limit = 1_000_000 if limit is None else limit
        return f"a record of {size} bytes for topic {topic} exceeds message.max.bytes={limit} of the producer: raise it"
    return f"a record of {size} bytes, or its batch, exceeds max.message.bytes of topic {topic}: raise it there"


def explain_refused_timestamp(error: BaseException | KafkaError) -> str:
    """Return why a topic refuses an output's timestamp; "" for any other error."""
    if _error_code(error) != _K.INVALID_TIMESTAMP:
        return ""
    return (
        "a timestamp is too far ahead of the broker's clock, by default more than an hour "
        "(message.timestamp.after.max.ms), or too old for the topic (message.timestamp.before.max.ms)"
    )


def explain_other_strategy(error: KafkaError, group: str) -> str:
    """Return how to resolve a conflict of assignment strategies in a group; "" for any other error."""
    if error.code() != _K.INCONSISTENT_GROUP_PROTOCOL:
        return ""
    return (
        f"group {group} has members that use another assignment strategy: stop those consumers first, or set "
        "partition.assignment.strategy to theirs"
    )
