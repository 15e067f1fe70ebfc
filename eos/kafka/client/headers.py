"""Reads the headers of a message if the client cannot decode the name of a header.

confluent-kafka decodes each header's name as UTF-8, and continues after a name that is not UTF-8: `Message.headers()`
returns its list with the exception set, and keeps the list. A pair whose name failed holds a NULL in place of the name,
and reading it ends the process. Owns the reading of such a list; it decides nothing about the record.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

from eos import hotloop
from eos.records import Header, UnreadableHeaders


def read_damaged_headers(message: Any, error: Exception) -> UnreadableHeaders:
    """Return the readable headers of a message whose `headers()` raised the UnicodeDecodeError `error`. Re-raise any
    other error."""
    if not isinstance(error.__cause__ if isinstance(error, SystemError) else error, UnicodeDecodeError):
        raise error
    pairs: Sequence[Header] = ()
    with contextlib.suppress(UnicodeDecodeError):  # another client may return no list with its exception
        pairs = message.headers() or ()
    whole = [len(gc.get_referents(pair)) == 2 for pair in pairs]  # a NULL refers to nothing
    which = f"header {whole.index(False) + 1} of {len(whole)}" if False in whole else "a header"
    kept = [pair for pair, is_whole in zip(pairs, whole, strict=True) if is_whole]
    return UnreadableHeaders(kept, f"the name of {which} is not UTF-8")


def read_headers(message: Any) -> Sequence[Header]:
    """Return the headers of one message in the form of Record.headers."""
    try:
        found: Sequence[Header] | None = hotloop.python.headers_of(message)
    except Exception as error:  # noqa: BLE001 - `read_damaged_headers` raises others again
        return read_damaged_headers(message, error)
    return found or ()
