"""Answers a broker would give with an error, made from the request; and whole requests read into names.

Owns no layout: kafka-python's classes have them. For what is decided here (faults, refusals of a policy), never for
traffic that passes. Raises Unanswerable for a request nobody can answer with an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kafka.protocol import consumer, producer
from kafka.protocol import metadata as cluster

from eos.shim.errors import Malformed, ProtocolError
from eos.shim.wire import api, measure

Of = Callable[[str | bytes, int], int]
Codes = int | Of  # one for all, or by topic and partition


# A request with room for few elements is read as it is: nearly all are.
_TOO_SMALL_TO_MATTER_BYTES = 256


class Unanswerable(ProtocolError):
    pass


def _classes(suffix: str) -> dict[int, Any]:
    modules = (producer, consumer, cluster)
    found = [cls for module in modules for name, cls in vars(module).items() if name.endswith(suffix)]
    return {cls.API_KEY: cls for cls in found if cls.API_KEY is not None}


REQUESTS, RESPONSES = _classes("Request"), _classes("Response")


def known(api_key: int, version: int) -> bool:
    """Whether requests of this version can be read."""
    return api_key in REQUESTS and version <= REQUESTS[api_key].max_version


def decoded(cls: Any, frame: bytes, version: int) -> Any:
    """A whole message of one of kafka-python's classes. Raises Malformed for whatever the class raises, and for a
    request with more in it than any has.

    The reason says no more than the kind of error: some show the bytes they stumbled over, and those may be secret.
    """
    if len(frame) > _TOO_SMALL_TO_MATTER_BYTES and cls.is_request():
        measure.check(cls, frame, version)
    try:
        return cls.decode(frame, version=version, header=True, framed=True)
    except Exception as error:
        raise Malformed(f"{cls.__name__} v{version} cannot be read ({type(error).__name__})") from error


def read(frame: bytes, api_key: int, version: int) -> Any:
    """A whole request. Raises Malformed."""
    return decoded(REQUESTS[api_key], frame, version)


def topic_of(topic: Any) -> str | bytes:
    """A topic's name, or the bytes of its id where this version has no name."""
    name = getattr(topic, "name", None) or getattr(topic, "topic", None)
    topic_id = getattr(topic, "topic_id", None)
    return str(name or "") if name or topic_id is None else bytes(topic_id.bytes)


def partitions(request: Any, api_key: int) -> Iterator[tuple[str | bytes, int]]:
    """The partitions a request of the transaction protocol, a Fetch or an OffsetCommit is about."""
    if api_key == api.PRODUCE:
        topics: Iterable[Any] = request.topic_data or ()
    elif api_key == api.ADD_PARTITIONS_TO_TXN:
        topics = request.v3_and_below_topics or ()
    else:
        topics = getattr(request, "topics", None) or ()
    for topic in topics:
        for each in getattr(topic, "partition_data", None) or getattr(topic, "partitions", None) or ():
            index = each if isinstance(each, int) else _index(each)
            yield topic_of(topic), index


def _index(partition: Any) -> int:
    for name in ("index", "partition_index", "partition"):
        found = getattr(partition, name, None)
        if found is not None:
            return int(found)
    raise Unanswerable(f"a partition without a number: {partition}")


def error_answer(frame: bytes, api_key: int, version: int, correlation_id: int, code: Codes) -> bytes:
    """The answer with this error, for every partition of the request where the answer is per partition."""
    of = code if callable(code) else lambda topic, partition: code
    if not known(api_key, version) or api_key not in RESPONSES:
        raise Unanswerable(f"{api.api_name(api_key)} v{version} cannot be answered with an error here")
    request, cls = read(frame, api_key, version), RESPONSES[api_key]
    whole = of("", -1)  # for answers with one error
    if api_key == api.PRODUCE:
        made = cls(version=version, responses=list(_produced(cls, request, of)), throttle_time_ms=0)
    elif api_key in (api.TXN_OFFSET_COMMIT, api.OFFSET_COMMIT):
        made = cls(version=version, topics=list(_committed(cls, request, api_key, of)))
    elif api_key == api.FETCH:
        made = _fetched(cls, request, version, of)
    elif api_key == api.ADD_PARTITIONS_TO_TXN:
        made = cls(version=version, results_by_topic_v3_and_below=list(_added(cls, request, of)))
    elif api_key == api.FIND_COORDINATOR:
        made = _coordinators(cls, request, version, whole)
    elif any(field["name"] == "ErrorCode" for field in cls._json["fields"]):
        made = cls(version=version, error_code=whole)
    else:
        raise Unanswerable(f"{api.api_name(api_key)} v{version} has no error of its own")
    if api_key == api.INIT_PRODUCER_ID:
        made.producer_epoch = -1
    made.with_header(correlation_id=correlation_id)
    return bytes(made.encode(header=True, framed=True))


