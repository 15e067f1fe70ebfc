"""What goes in and comes out: a Record as it was read, an Out to be sent, and the seam where outputs leave.

It must never do I/O or import a Kafka client.
"""

from __future__ import annotations

import enum
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NoReturn, Protocol, cast, final

import msgspec

from eos.errors import CallFailed

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    V = TypeVar("V", covariant=True, default=bytes | None)
else:
    V = typing.TypeVar("V", covariant=True)
Header = tuple[str, bytes | None]


class UnreadableHeaders(Sequence[Header]):
    """The headers of a record with a header name that is not UTF-8: reading them raises a ValueError that says `why`.

    `readable`: the other headers, in order."""

    def __init__(self, readable: Sequence[Header], why: str) -> None:
        self.readable, self.why = readable, why

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(self.why)

    __len__ = __getitem__ = __iter__ = __contains__ = _refuse


def readable(headers: Sequence[Header]) -> Sequence[Header]:
    """Return the headers that can be read, for whoever shows or keeps a record in spite of the others."""
    return headers.readable if isinstance(headers, UnreadableHeaders) else headers


# What an engine hands to its producer: (topic, value, key, partition, timestamp_ms, headers).
# partition -1: the partitioner decides. timestamp_ms 0: the time of producing.
Send = tuple[str, bytes | None, bytes | None, int, int, list[Header] | None]


def place_of(topic: str, partition: int, offset: int | None = None) -> str:
    """How a place is written, and read by the commands: `topic[partition]@offset`."""
    return f"{topic}[{partition}]" if offset is None else f"{topic}[{partition}]@{offset}"


def is_topic_name(name: object) -> bool:
    """Kafka's rule for topics (org.apache.kafka.common.internals.Topic)."""
    return isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name)) and name not in (".", "..")


def is_pattern(source: str) -> bool:
    """Return whether a source is a pattern and no name, as librdkafka's and Java's subscribe tell them apart."""
    return source.startswith("^")


class Sink(Protocol):
    """Where a feed puts its outputs: a producer, or what stands in its place."""

    @property
    def produce(self) -> Callable[..., object]:
        """confluent-kafka's produce() by position, so that nothing lies between: (topic, value, key[, partition, two
        callbacks that are None, timestamp_ms[, headers]])."""

    def on_produce_error(self, error: Exception, send: Send) -> object:
        """`produce` raised: sends the output after all, or raises CallFailed."""


class Fed(NamedTuple):
    """The result of a feed: `sent` outputs of the first `handled` records went out. `error`: the exception of the next
    record's function (nothing of that record went out), or the CallFailed of `on_produce_error`; None if all went out.
    `culprit`: the record that the error is about, if it is known."""

    sent: int
    handled: int
    error: BaseException | None
    culprit: Record | None = None

    @property
    def failure(self) -> CallFailed | None:
        """The `error` where it is the client's, and no function's."""
        if not isinstance(self.error, CallFailed):
            return None
        # A delivery that failed is reported during the send of some other record.
        return self.error.about(self.culprit) if self.error.call == "produce" else self.error


class Keep(enum.Enum):
    """The type of KEEP: an enum, so that it stays one object through copies and pickles, and narrows in mypy."""

    KEEP = "KEEP"

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = Keep.KEEP


# One Record per message at millions per second: positional, and invisible to the cyclic collector (gc=False).
# Frozen: nothing that a function does to a record may change what its outputs keep of it.
@final
class Record(msgspec.Struct, Generic[V], frozen=True, gc=False):
    """A record as it was read. `timestamp`: milliseconds since the epoch, -1 when unknown. `value` None: a
    tombstone. `headers`: (name, bytes or None) pairs, an empty sequence when there are none. As the annotation of a
    function's parameter `Record[Order]` is a record of which the value is decoded to an Order."""

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
        *,
        key: object = KEEP,
        topic: str | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Out:
        """An Out with this record's timestamp and, unless `key` says otherwise, its key."""
        timestamp = self.timestamp
        return Out(
            value,
            self.key if key is KEEP else key,
            topic,
            headers,
            partition,
            timestamp if timestamp > 0 else 0,  # unknown: the time of producing
        )


# See Route.feed.
Feed = Callable[[list[Record], Sink], Fed]


# See Route.each.
Each = Callable[[list[Record]], Iterator[Sequence[Send]]]


Headers = Sequence[tuple[str, bytes | str | None]] | Mapping[str, bytes | str | None]


@final
class Out(msgspec.Struct, frozen=True, gc=False):
    """One record to send.

    `value`: bytes as they are, str as UTF-8, None a tombstone, else JSON; `key` by the same rule, KEEP the
    input's key, None a null key. `topic` None: the first of `to`. `headers`: (name, bytes, str or None) pairs or
    a mapping; of the input's those that `eos.headers.pass` names come before them. `partition` None: by the key.
    `timestamp`: milliseconds since the epoch, KEEP the input's, 0 the time of producing.

    In a batch function an Out has no single input, so nothing can be kept: it says its key and its timestamp.
    `record.out(value)` says the record's.
    """

    value: object
    key: object = KEEP
    topic: str | None = None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int | Keep = KEEP

    def __init_subclass__(cls) -> None:
        raise TypeError("Out cannot be subclassed")


class Committed(Protocol):
    """What confluent-kafka's TopicPartition says of a committed offset; a negative one is none."""

    @property
    def offset(self) -> int: ...
    @property
    def metadata(self) -> str | None: ...


def metadata_with(metadata: str, entries: Mapping[str, object]) -> str:
    """Return the JSON beside an offset with these entries, without those that are None. What another program wrote
    there is replaced."""
    found = {name: value for name, value in {**noted(metadata), **entries}.items() if value is not None}
    return json.dumps(found, separators=(",", ":")) if found else ""


def metadata_of(committed: Committed) -> str | None:
    """What its committer wrote beside the offset; None where nobody can tell.

    confluent-kafka reads up to a NUL, which it alone writes. So what another client wrote (Kafka Streams) comes with
    bytes of this process behind it, which may be no UTF-8. What is ours is whole.
    """
    try:
        return committed.metadata
    except UnicodeDecodeError:
        return None


def noted(metadata: str | None) -> dict[str, Any]:
    """What one of ours wrote beside an offset, by name; nothing where another program did."""
    try:
        found = json.loads((metadata or "").rstrip("\0"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
