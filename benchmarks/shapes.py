"""Every shape of function that docs/howto/functions.md shows, and the same work by hand: rows of `make bench`.

`shows` are words of that page's table of results and of its list of annotations; tests/unit/test_docs.py looks whether
all of them have a shape here. Each turns the text into capitals; the value is JSON, `{"n": ..., "text": ...}`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from eos import App, Out, Record

HEADERS: list[tuple[str, bytes | str | None]] = [("source", b"bench")]


class Row(msgspec.Struct):
    n: int
    text: str


@dataclasses.dataclass
class DataRow:
    n: int
    text: str


class Shape(NamedTuple):
    """A function, the hand-written loop that does the same (a key of straight_loop.SENDERS), and what it shows."""

    function: Callable[..., Any]
    by_hand: str
    shows: tuple[str, ...]
    batch: bool = False


def of_record(record: Record) -> bytes | None:
    return record.value.upper() if record.value is not None else None


def of_bytes(value: bytes) -> bytes:
    return value.upper()


def of_str(value: str) -> str:
    return value.upper()


def of_dict(value: dict[str, Any]) -> dict[str, Any]:
    return {"n": value["n"], "text": value["text"].upper()}


def of_struct(row: Row) -> Row:
    return Row(row.n, row.text.upper())


def of_dataclass(row: DataRow) -> DataRow:
    return DataRow(row.n, row.text.upper())


def an_out(value: bytes) -> Out:
    return Out(value.upper())


def record_out(record: Record) -> Out:
    assert record.value is not None
    return record.out(record.value.upper())


def with_headers(value: bytes) -> Out:
    return Out(value.upper(), headers=HEADERS)


def with_a_mapping(value: bytes) -> Out:
    return Out(value.upper(), headers={"source": "bench"})


def a_list(value: bytes) -> list[bytes]:
    return [value.upper()]


def a_tuple(value: bytes) -> tuple[Out]:
    return (Out(value.upper()),)


def generated(value: bytes) -> Iterator[bytes]:
    yield value.upper()


def two_generated(value: bytes) -> Iterator[bytes | Out]:
    changed = value.upper()
    yield changed
    yield Out(changed)


def two_listed(value: bytes) -> list[bytes | Out]:
    changed = value.upper()
    return [changed, Out(changed)]


def filtered(value: bytes) -> bytes | None:
    return value if b"rare" in value else None


def batch(records: list[Record]) -> list[Out]:
    # As the straight loop with new timestamps.
    return [Out(r.value.upper(), r.key, timestamp=0) for r in records if r.value is not None]


def batch_record_out(records: list[Record]) -> list[Out]:
    return [r.out(r.value.upper()) for r in records if r.value is not None]


SHAPES = {
    "record": Shape(of_record, "bytes", ("`Record`", "a value")),
    "batch": Shape(batch, "new timestamps", ("`@app.process_batch`",), batch=True),
    "batch, record.out": Shape(batch_record_out, "bytes", ("`record.out(value)`",), batch=True),
    "bytes": Shape(of_bytes, "bytes", ("`bytes`",)),
    "str": Shape(of_str, "str", ("`str`",)),
    "Out": Shape(an_out, "bytes", ("`Out(value, key=..., topic=..., headers=..., partition=..., timestamp=...)`",)),
    "record.out": Shape(record_out, "bytes", ()),
    "headers": Shape(with_headers, "headers", ()),
    "headers, mapping": Shape(with_a_mapping, "mapping", ()),
    "list": Shape(a_list, "bytes", ("a list, tuple or generator",)),
    "tuple": Shape(a_tuple, "bytes", ()),
    "generator": Shape(generated, "bytes", ()),
    "generator, two": Shape(two_generated, "twice", ()),
    "list, two": Shape(two_listed, "twice", ()),
    "struct": Shape(of_struct, "json", ("`msgspec.Struct`",)),
    "dataclass": Shape(of_dataclass, "dataclass", ("dataclass",)),
    "dict": Shape(of_dict, "dict", ("`dict`",)),
    "filter": Shape(filtered, "filter", ("`None`",)),
}


def app_of(shape: Shape, group: str, source: str, target: str) -> App:
    app = App(group)
    (app.process_batch if shape.batch else app.process)(source, to=target)(shape.function)
    return app