def _named(kind: Any, topic: Any, **fields: Any) -> Any:
    name = topic_of(topic)
    if isinstance(name, bytes):
        return kind(topic_id=topic.topic_id, **fields)
    return kind(**({"topic": name} if hasattr(topic, "topic") else {"name": name}), **fields)


def _produced(cls: Any, request: Any, of: Of) -> Iterator[Any]:
    topic_kind = cls.TopicProduceResponse
    for topic in request.topic_data:
        kind = topic_kind.PartitionProduceResponse
        each = [
            kind(index=p.index, error_code=of(topic_of(topic), p.index), base_offset=-1) for p in topic.partition_data
        ]
        yield _named(topic_kind, topic, partition_responses=each)


def _committed(cls: Any, request: Any, api_key: int, of: Of) -> Iterator[Any]:
    prefix = "TxnOffsetCommit" if api_key == api.TXN_OFFSET_COMMIT else "OffsetCommit"
    topic_kind = getattr(cls, f"{prefix}ResponseTopic")
    kind = getattr(topic_kind, f"{prefix}ResponsePartition")
    for topic in request.topics:
        each = [
            kind(partition_index=p.partition_index, error_code=of(topic_of(topic), p.partition_index))
            for p in topic.partitions
        ]
        yield _named(topic_kind, topic, partitions=each)


def _added(cls: Any, request: Any, of: Of) -> Iterator[Any]:
    topic_kind = cls.AddPartitionsToTxnTopicResult
    kind = topic_kind.AddPartitionsToTxnPartitionResult
    for topic in request.v3_and_below_topics or ():
        each = [kind(partition_index=index, partition_error_code=of(topic.name, index)) for index in topic.partitions]
        yield topic_kind(name=topic.name, results_by_partition=each)


def _fetched(cls: Any, request: Any, version: int, of: Of) -> Any:
    """Per partition: an error of the whole Fetch is one of the session, and clients would only fetch again."""
    topic_kind = cls.FetchableTopicResponse
    kind = topic_kind.PartitionData
    found = [
        _named(
            topic_kind,
            topic,
            partitions=[
                kind(
                    partition_index=p.partition,
                    error_code=of(topic_of(topic), p.partition),
                    high_watermark=-1,
                    records=b"",
                )
                for p in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    return cls(version=version, session_id=0, responses=found)


def _coordinators(cls: Any, request: Any, version: int, code: int) -> Any:
    none = {"node_id": -1, "host": "", "port": -1, "error_code": code}
    if version >= 4:
        return cls(version=version, coordinators=[cls.Coordinator(key=key, **none) for key in request.coordinator_keys])
    return cls(version=version, **none)


def throttled(frame: bytes, api_key: int, version: int, milliseconds: int) -> bytes:
    """The same answer, with the time a broker's quota would ask the client to wait."""
    if api_key not in RESPONSES or version > RESPONSES[api_key].max_version:
        raise Unanswerable(f"{api.api_name(api_key)} v{version} cannot be throttled here")
    answer = decoded(RESPONSES[api_key], frame, version)
    answer.throttle_time_ms = milliseconds
    made = bytes(answer.encode(header=True, framed=True))
    if made == frame:
        raise Unanswerable(f"{api.api_name(api_key)} v{version} has no throttle time")
    return made


def errors_of(frame: bytes, api_key: int, version: int) -> list[int]:
    """Every error code of an answer, in order."""
    if api_key not in RESPONSES or version > RESPONSES[api_key].max_version:
        return []
    answer = decoded(RESPONSES[api_key], frame, version)
    return list(_codes(answer.to_dict()))


def _codes(node: Any) -> Iterator[int]:
    for name, value in node.items() if isinstance(node, dict) else ():
        if name.endswith("error_code"):
            yield value
        else:
            yield from _codes(value)
    for value in node if isinstance(node, list) else ():
        yield from _codes(value)
