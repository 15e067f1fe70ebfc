"""Read the requests and responses of the transaction protocol into steps.

The module reads FindCoordinator, InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit and EndTxn with
kafka-python's classes. wire/batches.py reads Produce and Fetch. Pure; raises Malformed for a frame that these classes
cannot read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kafka.protocol.metadata import MetadataResponse

from eos.codes import error_name
from eos.shim.errors import Malformed
from eos.shim.trace.model import Step
from eos.shim.wire import api, messages
from eos.shim.wire.batches import Topic

_TRANSACTION_KEY = 1


def can_decode(api_key: int, version: int) -> bool:
    return (api_key in _REQUEST or api_key == api.PRODUCE) and version <= messages.RESPONSES[api_key].max_version


def request_steps(api_key: int, version: int, frame: bytes, time: float) -> list[Step]:
    """Return the steps of a request: none, one, or for a batched FindCoordinator one per transactional.id."""
    request = messages.read_request(frame, api_key, version)
    steps = list(_REQUEST[api_key](request, version, time))
    if any(step.transactional_id is None for step in steps):
        raise Malformed("the transactional.id is null")  # brokers reject it
    return steps


def add_response(
    steps: Iterable[Step], api_key: int, version: int, frame: bytes, topic_name: Callable[[Topic], str]
) -> None:
    """Complete steps with the fields of their response. `topic_name` returns the name of a topic id."""
    response = messages.decode(messages.RESPONSES[api_key], frame, version)
    for step in steps:
        if api_key == api.PRODUCE:
            _complete_produce(step, response, version, topic_name)
        else:
            _RESPONSE[api_key](step, response, version)
        step.errors = list(dict.fromkeys(step.errors))


def topic_names(version: int, frame: bytes) -> dict[bytes, str]:
    """Return the topic ids and names in a Metadata response, v10 and later."""
    response = messages.decode(MetadataResponse, frame, version)
    return {topic.topic_id.bytes: topic.name for topic in response.topics if topic.name}


def _find_coordinator(request: Any, version: int, time: float) -> Iterator[Step]:
    if version >= 1 and request.key_type == _TRANSACTION_KEY:
        for name in request.coordinator_keys if version >= 4 else [request.key]:
            yield Step(name, "FindCoordinator", time)


def _init_producer_id(request: Any, version: int, time: float) -> Iterator[Step]:
    if request.transactional_id is not None:
        step = Step(request.transactional_id, "InitProducerId", time)
        if version >= 3 and request.producer_id >= 0:
            step.producer_id, step.epoch = request.producer_id, request.producer_epoch
        yield step


def _add_partitions(request: Any, version: int, time: float) -> Iterator[Step]:
    if version >= 4:
        return  # only brokers send these
    step = Step(request.v3_and_below_transactional_id, "AddPartitionsToTxn", time)
    step.producer_id, step.epoch = request.v3_and_below_producer_id, request.v3_and_below_producer_epoch
    step.partitions = [f"{topic.name}-{p}" for topic in request.v3_and_below_topics for p in topic.partitions]
    yield step


def _step_with_identity(request: Any, name: str, time: float) -> Step:
    step = Step(request.transactional_id, name, time)
    step.producer_id, step.epoch = request.producer_id, request.producer_epoch
    return step


def _add_offsets(request: Any, version: int, time: float) -> Iterator[Step]:
    step = _step_with_identity(request, "AddOffsetsToTxn", time)
    step.group = request.group_id or ""
    yield step


def _txn_offset_commit(request: Any, version: int, time: float) -> Iterator[Step]:
    step = _step_with_identity(request, "TxnOffsetCommit", time)
    step.group = request.group_id or ""
    for topic in request.topics:
        for partition in topic.partitions:
            step.offsets[f"{topic.name}-{partition.partition_index}"] = partition.committed_offset
    yield step


def _end_txn(request: Any, version: int, time: float) -> Iterator[Step]:
    step = _step_with_identity(request, "EndTxn", time)
    step.outcome = "commit" if request.committed else "abort"
    yield step


_REQUEST: dict[int, Callable[[Any, int, float], Iterator[Step]]] = {
    api.FIND_COORDINATOR: _find_coordinator,
    api.INIT_PRODUCER_ID: _init_producer_id,
    api.ADD_PARTITIONS_TO_TXN: _add_partitions,
    api.ADD_OFFSETS_TO_TXN: _add_offsets,
    api.TXN_OFFSET_COMMIT: _txn_offset_commit,
    api.END_TXN: _end_txn,
}


def _note_error(step: Step, code: int) -> None:
    if code:
        step.errors.append(error_name(code))


def _complete_find_coordinator(step: Step, response: Any, version: int) -> None:
    found = [c for c in response.coordinators if c.key == step.transactional_id] if version >= 4 else [response]
    for coordinator in found:
        _note_error(step, coordinator.error_code)
        if coordinator.node_id >= 0:
            step.coordinator = f"broker {coordinator.node_id}"


def _complete_init(step: Step, response: Any, version: int) -> None:
    _note_error(step, response.error_code)
    if not response.error_code:
        step.new_producer_id, step.new_epoch = response.producer_id, response.producer_epoch


def _complete_add_partitions(step: Step, response: Any, version: int) -> None:
    for topic in response.results_by_topic_v3_and_below:
        for partition in topic.results_by_partition:
            _note_error(step, partition.partition_error_code)


def _complete_produce(step: Step, response: Any, version: int, topic_name: Callable[[Topic], str]) -> None:
    for topic in response.responses:
        name = topic_name(topic.topic_id.bytes if version >= 13 else topic.name)
        for partition in topic.partition_responses:
            _note_error(step, partition.error_code)
            if not partition.error_code:
                step.offsets[f"{name}-{partition.index}"] = partition.base_offset


def _complete_with_error(step: Step, response: Any, version: int) -> None:
    _note_error(step, response.error_code)


def _complete_offset_commit(step: Step, response: Any, version: int) -> None:
    for topic in response.topics:
        for partition in topic.partitions:
            _note_error(step, partition.error_code)


def _complete_end(step: Step, response: Any, version: int) -> None:
    if response.error_code != api.ABORTED_UNKNOWN_PRODUCER_ID:
        _note_error(step, response.error_code)
    if version >= 5 and response.producer_id >= 0:
        step.new_producer_id, step.new_epoch = response.producer_id, response.producer_epoch


_RESPONSE: dict[int, Callable[[Step, Any, int], None]] = {
    api.FIND_COORDINATOR: _complete_find_coordinator,
    api.INIT_PRODUCER_ID: _complete_init,
    api.ADD_PARTITIONS_TO_TXN: _complete_add_partitions,
    api.ADD_OFFSETS_TO_TXN: _complete_with_error,
    api.TXN_OFFSET_COMMIT: _complete_offset_commit,
    api.END_TXN: _complete_end,
}
