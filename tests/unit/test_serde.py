"""The rule from annotation to decoder, and from value to bytes: no Kafka, no records."""

import contextlib
import dataclasses
import datetime
import enum
import functools
import json
import sys
import typing
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos import App
from eos.app import annotations
from eos.encoding import serde
from eos.encoding.serde import DecodeError, decoder, encode, encode_key
from eos.errors import ConfigurationError


class Flight(msgspec.Struct):
    carrier: str
    number: int
    dep_delay: float | None = None


@dataclasses.dataclass
class Plane:
    tail: str
    seats: int
    built: datetime.date | None = None


class Row(TypedDict):
    a: int


class Point(NamedTuple):
    x: int
    y: int


class Node(msgspec.Struct):
    name: str
    children: "list[Node]" = []


class Foreign:
    pass


class HoldsForeign(msgspec.Struct):
    inner: "dict[str, list[Foreign | None]]"


class Colour(enum.StrEnum):
    RED = "red"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


# ------------------------------------------------------------------------------------------------ decoding


@given(st.binary())
def test_bytes_are_unchanged(value: bytes) -> None:
    assert decoder(bytes)(value) is value


@given(st.text())
def test_str_round_trips(text: str) -> None:
    assert decoder(str)(encode(text)) == text


@given(st.dictionaries(st.text(), json_values))
def test_dict_round_trips(value: dict[str, Any]) -> None:
    encoded = encode(value)
    assert decoder(dict)(encoded) == value == json.loads(encoded or b"")


@given(
    st.builds(
        Flight,
        st.text(),
        st.integers(-(2**63), 2**63 - 1),
        st.none() | st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_struct_round_trips(flight: Flight) -> None:
    assert decoder(Flight)(encode(flight)) == flight


@given(st.builds(Plane, st.text(), st.integers(0, 900), st.none() | st.dates()))
def test_dataclass_round_trips(plane: Plane) -> None:
    assert decoder(Plane)(encode(plane)) == plane


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (list[int], [1, 2]),
        (list[Flight], [Flight("UA", 1)]),
        (dict[str, Plane], {"a": Plane("N1", 2)}),
        (int, 5),
        (float, 0.5),
        (bool, True),
        (Row, {"a": 1}),
        (Point, Point(1, 2)),
        (Node, Node("a", [Node("b")])),
        (Colour | int, 3),
        (Literal["a", "b"], "a"),
        (Any, {"a": [None]}),
        (datetime.datetime, datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)),
        (list[bytes], [b"\xff"]),
        (Annotated[int, msgspec.Meta(gt=1)], 2),
    ],
)
def test_other_msgspec_types_are_encoded_as_json(annotation: object, value: object) -> None:
    encoded = msgspec.json.encode(value)
    assert decoder(annotation)(encoded) == value


@pytest.mark.parametrize(
    ("annotation", "value", "sentence"),
    [
        (
            Flight,
            b'{"carrier":"UA","number":"x"}',
            r"expected Flight as JSON: Expected `int`, got `str` - at `\$.number`",
        ),
        (Flight, b'{"carrier":"UA"}', "expected Flight as JSON: Object missing required field `number`"),
        (Plane, b"[]", "expected Plane as JSON: Expected `object`, got `array`"),
        (Flight | None, b"[]", r"expected Flight \| None as JSON"),
        (dict, b"", "expected dict as JSON: Input data was truncated"),
        (dict, b"[]", "expected dict as JSON"),
        (dict, b'{"a":"\xff"}', "expected dict as JSON"),
        (dict, b"{} {}", "expected dict as JSON"),
        (list[int], b"[null]", r"expected list\[int\] as JSON"),
        (Annotated[int, msgspec.Meta(gt=1)], b"1", "Expected `int` >= 2"),
        (Flight, b"null", "expected Flight as JSON"),
        (str, b"\xff", "expected str as UTF-8"),
        (str, b"\xc3(", "expected str as UTF-8"),
        (str, b"\xed\xa0\x80", "expected str as UTF-8"),
        pytest.param(Any, b"[" * 200_000, "expected Any as JSON", id="nested too deep"),
    ],
)
def test_decode_error_names_expected_and_found(annotation: object, value: bytes, sentence: str) -> None:
    with pytest.raises(DecodeError, match=sentence) as caught:
        decoder(annotation)(value)
    assert isinstance(caught.value, ValueError)
    assert caught.value.__cause__ is not None


