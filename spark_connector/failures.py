"""Carries an App's error from an executor to the driver: its type, sentence, record position and the user's traceback.

Owns the one line that carries it. Spark brings an exception from a Python task to the driver as text inside text
(PythonException, SparkException, StreamingQueryException), in which this line is found again. It must never guess from
words that Spark or a user wrote.
"""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path

import eos
from eos.errors import ConfigurationError, EosError, IllegalState, PoisonRecord, Temporary

_MARK = "eos-failure "
# JSON in ASCII contains no line break, so the line ends where the object ends.
_LINE = re.compile(re.escape(_MARK) + r"(\{.*\})")
_TRACE_CHARACTERS = 8_000
_OURS = tuple(str(Path(str(file)).parent) for file in (eos.__file__, __file__))
_KINDS: dict[str, type[EosError]] = {
    kind.__name__: kind for kind in (PoisonRecord, ConfigurationError, IllegalState, Temporary, EosError)
}


class ExecutorFailure(Exception):
    """Carries an error from a task to the driver; the text of this exception is one line that describes the error."""


def to_line(error: EosError) -> ExecutorFailure:
    """Return the exception that a task raises so that the driver can raise `error` again."""
    cause = error.__cause__
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
    fields: dict[str, object] = {"kind": kind, "sentence": str(error)}
    if isinstance(error, PoisonRecord):
        fields |= {"topic": error.topic, "partition": error.partition, "offset": error.offset}
    if cause is not None:
        fields["trace"] = _trace(cause)[-_TRACE_CHARACTERS:]
    return ExecutorFailure(_MARK + json.dumps(fields))


def _trace(error: BaseException) -> str:
    """Return the traceback with the user's own frames only, as `eos run` shows it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    if not frames:
        return ""
    head = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return "".join([*head, *traceback.format_exception_only(error)])


def from_text(text: str) -> tuple[EosError, str] | None:
    """Return the error that a task raised, and the traceback of user code, or None if `text` carries no error."""
    found = _LINE.search(text)
    if found is None:
        return None
    fields = json.loads(found[1])
    trace = str(fields.get("trace", ""))
    if fields["kind"] == PoisonRecord.__name__:
        poison = PoisonRecord(fields["sentence"], fields["topic"], fields["partition"], fields["offset"])
        return poison, trace
    return _KINDS[fields["kind"]](fields["sentence"]), trace
