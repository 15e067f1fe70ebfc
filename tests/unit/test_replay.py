"""Replay of dead letters: the restored record, its function, and the progress of a replay."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eos
from eos.app.definition import App
from eos.encoding.dead_letters import make_dead_letter
from eos.errors import ConfigurationError, UsageError
from eos.kafka.client.world import REAL
from eos.records import Record
from eos.worker.dead_letters import DeadLetter, Done, failed_again, letter_of, offsets_of
from eos.worker.replay import DROPPING, ReplayResult, Settling, choose_all, route_of, sources_of

RECORD = Record("orders", 3, 17, 1_700_000_000_000, b"k", b"v", [("trace", b"t"), ("trace", None)])


def read(send: tuple[object, ...], offset: int = 5) -> Record:
    """Return a worker's send as the record that a replay reads."""
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


def summary(letter: DeadLetter) -> tuple[str, str, str, str, int]:
    return letter.source, letter.app, letter.exception, letter.message, letter.replays


def test_dead_letter_restores_the_failed_record_after_each_replay() -> None:
    letter = letter_of(read(make_dead_letter(RECORD, ValueError("why"), app="shop")))
    assert (letter.position, letter.record) == ("orders.dlq[1]@5", RECORD)
    assert summary(letter) == ("orders[3]@17", "shop", "ValueError", "why", 0)
    for replays in (1, 2, 3):
        failed = make_dead_letter(letter.record, KeyError(replays))
        letter = letter_of(read(failed_again(letter, failed), 5 + replays))
        assert (letter.position, letter.record) == (f"orders.dlq[1]@{5 + replays}", RECORD)
        assert summary(letter) == ("orders[3]@17", "", "KeyError", str(replays), replays)


def test_foreign_dead_letter_is_taken_unchanged() -> None:
    strange = [("eos-dlq-partition", b"x"), ("eos-dlq-offset", None)]
    letter = letter_of(Record("orders.dlq", 1, 5, 9, None, None, strange))
    assert letter.record == Record("orders", 1, 5, 9, headers=strange)
    assert summary(letter) == ("orders.dlq[1]@5", "", "-", "-", 0)


def test_record_headers_that_imitate_a_dead_letter_are_ignored() -> None:
    """Such headers change neither the source nor the App of a dead letter, and long values do not fail a replay."""
    names = ("topic", "partition", "offset", "timestamp", "app", "exception", "replays")
    theirs = [(f"eos-dlq-{name}", b"victim" if name == "topic" else b"9" * 5_000) for name in names]
    record = Record("orders", 3, 17, 1_700_000_000_000, b"k", b"v", theirs)
    letter = letter_of(read(make_dead_letter(record, ValueError("why"), app="shop")))
    assert letter.record == record
    assert summary(letter) == ("orders[3]@17", "shop", "ValueError", "why", 0)
    # Without a worker's own headers, these headers are read as far as they are valid.
    letter = letter_of(Record("orders.dlq", 1, 5, 9, None, b"v", theirs))
    assert letter.record == Record("orders", 1, 5, 9, None, b"v")
    assert summary(letter) == ("orders[1]@5", "9" * 5_000, "9" * 5_000, "-", 0)


def test_replay_runs_the_failed_or_the_named_function() -> None:
    app = app_of()
    assert route_of(app, "returns", None).name == "total"
    assert route_of(app, "returns", "other").name == "other"
    assert sources_of(app) == ["orders", "returns"]
    with pytest.raises(UsageError, match="--topic nope: not a source of shop"):
        route_of(app, "nope", None)
    with pytest.raises(UsageError, match="--function nope: shop has no such function, it has total, other"):
        route_of(app, "orders", "nope")


@given(st.integers(0, 8), st.lists(st.integers(0, 24), unique=True), st.randoms())
def test_replay_progress_is_exact_for_any_order_of_dead_letters(low: int, order: list[int], chance: Random) -> None:
    """Add each dead letter as the replay does, with the gap before it that holds no dead letter."""
    there = sorted(chance.sample(range(25), chance.randint(0, 25)))
    done, expected = Done().starting_at(low), set(range(low))
    for offset in order:
        if offset in there:
            before = max((each for each in there if each < offset), default=-1)
            done = done.add((before + 1, offset))
            expected.add(offset)
        done = Done.read(done.offset, done.metadata())
        assert {each for each in there if done.contains(each)} == {each for each in there if each in expected}
        edges = [done.offset, *(edge for first, last in done.runs for edge in (first, last + 1))]
        assert edges == sorted(set(edges)), "ranges are joined where possible"
    if set(there) <= expected:
        assert done.runs == ()


def test_replay_refuses_more_ranges_than_offset_metadata_holds() -> None:
    runs = tuple((2 * n, 2 * n) for n in range(1_000_000, 1_001_000))
    (place,) = offsets_of("orders.dlq", {3: Done(0, runs)})
    assert (place.partition, place.offset, place.metadata) == (3, 0, Done(0, runs).metadata())
    with pytest.raises(
        UsageError,
        match=r"orders.dlq\[3\]: the settled dead letters form 2000 separate ranges, more than offset metadata",
    ):
        offsets_of("orders.dlq", {3: Done(0, tuple((3 * n, 3 * n) for n in range(1, 2_001)))})


def test_offset_metadata_of_a_newer_format_is_refused() -> None:
    assert Done(3, ((5, 9), (11, 11))).metadata() == '{"v":1,"done":[2,5,1,1]}'
    foreign = (
        None,
        "",
        "{",
        "[]",
        '{"v":1}',
        '{"done":[]}',
        '{"v":"x","done":1}',
        '{"v":1,"done":[5]}',
        "[" * 9_000,
    )
    for strange in foreign:
        assert Done.read(3, strange) == Done(3)
    with pytest.raises(ConfigurationError, match="stored in format 2, this version reads 1"):
        Done.read(3, '{"v":2,"more":1}')


def test_dead_letters_of_other_apps_need_no_metadata() -> None:
    def at(offset: int, app: str) -> DeadLetter:
        sent = make_dead_letter(msgspec.structs.replace(RECORD, offset=offset), ValueError("why"), app=app)
        return letter_of(read(sent, offset))

    there = [at(offset, "shop" if offset % 2 else "billing") for offset in range(40)]
    settling = Settling.__new__(Settling)
    settling._app_id, settling._world, settling._interval_s = "shop", REAL, 60.0
    for chosen, runs in (({37}, ((36, 38),)), ({5, 7, 37}, ((4, 8), (36, 38))), (set(), ((40, 39),))):
        result = ReplayResult()
        choose = lambda letter, chosen=chosen: letter if letter.offset in chosen else None  # noqa: E731
        done = Done(0)
        for batch in settling._batches(iter(there), DROPPING, choose, None, result):
            done = done.add(*((step.first, step.settled.letter.offset) for step in batch))
        waiting = [letter.offset for letter in there if letter.is_of("shop") and not done.contains(letter.offset)]
        assert waiting == [offset for offset in range(1, 40, 2) if offset not in chosen]
        assert len(done.runs) <= len(runs)
        assert result.of_other_apps == {"billing": 20}
    everything = Done(0).add(
        *(
            (s.first, s.settled.letter.offset)
            for b in settling._batches(iter(there), DROPPING, choose_all, None, ReplayResult())
            for s in b
        )
    )
    assert everything == Done(40)
