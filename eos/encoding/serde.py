"""Makes decoders from type annotations, and encodes Python values to bytes.

Owns the rule by which an annotation chooses the decoder of a record's value, and the rule by which a value or key
becomes bytes. It must never do I/O, know about topics or records, or decide about a record that does not decode. It
raises an error, and the worker's policy decides.

Alone (or as `| None`), `bytes` and `str` mean the raw value. Every other annotation means JSON, read by msgspec.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec

from eos.errors import ConfigurationError, raise_if_interrupted, safe_str

Decode = Callable[[bytes | None], Any]
Encode = Callable[[Any], bytes | None]
_Node = TypeVar("_Node")

JSON = msgspec.json.Encoder()
# A key decides the partition and what compaction keeps, so equal dicts and sets must give equal bytes.
_JSON_KEY = msgspec.json.Encoder(order="deterministic")


class DecodeError(ValueError):
    """Reports a record's value that does not match the function's annotation."""


# ---------------------------------------------------------------------------------------------- annotation


def underlying(function: Callable[..., object]) -> Callable[..., object]:
    """Return the plain function inside partials, `functools.wraps` and `__call__`: the owner of globals and code."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    if inspect.isroutine(function) or isinstance(function, type):
        return getattr(function, "__func__", function)
    return getattr(type(function), "__call__", function)  # noqa: B004 (we need the method itself, not whether it is callable)


def function_name(function: Callable[..., object]) -> str:
    """Return the name of a user's function for messages."""
    return str(getattr(underlying(function), "__qualname__", repr(function))).rpartition("<locals>.")[2]


