"""What can go wrong, named by what the caller must do.

Owns the error tree and the one table that turns a foreign error (confluent-kafka's) into an action. It must
never talk to Kafka, and no other module may look at an error code to decide what to do.

    EosError                    exit code
    ├── UsageError              64   the command line was wrong
    ├── PoisonRecord            65   a record that cannot be handled stopped the worker
    ├── InputGone               66   the input at the committed offset does not exist any more
    ├── Unavailable             69   the cluster cannot be reached, or a preflight check failed
    ├── IllegalState            70   a call in the wrong order: nothing was sent, nothing changed
    ├── Temporary               75   restart me: nothing is lost
    │   └── CommitOutcomeUnknown     a commit was sent and its answer never came
    ├── NotAuthorised           77
    ├── ConfigurationError      78
    └── Fenced                  79   a newer instance owns this transactional.id
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from confluent_kafka import KafkaError, KafkaException


class EosError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is what the command line ends with."""

    exit_code = 70


class UsageError(EosError):
    exit_code = 64


class PoisonRecord(EosError):
    """A record that its function, its decoder or the broker refuses. The original error is the `__cause__`."""

    exit_code = 65

    def __init__(self, message: str, topic: str, partition: int, offset: int) -> None:
        super().__init__(message)
        self.topic, self.partition, self.offset = topic, partition, offset


class InputGone(EosError):
    """The committed offset of a partition is out of range; resetting it silently would lose or repeat records."""

    exit_code = 66


class Unavailable(EosError):
    exit_code = 69


class IllegalState(EosError):
    """A call that is not legal in the present state of the transaction; it was refused before it did anything."""

    exit_code = 70


class Temporary(EosError):
    """This process cannot go on, a restarted one can: committed work stays, the rest is read again."""

    exit_code = 75


class CommitOutcomeUnknown(Temporary):
    """The commit may or may not have happened. A session with an input resolves this by the group's offsets."""


class NotAuthorised(EosError):
    exit_code = 77


class ConfigurationError(EosError):
    exit_code = 78


class Fenced(EosError):
    """A newer instance with the same transactional.id took over; going on would fence it in turn."""

    exit_code = 79


class Action(Enum):
    """What the caller of a failed call must do; the only answer `classify` gives."""

    RETRY = "call the same function again, inside a deadline"
    ABORT = "abort the transaction and hand its records out again"
    REBUILD = "replace the producer, then go on from the group's stable committed offsets"
    SETTLE = "find out who owns the transactional.id before anything else"
    POISON = "the record is refused for good: treat it like a record whose function raised"
    INPUT_GONE = "stop: the input at the committed offset is gone"
    UNAVAILABLE = "stop: something that must exist does not"
    UNAUTHORISED = "stop: not authorised"
    MISCONFIGURED = "stop: the configuration is wrong"
    FENCED = "stop: a newer instance took over"
    BUG = "stop: a call in the wrong order, which our own guard should have refused"


# The consumer's and the producer's calls, as the table names them. "delivery" is the error of a delivery report:
# it always comes with all three flags unset, so flags are never looked at there.
Call = Literal[
    "init", "begin", "produce", "delivery", "flush", "send_offsets", "commit", "abort", "consume", "committed"
]

_K = KafkaError
_ANY: Literal["*"] = "*"

