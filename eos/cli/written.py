"""How records are shown: text for people, JSON for machines, which reads back into the same bytes.

Our own headers are said in words: whose output a record is (lineage), and what a dead letter is and why.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from eos import log
from eos.encoding import lineage
from eos.encoding.dead_letters import split_headers
from eos.records import Header, format_position

Json = str | dict[str, str] | None


def text_of(data: bytes) -> str:
    """UTF-8 as it reads, and printable; other bytes as Python writes them."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return repr(data)
    return log.printable(text)


def headers_text(headers: Sequence[Header]) -> list[str]:
    """`name=value` of each; those of lineage and of a dead letter in words, behind the others."""
    own, told = split_headers(headers)
    if "topic" not in told:
        return [_header_text(name, value) for name, value in headers]
    whose = "/".join(told[name] for name in ("app", "function") if name in told)
    where = f"{told['topic']}[{told.get('partition', '?')}]@{told.get('offset', '?')}"
    why = f"{told.get('exception', '-')}: {told.get('message', '-')}"
    times = f", replays: {told['replays']}" if "replays" in told else ""
    of = f" of {whose}" if whose else ""
    # The letter's own lineage stands behind its headers.
    behind = [_header_text(name, value) for name, value in headers[len(own) :] if name == lineage.HEADER]
    letter = log.printable(f"(dead letter{of}, from {where}{times}: {why})")
    return [*(_header_text(name, value) for name, value in own), *behind, letter]


def _header_text(name: str, value: bytes | None) -> str:
    if (source := _source_of(name, value)) is None:
        return f"{log.printable(name)}={'(null)' if value is None else text_of(value)}"
    which = f"output {source.i + 1} of {source.n}" if source.n > 1 else "output"
    place = format_position(log.printable(source.topic), source.partition, source.offset)
    return f"({which} of {place}, number {source.number})"


def _source_of(name: str, value: bytes | None) -> lineage.Source | None:
    """What a header of lineage says; None for every other one, also somebody else's of that name."""
    if name != lineage.HEADER or value is None:
        return None
    try:
        return lineage.decode(value)
    except ValueError:
        return None


def json_of(data: bytes | None) -> Json:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def header_json(name: str, value: bytes | None) -> object:
    """As json_of; a header of lineage as what it says."""
    source = _source_of(name, value)
    return json_of(value) if source is None else source._asdict()


def bytes_of(given: object) -> bytes | None:
    """What json_of made of bytes, undone. Raises ValueError for anything else."""
    if given is None:
        return None
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, dict) and given.keys() == {"base64"} and isinstance(given["base64"], str):
        try:
            return base64.b64decode(given["base64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"no base64: {error}") from error
    raise ValueError('a text, null or {"base64": TEXT} is expected')
