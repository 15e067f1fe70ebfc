"""Defines dead letters: unchanged copies of records that could not be handled, with headers about position and error.

Owns the format only; it must never send a dead letter. eos/engine/handling.py and eos/session/transaction.py send it in
the transaction that commits the record's offset.

Key and value are the record's own bytes; the partition follows from the key. The timestamp is the time when it is sent:
with the record's own timestamp, a replay of old records would leave dead letters that retention deletes at once. The
record's headers come first, then these, all as UTF-8 text: `eos-dlq-topic`, `-partition`, `-offset`, `-timestamp`
(milliseconds since the epoch, -1 unknown), `-app` and `-function` (the owner of the dead letter), `-exception` (the
class with its module), `-message` and, if the user's own code raised, `-trace` (its innermost frames, one per line, the
raising frame last). A replay adds `-replays` (how often the record was replayed and failed). `-topic` is the first of
them. Headers before the last `-topic` are the record's own, even if they are headers of an earlier dead letter, and are
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from eos.encoding.frames import Frame, format_frames
from eos.encoding.lineage import HEADER as LINEAGE
from eos.errors import safe_str
from eos.records import Header, Record, Send, readable_headers

PREFIX = "eos-dlq-"
DEAD_LETTER_SUFFIX: Final = ".dlq"
MAX_MESSAGE_BYTES = 1_000  # limit for the exception's message, which may quote the whole record


def dead_letter_topic(source: str) -> str:
    """Return the name of a source topic's dead-letter topic."""
    return source + DEAD_LETTER_SUFFIX


def make_dead_letter(
    record: Record, error: BaseException, frames: Sequence[Frame] = (), app: str = "", function: str = ""
) -> Send:
    """Return the dead letter of a record that failed with `error`; `frames` are the frames of the user's code."""
    why = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp": str(record.timestamp),
        **{name: text for name, text in (("app", app), ("function", function)) if text},
        "exception": class_name(error),
        "message": short_message(error),
    }
    if trace := format_frames(frames):
        why["trace"] = trace
    # The record's own lineage describes an earlier step. The lineage of this step is added when the record is sent.
    headers: list[Header] = [header for header in readable_headers(record.headers) if header[0] != LINEAGE]
    headers += [(PREFIX + name, text.encode(errors="replace")) for name, text in why.items()]
    return dead_letter_topic(record.topic), record.value, record.key, -1, 0, headers


def split_headers(headers: Sequence[Header]) -> tuple[list[Header], dict[str, str]]:
    """Return the record's own headers of a dead letter, and the worker's notes by name. A note's name is that of its
    header after PREFIX.

    A record that no worker wrote has only headers of its own.
    """
    first = max((at for at, (name, _) in enumerate(headers) if name == f"{PREFIX}topic"), default=len(headers))
    notes = {
        name.removeprefix(PREFIX): value.decode(errors="replace")
        for name, value in headers[first:]
        if name.startswith(PREFIX) and value
    }
    return list(headers[:first]), notes


# These classes have moved to other modules. Dead letters keep naming their first module.
_STORED_NAMES = {
    "eos.encoding.serde.DecodeError": "eos.serde.DecodeError",
    "eos.engine.handling.RecordRefused": "eos.handling.RecordRefused",
    "eos.engine.handling.DeadLetterRefused": "eos.handling.DeadLetterRefused",
}


def class_name(error: BaseException) -> str:
    """Return the exception's class as text: `ValueError`, `eos.serde.DecodeError`, `shop.OutOfStock`."""
    kind = type(error)
    module = "eos" if kind.__module__ == "eos.errors" else kind.__module__
    name = f"{module}.{kind.__qualname__}"
    return kind.__qualname__ if kind.__module__ in ("builtins", None) else _STORED_NAMES.get(name, name)


def short_message(error: BaseException) -> str:
    """Return the exception's message cut to MESSAGE_BYTES, for dead letters and log lines."""
    whole = safe_str(error).encode(errors="replace")
    return (
        whole.decode() if len(whole) <= MAX_MESSAGE_BYTES else whole[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
    )
