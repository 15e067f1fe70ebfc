"""What a dead letter is turned back into, and which function it goes to."""

from __future__ import annotations

import pytest

import eos
from eos.app.definition import App
from eos.errors import UsageError
from eos.records import Record
from eos.worker.dead_letters import dead_letter
from eos.worker.replay import Letter, again, letter_of, route_of, sources_of

RECORD = Record("orders", 3, 17, 1_700_000_000_000, b"k", b"v", [("trace", b"t"), ("trace", None)])


def read(send: tuple[object, ...], offset: int = 5) -> Record:
    """The record that a replay reads of what a worker sent."""
    topic, value, key, _, _, headers = send
    return Record(topic, 1, offset, 9, key, value, headers or [])  # type: ignore[arg-type]


def app_of() -> App:
    app = App("shop")

    @app.process(["orders", "returns"], to="out", on_error=eos.dlq)
    def total(value: bytes) -> bytes:
        return value

    @app.process("others", to="out")
    def other(value: bytes) -> bytes:
        return value

    return app


def test_a_letter_is_the_record_that_failed_again_and_again() -> None:
    letter = letter_of(read(dead_letter(RECORD, ValueError("why"), app="shop")))
    assert letter == Letter(1, 5, RECORD, "shop", "ValueError", "why", 0)
    for replays in (1, 2, 3):
        failed = dead_letter(letter.record, KeyError(replays))
        letter = letter_of(read(again(letter, failed), 5 + replays))
        assert letter == Letter(1, 5 + replays, RECORD, "", "KeyError", str(replays), replays)


def test_what_no_worker_wrote_is_taken_as_it_lies_there() -> None:
    strange = [("eos-dlq-partition", b"x"), ("eos-dlq-offset", None)]
    letter = letter_of(Record("orders.dlq", 1, 5, 9, None, None, strange))
    assert letter == Letter(1, 5, Record("orders", 1, 5, 9, headers=strange), "", "-", "-", 0)


def test_headers_of_a_record_that_look_like_a_letters_choose_nothing() -> None:
    """Not where it goes back to, nor whose it is; and no number of them ends a replay."""
    names = ("topic", "partition", "offset", "timestamp", "app", "exception", "replays")
    theirs = [(f"eos-dlq-{name}", b"victim" if name == "topic" else b"9" * 5_000) for name in names]
    record = Record("orders", 3, 17, 1_700_000_000_000, b"k", b"v", theirs)
    assert letter_of(read(dead_letter(record, ValueError("why"), app="shop"))) == Letter(
        1, 5, record, "shop", "ValueError", "why", 0
    )
    # Written by nobody's worker: what they say is read, where it can be.
    assert letter_of(Record("orders.dlq", 1, 5, 9, None, b"v", theirs)) == Letter(
        1, 5, Record("orders", 1, 5, 9, None, b"v"), "9" * 5_000, "9" * 5_000, "-", 0
    )


def test_the_function_is_the_one_that_failed_or_the_one_that_is_named() -> None:
    app = app_of()
    assert route_of(app, "returns", None).name == "total"
    assert route_of(app, "returns", "other").name == "other"
    assert sources_of(app) == ["orders", "returns"]
    with pytest.raises(UsageError, match="--topic nope: not a source of shop"):
        route_of(app, "nope", None)
    with pytest.raises(UsageError, match="--function nope: shop has no such function, it has total, other"):
        route_of(app, "orders", "nope")