def annotation_name(annotation: object) -> str:
    """Return the name of a type for messages: `Flight`, `Flight | None`, `list[int]`."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join("None" if a is types.NoneType else annotation_name(a) for a in typing.get_args(annotation))
    return str(annotation).replace("typing.", "")


def without_none(annotation: object) -> tuple[object, bool]:
    """Return the annotation without `| None`, and whether it contained `| None`."""
    if typing.get_origin(annotation) is typing.Annotated:  # Annotated[T | None, ...] keeps its constraints
        return annotation, without_none(typing.get_args(annotation)[0])[1]
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, annotation is types.NoneType
    rest = tuple(a for a in typing.get_args(annotation) if a is not types.NoneType)
    nullable = len(rest) < len(typing.get_args(annotation))
    return functools.reduce(lambda a, b: typing.Union[a, b], rest), nullable  # noqa: UP007


# ------------------------------------------------------------------------------------------------ decoding


def decoder(annotation: object, of: str = "", kept: bool = False) -> Decode:
    """Return the decoder of a record's value (bytes, or None for a tombstone) for this annotation.

    `of`: the name of the parameter in error messages. `kept`: the value belongs to state, which has no decode=. Raises
    ConfigurationError for an annotation without a decoder. The decoder raises DecodeError for a value of another type,
    and for a tombstone unless the annotation is `T | None`.
    """
    inner, nullable = without_none(annotation)
    if inner is bytes:
        return _bytes_or_none if nullable else _bytes
    if inner is str:
        return _str_or_none if nullable else _str
    union = typing.get_origin(inner) in (typing.Union, types.UnionType)
    if union and {bytes, str}.intersection(typing.get_args(inner)):
        raise ConfigurationError(
            f"{of}the annotation {annotation_name(annotation)} is ambiguous: bytes and str alone mean the raw value, "
            "but the other types mean JSON; annotate Record or bytes and decode in the function"
        )
    if inner in (bytearray, memoryview):
        raise ConfigurationError(f"{of}{annotation_name(annotation)} would be read as JSON: annotate bytes")
    return _json_decoder(annotation, nullable, of, kept)


def _json_decoder(annotation: object, nullable: bool, of: str, kept: bool) -> Decode:
    name = annotation_name(annotation)
    try:
        decode = msgspec.json.Decoder(annotation).decode
        foreign = _find_type(msgspec.inspect.CustomType, msgspec.inspect.type_info(annotation), set())
    except (TypeError, NameError, AttributeError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{of}no decoder for the annotation {name}: {error}") from error
    if foreign is not None:
        # msgspec accepts any class and then refuses every value of it. Report this now, not at the first record.
        raise ConfigurationError(
            f"{of}no decoder for the annotation {name}: msgspec cannot read {annotation_name(foreign.cls)} from JSON",
            remedy=_suggest_annotation(foreign.cls, kept),
        )

    def from_json(value: bytes | None) -> Any:
        if value is None:
            if nullable:
                return None
            raise _tombstone(name)
        try:
            return decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"expected {name} as JSON: {error}") from error

    return _with_bare(from_json, decode)


def _with_bare(decode: Decode, bare: Callable[[bytes], Any]) -> Decode:
    """Attach the function that decodes bytes alike, but raises other errors: the compiled hot loop calls it first."""
    decode.__dict__["bare"] = bare
    return decode


def _suggest_annotation(kind: type, kept: bool) -> str:
    """Return which annotation to use in place of a class that msgspec does not know."""
    if hasattr(kind, "model_validate_json"):
        name = annotation_name(kind)
        return "keep a dict, its model_dump()" if kept else f"pass decode={name}.model_validate_json"
    if kind.__module__.partition(".")[0] == "numpy":
        return "annotate int, float, bool or list"
    known = "bytes, str, dict, a msgspec.Struct, a dataclass or another type that msgspec knows"
    return f"use {known}" if kept else f"use Record, {known}, or pass decode="


def _find_type(kinds: type[_Node] | tuple[type[_Node], ...], node: object, seen: set[int]) -> _Node | None:
    """Return the first part of a msgspec type description that is one of these kinds, or None.

    A CustomType is a class that msgspec knows only by `isinstance`.
    """
    if isinstance(node, kinds):
        return node
    if id(node) in seen:  # types may be recursive
        return None
    seen.add(id(node))
    children: tuple[object, ...] = ()
    if isinstance(node, tuple):
        children = node
    elif isinstance(node, msgspec.inspect.Field):
        children = (node.type,)  # only the type: the field's default is the user's object
    elif isinstance(node, msgspec.inspect.Type):
        children = tuple(getattr(node, name) for name in node.__struct_fields__)
    return next((found for child in children if (found := _find_type(kinds, child, seen)) is not None), None)


def _tombstone(name: str) -> DecodeError:
    return DecodeError(
        f"expected {name}, got a tombstone (a null value): annotate {name} | None to receive tombstones as None"
    )


def _bytes_or_none(value: bytes | None) -> bytes | None:
    return value


def _bytes(value: bytes | None) -> bytes:
    if value is None:
        raise _tombstone("bytes")
    return value


def _str_or_none(value: bytes | None) -> str | None:
    return None if value is None else _str(value)


def _str(value: bytes | None) -> str:
    if value is None:
        raise _tombstone("str")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"expected str as UTF-8: {error}") from error


_with_bare(_bytes, bytes)
_with_bare(_bytes_or_none, bytes)
_with_bare(_str, bytes.decode)
_with_bare(_str_or_none, bytes.decode)


def wrap_decoder(decode: Callable[[bytes], Any] | None, annotation: object) -> Decode | None:
    """Return a user's decoder with the common rules.

    The decoder gets only bytes, its exceptions become DecodeError, and the annotation decides about tombstones.
    """
    if decode is None:
        return None
    if not callable(decode):
        raise ConfigurationError(f"decode={decode!r} is not a function of bytes")
    return _UserDecoder(decode, annotation_name(annotation), without_none(annotation)[1])


def wrap_encoder(encode: Callable[[Any], bytes] | None) -> Encode | None:
    """Return a user's encoder that passes None (a tombstone) through.

    It raises TypeError for a result that is not bytes.
    """
    if encode is None:
        return None
    if not callable(encode):
        raise ConfigurationError(f"encode={encode!r} is not a function that returns bytes")
    return _UserEncoder(encode)


class _UserDecoder:
    """Wraps a user's decoder with the common rules; a class and not a closure, because Spark pickles routes."""

    def __init__(self, decode: Callable[[bytes], Any], name: str, nullable: bool) -> None:
        self._decode, self._name, self._nullable = decode, name, nullable

    def __call__(self, value: bytes | None) -> Any:
        if value is None:
            if self._nullable:
                return None
            raise _tombstone(self._name)
        try:
            return self._decode(value)
        except BaseException as error:
            raise_if_interrupted(error)
            raise DecodeError(f"{function_name(self._decode)}: {type(error).__name__}: {safe_str(error)}") from error


