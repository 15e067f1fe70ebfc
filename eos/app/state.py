"""State of a function's own, by the key of its record: how it is written, and what a route needs to give it.

A function's parameter behind the first one that is annotated `State[T]` is a store: its name names it, T says what a
key's value is. While the function runs on a record the parameter is the state of that record's key. What the function
leaves there counts only if it returns; where it is kept is eos/state's, behind `Cells`. It must never do I/O.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar, overload

from eos.app.serde import Decode, DecodeError, annotation_name, decoder, encode, function_name, resolved
from eos.errors import ConfigurationError, IllegalState
from eos.records import Record

T = TypeVar("T")
D = TypeVar("D")
# Values that nobody can change in place.
_FIXED: Final = frozenset({int, str, bytes, float, bool, types.NoneType})


class _Mark:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


_UNREAD, _ABSENT = _Mark("UNREAD"), _Mark("ABSENT")


class Cells(Protocol):
    """The values of one task (a function and a partition), as the open transaction sees them."""

    def read(self, store: str, key: bytes) -> bytes | None: ...

    def write(self, store: str, key: bytes, value: bytes | None) -> None:
        """None: there is no value any more."""


CellsOf = Callable[[Record], Cells]
"""The cells of the record's task."""


class Store(NamedTuple):
    """A parameter that is state; `annotation` is T."""

    name: str
    annotation: Any


class State(Generic[T]):
    """The value of one key. `get()` gives it, None or the default where there is none; `set(value)`, `delete()`.

    A value that was changed in place is set, also a default: `seen.get([]).append(x)` is enough. Values are JSON, bytes
    and str are kept as they are. It is there while its function runs: do not keep it.
    """

    __slots__ = ("_before", "_cells", "_decode", "_key", "_offered", "_store", "_value")

    _value: Any
    _before: Any  # its bytes
    _key: bytes
    _offered: list[tuple[Any, bytes | None]]  # defaults that were given, and their bytes then

    def __init__(self, store: Store, decode: Decode) -> None:
        self._store, self._decode = store, decode
        self._cells: Cells | None = None

    @overload
    def get(self) -> T | None: ...

    @overload
    def get(self, default: D) -> T | D: ...

    def get(self, default: Any = None) -> Any:
        value = self._present()
        if value is _UNREAD:
            value = self._value = self._read()
        if value is not _ABSENT:
            return value
        if type(default) not in _FIXED:
            self._offered.append((default, _encoded_or_none(default)))
        return default

    def set(self, value: T) -> None:
        self._present()
        if value is None:
            raise TypeError(f"the state {self._store.name} cannot be None: delete() says that there is none")
        self._value = value

    def delete(self) -> None:
        """There is no value for this key any more."""
        self._present()
        self._value = _ABSENT

    def _present(self) -> Any:
        if self._cells is None:
            raise IllegalState(f"the state {self._store.name} is there while its function runs on a record")
        return self._value

    def _read(self) -> Any:
        assert self._cells is not None
        self._before = before = self._cells.read(self._store.name, self._key)
        if before is None:
            return _ABSENT
        try:
            return self._decode(before)
        except DecodeError as error:
            raise ConfigurationError(
                f"the state {self._store.name} of the key {self._key!r} is no "
                f"{annotation_name(self._store.annotation)} ({error}): its type was another one when it was kept"
            ) from error

    # ---- what the route does ----------------------------------------------------------------------------------

    def _enter(self, cells: Cells, key: bytes) -> None:
        self._cells, self._key = cells, key
        self._value = self._before = _UNREAD
        self._offered = []

    def _changed(self) -> tuple[bool, bytes | None]:
        """Whether the value is another one than before, and which. Raises TypeError for what cannot be kept."""
        value = self._value
        if value is _ABSENT and self._before is None:
            # There was none, and none was set: but a default that was changed in place is one.
            value = next((given for given, before in self._offered if _encoded_or_none(given) != before), _ABSENT)
        if value is _UNREAD:
            return False, None
        after = None if value is _ABSENT else encode(value)
        return after != self._before, after

    def _leave(self) -> None:
        self._cells = None


def _encoded_or_none(value: Any) -> bytes | None:
    """None for what is no value that could be kept (a default may be anything)."""
    try:
        return encode(value)
    except (TypeError, ValueError):
        return None


def stores_of(function: Callable[..., Any], frame: types.FrameType | None) -> tuple[Store, ...]:
    """The parameters behind the first that are annotated State[T]. ConfigurationError for one that cannot be kept."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError, NameError):
        return ()  # said by whoever looks at the first parameter
    found = []
    for parameter in parameters:
        if parameter.annotation is inspect.Parameter.empty:
            continue
        annotation = resolved(function, parameter.annotation, frame)
        if annotation is State:
            raise ConfigurationError(
                f"{function_name(function)} has state {parameter.name} of no type: annotate it State[int], or what its "
                "value is"
            )
        if typing.get_origin(annotation) is not State:
            continue
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or parameter.default is not parameter.empty:
            raise ConfigurationError(
                f"the state {parameter.name} of {function_name(function)} must be an ordinary parameter without default"
            )
        (inner,) = typing.get_args(annotation)
        decoder(inner)  # raises for what cannot be decoded
        found.append(Store(parameter.name, inner))
    return tuple(found)


Run = Callable[[Record, Any, Callable[[Any], Any]], Any]


def with_state(function: Callable[..., Any], name: str, stores: Sequence[Store], cells_of: CellsOf | None) -> Run:
    """Calls the function with the state of the record's key."""
    handles = [State[Any](store, decoder(store.annotation)) for store in stores]

    def run(record: Record, given: Any, finish: Callable[[Any], Any]) -> Any:
        """`finish` makes outputs of the result; what it raises is the function's failure, and changes nothing."""
        if cells_of is None:
            raise IllegalState(f"{name} has state: run it by `eos run`, `eos.run` or `eos.testing.run`")
        key = record.key
        if key is None:
            raise ValueError(f"{name} keeps state by key, and this record has no key")
        cells = cells_of(record)
        for handle in handles:
            handle._enter(cells, key)
        try:
            outputs = finish(function(given, *handles))
            changes = [handle._changed() for handle in handles]
        finally:
            for handle in handles:
                handle._leave()
        for store, (changed, value) in zip(stores, changes, strict=True):
            if changed:
                cells.write(store.name, key, value)
        return outputs

    return run
