"""Build error responses for requests, and read whole requests.

The layouts are those of kafka-python's classes. The module serves faults, policies and protection, never forwarded
traffic. It raises Unanswerable for a request that it cannot answer with an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from kafka.protocol import consumer, producer
from kafka.protocol import metadata as cluster

from eos.shim.errors import Malformed, ProtocolError
from eos.shim.wire import api
from eos.shim.wire.cursor import Cursor, string, uvarint
from eos.shim.wire.frames import Piece
from eos.shim.wire.headers import REQUEST_HEAD

CodeOf = Callable[[str | bytes, int], int]
Codes = int | CodeOf  # one code for all partitions, or a function of topic and partition


# A request of at most this size has room for few elements, so it is decoded without a check of their number. Nearly all
# requests are this small.
_UNCHECKED_BYTES = 256


class Unanswerable(ProtocolError):
    pass


def _classes(suffix: str) -> dict[int, Any]:
    modules = (producer, consumer, cluster)
    found = [cls for module in modules for name, cls in vars(module).items() if name.endswith(suffix)]
    return {cls.API_KEY: cls for cls in found if cls.API_KEY is not None}


REQUESTS, RESPONSES = _classes("Request"), _classes("Response")


def can_read(api_key: int, version: int) -> bool:
    """Return whether requests of this version can be read."""
    return api_key in REQUESTS and version <= REQUESTS[api_key].max_version


def decode(cls: Any, frame: bytes, version: int) -> Any:
    """Decode a whole message with one of kafka-python's classes.

    Raises Malformed for any error of the class, and for a request with more elements than a real one. The reason names
    only the type of the error, because messages of some errors contain bytes that may be secret.
    """
    if len(frame) > _UNCHECKED_BYTES and cls.is_request():
        check_request(cls, frame, version)
    try:
        return cls.decode(frame, version=version, header=True, framed=True)
    except Exception as error:
        raise Malformed(f"{cls.__name__} v{version} cannot be read ({type(error).__name__})") from error


def read_request(frame: bytes, api_key: int, version: int) -> Any:
    """Decode a whole request. Raises Malformed."""
    return decode(REQUESTS[api_key], frame, version)


def topic_name_or_id(topic: Any) -> str | bytes:
    """Return a topic's name, or the bytes of its id if this version has no name."""
    name = getattr(topic, "name", None) or getattr(topic, "topic", None)
    topic_id = getattr(topic, "topic_id", None)
    return str(name or "") if name or topic_id is None else bytes(topic_id.bytes)


def request_partitions(request: Any, api_key: int) -> Iterator[tuple[str | bytes, int]]:
    """Yield the partitions of a request of the transaction protocol, a Fetch or an OffsetCommit."""
    if api_key == api.PRODUCE:
        topics: Iterable[Any] = request.topic_data or ()
    elif api_key == api.ADD_PARTITIONS_TO_TXN:
        topics = request.v3_and_below_topics or ()
    else:
        topics = getattr(request, "topics", None) or ()
    for topic in topics:
        for each in getattr(topic, "partition_data", None) or getattr(topic, "partitions", None) or ():
            index = each if isinstance(each, int) else _index(each)
            yield topic_name_or_id(topic), index


def _index(partition: Any) -> int:
    for name in ("index", "partition_index", "partition"):
        found = getattr(partition, name, None)
        if found is not None:
            return int(found)
    raise Unanswerable(f"a partition without a number: {partition}")


def error_response(frame: bytes, api_key: int, version: int, correlation_id: int, code: Codes) -> bytes:
    """Return the response to a request with this error, for each of its partitions if errors are per partition."""
    if not can_read(api_key, version) or api_key not in RESPONSES:
        raise Unanswerable(f"{api.api_name(api_key)} v{version} cannot be answered with an error here")
    request = read_request(frame, api_key, version)
    if api_key == api.FIND_COORDINATOR:
        return _coordinator_response(request, version, correlation_id, _as_function(code)("", -1))
    named = list(request_partitions(request, api_key)) if api_key in _PER_PARTITION else ()
    return refusal_response(api_key, version, correlation_id, code, named)