@given(st.binary())
def test_decoder_raises_only_decode_error(value: bytes) -> None:
    for annotation in (bytes, str, dict, Flight, Plane, list[int], Flight | None, Any):
        with contextlib.suppress(DecodeError):
            decoder(annotation)(value)


@pytest.mark.parametrize("annotation", [bytes, str, dict, Flight, Plane, list[int], Any, int])
def test_tombstone_is_decode_error_without_none_in_annotation(annotation: object) -> None:
    with pytest.raises(DecodeError, match=r"got a tombstone .*annotate .* \| None to receive"):
        decoder(annotation)(None)


@pytest.mark.parametrize(
    "annotation",
    [
        bytes | None, str | None, dict | None, Flight | None, typing.Optional[Plane], None | list[int],  # noqa: UP045
        int | Row | None, Annotated[Flight | None, "doc"],
    ],
)  # fmt: skip
def test_tombstone_is_none_with_none_in_annotation(annotation: object) -> None:
    assert decoder(annotation)(None) is None


def test_optional_raw_types_stay_raw() -> None:
    assert decoder(bytes | None)(b'"a"') == b'"a"'
    assert decoder(str | None)(b'"a"') == '"a"'
    with pytest.raises(DecodeError):
        decoder(str | None)(b"\xff")


def test_json_null_is_none_if_annotated() -> None:
    assert decoder(Flight | None)(b"null") is None


class Broken(msgspec.Struct):
    field: "Nowhere"  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("annotation", "sentence"),
    [
        (Foreign, "no decoder for the annotation"),
        (object, "no decoder for the annotation"),
        (complex, "no decoder for the annotation"),
        (list[Foreign], "no decoder for the annotation"),
        (dict[str, Foreign] | None, "no decoder for the annotation"),
        (HoldsForeign, "no decoder for the annotation HoldsForeign: msgspec cannot read Foreign from JSON"),
        (typing.Callable, "no decoder for the annotation"),
        (set[int] | list[int], "no decoder for the annotation"),
        (5, "no decoder for the annotation"),
        (Broken, r"annotation Broken: .*Nowhere"),
        (bytes | int, "ambiguous"),
        (str | Flight, "ambiguous"),
        (str | int | None, "ambiguous"),
    ],
)
def test_type_without_decoder_is_refused_early(annotation: object, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        decoder(annotation)


# ----------------------------------------------------------------------------------------- annotation of a function


def annotation_of(function: Any) -> object:
    return annotations.parameter_annotation(function, "default", sys._getframe(1))


def test_function_without_annotation_gets_the_default() -> None:
    assert annotation_of(lambda record: record) == "default"


def test_string_annotation_resolves_in_function_module() -> None:
    def f(flight: "Flight | None") -> "Nowhere": ...  # type: ignore[name-defined]  # noqa: F821

    assert annotation_of(f) == Flight | None


def test_string_annotation_resolves_local_types() -> None:
    class Local(msgspec.Struct):
        a: int

    class Flight(msgspec.Struct):  # hides the one of the module, as it does for Python
        b: int

    def f(local: "Local") -> None: ...

    def g(flights: "list[Flight]") -> None: ...

    assert annotation_of(f) is Local
    assert annotation_of(g) == list[Flight]


def test_imported_function_ignores_local_names() -> None:
    class Flight:
        pass

    assert annotation_of(takes_flight) is globals()["Flight"] is not Flight


def takes_flight(flight: "Flight") -> None: ...


@pytest.mark.parametrize("text", ["Nowhere", "list[Nowhere]", "Flight |", "msgspec.Nowhere", "1 + None"])
def test_error_names_the_unresolvable_annotation(text: str) -> None:
    def f(value): ...  # type: ignore[no-untyped-def]

    f.__annotations__["value"] = text
    with pytest.raises(ConfigurationError) as caught:
        annotation_of(f)
    assert repr(text) in str(caught.value)
    assert " of f " in str(caught.value)


def test_annotated_constraints_are_kept() -> None:
    def f(value: "Annotated[int, msgspec.Meta(gt=1)]") -> None: ...

    with pytest.raises(DecodeError):
        decoder(annotation_of(f))(b"1")


def test_annotations_of_wrapped_callables_are_found() -> None:
    def two(setting: int, flight: "Flight") -> None: ...

    def one(flight: "Flight") -> None: ...

    class Service:
        def method(self, flight: "Flight") -> None: ...

        def __call__(self, flight: "Flight") -> None: ...

    @functools.wraps(one)
    def wrapped(*args: object) -> None: ...

    for function in (functools.partial(two, 1), wrapped, Service().method, Service()):
        assert annotation_of(function) is Flight, function
    assert serde.function_name(functools.partial(one)) == "one"


@pytest.mark.parametrize("function", [lambda: None, lambda a, b: None, lambda *, a: None])
def test_function_without_single_argument_is_refused(function: Any) -> None:
    with pytest.raises(ConfigurationError, match="exactly one positional argument"):
        annotation_of(function)


def test_more_parameters_with_defaults_are_allowed() -> None:
    def f(value: bytes, limit: int = 3, *, flag: bool = False) -> None: ...

    assert annotation_of(f) is bytes


# ------------------------------------------------------------------------------------------------ encoding


@given(st.binary())
def test_bytes_like_values_are_sent_unchanged(value: bytes) -> None:
    assert encode(value) is value
    for kind in (bytearray, memoryview):
        encoded = encode(kind(value))
        assert type(encoded) is bytes
        assert encoded == value


def test_none_stays_none() -> None:
    assert encode(None) is None
    assert encode_key(None) is None


@given(st.text())
def test_str_is_sent_as_utf_8_without_quotes(text: str) -> None:
    assert encode(text) == text.encode("utf-8")
    assert encode(Colour.RED) == b"red"


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ({"a": 1, "é": None}, '{"a":1,"é":null}'.encode()),
        (Flight("UA", 1), b'{"carrier":"UA","number":1,"dep_delay":null}'),
        (Plane("N1", 2, datetime.date(2026, 11, 1)), b'{"tail":"N1","seats":2,"built":"2026-11-01"}'),
        (datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC), b'"2026-11-01T00:00:00Z"'),
        ([1, "a"], b'[1,"a"]'),
        (Point(1, 2), b"[1,2]"),
        (5, b"5"),
        (True, b"true"),
        (float("nan"), b"null"),
    ],
)
def test_other_values_are_sent_as_json(value: object, encoded: bytes) -> None:
    assert encode(value) == encoded
    assert encode_key(value) == encoded


