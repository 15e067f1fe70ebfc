"""The compiled State against the Python one: the same values, writes and errors, no reference lost."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eos import App, State, hotloop
from eos.app import state as states
from eos.app.cells import cell_of, encode_key
from eos.app.layers import Layer
from eos.app.state import OPEN_STATE, CompiledStore, Store
from eos.errors import ConfigurationError, IllegalState
from eos.records import Record
from eos.state.tasks import Task
from eos.state.values import InMemory
from tests.unit.test_hotloop import BOTH, compiled, leaves_all_as_it_was

fast_only = pytest.mark.skipif(OPEN_STATE is State, reason="the Python loop is in use")
both_loops = pytest.mark.parametrize("loop", BOTH)
CELL = cell_of("n", b"k")


class Part(msgspec.Struct):
    n: int


class Foreign:
    """A value that no state can keep."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Foreign

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Foreign()"


class Cells(Layer):
    """Cells with one value, which note what is written."""

    def __init__(self, stored: bytes | None) -> None:
        super().__init__(InMemory())
        self.changed[CELL] = stored
        self.written: list[object] = []

    def put(self, cell: bytes, value: bytes | None) -> None:
        self.written.append((cell, value))


KINDS = [int, bool, float, str, bytes, Part, list[int], set[int], int | None]
STORED = [None, b"5", b"true", b"text", b'{"n":1}', b"[2,1]", b"\xff", b""]
VALUES = [5, 2**70, True, "text", b"bytes", None, Part(1), [1], [], {2, 1}, 1.5, "\ud800", Foreign()]
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "get": lambda state, _: state.get(),
    "get a default": lambda state, value: state.get(value),
    "get by name": lambda state, value: state.get(default=value),
    "get too much": lambda state, value: state.get(value, value),
    "change a default": lambda state, _: state.get([]).append(1),
    "set": lambda state, value: state.set(value),
    "set by name": lambda state, value: state.set(value=value),
    "set nothing": lambda state, _: state.set(),
    "delete": lambda state, _: state.delete(),
    "encode": lambda state, _: state._encode(),
    "close": lambda state, _: state._close(),
}
calls = st.lists(st.tuples(st.sampled_from(list(CALLS)), st.sampled_from(VALUES)), max_size=5)


def use(kind: type[Any], store: Store, stored: bytes | None, calls: list[tuple[str, object]]) -> list[object]:
    """Return what the calls, the end of the function and the write returned or raised, and what was written."""
    cells = Cells(stored)
    state = kind(CompiledStore(store), cells, encode_key(b"k"))

    def outcome(call: Callable[..., object], *args: object) -> object:
        try:
            return call(*args), state._is_stored
        except Exception as error:  # noqa: BLE001 - any error of the two forms is compared
            return type(error), str(error).replace("eos.app.state.", "")

    done = [outcome(CALLS[name], state, copy.copy(value)) for name, value in calls]
    done += [outcome(state._encode), outcome(state._write, cells), outcome(state._close), outcome(state.get)]
    return [*done, cells.written]


@fast_only
@settings(max_examples=600)
@given(st.sampled_from(KINDS), st.sampled_from([None, 1000]), st.sampled_from(STORED), calls)
def test_fast_state_does_what_state_does(kind: Any, ttl_ms: int | None, stored: bytes | None, made: Any) -> None:
    store = Store("n", State, (kind,), ttl_ms=ttl_ms)
    assert issubclass(OPEN_STATE, State)
    assert use(OPEN_STATE, store, stored, made) == use(State, store, stored, made)


@pytest.mark.parametrize("kind", {State, OPEN_STATE})
@pytest.mark.parametrize(
    ("annotation", "stored", "left"), [(int, b"5", b"6"), (str, b"a", b"b"), (bytes, b"a", b"b"), (bool, b"true", b"0")]
)
def test_state_reads_once_and_writes_changes(kind: Any, annotation: Any, stored: bytes, left: bytes) -> None:
    compiled_store = CompiledStore(Store("n", State, (annotation,)))
    cells = Cells(stored)
    state = kind(compiled_store, cells, encode_key(b"k"))
    value = state.get()
    cells.changed[CELL] = left
    assert (state.get(), type(value)) == (value, annotation)
    state.set(value)
    state._encode()
    state._write(cells)
    assert cells.written == []  # an equal value is no change
    state.set(compiled_store.decode(left) if annotation is not bool else False)
    state._encode()
    state._write(cells)
    assert cells.written == [(CELL, left if annotation is not bool else b"false")]


