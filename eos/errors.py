"""Defines the errors of this package, named by what the caller must do.

Owns the error tree and the actions. eos/kafka/client/failures.py maps errors of the client to actions. This module must
never talk to Kafka, and importing it loads no Kafka client, because a Spark executor that runs an App has none.

    EosError                    exit code
    ├── UsageError              64   the command line was wrong
    │   └── ImportFailed             a user's module raised while it was imported
    ├── PoisonRecord            65   a record that cannot be handled stopped the worker
    ├── InputGone               66   the input at the committed offset no longer exists, or is damaged
    ├── Unavailable             69   the cluster cannot be reached, or a preflight check failed
    ├── IllegalState            70   a call in the wrong order; it sent and changed nothing
    ├── Temporary               75   a restart helps; nothing is lost
    │   └── CommitOutcomeUnknown     a commit was sent and never answered
    ├── NotAuthorised           77
    ├── ConfigurationError      78
    └── Fenced                  79   a newer instance owns this transactional.id
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from confluent_kafka import KafkaError


class EosError(Exception):
    """Is the base of every error that this package raises on purpose.

    `exit_code` is the exit code of the command line. `remedy` says what to do, and follows the message."""

    exit_code = 70

    def __init__(self, *args: object, remedy: str = "") -> None:
        super().__init__(*args)
        self.remedy = remedy

    def __str__(self) -> str:
        sentence = super().__str__()
        return f"{sentence}: {self.remedy}" if self.remedy else sentence


class UsageError(EosError):
    exit_code = 64


class ImportFailed(UsageError):
    """Reports that a user's module raised the `__cause__` while it was imported."""


class PoisonRecord(EosError):
    """Reports a record that its function, its decoder or the broker refused. `__cause__` is the reason."""

    exit_code = 65

    def __init__(self, message: str, topic: str, partition: int, offset: int) -> None:
        super().__init__(message)
        self.topic, self.partition, self.offset = topic, partition, offset


class InputGone(EosError):
    """Reports that the committed offset of a partition is out of range, the batch there is damaged, or its state is
    lost.

    A silent new start would lose or repeat records."""

    exit_code = 66


class Unavailable(EosError):
    exit_code = 69


class IllegalState(EosError):
    """Reports a call that is illegal in the present state of the transaction. It was refused before it did anything."""

    exit_code = 70


class Temporary(EosError):
    """Reports that this process cannot continue, but a restarted one can. Committed work stays; all else is read
    again."""

    exit_code = 75


class CommitOutcomeUnknown(Temporary):
    """Reports that a commit may or may not have succeeded. A session with an input resolves this by the group's
    offsets."""


class NotAuthorised(EosError):
    exit_code = 77


class ConfigurationError(EosError):
    exit_code = 78


class Fenced(EosError):
    """Reports that a newer instance with the same transactional.id took over. To continue would fence the newer
    instance."""

    exit_code = 79


class Interruption(BaseException):
    """Interrupts the main thread, wherever it is: a signal handler of this package raises it.

    A BaseException, so that no `except Exception` of a user's function swallows it.
    """