def refusal_response(
    api_key: int, version: int, correlation_id: int, code: Codes, named: Iterable[tuple[str | bytes, int]] = ()
) -> bytes:
    """Return the error response to a request that was read already. `named` are its partitions, if needed."""
    cls, of = RESPONSES[api_key], _as_function(code)
    if api_key in _PER_PARTITION:
        return _encode_partition_errors(api_key, version, correlation_id, named, of)
    if all(field["name"] != "ErrorCode" for field in cls._json["fields"]):
        raise Unanswerable(f"{api.api_name(api_key)} v{version} has no field for an error")
    no_producer = {"producer_epoch": -1} if api_key == api.INIT_PRODUCER_ID else {}
    return encode_response(api_key, version, correlation_id, error_code=of("", -1), **no_producer)


def encode_response(api_key: int, version: int, correlation_id: int, **fields: Any) -> bytes:
    """Encode a response with these fields and defaults for the others. Raises Malformed for a name that is not text."""
    made = RESPONSES[api_key](version=version, **fields)
    made.with_header(correlation_id=correlation_id)
    try:
        return bytes(made.encode(header=True, framed=True))
    except UnicodeEncodeError as error:
        raise Malformed(f"{api.api_name(api_key)} v{version} has a name that is not text") from error


def _as_function(code: Codes) -> CodeOf:
    return code if callable(code) else lambda topic, partition: code


class _Layout(NamedTuple):
    """Name the fields of a response with errors per partition. `more` are further fields of a partition. Fetch has such
    a layout here although its response also has a top-level error. That error is about the fetch session, and clients
    would only fetch again after it.
    """

    topics: str
    error: str = "error_code"
    more: Mapping[str, Any] = MappingProxyType({})


_PER_PARTITION: Mapping[int, _Layout] = {
    api.PRODUCE: _Layout("responses", more={"base_offset": -1}),
    api.FETCH: _Layout("responses", more={"high_watermark": -1, "records": b""}),
    api.OFFSET_COMMIT: _Layout("topics"),
    api.TXN_OFFSET_COMMIT: _Layout("topics"),
    api.ADD_PARTITIONS_TO_TXN: _Layout("results_by_topic_v3_and_below", "partition_error_code"),
}


def _encode_partition_errors(
    api_key: int, version: int, correlation_id: int, named: Iterable[tuple[str | bytes, int]], of: CodeOf
) -> bytes:
    """Encode a response with a result per partition.

    In all of these responses and versions a topic is its name or id and an array of partitions, and a partition is its
    number and a result. A result is encoded once per error instead of once per partition, because a client may name
    tens of thousands of partitions and all connections wait meanwhile.
    """
    cls, layout = RESPONSES[api_key], _PER_PARTITION[api_key]
    flexible = cls.flexible_version_q(version)
    tags = b"\0" if flexible else b""
    topic_field = cls._struct.fields[layout.topics].array_of
    partition_field = topic_field.untagged_fields(version)[1].array_of
    number = struct.Struct(">i")

    @cache
    def result(code: int) -> bytes:
        refused = partition_field(version=version, **{layout.error: code}, **layout.more)
        return _encode(refused, version, flexible)[number.size :]

    topics: dict[str | bytes, list[bytes]] = {}
    for topic, index in named:
        topics.setdefault(topic, []).append(number.pack(index) + result(of(topic, index)))
    made = [
        (string(topic, flexible) if isinstance(topic, str) else topic) + _array(results, flexible) + tags
        for topic, results in topics.items()
    ]
    answer = cls(version=version)
    answer.with_header(correlation_id=correlation_id)
    body = _encode(answer, version, flexible, {layout.topics: _array(made, flexible)})
    frame = bytes(answer.encode_header(flexible=flexible)) + body
    return number.pack(len(frame)) + frame


