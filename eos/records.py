"""Defines input and output records (Record, Out), and the interface through which outputs are sent (Sink).

It must never do I/O or import a Kafka client.
"""

from __future__ import annotations

import enum
import json
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NoReturn, Protocol, cast, final

import msgspec

from eos import hotloop
from eos.errors import CallFailed

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    V = TypeVar("V", covariant=True, default=bytes | None)
else:
    V = typing.TypeVar("V", covariant=True)
Header = tuple[str, bytes | None]


class UnreadableHeaders(Sequence[Header]):
    """Stands for the headers of a record with a header name that is not UTF-8; reading them raises ValueError.

    `readable`: the other headers, in order. `why`: the message of the error."""

    def __init__(self, readable: Sequence[Header], why: str) -> None:
        self.readable, self.why = readable, why

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(self.why)

    __len__ = __getitem__ = __iter__ = __contains__ = _refuse


def readable_headers(headers: Sequence[Header]) -> Sequence[Header]:
    """Return the headers that can be read, for code that shows or keeps a record even if others cannot be read."""
    return headers.readable if isinstance(headers, UnreadableHeaders) else headers


# An encoded output for the producer: (topic, value, key, partition, timestamp_ms, headers).
# partition -1: the partitioner decides. timestamp_ms 0: the time when it is sent.
Send = tuple[str, bytes | None, bytes | None, int, int, list[Header] | None]
SendAll = Callable[[Iterable[Send]], None]


def format_position(topic: str, partition: int, offset: int | None = None) -> str:
    """Return a partition or an offset as text: `topic[partition]@offset`, the form that the commands accept."""
    return f"{topic}[{partition}]" if offset is None else f"{topic}[{partition}]@{offset}"


def is_topic_name(name: object) -> bool:
    """Return True if Kafka accepts the name for a topic (org.apache.kafka.common.internals.Topic)."""
    return isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name)) and name not in (".", "..")


def is_pattern(source: str) -> bool:
    """Return True if a source is a pattern and not a name, by the rule of librdkafka's and Java's subscribe."""
    return source.startswith("^")


class Sink(Protocol):
    """Receives the outputs of a feed: a producer, or a replacement in tests."""

    @property
    def produce(self) -> Callable[..., object]:
        """Return confluent-kafka's produce(), to be called with positional arguments.

        They are (topic, value, key[, partition, None, None, timestamp_ms[, headers]]). The list of headers may be the
        application's own, so a sink that keeps it must copy it."""

    def on_produce_error(self, error: Exception, send: Send) -> object:
        """Handle an error of `produce`: send the output again, or raise CallFailed."""


class FeedResult(NamedTuple):
    """Holds the result of a feed: `sent` outputs of the first `handled` records were sent.

    `error`: the exception of the next record's function (none of its outputs was sent), or the CallFailed of
    `on_produce_error`, or None if all records were handled. `culprit`: the record that the error is about, if known."""

    sent: int
    handled: int
    error: BaseException | None
    culprit: Record | None = None

    @property
    def failure(self) -> CallFailed | None:
        """Return the error if the client raised it, or None if a function did."""
        if not isinstance(self.error, CallFailed):
            return None
        # A delivery that failed is reported during the send of some other record.
        return self.error.about(self.culprit) if self.error.call == "produce" else self.error


class Keep(enum.Enum):
    """Is the type of KEEP: an enum member stays the same object in copies and pickles, and mypy narrows it."""

    KEEP = "KEEP"

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = Keep.KEEP


# Millions of Records are made per second, so their fields are positional, and the cyclic garbage collector ignores them
# (gc=False). They are frozen, because a function must not change a record whose outputs keep its key and timestamp.
@final
class Record(msgspec.Struct, Generic[V], frozen=True, gc=False):
    """Holds a record as it was read.

    `timestamp`: milliseconds since the epoch, -1 if unknown. `value` None: a tombstone. `headers`: (name, bytes or
    None) pairs. As a parameter's annotation, `Record[Order]` means a record whose value is decoded to an Order."""

    topic: str
    partition: int
    offset: int
    timestamp: int = -1
    key: bytes | None = None
    value: V = cast("V", None)
    headers: Sequence[Header] = ()

    def __init_subclass__(cls) -> None:
        # `type(x) is Out` is six times faster than `isinstance` of a Struct: both types are closed.
        raise TypeError("Record cannot be subclassed")

    def out(
        self,
        value: object,
        key: object = KEEP,
        topic: str | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Out:
        """Return an Out with this record's timestamp and, without `key`, its key. The parameters are those of Out."""
        timestamp = self.timestamp
        return Out(
            value,
            self.key if key is KEEP else key,
            topic,
            headers,
            partition,
            timestamp if timestamp > 0 else 0,  # 0: unknown, so it becomes the time of sending
        )


# See Route.feed.
Feed = Callable[[list[Record], Sink], FeedResult]


# See Route.each.
Each = Callable[[list[Record]], Iterator[Sequence[Send]]]


Headers = Sequence[tuple[str, bytes | str | None]] | Mapping[str, bytes | str | None]


@final
class Out(msgspec.Struct, frozen=True, gc=False):
    """Holds one record to send.

    `value`: bytes are sent unchanged, str as UTF-8, None as a tombstone, and anything else as JSON. `key`: encoded by
    the same rule; KEEP means the input's key, None a null key. `topic`: None means the first of `to`. `headers`: (name,
    bytes, str or None) pairs or a mapping; headers of the input that `eos.headers.pass` names come before them.
    `partition`: None means by the key. `timestamp`: milliseconds since the epoch; KEEP means the input's, 0 the time
    when it is sent.

    In a batch function an Out has no single input, so it needs its own key, and KEEP means the batch's latest
    timestamp. `record.out(value)` sets the record's key and timestamp.
    """

    value: object
    key: object = KEEP
    topic: str | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int | Keep = KEEP

    def __init_subclass__(cls) -> None:
        raise TypeError("Out cannot be subclassed")


Record.out = hotloop.fast_out(Record.out, Record, Out, KEEP)  # type: ignore[method-assign]


class Committed(Protocol):
    """Describes the fields of confluent-kafka's TopicPartition for a committed offset; a negative offset means none."""

    @property
    def offset(self) -> int: ...
    @property
    def metadata(self) -> str | None: ...


def merge_metadata(metadata: str, entries: Mapping[str, object]) -> str:
    """Return offset metadata with these entries set, and those that are None removed.

    Replaces metadata that another program wrote."""
    found = {name: value for name, value in {**parse_metadata(metadata), **entries}.items() if value is not None}
    return json.dumps(found, separators=(",", ":")) if found else ""


def read_metadata(committed: Committed) -> str | None:
    """Return the metadata of a committed offset, or None if it cannot be read.

    confluent-kafka reads up to a NUL, which only it writes. So metadata of another client (Kafka Streams) is followed
    by random bytes of this process, which may not be UTF-8. Metadata that eos wrote is always complete.
    """
    try:
        return committed.metadata
    except UnicodeDecodeError:
        return None


def parse_metadata(metadata: str | None) -> dict[str, Any]:
    """Return the entries of offset metadata that eos wrote; empty for metadata of another program."""
    try:
        found = json.loads((metadata or "").rstrip("\0"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
