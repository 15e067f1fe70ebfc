"""Render records as text for people, and as JSON that can be read back into the same bytes.

Headers of eos are rendered as sentences: the input of an output (lineage), and the origin and error of a dead letter.
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


def bytes_as_text(data: bytes) -> str:
    """Return UTF-8 as printable text, and other bytes as a Python literal."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return repr(data)
    return log.printable(text)


def headers_as_text(headers: Sequence[Header]) -> list[str]:
    """Return `name=value` for each header, followed by sentences for lineage and for a dead letter."""
    own, failure = split_headers(headers)
    if "topic" not in failure:
        return [_header_as_text(name, value) for name, value in headers]
    owner = "/".join(failure[name] for name in ("app", "function") if name in failure)
    where = f"{failure['topic']}[{failure.get('partition', '?')}]@{failure.get('offset', '?')}"
    why = f"{failure.get('exception', '-')}: {failure.get('message', '-')}"
    replays = f", replays: {failure['replays']}" if "replays" in failure else ""
    of = f" of {owner}" if owner else ""
    # Headers after the record's own belong to the dead letter.
    added = [_header_as_text(name, value) for name, value in headers[len(own) :] if name == lineage.HEADER]
    sentence = log.printable(f"(dead letter{of}, from {where}{replays}: {why})")
    return [*(_header_as_text(name, value) for name, value in own), *added, sentence]


def _header_as_text(name: str, value: bytes | None) -> str:
    if (source := _decode_lineage(name, value)) is None:
        return f"{log.printable(name)}={'(null)' if value is None else bytes_as_text(value)}"
    which = f"output {source.i + 1} of {source.n}" if source.n > 1 else "output"
    place = format_position(log.printable(source.topic), source.partition, source.offset)
    return f"({which} of {place}, number {source.number})"


def _decode_lineage(name: str, value: bytes | None) -> lineage.Source | None:
    """Return the source in a lineage header, or None for other headers, even of the same name."""
    if name != lineage.HEADER or value is None:
        return None
    try:
        return lineage.decode(value)
    except ValueError:
        return None


def bytes_as_json(data: bytes | None) -> Json:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def header_as_json(name: str, value: bytes | None) -> object:
    """Return a lineage header as an object with its fields, and any other header as `bytes_as_json` does."""
    source = _decode_lineage(name, value)
    return bytes_as_json(value) if source is None else source._asdict()


def bytes_from_json(value: object) -> bytes | None:
    """Return the bytes that `bytes_as_json` encoded. Raises ValueError for any other value."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error as error:
            raise ValueError(f"invalid base64: {error}") from error
    raise ValueError('expected a string, null or {"base64": TEXT}')