def test_kept_state_is_refused_after_the_function() -> None:
    kept: list[Any] = []

    def count(value: bytes, n: State[int]) -> bytes:
        kept.append(n)
        n.set(n.get(0) + 1)
        return b"%d" % (n.get() or 0)

    app = App("app")
    app.process("in", to="out")(count)
    task = Task()
    route = app.routes["in"].bind(cells_of=lambda record: task)
    assert [route.outputs(Record("in", 0, at, 5, b"k", b"v"))[0][1] for at in range(3)] == [b"1", b"2", b"3"]
    assert {type(one) for one in kept} == {OPEN_STATE}
    for call in (kept[0].get, lambda: kept[0].get(0), lambda: kept[0].set(1), kept[0].delete):
        with pytest.raises(IllegalState):
            call()


@fast_only
def test_fast_state_without_its_fields_raises() -> None:
    for call in (OPEN_STATE.get, lambda one: one.set(5), OPEN_STATE._encode, lambda one: one._write(Cells(None))):
        with pytest.raises(AttributeError):
            call(OPEN_STATE.__new__(OPEN_STATE))  # type: ignore[operator]
    for fields in ((), (1, 2, 3), (CompiledStore(Store("n", State, (int,))), Cells(None), "text")):
        with pytest.raises((TypeError, AttributeError)):
            OPEN_STATE(*fields)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        OPEN_STATE(compiled=5)  # type: ignore[call-arg]


@fast_only
def test_state_closed_while_it_is_read_or_encoded_does_not_crash() -> None:
    made: list[Any] = []

    def closing(value: object) -> Any:
        for slot in ("_cells", "_compiled", "_value", "_row", "_bytes_before", "_defaults"):
            delattr(made[0], slot)
        return b"5" if type(value) is int else 5

    for name in ("bare", "encode"):
        store = CompiledStore(Store("n", State, (int,)))
        setattr(store, name, closing)
        made[:] = [OPEN_STATE(store, Cells(b"5"), encode_key(b"k"))]
        if name == "bare":
            assert made[0].get() == 5
        else:
            made[0].set(5)
            made[0]._encode()


@fast_only
def test_fast_state_is_collected_with_its_cycle() -> None:
    class Node:
        """A value that knows its state."""

    node = Node()
    state = OPEN_STATE(CompiledStore(Store("n", State, (int,))), Cells(None), encode_key(b"k"))
    state.set(node)
    node.state = state  # type: ignore[attr-defined]
    seen = weakref.ref(node)
    del node, state
    gc.collect()
    assert seen() is None


@compiled
def test_fast_state_of_another_class_is_the_class_itself() -> None:
    from eos.hotloop import _native

    class OtherState:
        pass

    rest = states._UNREAD, states._ABSENT, states._IMMUTABLE
    _native.fast_state(State, CompiledStore, *rest)
    assert _native.fast_state(OtherState, CompiledStore, *rest) is OtherState
    with pytest.raises(TypeError):
        _native.fast_state(State, CompiledStore, *rest[:2], [])  # type: ignore[arg-type]


@fast_only
def test_fast_state_leaks_no_reference() -> None:
    value, stored = "value" * 9, b"stored" * 9
    compiled_store = CompiledStore(Store("n", State, (str,), ttl_ms=1000))
    cells, key = Cells(stored), encode_key(b"k" * 9)

    def turn() -> None:
        for steps in (("get",), ("set",), ("get", "set"), ("get a default",), ("set by name",), ("delete", "get")):
            cells.changed[CELL] = b"\xff" if steps == ("get",) else stored
            state = OPEN_STATE(compiled_store, cells, key)
            for step in steps:
                with contextlib.suppress(ConfigurationError):
                    CALLS[step](state, value)
            state._encode()
            state._write(cells)
            state._close()
        cells.written.clear()

    cells.changed[b"n\0" + key] = stored
    leaves_all_as_it_was(turn, [value, stored, compiled_store, cells, key, OPEN_STATE, State])


@both_loops
@given(st.binary(max_size=300))
def test_encoded_key_starts_with_its_length(loop: Any, key: bytes) -> None:
    assert loop.encode_key(key) == len(key).to_bytes(4, "big") + key


@both_loops
@pytest.mark.parametrize("key", [None, "text", 5])
def test_only_bytes_are_encoded_as_a_key(loop: Any, key: Any) -> None:
    with pytest.raises(TypeError):
        loop.encode_key(key)


def test_functions_get_the_state_of_the_chosen_loop() -> None:
    assert (OPEN_STATE is State) is not hotloop.COMPILED


@pytest.mark.parametrize("kind", {State, OPEN_STATE})
def test_setting_an_equal_value_extends_its_life(kind: Any) -> None:
    cells = Cells(b"5")
    state = kind(CompiledStore(Store("n", State, (int,), ttl_ms=1000)), cells, encode_key(b"k"))
    state.set(state.get())
    state._encode()
    state._write(cells)
    assert cells.written == [(CELL, b"5")]