_MOST_CAUSES: Final = 1_000


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its group members, and the exceptions that led to each of them, nearest first."""
    waiting = deque([error])
    for _ in range(_MOST_CAUSES):
        if not waiting:
            return
        one = waiting.popleft()
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        if (cause := one.__cause__ or (None if one.__suppress_context__ else one.__context__)) is not None:
            waiting.append(cause)


def interruption_of(error: BaseException) -> BaseException | None:
    """Return the Interruption or Ctrl-C in this thread that `error` is or was caused by; otherwise None.

    Everything else that user code raises is a failure of that code: SystemExit, CancelledError, and a
    KeyboardInterrupt where Ctrl-C has another handler than Python's.
    """
    if isinstance(error, KeyboardInterrupt):
        in_main = threading.current_thread() is threading.main_thread()
        return error if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler else None
    return next((one for one in causes(error) if isinstance(one, Interruption)), None)


def raise_if_interrupted(error: BaseException) -> None:
    """Raise what `interruption_of` returns, if anything."""
    if (interruption := interruption_of(error)) is not None:
        raise interruption


def safe_str(error: BaseException) -> str:
    """Return the text of an exception; for an ExceptionGroup, also the texts of its exceptions.

    If `__str__` raises, the text names the error that it raised.
    """
    try:
        text = str(error)
        if isinstance(error, BaseExceptionGroup):
            text += ": " + "; ".join(f"{type(one).__name__}: {safe_str(one)}" for one in error.exceptions)
    except BaseException as failure:  # noqa: BLE001 - user code may raise anything
        raise_if_interrupted(failure)
        return f"(its __str__ raised {type(failure).__name__})"
    return text


class Action(Enum):
    """Lists the actions that a failed call can require of its caller. `classify` returns one."""

    RETRY = "call the same function again, inside a deadline"
    ABORT = "abort the transaction and hand its records out again"
    REBUILD = "replace the producer, then continue from the group's stable committed offsets"
    SETTLE = "find out who owns the transactional.id before anything else"
    POISON = "the record is refused permanently: treat it like a record whose function raised"
    INPUT_GONE = "stop: the input at the committed offset is gone"
    DAMAGED = "stop once all earlier records are committed: the batch there cannot be read"
    UNAVAILABLE = "stop: something that must exist does not"
    UNAUTHORISED = "stop: not authorised"
    MISCONFIGURED = "stop: the configuration is wrong"
    FENCED = "stop: a newer instance took over"
    CHECK_TOPICS = "stop if a topic of the session's own was deleted or recreated; else as REBUILD"
    REJOIN = "find out who owns the transactional.id; if it is still ours, join the group with a new consumer"
    INTERRUPTED = "drop everything in progress, and start from the committed offsets with new clients"
    BUG = "stop: a call in the wrong order, which our own checks should have refused"


# Calls of the consumer and the producer, as the table of failures names them. "delivery" stands for the error of a
# delivery report, whose three flags are ignored because they are always unset.
Call = Literal[
    "init",
    "begin",
    "produce",
    "delivery",
    "flush",
    "send_offsets",
    "commit",
    "abort",
    "consume",
    "committed",
    "seek",
    "database",
]


class CallFailed(Exception):
    """Reports a failed client call; `action` says how to handle it. Internal: it never leaves a session.

    `sentence` precedes the call and its error in the message, if they alone say too little. `record`: the input record
    whose output it is about, if that is known."""

    def __init__(
        self, call: Call, action: Action, cause: BaseException | KafkaError, sentence: str = "", record: Any = None
    ) -> None:
        described = f"{call}: {describe_error(cause)}"
        super().__init__(f"{sentence} ({described})" if sentence else described)
        self.call, self.action, self.error, self.sentence, self.record = call, action, cause, sentence, record

    def about(self, record: Any) -> CallFailed:
        """Return the same failure with the input record whose output it is about."""
        known = CallFailed(self.call, self.action, self.error, self.sentence, record)
        known.__cause__ = self.__cause__
        return known


_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


def no_broker(servers: str) -> str:
    """Return the remedy for unreachable brokers; on this machine it includes starting one."""
    remedy = "check bootstrap.servers, security.protocol, and that a broker listens there for this machine"
    hosts = {server.strip().rpartition(":")[0] for server in servers.split(",")}
    return f"{remedy}; `eos broker start` starts one here" if hosts & _THIS_MACHINE else remedy


def missing_right(resource: str, operation: str) -> tuple[str, str]:
    """Return the message about a missing right, and its remedy."""
    return f"{resource}: not authorised to {operation} it", f"add an ACL that allows {operation} on {resource}"


def not_authorised(resource: str, operation: str) -> NotAuthorised:
    sentence, remedy = missing_right(resource, operation)
    return NotAuthorised(sentence, remedy=remedy)


def describe_error(error: BaseException | KafkaError) -> str:
    """Return one line: the error code's name with librdkafka's message, or the exception."""
    from confluent_kafka import KafkaError, KafkaException

    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        error = error.args[0]
    if isinstance(error, KafkaError):
        return f"{error.name()} ({error.str()})"
    return f"{type(error).__name__}: {safe_str(error) if isinstance(error, BaseException) else error}"


def stop_error(failure: CallFailed) -> EosError:
    """Return the public error of a failure that stops the session, with the failure as its cause."""
    kinds: dict[Action, type[EosError]] = {
        Action.UNAVAILABLE: Unavailable,
        Action.UNAUTHORISED: NotAuthorised,
        Action.MISCONFIGURED: ConfigurationError,
        Action.FENCED: Fenced,
        Action.INPUT_GONE: InputGone,
        Action.DAMAGED: InputGone,
        Action.BUG: IllegalState,
    }
    stopped = kinds.get(failure.action, Temporary)(str(failure))
    stopped.__cause__ = failure
    return stopped
