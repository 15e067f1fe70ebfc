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