def _encode(made: Any, version: int, flexible: bool, ready: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """Encode a message or a part of one. Fields in `ready` are encoded already."""
    fields = made._struct.untagged_fields(version)
    parts = [
        ready[field.name]
        if field.name in ready
        else field.encode(getattr(made, field.name), version=version, compact=flexible, tagged=flexible)
        for field in fields
    ]
    if flexible:
        parts.append(made._struct.tagged_fields(version).encode(made, version=version))
    return b"".join(parts)


def _array(elements: Sequence[bytes], flexible: bool) -> bytes:
    count = uvarint(len(elements) + 1) if flexible else struct.pack(">i", len(elements))
    return count + b"".join(elements)


def _coordinator_response(request: Any, version: int, correlation_id: int, code: int) -> bytes:
    none = {"node_id": -1, "host": "", "port": -1, "error_code": code}
    if version >= 4:
        kind = RESPONSES[api.FIND_COORDINATOR].Coordinator
        none = {"coordinators": [kind(key=key, **none) for key in request.coordinator_keys]}
    return encode_response(api.FIND_COORDINATOR, version, correlation_id, **none)


def with_throttle_time(frame: bytes, api_key: int, version: int, milliseconds: int) -> bytes:
    """Return the response with a throttle time, as a broker's quota would set it."""
    if api_key not in RESPONSES or version > RESPONSES[api_key].max_version:
        raise Unanswerable(f"{api.api_name(api_key)} v{version} cannot be throttled here")
    answer = decode(RESPONSES[api_key], frame, version)
    answer.throttle_time_ms = milliseconds
    made = bytes(answer.encode(header=True, framed=True))
    if made == frame:
        raise Unanswerable(f"{api.api_name(api_key)} v{version} has no throttle time")
    return made


def error_codes(frame: bytes, api_key: int, version: int) -> list[int]:
    """Return all error codes of a response, in order."""
    if api_key not in RESPONSES or version > RESPONSES[api_key].max_version:
        return []
    answer = decode(RESPONSES[api_key], frame, version)
    return list(_find_codes(answer.to_dict()))


def _find_codes(node: Any) -> Iterator[int]:
    for name, value in node.items() if isinstance(node, dict) else ():
        if name.endswith("error_code"):
            yield value
        else:
            yield from _find_codes(value)
    for value in node if isinstance(node, list) else ():
        yield from _find_codes(value)


_SIZES = {"int8": 1, "bool": 1, "int16": 2, "uint16": 2, "int32": 4, "int64": 8, "float64": 8, "uuid": 16}
_STRUCT_IS_NULL = -1


def check_request(cls: Any, frame: Piece, version: int) -> None:
    """Raise Malformed for a request frame with more elements than are accepted, or one that ends too early."""
    cursor = Cursor(frame, REQUEST_HEAD.size, cls.flexible_version_q(version))
    cursor.header_string()
    cursor.skip_tags()
    _check_struct(cls._struct, cursor, version)


def _check_struct(struct: Any, cursor: Cursor, version: int) -> None:
    if struct.nullable_for_version_q(version) and cursor.int8() == _STRUCT_IS_NULL:
        return
    for field in struct.untagged_fields(version):
        if not field.is_array():
            _check_value(field, field.type_str, cursor, version)
            continue
        kind = field.array_of
        for _ in range(max(0, cursor.count())):
            _check_value(kind, kind.type_str, cursor, version)
    cursor.skip_tags()


def _check_value(field: Any, kind: str, cursor: Cursor, version: int) -> None:
    size = _SIZES.get(kind)
    if size is not None:
        cursor.skip(size)
    elif kind == "string":
        cursor.skip_string()
    elif kind in ("bytes", "records"):
        cursor.skip_bytes()
    elif field.is_struct():
        _check_struct(field, cursor, version)
    else:
        raise Malformed(f"a field of type {kind}")
