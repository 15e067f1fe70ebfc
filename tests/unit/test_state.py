"""State of a function by key: changes are stored only if the function returns and its transaction commits."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NewType

import msgspec
import numpy as np
import pytest

import eos
import eos.testing
from eos import App, ListState, MapState, Out, Record, State
from eos.app.cells import cell_of, parse_cell
from eos.errors import ConfigurationError, IllegalState, UsageError
from eos.state.tasks import Task
from eos.state.values import InMemory
from eos.worker.replay import route_of


class Account(msgspec.Struct):
    cents: int = 0
    seen: list[str] = []


def run(function: Callable[..., Any], *records: Record | tuple[Any, ...], **more: Any) -> eos.testing.Ran:
    app = App("bank")
    app.process("in", to="out", **more)(function)
    return eos.testing.run(app, records)


def count(word: str, seen: State[int]) -> int:
    seen.set(seen.get(0) + 1)
    return seen.get(0)


def test_function_sees_the_state_of_its_records_key() -> None:
    ran = run(count, ("in", "x", "a"), ("in", "x", "b"), ("in", "x", "a"))
    assert ran.values("out") == [b"1", b"1", b"2"]
    assert ran.states == {"count": {"seen": {b"a": 2, b"b": 1}}}


def test_deleted_value_is_gone_and_leaves_a_tombstone() -> None:
    def toggle(value: str, on: State[bool], text: State[str]) -> list[str]:
        if on.get():
            on.delete()
            text.delete()
        else:
            on.set(True)
            text.set(value)
        return [text.get("-"), str(on.get())]

    ran = run(toggle, ("in", "x", "a"), ("in", "y", "a"), ("in", "z", "b"))
    assert ran.values("out") == [b"x", b"True", b"-", b"None", b"z", b"True"]
    assert ran.states == {"toggle": {"on": {b"b": True}, "text": {b"b": "z"}}}


def test_in_place_change_of_a_default_value_is_stored() -> None:
    def pay(cents: int, account: State[Account], names: State[list[str]]) -> None:
        mine = account.get(Account())
        mine.cents += cents
        mine.seen.append("x")
        names.get([]).append("n")

    def untouched(cents: int, account: State[Account]) -> None:
        account.get(Account()).cents += 0
        account.get(object())

    ran = run(pay, ("in", "2", "a"), ("in", "3", "a"))
    assert ran.states == {"pay": {"account": {b"a": Account(5, ["x", "x"])}, "names": {b"a": ["n", "n"]}}}
    assert run(untouched, ("in", "2", "a")).states["untouched"] == {"account": {}}


def test_failing_record_changes_nothing_and_retry_sees_old_state() -> None:
    seen_before: list[int] = []

    def fussy(value: str, seen: State[int]) -> object:
        seen_before.append(seen.get(0))
        seen.set(seen.get(0) + 1)
        if value == "raises" and len(seen_before) < 4:
            raise ValueError(value)
        return object() if value == "cannot be sent" else str(seen.get())

    given = [("in", "x", "a"), ("in", "raises", "a"), ("in", "cannot be sent", "a"), ("in", "x", "a")]
    ran = run(fussy, *given, on_error=eos.retry(1, then=eos.skip))
    assert (ran.values("out"), ran.skipped) == ([b"1", b"2"], 2)
    assert seen_before == [0, 1, 1, 1, 1, 1]
    assert ran.states["fussy"] == {"seen": {b"a": 2}}


def test_generator_and_record_without_key_follow_policy() -> None:
    def twice(record: Record, seen: State[int]) -> Any:
        yield Out(record.value)
        seen.set(seen.get(0) + 1)
        yield Out(str(seen.get()))

    ran = run(twice, ("in", "x"), ("in", "x", "a"), on_error=eos.dlq)
    assert ran.values("out") == [b"x", b"1"]
    (letter,) = ran.to("in.dlq")
    assert dict(letter.headers)["eos-dlq-message"] == b"twice keeps state by key, but this record has no key"


def test_unstorable_value_fails_record_and_changed_type_fails_app() -> None:
    def bad(value: str, seen: State[Any]) -> None:
        seen.set(object() if value == "object" else None)

    ran = run(bad, ("in", "object", "a"), ("in", "none", "a"), on_error=eos.dlq)
    assert [dict(sent.headers)["eos-dlq-exception"] for sent in ran.to("in.dlq")] == [b"TypeError", b"TypeError"]

    task = Task(InMemory({cell_of("seen", b"a"): b'"text"'}))
    app = App("bank")
    app.process("in", to="out")(count)
    bound = app.routes["in"].bind(cells_of=lambda _: task)
    with pytest.raises(
        ConfigurationError, match=r"the state seen of the key b'a' is not of type int .*stored with another type"
    ):
        bound.outputs(Record("in", 0, 0, key=b"a", value=b"x"))


class Colour(enum.StrEnum):
    RED = "red"


class Shade(str, enum.Enum):  # noqa: UP042 - the older way, which people have
    DARK = "dark"


Name = NewType("Name", str)
Short = Annotated[str, msgspec.Meta(max_length=3)]
Even = Annotated[int, msgspec.Meta(multiple_of=2)]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Literal["a", "b"], "a"),
        (Colour, Colour.RED),
        (Shade, Shade.DARK),
        (Name, Name("x")),
        (Short, "abc"),
        (Any, "text"),
        (str, "text"),
        (bytes, b"\xff"),
        (float, 1),
        (int, 2**64),
        (dict[int, str], {1: "one"}),
        (tuple[int, str], (1, "a")),
        (Account | None, Account(5, ["a"])),
    ],
)
def test_set_value_is_read_by_next_record(kind: Any, value: Any) -> None:
    found = []

    def remembers(what, seen, each, every):  # type: ignore[no-untyped-def]
        if what == "look":
            found.extend([seen.get(), each["x"], next(iter(every))])
        else:
            seen.set(value)
            each["x"] = value
            every.append(value)

    stores = {"seen": State[kind], "each": MapState[str, kind], "every": ListState[kind]}
    remembers.__annotations__ = {"what": str, **stores}
    run(remembers, ("in", "keep", "a"), ("in", "look", "a"))
    assert found == [value] * 3


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, 1.5, "the state seen cannot be 1.5: expected int as JSON: Expected `int`, got `float`"),
        (int, True, "the state seen cannot be True: expected int as JSON: Expected `int`, got `bool`"),
        (
            float,
            float("nan"),
            "the state seen cannot be nan: expected float as JSON: Expected `float`, got `null`: JSON has",
        ),
        (
            int,
            np.int64(3),
            "the state seen cannot be np.int64(3): Encoding objects of type numpy.int64 is unsupported: use",
        ),
        (str, 5, "the state seen cannot be 5: expected str, got int"),
        (str, "\ud800", "the state seen cannot be '\\ud800': 'utf-8' codec can't encode"),
        (bytes, "x", "the state seen cannot be 'x': expected bytes, got str"),
        (Short, "long", "the state seen cannot be 'long': expected "),
        (Even, 3, "the state seen cannot be 3: expected "),
        (Account, Account("many"), "the state seen cannot be Account(cents='many', seen=[]): expected Account"),  # type: ignore[arg-type]
        (Any, object(), "the state seen cannot be <object obj"),
    ],
)
def test_undecodable_value_fails_its_record(kind: Any, value: Any, said: str) -> None:
    """If stored, it would end the worker at every later record of its key."""

    def remembers(what, seen):  # type: ignore[no-untyped-def]
        assert seen.get() is None
        seen.set(value)

    def maps(what, seen):  # type: ignore[no-untyped-def]
        assert "x" not in seen
        seen["x"] = value

    for function, store in ((remembers, State[kind]), (maps, MapState[str, kind])):
        function.__annotations__ = {"what": str, "seen": store}
        letters = run(function, ("in", "one", "a"), ("in", "two", "a"), on_error=eos.dlq).to("in.dlq")
        messages = [dict(letter.headers)["eos-dlq-message"] or b"" for letter in letters]
        assert len(messages) == 2
        assert all(message.decode().startswith(said) for message in messages), messages


@dataclass
class Users:
    names: set[str]
    logins: int = field(default=0, compare=False)


def test_in_place_change_after_set_is_stored() -> None:
    def visit(name: str, users: State[Users], recent: State[dict[str, set[str]]]) -> str:
        seen, latest = users.get(Users(set())), recent.get({})
        seen.names.add(name)
        seen.logins += 1
        latest[name] = latest.pop(name, {name, *"xyz"})  # to the end
        return f"{seen.logins} {''.join(latest)}"

    ran = run(visit, *[("in", name, "k") for name in "abcab"])
    assert ran.values("out") == [b"1 a", b"2 ab", b"3 abc", b"4 bca", b"5 cab"]


def test_state_is_usable_only_while_its_function_runs() -> None:
    kept: list[State[int]] = []

    def keeps(value: str, seen: State[int]) -> None:
        kept.append(seen)

    run(keeps, ("in", "x", "a"))
    with pytest.raises(IllegalState, match="the state seen was used after its function had returned"):
        kept[0].get()

    lists: list[ListState[int]] = []

    def keeps_a_list(value: str, seen: ListState[int]) -> None:
        lists.append(seen)

    run(keeps_a_list, ("in", "x", "a"))
    with pytest.raises(IllegalState, match="the state seen was used after its function had returned"):
        lists[0].append(1)
    app = App("bank")
    app.process("in", to="out")(count)
    with pytest.raises(IllegalState, match="count has state: run it with"):
        app.routes["in"].outputs(Record("in", 0, 0, key=b"a", value=b"x"))
    with pytest.raises(UsageError, match="count has state, which only the worker"):
        route_of(app, "in", None)


def refused(topics: str | list[str], function: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        App("bank").process(topics, to="out")(function)
    return str(error.value)


def test_wrong_state_definition_is_refused_at_definition() -> None:
    def untyped(value: str, seen: State) -> None: ...  # type: ignore[type-arg]

    def other(value: str, seen: int) -> None: ...

    def default(value: str, seen: State[int] = 5) -> None: ...  # type: ignore[assignment]

    def impossible(value: str, seen: State[Callable[[], int]]) -> None: ...

    assert "the state seen of untyped has no type" in refused("in", untyped)
    assert "must take exactly one positional argument" in refused("in", other)
    assert "the state seen of default must be an ordinary parameter" in refused("in", default)
    assert "Callable" in refused("in", impossible)
    assert "has state, but reads a, b: a function with state must read one topic" in refused(["a", "b"], count)
    assert "has state, but reads ^in.*" in refused("^in.*", count)


@pytest.mark.parametrize("first", [True, False])
def test_app_refuses_to_write_to_its_own_changelog(first: bool) -> None:
    app = App("bank")
    changelog = "bank-count-changelog"

    def copy(record: Record) -> Out:
        return Out(record.value, topic=changelog)

    definitions = [("in", "out", count), ("raw", ["out", changelog], copy)]
    (source, to, function), (other, others, last) = definitions if first else definitions[::-1]
    app.process(source, to=to)(function)
    with pytest.raises(ConfigurationError, match="'bank-count-changelog', the changelog of count"):
        app.process(other, to=others)(last)
    assert app.topics == [source]
    with pytest.raises(ConfigurationError, match="the changelog of count"):
        App("bank").process("in", to=changelog)(count)


def test_pattern_does_not_match_changelogs_of_its_app() -> None:
    app = App("bank")
    app.process("in", to="out")(count)

    @app.process("^bank-.*")
    def read(record: Record) -> None: ...

    assert app.add_topics(["bank-a", "bank-count-changelog", "bank-other-changelog"]) == [
        "bank-a",
        "bank-other-changelog",
    ]


def test_task_sees_own_changes_and_drops_aborted_ones() -> None:
    task, cell = Task(), cell_of("s", b"k")
    task.put(cell, b"1")
    assert task.get(cell) == b"1"
    task.roll_back()
    assert task.get(cell) is None
    task.put(cell, b"2")
    task.committed(0.0)
    task.put(cell, None)
    assert task.get(cell) is None
    task.roll_back()
    assert (task.get(cell), len(task.values)) == (b"2", 1)
    cells = [("s", b"", b""), ("store", b"\0k", b"\0f"), ("store", b"k", b"f")]
    assert [parse_cell(cell_of(*cell)) for cell in cells] == cells
    for strange in (b"", b"s\0", b"s\0\0\0\0\5k", b"sk"):
        with pytest.raises(ValueError):
            parse_cell(strange)


def test_string_annotations_of_state_resolve() -> None:
    class Local(msgspec.Struct):
        n: int

    app = App("bank")

    @app.process("in", to="out")
    def function(value: str, seen: State[Local]) -> None:
        seen.set(Local(1))

    assert app.routes["in"].stores[0].annotations == (Local,)
