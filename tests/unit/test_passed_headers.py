"""Headers passed from an input to its outputs: by default those of a trace, so that it continues."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import eos.testing
from eos import App, Out, Record, Settings
from eos.app.lineage import Ledger
from eos.encoding.lineage import HEADER
from eos.engine.handling import Collector, Handler
from eos.kafka.client.settings import OPTIONS

TRACE = [("traceparent", b"00-1"), ("tracestate", b"v=1")]
HEADERS = [("other", b"x"), *TRACE, ("more", None)]


pytestmark = pytest.mark.usefixtures("loop_ends")


def app_of(function: Callable[[Any], Any], **more: Any) -> App:
    app = App("app")
    app.process("in", to=["out", "two"], **more)(function)
    return app


def records(*headers: Any) -> list[Record]:
    return [Record("in", 0, number, 1_000, b"k", b'{"n":1}', given) for number, given in enumerate(headers)]


def raw(record: Record) -> bytes | None:
    return record.value


def typed(value: dict[str, int]) -> dict[str, int]:
    return value


def out(record: Record) -> Out:
    return record.out("v", topic="two")


def several(record: Record) -> Iterator[object]:
    yield b"a"
    yield Out("b")


async def later(record: Record) -> bytes | None:
    return record.value


async def several_later(record: Record) -> AsyncIterator[object]:
    yield b"a"


@pytest.mark.parametrize("function", [raw, typed, out, several, later, several_later])
def test_output_gets_the_trace_headers_of_its_record(function: Callable[[Any], Any]) -> None:
    ran = eos.testing.run(app_of(function), records(HEADERS, (), [("other", b"x")]))
    each = len(ran.sent) // 3
    assert [sent.headers for sent in ran.sent] == [TRACE] * each + [[]] * each * 2


def test_passed_headers_work_with_a_custom_encoder() -> None:
    ran = eos.testing.run(app_of(typed, encode=lambda value: b"x"), records(HEADERS))
    assert [sent.headers for sent in ran.sent] == [TRACE]


def test_header_of_an_out_replaces_the_passed_one() -> None:
    ran = eos.testing.run(app_of(lambda record: Out("v", headers={"traceparent": "mine", "h": "1"})), records(HEADERS))
    assert ran.sent[0].headers == [("tracestate", b"v=1"), ("traceparent", b"mine"), ("h", b"1")]


def test_batch_outputs_get_no_passed_headers() -> None:
    app = App("app")
    app.process_batch("in", to="out")(
        lambda records: [records[0].out("a"), records[0].out("b", headers=records[0].headers)]
    )
    ran = eos.testing.run(app, records(HEADERS))
    assert [sent.headers for sent in ran.sent] == [[], HEADERS]


def test_dead_letter_has_all_headers_once() -> None:
    def fails(record: Record) -> None:
        raise ValueError

    ran = eos.testing.run(app_of(fails, on_error=eos.dlq), records(HEADERS))
    headers = ran.sent[0].headers
    assert headers[: len(HEADERS)] == HEADERS
    assert {name.startswith("eos-dlq-") for name, _ in headers[len(HEADERS) :]} == {True}


def test_passed_headers_and_lineage_are_both_added() -> None:
    app, ledger, kept = app_of(raw), Ledger(), Collector()
    ledger.begin(("in", 0), 0, None)
    assert Handler(app, ledger, passing=["traceparent"]).handle(kept, records(HEADERS)) is None
    assert [name for name, _ in kept.sends[0][5] or []] == ["traceparent", HEADER]


@pytest.mark.parametrize(
    ("setting", "names"),
    [(None, {"traceparent", "tracestate"}), ("", set()), (" a, b,, ", {"a", "b"}), ("traceparent", {"traceparent"})],
)
def test_passed_headers_setting_is_a_list_of_names(setting: str | None, names: set[str]) -> None:
    assert Settings({} if setting is None else {"eos.headers.pass": setting}).passed_headers == names


def test_only_traces_are_passed_by_default() -> None:
    assert OPTIONS["eos.headers.pass"].default == "traceparent,tracestate"


def test_empty_list_passes_no_headers() -> None:
    kept = Collector()
    assert Handler(app_of(raw), passing=()).handle(kept, records(HEADERS)) is None
    assert kept.sends[0][5] is None


def test_pickled_route_keeps_passed_headers() -> None:
    route = app_of(raw).routes["in"].bind(["traceparent"])
    assert pickle.loads(pickle.dumps(route)).outputs(records(HEADERS)[0])[0][5] == [("traceparent", b"00-1")]
