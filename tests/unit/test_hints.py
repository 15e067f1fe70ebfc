"""Hints: a probably unintended result is logged once, with the code to write instead."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Optional

import pytest

import eos.testing
from eos import App, Out, Record, State
from eos.app import results
from eos.testing.offline import Ran

SWALLOWED = "tombstone dropped"
PAIR = "tuple sent as separate records"
NOTHING = "function returned None against its annotation"


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_warned", set())


def app_of(function: Callable[[Any], Any], to: Any = "out", **more: Any) -> App:
    app = App("app")
    app.process("in", to=to, **more)(function)
    return app


def run(function: Callable[[Any], Any], *values: object, **more: Any) -> Ran:
    return eos.testing.run(app_of(function, **more), [("in", value, b"k") for value in values])


def raw(record: Record) -> bytes | None:
    return record.value


def typed(value: dict[str, int] | None) -> dict[str, int] | None:
    return value


def generated(record: Record) -> Iterator[bytes | None]:
    yield record.value


def listed(record: Record) -> list[bytes | None]:
    return [record.value]


async def later(record: Record) -> bytes | None:
    return record.value


@pytest.mark.parametrize("function", [raw, typed, generated, listed, later])
def test_dropped_tombstone_is_warned_once_with_position_and_remedy(
    function: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    ran = run(function, {"n": 1}, None, None, {"n": 2})
    assert ran.values("out") == [b'{"n":1}', b'{"n":2}'], "the hint does not change the outputs"
    (line,) = [line for line in caplog.messages if line.startswith(SWALLOWED)]
    assert f"function={function.__name__} topic=in partition=0 offset=1 " in line
    assert "return Out(None)" in line
    assert "record.out(record.value)" in line
    assert "return ()" in line


def test_remedies_of_tombstone_hint_work_without_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def out(record: Record) -> Out:
        return Out(record.value)

    def made(record: Record) -> Out:
        return record.out(record.value)

    def dropped(record: Record) -> object:
        return () if record.value is None else record.value

    assert run(out, b"a", None).values("out") == [b"a", None]
    assert run(made, b"a", None).values("out") == [b"a", None]
    assert run(dropped, b"a", None).values("out") == [b"a"]
    assert caplog.messages == []


def test_filter_and_function_without_destination_are_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    def none(record: Record) -> None: ...

    run(none, b"a", b"b")
    run(none, None, to=())
    assert caplog.messages == []


def test_route_copy_does_not_warn_again(caplog: pytest.LogCaptureFixture) -> None:
    route = app_of(raw).routes["in"]
    for copy in (route, pickle.loads(pickle.dumps(route))):
        assert copy.outputs(Record("in", 0, 7)) == ()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("result", [("key", "value"), (b"key", b"value"), ("key", {"n": 1}), ("key", None)])
def test_tuple_like_key_and_value_is_warned_once(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    def pair(record: Record) -> Any:
        return result

    ran = run(pair, b"a", b"b")
    assert len(ran.sent) == 2 * len([item for item in result if item is not None]), (
        "the hint does not change the outputs"
    )
    (line,) = [line for line in caplog.messages if line.startswith(PAIR)]
    assert "function=pair topic=in partition=0 offset=0 " in line
    assert "Out(value, key=key)" in line


@pytest.mark.parametrize("result", [["key", "value"], ("a", "b", "c"), (1, 2), ("a",), (), ("a", Out("b"))])
def test_other_multiple_results_are_not_warned(result: Any, caplog: pytest.LogCaptureFixture) -> None:
    def several(record: Record) -> Any:
        return result

    run(several, b"a")
    assert caplog.messages == []


# ---- a function without its return -----------------------------------------------------------------------------------


class Total:
    """A type of this module."""


def forgets(value: str) -> str:  # type: ignore[return]
    value.upper()


def forgets_several(value: str) -> list[Out]:  # type: ignore[return]
    value.upper()


def forgets_a_type_of_its_own(value: str) -> Total:  # type: ignore[return]
    value.upper()


def forgets_what_only_type_checkers_import(value: str) -> Elsewhere:  # type: ignore[name-defined]  # noqa: F821
    value.upper()


def forgets_its_state(value: str, seen: State[int]) -> str:  # type: ignore[return]
    seen.set(1)


async def forgets_later(value: str) -> str:  # type: ignore[return]
    value.upper()


async def forgets_its_state_later(value: str, seen: State[int]) -> str:  # type: ignore[return]
    seen.set(1)


FORGETFUL = [
    *(forgets, forgets_several, forgets_a_type_of_its_own, forgets_what_only_type_checkers_import),
    *(forgets_its_state, forgets_later, forgets_its_state_later),
]


@pytest.mark.parametrize("function", FORGETFUL, ids=lambda function: function.__name__)
@pytest.mark.parametrize("more", [{}, {"encode": str.encode}], ids=["", "encode"])
def test_missing_return_is_warned_once(
    function: Callable[..., Any], more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert run(function, "a", "b", "c", **more).sent == []
    (line,) = [line for line in caplog.messages if line.startswith(NOTHING)]
    assert f"function={function.__name__} topic=in partition=0 offset=0 " in line
    assert "a `return` may be missing" in line


@pytest.mark.parametrize("state", [False, True])
def test_missing_return_of_batch_function_is_warned_once(state: bool, caplog: pytest.LogCaptureFixture) -> None:
    app = App("app")

    def plain(records: list[Record]) -> list[Out]:  # type: ignore[return]
        len(records)

    def with_state(records: list[Record], seen: dict[bytes, State[int]]) -> list[Out]:  # type: ignore[return]
        len(records)

    app.process_batch("in", to="out")(with_state if state else plain)
    eos.testing.run(app, [("in", b"a", b"k"), ("in", b"b", b"k")])
    assert [line.partition(" function=")[0] for line in caplog.messages] == [NOTHING]


Sometimes = str | None


def filters(value: str) -> str | None: ...
def filters_optionally(value: str) -> Optional[str]: ...  # noqa: UP045
def filters_by_an_alias(value: str) -> Sometimes: ...
def filters_annotated(value: str) -> Annotated[str | None, "a note"]: ...
def filters_anything(value: str) -> Any: ...
def filters_objects(value: str) -> object: ...
def filters_what_only_type_checkers_import(value: str) -> Elsewhere | None: ...  # type: ignore[name-defined]  # noqa: F821
def filters_without_an_annotation(value): ...  # type: ignore[no-untyped-def]
def ends_nowhere(value: str) -> None: ...
def gives_nothing(value: str) -> Iterator[str]:
    yield from ()


FILTERS = [
    *(filters, filters_optionally, filters_by_an_alias, filters_annotated, filters_anything, filters_objects),
    *(filters_what_only_type_checkers_import, filters_without_an_annotation, ends_nowhere, gives_nothing),
]


@pytest.mark.parametrize("function", FILTERS, ids=lambda function: function.__name__)
def test_filter_causes_no_warning(function: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    decode = {"decode": bytes.decode} if function is filters_without_an_annotation else {}
    assert run(function, "a", "b", **decode).sent == []
    assert caplog.messages == []
