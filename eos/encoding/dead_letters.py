"""Dead letters: a record that could not be handled, as it came, with headers that say where it was and why.

Owns the format only; it must never send one (eos/worker/handling.py and eos/session/transaction.py do, in the
transaction that moves the record's offset).

Key and value are the record's own bytes; the partition follows from the key. The timestamp is the time of producing:
with the record's own, a replay of old records would leave dead letters that retention removes at once. The record's
headers come first, then ours, all UTF-8 text: `eos-dlq-topic`, `-partition`, `-offset`, `-timestamp` (milliseconds
since the epoch, -1 unknown), `-app` and `-function` (whose dead letter it is), `-exception` (its class with its
module), `-message` and, where the user's own code raised, `-trace` (its innermost frames, one per line, that which
raised is the last); `-replays` where a replay wrote it (how often it came back and failed). `-topic` is the first of
them: what stands before the last one is the record's own, other dead letters' headers too, and tells us nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from eos.encoding.frames import Frame, text_of
from eos.encoding.lineage import HEADER as LINEAGE
from eos.errors import safe_str
from eos.records import Header, Record, Send, readable

PREFIX = "eos-dlq-"
DEAD_LETTER_SUFFIX: Final = ".dlq"
MESSAGE_BYTES = 1_000  # of the exception's message; a message may quote the whole record


def dead_letter_topic(source: str) -> str:
    """Where the dead letters of a source topic go."""
    return source + DEAD_LETTER_SUFFIX


def dead_letter(
    record: Record, error: BaseException, frames: Sequence[Frame] = (), app: str = "", function: str = ""
) -> Send:
    """What to send for `record`, which failed with `error` in these frames of the user's."""
    why = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp": str(record.timestamp),
        **{name: text for name, text in (("app", app), ("function", function)) if text},
        "exception": class_name(error),
        "message": message_of(error),
    }
    if trace := text_of(frames):
        why["trace"] = trace
    # Lineage of the record itself is about an earlier step; this one's is written when the letter is sent.
    headers: list[Header] = [header for header in readable(record.headers) if header[0] != LINEAGE]
    headers += [(PREFIX + name, text.encode(errors="replace")) for name, text in why.items()]
    return dead_letter_topic(record.topic), record.value, record.key, -1, 0, headers


def parts_of(headers: Sequence[Header]) -> tuple[list[Header], dict[str, str]]:
    """The headers of a dead letter, undone: the record's own, and what its worker said of it by name without PREFIX. A
    record that no worker wrote has only headers of its own."""
    first = max((at for at, (name, _) in enumerate(headers) if name == f"{PREFIX}topic"), default=len(headers))
    told = {
        name.removeprefix(PREFIX): value.decode(errors="replace")
        for name, value in headers[first:]
        if name.startswith(PREFIX) and value
    }
    return list(headers[:first]), told


# Ours keep the names that dead letters have always had, wherever they live.
_AS_WRITTEN = {
    "eos.encoding.serde.DecodeError": "eos.serde.DecodeError",
    "eos.worker.handling.RecordRefused": "eos.handling.RecordRefused",
    "eos.worker.handling.DeadLetterRefused": "eos.handling.DeadLetterRefused",
}


def class_name(error: BaseException) -> str:
    """`ValueError`, `eos.serde.DecodeError`, `shop.OutOfStock`."""
    kind = type(error)
    module = "eos" if kind.__module__ == "eos.errors" else kind.__module__
    name = f"{module}.{kind.__qualname__}"
    return kind.__qualname__ if kind.__module__ in ("builtins", None) else _AS_WRITTEN.get(name, name)


def message_of(error: BaseException) -> str:
    """What the exception says, cut to MESSAGE_BYTES: for a dead letter, and wherever else a failing record is told."""
    whole = safe_str(error).encode(errors="replace")
    return whole.decode() if len(whole) <= MESSAGE_BYTES else whole[:MESSAGE_BYTES].decode(errors="ignore") + "..."
