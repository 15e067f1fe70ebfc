"""Headers whose names the client cannot decode: what is left of them, and the sentence that says what is wrong.

confluent-kafka makes a str of each header's name, and goes on when a name is not UTF-8: `Message.headers()` returns its
list with that exception set, and keeps the list. A pair in it whose name failed holds a NULL in the name's place, which
ends the process when it is read. Owns how such a list is read; it decides nothing about the record.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from typing import Any

from eos import hotloop
from eos.records import Header, UnreadableHeaders


def unreadable(message: Any, error: Exception) -> UnreadableHeaders:
    """Return the headers of a message that raised `error` when it was asked for them. Raises any other error again."""
    if not isinstance(error.__cause__ if isinstance(error, SystemError) else error, UnicodeDecodeError):
        raise error
    pairs: Sequence[Header] = ()
    with contextlib.suppress(UnicodeDecodeError):  # a client that returns no list beside its exception
        pairs = message.headers() or ()
    whole = [len(gc.get_referents(pair)) == 2 for pair in pairs]  # a NULL refers to nothing
    which = f"header {whole.index(False) + 1} of {len(whole)}" if False in whole else "a header"
    kept = [pair for pair, is_whole in zip(pairs, whole, strict=True) if is_whole]
    return UnreadableHeaders(kept, f"the name of {which} is not UTF-8")


def headers_of(message: Any) -> Sequence[Header]:
    """Return the headers of one message, as a record has them."""
    try:
        found: Sequence[Header] | None = hotloop.python.headers_of(message)
    except Exception as error:  # noqa: BLE001 - `unreadable` tells which it takes
        return unreadable(message, error)
    return found or ()