class _UserEncoder:
    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode

    def __call__(self, value: object) -> bytes | None:
        if value is None:
            return None
        encoded = self._encode(value)
        if type(encoded) is not bytes:
            raise TypeError(f"{function_name(self._encode)} returned a {type(encoded).__name__}, not bytes")
        return encoded


# ------------------------------------------------------------------------------------------------ encoding


def encode(value: object) -> bytes | None:
    """Return the bytes of a record's value.

    bytes, bytearray and memoryview stay as they are, str becomes UTF-8, None stays None (a tombstone), and all else
    becomes JSON, as msgspec writes it: NaN and infinities become null, bytes inside JSON become base64. Raises
    TypeError for a type that JSON cannot hold, ValueError for a str that UTF-8 cannot encode.
    """
    return _encode(value, JSON, "sent")


class Codec(NamedTuple):
    """Holds the decoder and encoder for state values of one annotation; `decode` reads the bytes that `encode` wrote.

    `encode` raises TypeError or ValueError for a value that cannot be encoded. A value whose exact type is `exact_type`
    can always be decoded again. For other types only a call of `decode` shows this. `unordered`: a decoded value may
    encode to other bytes.
    """

    decode: Decode
    encode: Callable[[Any], bytes]
    exact_type: type | None
    unordered: bool = False


def codec(annotation: object) -> Codec:
    """Return the codec for an annotation. Raise ConfigurationError if it has no decoder."""
    decode, (inner, _) = decoder(annotation), without_none(annotation)
    if inner is bytes or inner is str:
        return Codec(decode, functools.partial(_encode_raw, inner), inner)
    sets = (msgspec.inspect.SetType, msgspec.inspect.FrozenSetType)
    unordered = _find_type(sets, msgspec.inspect.type_info(annotation), set()) is not None
    return Codec(decode, JSON.encode, inner if inner is int or inner is bool else None, unordered)


def _encode_raw(kind: type[bytes] | type[str], value: object) -> bytes:
    if isinstance(value, str if kind is str else (bytes, bytearray, memoryview)):
        return cast("bytes", encode(value))
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


class _IsJson(dict[type, bool]):
    """Caches for each type whether `encode` writes it as JSON."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = not issubclass(kind, (str, bytes, bytearray, memoryview, types.NoneType))
        return self[kind]


IS_JSON = _IsJson()


def encode_key(key: object) -> bytes | None:
    """Return the bytes of a record's key as `encode` does, but sort dicts and sets: equal keys give equal bytes."""
    return _encode(key, _JSON_KEY, "sent as a key")


_NO_NAN: Final = "JSON has no NaN and no infinity: use None or another value instead"


def suggest_encoding(value: object, kept: bool = False) -> str:
    """Return the remedy for a value that JSON cannot hold, chosen for its first such part, or "" if none is known.

    `kept`: the value belongs to state and is not sent.
    """
    refused: list[Any] = []

    def refuse(part: object) -> object:
        refused.append(part)
        raise NotImplementedError

    plain: object = None
    with contextlib.suppress(NotImplementedError, TypeError, ValueError, OverflowError, RecursionError):
        plain = msgspec.to_builtins(value, enc_hook=refuse, str_keys=True)
    if not refused:
        try:
            json.dumps(plain, allow_nan=False)
        except ValueError:
            return _NO_NAN
        return ""
    part = refused[0]
    if hasattr(part, "model_dump_json"):
        return 'use its model_dump(mode="json")' if kept or part is not value else "use its model_dump_json()"
    if type(part).__module__ == "numpy":
        return f"use its {'tolist' if getattr(part, 'ndim', 0) else 'item'}()"
    return ""


def _encode(value: object, encoder: msgspec.json.Encoder, use: str) -> bytes | None:
    if value is None or type(value) is bytes:
        return value
    if not IS_JSON[type(value)]:
        return value.encode() if isinstance(value, str) else bytes(cast("bytes | bytearray | memoryview", value))
    try:
        return encoder.encode(value)
    except TypeError as error:
        remedy = suggest_encoding(value) or (
            "send bytes, str, or a value that JSON can hold (a dict, a dataclass, a msgspec.Struct, a number, ...)"
        )
        own = "" if encoder is _JSON_KEY else ", or pass encode="
        raise TypeError(f"a {type(value).__name__} cannot be {use} ({error}): {remedy}{own}") from error