# (call, code) -> action; a row for the call wins over a row for any call. Each row is measured or from librdkafka's
# transaction manager; what has no row is decided by its flags in `classify`.
TABLE: dict[tuple[Call | Literal["*"], int], Action] = {
    # A newer init, or the broker timed our transaction out: both look the same (KIP-360, KIP-447).
    (_ANY, _K._FENCED): Action.SETTLE,
    (_ANY, _K._FATAL): Action.SETTLE,
    (_ANY, _K.INVALID_PRODUCER_EPOCH): Action.SETTLE,
    (_ANY, _K.PRODUCER_FENCED): Action.SETTLE,
    # The transactional.id expired (transactional.id.expiration.ms), or the coordinator lost it: nobody's fault.
    (_ANY, _K.INVALID_PRODUCER_ID_MAPPING): Action.REBUILD,
    (_ANY, _K.UNKNOWN_PRODUCER_ID): Action.REBUILD,
    # The group moved on without us.
    ("send_offsets", _K.UNKNOWN_MEMBER_ID): Action.ABORT,
    ("send_offsets", _K.ILLEGAL_GENERATION): Action.ABORT,
    ("send_offsets", _K.REBALANCE_IN_PROGRESS): Action.ABORT,
    ("send_offsets", _K.STALE_MEMBER_EPOCH): Action.ABORT,
    ("commit", _K.UNKNOWN_MEMBER_ID): Action.ABORT,
    ("commit", _K.ILLEGAL_GENERATION): Action.ABORT,
    # Static membership: another consumer joined with our group.instance.id, after us.
    ("send_offsets", _K.FENCED_INSTANCE_ID): Action.FENCED,
    ("commit", _K.FENCED_INSTANCE_ID): Action.FENCED,
    ("consume", _K.FENCED_INSTANCE_ID): Action.FENCED,
    ("consume", _K._FATAL): Action.FENCED,
    # A call that was left for another one; the session never does so, a replaced producer clears it.
    (_ANY, _K._CONFLICT): Action.REBUILD,
    (_ANY, _K._STATE): Action.BUG,
    (_ANY, _K._NOT_CONFIGURED): Action.BUG,
    ("init", _K.INVALID_TRANSACTION_TIMEOUT): Action.MISCONFIGURED,
    (_ANY, _K._INVALID_ARG): Action.MISCONFIGURED,
    # One record is refused, by the client before it left or by the broker.
    ("produce", _K.MSG_SIZE_TOO_LARGE): Action.POISON,
    ("produce", _K._UNKNOWN_PARTITION): Action.POISON,
    ("produce", _K._INVALID_ARG): Action.POISON,
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
    ("consume", _K.INVALID_SESSION_TIMEOUT): Action.MISCONFIGURED,
    ("consume", _K.INCONSISTENT_GROUP_PROTOCOL): Action.MISCONFIGURED,
    ("consume", _K.INVALID_GROUP_ID): Action.MISCONFIGURED,
    ("consume", _K.UNSUPPORTED_ASSIGNOR): Action.MISCONFIGURED,
    (_ANY, _K.UNSUPPORTED_VERSION): Action.MISCONFIGURED,
    (_ANY, _K._UNSUPPORTED_FEATURE): Action.MISCONFIGURED,
    (_ANY, _K.TOPIC_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (_ANY, _K.GROUP_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (_ANY, _K.CLUSTER_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (_ANY, _K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED): Action.UNAUTHORISED,
    (_ANY, _K.SASL_AUTHENTICATION_FAILED): Action.UNAUTHORISED,
    (_ANY, _K._AUTHENTICATION): Action.UNAUTHORISED,
}

# Without flags these calls change nothing by failing, so trying again is safe.
_DEFAULTS: dict[Call, Action] = {
    "delivery": Action.ABORT,
    "consume": Action.RETRY,
    "committed": Action.RETRY,
}


def classify(call: Call, error: KafkaError) -> Action:
    """The action for `error` raised by (or, for "delivery", reported after) `call`.

    Order: the table; what the call defaults to; librdkafka's flags; and an error without any flag ends this
    producer, whose successor starts from what is committed.
    """
    code = error.code()
    row = TABLE.get((call, code)) or TABLE.get((_ANY, code))
    if row is not None:
        return row
    if call in _DEFAULTS:
        return _DEFAULTS[call]
    if error.txn_requires_abort():
        return Action.ABORT
    if error.retriable() and not error.fatal():
        return Action.RETRY
    return Action.REBUILD


class CallFailed(Exception):
    """A client call failed in a way that `action` says how to handle. Internal: it never leaves a session."""

    def __init__(self, call: Call, action: Action, cause: BaseException | KafkaError) -> None:
        super().__init__(f"{call}: {describe_error(cause)}")
        self.call, self.action, self.error = call, action, cause


def describe_error(error: BaseException | KafkaError) -> str:
    """One line: the code's name and librdkafka's sentence, or the exception."""
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        error = error.args[0]
    if isinstance(error, KafkaError):
        return f"{error.name()} ({error.str()})"
    return f"{type(error).__name__}: {error}"


def stop_error(failure: CallFailed) -> EosError:
    """The public error of a failure whose action is to stop; its cause is the original."""
    kinds: dict[Action, type[EosError]] = {
        Action.UNAVAILABLE: Unavailable,
        Action.UNAUTHORISED: NotAuthorised,
        Action.MISCONFIGURED: ConfigurationError,
        Action.FENCED: Fenced,
        Action.INPUT_GONE: InputGone,
        Action.BUG: IllegalState,
    }
    stopped = kinds.get(failure.action, Temporary)(str(failure))
    stopped.__cause__ = failure
    return stopped
