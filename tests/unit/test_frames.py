"""Logged frames of a failure: the innermost frames of user code, within a bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import eos
from eos import App, Record
from eos.encoding.dead_letters import make_dead_letter
from eos.encoding.frames import MAX_FRAMES, MAX_TEXT_BYTES, format_frames, frames_of
from eos.engine.handling import Collector, Handler

pytestmark = pytest.mark.usefixtures("loop_ends")


def failure(function: Callable[[Any], Any], **more: Any) -> BaseException:
    """Return the error that reaches the policy."""
    app = App("app")
    app.process("in", to="out", **more)(function)
    error = app.routes["in"].feed([Record("in", 0, 0, value=b"v")], Collector()).error
    assert error is not None
    return error


def names(error: BaseException) -> list[str]:
    return [frame.function for frame in frames_of(error)]


def mine(value: bytes) -> bytes:
    raise ValueError("mine")


def through_the_standard_library(value: bytes) -> bytes:
    return bytes(json.loads(value))


def through_a_library(value: bytes) -> bytes:
    return bytes(pytest.importorskip(value.decode() + " no module", exc_type=KeyError))


async def later(value: bytes) -> bytes:
    await asyncio.sleep(0)
    return mine(value)


def again(value: bytes) -> bytes:
    try:
        return mine(value)
    except ValueError as error:
        raise LookupError from error


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (mine, ["mine"]),
        (through_the_standard_library, ["through_the_standard_library"]),
        (through_a_library, ["through_a_library"]),
        (later, ["later", "mine"]),
        (again, ["again"]),
    ],
)
def test_frames_are_of_user_code_only(function: Callable[[Any], Any], expected: list[str]) -> None:
    assert names(failure(function)) == expected


def test_frames_of_a_user_decoder_come_from_the_error_cause() -> None:
    assert names(failure(lambda value: value, decode=mine)) == ["mine"]


def test_error_without_user_code_has_no_frames() -> None:
    def order(value: dict[str, int]) -> None: ...

    error = failure(order)
    assert frames_of(error) == []
    assert "eos-dlq-trace" not in dict(make_dead_letter(Record("in", 0, 0), error, frames_of(error))[5] or [])


def test_program_installed_as_library_counts_as_user_code(tmp_path: Path) -> None:
    installed = str(Path(msgspec.__file__).parent / "program.py")
    space: dict[str, Any] = {}
    exec(compile("def total(value):\n    return 1 / 0\n", installed, "exec"), space)
    (frame,) = frames_of(failure(space["total"]))
    assert (frame.file, frame.line, frame.function) == (installed, 2, "total")


def test_frame_text_is_bounded_and_keeps_innermost_frames() -> None:
    space: dict[str, Any] = {}
    name = "n" * 300
    code = f"def {name}(depth):\n    return {name}(depth - 1) if depth else 1 / 0\ndef outer(value):\n    {name}(400)\n"
    exec(compile(code, "wide.py", "exec"), space)
    error = failure(space["outer"])
    assert names(error) == [name] * MAX_FRAMES
    text = format_frames(frames_of(error))
    assert 300 < len(text.encode()) <= MAX_TEXT_BYTES
    assert set(text.splitlines()) == {f"wide.py:2 in {name}"}


def test_dead_letter_has_its_frames_one_per_line() -> None:
    app, kept = App("app"), Collector()
    app.process("in", to="out", on_error=eos.dlq)(later)
    assert Handler(app).handle(kept, [Record("in", 0, 0, value=b"v")]) is None
    trace = (dict(kept.sends[0][5] or [])["eos-dlq-trace"] or b"").decode()
    at = later.__code__.co_firstlineno + 2, mine.__code__.co_firstlineno + 1
    assert trace.splitlines() == [
        f"{__file__}:{at[0]} in later: return mine(value)",
        f'{__file__}:{at[1]} in mine: raise ValueError("mine")',
    ]
