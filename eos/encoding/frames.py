"""Finds the frames of user code that raised an exception, for log lines and the headers of dead letters.

Owns the choice of frames and their text. It must never run user code or keep a traceback, and its text is bounded:
an exception may have passed through a thousand frames.
"""

from __future__ import annotations

import functools
import linecache
import os
import site
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from eos.errors import causes

MAX_FRAMES = 5  # maximum number of frames
MAX_TEXT_BYTES = 1_000  # limit for all frames together; a line of code may be long
_MAX_LINE_CHARACTERS = 200

_OURS = str(Path(__file__).parent.parent) + os.sep
_LIBRARIES = tuple(str(path) + os.sep for path in (*site.getsitepackages(), sysconfig.get_paths()["purelib"]))
_STANDARD = (sysconfig.get_paths()["stdlib"] + os.sep, "<frozen ")
_MAX_CAUSES = 5


class Frame(NamedTuple):
    file: str
    line: int
    function: str


@functools.lru_cache(1_000)
def _format_frame(frame: Frame) -> str:
    """Return a frame as text: `/srv/shop/orders.py:42 in total: return order.price / order.count`."""
    code = linecache.getline(frame.file, frame.line).strip()[:_MAX_LINE_CHARACTERS]
    return f"{frame.file}:{frame.line} in {frame.function}" + (f": {code}" if code else "")


def frames_of(error: BaseException) -> list[Frame]:
    """Return the last frames of the user's own code, the innermost last.

    If the exception has none, as when a user's decoder raised, they come from its cause. A program that is installed as
    a library counts as the user's code too.
    """
    for cause in islice(causes(error), _MAX_CAUSES):
        theirs = list(_user_frames(cause))
        own = [frame for frame in theirs if not _is_library(frame[0].co_filename)] or theirs
        if own:
            return [_to_frame(code, line) for code, line in own[-MAX_FRAMES:]]
    return []


def format_frames(frames: Sequence[Frame], separator: str = "\n") -> str:
    """Return the innermost frames as text, as many as fit into TEXT_BYTES."""
    lines: list[str] = []
    left = MAX_TEXT_BYTES
    for frame in reversed(frames):
        line = _format_frame(frame)
        left -= len(line.encode(errors="replace")) + len(separator)
        if left < 0:
            break
        lines.append(line)
    return separator.join(reversed(lines))


def _user_frames(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and line of frames that belong neither to eos nor to the standard library."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_ours(code.co_filename):
            yield code, trace.tb_lineno
        trace = trace.tb_next


def _to_frame(code: CodeType, line: int) -> Frame:
    return Frame(code.co_filename, line, code.co_qualname.rpartition("<locals>.")[2])


@functools.lru_cache(1_000)
def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) or (file.startswith(_STANDARD) and not _is_library(file))


@functools.lru_cache(1_000)
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES)