@pytest.mark.parametrize("value", [Foreign(), object(), {"a": Foreign()}, 1j, iter([])])
def test_value_without_json_form_raises_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=rf"a {type(value).__name__} cannot be sent .*: send bytes, str, or"):
        encode(value)


class Model:
    """Stands for a model of Pydantic, with the attributes that eos uses."""

    @classmethod
    def model_validate_json(cls, value: bytes) -> "Model":
        return cls()

    def model_dump_json(self) -> str:
        return "{}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.int64(3), r"use its item\(\)"),
        ({"a": [np.float64(3)]}, r"use its item\(\)"),
        (np.array([1]), r"use its tolist\(\)"),
        (Model(), r"use its model_dump_json\(\)"),
        ([Model()], r'use its model_dump\(mode="json"\)'),
    ],
)
def test_error_for_a_refused_value_names_its_remedy(value: object, said: str) -> None:
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"^a {kind} cannot be sent \(.*\): {said}, or pass encode=$"):
        encode(value)
    with pytest.raises(TypeError, match=rf"^a {kind} cannot be sent as a key \(.*\): {said}$"):
        encode_key(value)


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (Model, "msgspec cannot read Model from JSON: pass decode=Model.model_validate_json"),
        (list[np.float64], "msgspec cannot read float64 from JSON: annotate int, float, bool or list"),
        (Foreign, "another type that msgspec knows, or pass decode="),
        (bytearray, "bytearray would be read as JSON: annotate bytes"),
        (memoryview | None, "would be read as JSON: annotate bytes"),
        (str | int, "is ambiguous"),
    ],
)
def test_error_for_a_refused_annotation_names_parameter_and_remedy(annotation: Any, said: str) -> None:
    def price(item):  # type: ignore[no-untyped-def]
        return item

    price.__annotations__["item"] = annotation
    with pytest.raises(ConfigurationError, match=f"^the parameter item of price: .*{said}"):
        App("a").process("in", to="out")(price)


def test_lone_surrogate_raises_value_error() -> None:
    for value in ("\ud800", {"a": "\ud800"}):
        with pytest.raises(ValueError, match="surrogates"):
            encode(value)


@given(st.dictionaries(st.text(), st.integers(0, 9)))
def test_equal_keys_are_equal_bytes(key: dict[str, int]) -> None:
    assert encode_key(key) == encode_key(dict(reversed(key.items())))
    assert json.loads(encode_key(key) or b"") == key
