"""The frames of protect: replaced fields, unchanged bytes, and responses like those of a broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol import producer as protocol
from kafka.protocol.admin import DescribeTransactionsResponse
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.record._crc32c import crc as crc32c
from kafka.record.memory_records import MemoryRecords, MemoryRecordsBuilder

from eos.shim.errors import Malformed
from eos.shim.pipeline import Connection, Exchange
from eos.shim.protect import Journal, ProtectJob, crc, translate
from eos.shim.protect.machine import Identity
from eos.shim.wire import api, messages
from tests.unit.shim.messages import decoded, framed, frames, producing

OLD, NEW = Identity(4000, 7), Identity(2**40 + 5, 300)


def encoded(request: Any) -> bytes:
    return framed(request, 77, client_id="client")


def records(*sequences: int, count: int = 3, gzip: bool = False, size: int = 20) -> bytes:
    """Return a records field with one batch of `count` records per sequence."""
    made = b""
    for sequence in sequences:
        builder = MemoryRecordsBuilder(2, int(gzip), 1 << 20)
        builder.set_producer_state(*OLD, sequence, True)
        for number in range(count):
            builder.append(timestamp=1, key=None, value=b"%d" % number * size)
        builder.close()
        made += bytes(builder.buffer())
    return made


def produce_request(version: int, name: str | None, data: dict[str, dict[int, bytes | None]]) -> bytes:
    return encoded(producing(version, name, data))


def requests(key: int, version: int) -> Any:
    identity = {"transactional_id": "t", "producer_id": OLD[0], "producer_epoch": OLD[1]}
    if key == api.ADD_PARTITIONS_TO_TXN:
        topic = protocol.AddPartitionsToTxnRequest.AddPartitionsToTxnTopic
        return protocol.AddPartitionsToTxnRequest(
            version=version,
            v3_and_below_transactional_id="t",
            v3_and_below_producer_id=OLD[0],
            v3_and_below_producer_epoch=OLD[1],
            v3_and_below_topics=[topic(version=0, name=n, partitions=p) for n, p in (("a", [0, 3]), ("b", [1]))],
        )
    if key == api.ADD_OFFSETS_TO_TXN:
        return protocol.AddOffsetsToTxnRequest(version=version, group_id="g", **identity)
    if key == api.END_TXN:
        return protocol.EndTxnRequest(version=version, committed=True, **identity)
    if key == api.INIT_PRODUCER_ID:
        more = {"producer_id": OLD[0], "producer_epoch": OLD[1]} if version >= 3 else {}
        return protocol.InitProducerIdRequest(version=version, transactional_id="t", transaction_timeout_ms=9, **more)
    topic = protocol.TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    each = [
        topic.TxnOffsetCommitRequestPartition(
            version=version, partition_index=i, committed_offset=5, committed_metadata="m", committed_leader_epoch=1
        )
        for i in (0, 2)
    ]
    more = {"generation_id": 4, "member_id": "member", "group_instance_id": None} if version >= 3 else {}
    return protocol.TxnOffsetCommitRequest(
        version=version, group_id="g", topics=[topic(version=version, name="in", partitions=each)], **identity, **more
    )


CASES = [(key, version) for key, versions in translate.VERSIONS.items() if key != api.PRODUCE for version in versions]


@pytest.mark.parametrize(("key", "version"), CASES)
def test_replaced_identity_changes_no_other_bytes(key: int, version: int) -> None:
    frame = encoded(requests(key, version))
    found = translate.read_transactional_request(frame, key, version)
    assert found.name == "t"
    if found.at < 0:
        assert (key, version < 3) == (api.INIT_PRODUCER_ID, True)
        return
    assert found.identity == OLD
    made = translate.replace_identity(frame, found.at, NEW)
    prefix = "v3_and_below_" if key == api.ADD_PARTITIONS_TO_TXN else ""
    decoded = type(requests(key, version)).decode(made, version=version, header=True, framed=True).to_dict()
    before = type(requests(key, version)).decode(frame, version=version, header=True, framed=True).to_dict()
    assert decoded == before | {f"{prefix}producer_id": NEW[0], f"{prefix}producer_epoch": NEW[1]}


@pytest.mark.parametrize(("key", "version"), CASES)
def test_refusal_response_equals_a_broker_error(key: int, version: int) -> None:
    frame = encoded(requests(key, version))
    made = translate.refusal_response(frame, key, version, 77, 51)
    answer = messages.RESPONSES[key].decode(made, version=version, header=True, framed=True)
    assert framed(answer, 77) == made
    if key == api.ADD_PARTITIONS_TO_TXN:
        results = {
            (topic.name, each.partition_index): each.partition_error_code
            for topic in answer.results_by_topic_v3_and_below
            for each in topic.results_by_partition
        }
        assert results == {("a", 0): 51, ("a", 3): 51, ("b", 1): 51}
    elif key == api.TXN_OFFSET_COMMIT:
        results = {(t.name, each.partition_index): each.error_code for t in answer.topics for each in t.partitions}
        assert results == {("in", 0): 51, ("in", 2): 51}
    else:
        assert answer.error_code == 51


@pytest.mark.parametrize("version", translate.VERSIONS[api.END_TXN])
@pytest.mark.parametrize("committed", [True, False])
def test_end_txn_is_translated_to_v5_and_back(version: int, committed: bool) -> None:
    frame = encoded(requests(api.END_TXN, version))
    made = translate.end_txn_v5(frame, version, "t", NEW, committed)
    request = protocol.EndTxnRequest(
        version=5, transactional_id="t", producer_id=NEW[0], producer_epoch=NEW[1], committed=committed
    )
    assert made == encoded(request)
    for error in (0, 51, 90):
        answer = protocol.EndTxnResponse(
            version=5, throttle_time_ms=3, error_code=error, producer_id=NEW[0], producer_epoch=NEW[1]
        )
        assert translate.read_end_txn_response(framed(answer, 77)) == (3, error, NEW)
        back = protocol.EndTxnResponse.decode(
            translate.end_txn_response(77, version, 3, error), version=version, header=True, framed=True
        )
        assert back.error_code == (47 if error == 90 and version < 2 else error)


@pytest.mark.parametrize("version", translate.VERSIONS[api.PRODUCE])
@pytest.mark.parametrize("gzip", [False, True])
def test_produce_rewrite_changes_every_batch(version: int, gzip: bool) -> None:
    data: dict[str, dict[int, bytes | None]] = {
        "a": {0: records(10, 13, gzip=gzip), 4: records(2**31 - 2, gzip=gzip, size=2000)},
        "b": {0: records(7, gzip=gzip), 1: None},
    }
    frame = produce_request(version, "t", data)
    request = translate.read_produce(frame, version, len(frame))
    assert request.name == "t"
    assert list(request.partitions) == [("a", 0), ("a", 4), ("b", 0), ("b", 1)]
    assert request.identities == {OLD}
    bases = {("a", 0): 10, ("a", 4): 2**31 - 5, ("b", 0): 0}
    made = translate.rewrite_produce(frame, request, NEW, bases)
    assert len(made) == len(frame)
    decoded = protocol.ProduceRequest.decode(made, version=version, header=True, framed=True)
    seen = list[tuple[str, int, int]]()
    for topic in decoded.topic_data:
        for each in topic.partition_data:
            batches = MemoryRecords(each.records or b"")
            while (batch := batches.next_batch()) is not None:
                assert batch.validate_crc()
                assert (batch.producer_id, batch.producer_epoch) == NEW
                assert len(list(batch)) == 3
                seen.append((topic.name, each.index, batch.base_sequence))
    assert seen == [("a", 0, 0), ("a", 0, 3), ("a", 4, 3), ("b", 0, 7)]
    back = {partition: -base for partition, base in bases.items()}
    assert translate.rewrite_produce(made, translate.read_produce(made, version, len(made)), OLD, back) == frame


@pytest.mark.parametrize("version", translate.VERSIONS[api.PRODUCE])
def test_refused_produce_names_each_partition(version: int) -> None:
    frame = produce_request(version, "t", {"a": {0: records(1), 4: records(1)}, "b": {0: records(1)}})
    made = messages.refusal_response(
        api.PRODUCE, version, 77, 19, translate.read_produce(frame, version, len(frame)).partitions
    )
    answer = protocol.ProduceResponse.decode(made, version=version, header=True, framed=True)
    results = {(t.name, each.index): each.error_code for t in answer.responses for each in t.partition_responses}
    assert results == {("a", 0): 19, ("a", 4): 19, ("b", 0): 19}
    assert framed(answer, 77) == made


def test_refusal_keeps_a_topic_name_that_is_not_utf8() -> None:
    frame = produce_request(9, "t", {"zz": {0: records(1)}}).replace(b"zz", b"\xff\xfe")
    made = messages.refusal_response(api.PRODUCE, 9, 77, 19, translate.read_produce(frame, 9, len(frame)).partitions)
    assert b"\x02\x03\xff\xfe\x02\0\0\0\0\0\x13" in made  # one topic, its name, one partition, its number, the error


@given(frames(DescribeTransactionsResponse, translate.DESCRIBED_VERSION))
def test_describe_response_changes_identities_only(frame: bytes) -> None:
    asked = list[tuple[str, Identity, str]]()

    def shown(name: str, identity: Identity, state: str) -> Identity:
        asked.append((name, identity, state))
        return NEW

    changed = translate.replace_described_identities(frame, shown)
    wanted = decoded(DescribeTransactionsResponse, translate.DESCRIBED_VERSION, frame)
    for state, (name, identity, called) in zip(wanted["transaction_states"], asked, strict=True):
        assert (state["transactional_id"], state["transaction_state"]) == (name, called)
        assert (state["producer_id"], state["producer_epoch"]) == identity
        state["producer_id"], state["producer_epoch"] = NEW
    assert decoded(DescribeTransactionsResponse, translate.DESCRIBED_VERSION, changed) == wanted
    assert len(changed) == len(frame)


@given(frames(DescribeTransactionsResponse, translate.DESCRIBED_VERSION), st.data())
def test_incomplete_describe_response_is_malformed(frame: bytes, data: st.DataObject) -> None:
    cut = frame[: data.draw(st.integers(8, len(frame) - 1))]
    with pytest.raises(Malformed):
        translate.replace_described_identities(cut, lambda name, identity, state: identity)


@given(st.data())
def test_checksum_is_updated_from_the_changed_bytes_only(data: st.DataObject) -> None:
    message = data.draw(st.binary(min_size=1, max_size=3000))
    start = data.draw(st.integers(0, len(message)))
    end = data.draw(st.integers(start, min(len(message), start + 20)))
    after = data.draw(st.binary(min_size=end - start, max_size=end - start))
    wanted = crc32c(message[:start] + after + message[end:])
    assert crc.update(crc32c(message), message[start:end], after, len(message) - end) == wanted


@given(st.data())
def test_damaged_produce_never_breaks_the_parser(data: st.DataObject) -> None:
    frame = bytearray(produce_request(data.draw(st.sampled_from([3, 9])), "t", {"a": {0: records(10, 13)}}))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(8, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(frame[: data.draw(st.integers(20, len(frame)))])
    try:
        request = translate.read_produce(cut, int.from_bytes(frame[6:8], "big"), len(cut))
    except (Malformed, KeyError):
        return
    bases = dict.fromkeys(request.partitions, 0)
    assert len(translate.rewrite_produce(cut, request, NEW, bases)) == len(cut)


# The job.


def test_broker_without_end_txn_v5_disables_protection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = ProtectJob()
    job.on_broker_versions({"broker 1": {api.END_TXN: 5}, "broker 2": {api.END_TXN: 4}})
    assert not job.wants_request(api.END_TXN, 1)
    assert [record.message.split(" effect=")[0] for record in caplog.records] == ["protection unavailable"]


@pytest.mark.parametrize("offered", [{}, {"broker 1": None, "broker 2": None}])
def test_protection_is_disabled_if_no_broker_answers(
    offered: dict[str, None], caplog: pytest.LogCaptureFixture
) -> None:
    job = ProtectJob()
    job.on_broker_versions(offered)
    assert not job.wants_request(api.END_TXN, 1)
    (said,) = caplog.records
    assert said.message.startswith("protection unavailable")
    assert all(name in said.message for name in offered)


def test_warning_names_the_silent_broker_and_the_others_decide(caplog: pytest.LogCaptureFixture) -> None:
    job = ProtectJob()
    job.on_broker_versions({"broker 1": {api.END_TXN: 5}, "broker 2": None})
    assert job.wants_request(api.END_TXN, 1)
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "broker 2" in warned.message
    assert "broker 1" not in warned.message


def test_requests_of_clients_with_kip_890_part_2_are_unchanged() -> None:
    job = ProtectJob()
    job.on_broker_versions({"broker 1": {api.END_TXN: 5}})
    assert job.wants_request(api.END_TXN, 1)
    for key, version in (
        (api.PRODUCE, 12),
        (api.END_TXN, 5),
        (api.TXN_OFFSET_COMMIT, 5),
        (api.ADD_PARTITIONS_TO_TXN, 4),
    ):
        assert not job.wants_request(key, version)
        assert not job.wants_response(key, version)


def test_requests_of_an_idempotent_producer_are_unchanged() -> None:
    job = ProtectJob()
    job.on_broker_versions({"broker 1": {api.END_TXN: 5}})
    connection = Connection(1, "c", "b", 0)
    frame = produce_request(9, None, {"a": {0: records(5)}})
    assert job.request(Exchange(connection, api.PRODUCE, 9, 77), frame) is frame
    request = protocol.InitProducerIdRequest(
        version=4, transactional_id=None, transaction_timeout_ms=9, producer_id=-1, producer_epoch=-1
    )
    frame = encoded(request)
    assert job.request(Exchange(connection, api.INIT_PRODUCER_ID, 4, 77), frame) is frame


def named(name: str, software_version: str, version: int = 3) -> bytes:
    return encoded(
        ApiVersionsRequest(version=version, client_software_name=name, client_software_version=software_version)
    )


@pytest.mark.parametrize(
    ("name", "software_version", "renews"),
    [
        ("librdkafka", "2.16.0", True),
        ("librdkafka", "v2.0.2", True),
        ("librdkafka", "1.9.2", False),
        ("confluent-kafka-python", "2.16.1-rdkafka-2.16.0", True),
        ("confluent-kafka-go", "v2.3.0-librdkafka-v2.3.0", True),
        ("confluent-kafka-python", "1.8.2-librdkafka-1.8.2", False),
        ("kafka-python", "3.0.12", False),
        ("apache-kafka-java", "3.9.2", False),
        ("rust-rdkafka", "0.36.2", False),
        ("", "", False),
    ],
)
def test_renewing_client_is_known_by_its_software_name(name: str, software_version: str, renews: bool) -> None:
    assert translate.renews_after_abort(named(name, software_version), 3) is renews


@given(st.binary(max_size=60))
def test_unreadable_api_versions_is_left_to_the_broker(body: bytes) -> None:
    payload = api.API_VERSIONS.to_bytes(2, "big") + b"\0\3" + body
    assert translate.renews_after_abort(len(payload).to_bytes(4, "big") + payload, 3) in (True, False)


@pytest.mark.parametrize("version", translate.VERSIONS[api.INIT_PRODUCER_ID])
def test_init_response_equals_a_broker_response(version: int) -> None:
    made = translate.init_response(77, version, NEW)
    assert translate.read_init_response(made, version) == (0, NEW)
    answer = protocol.InitProducerIdResponse.decode(made, version=version, header=True, framed=True)
    assert framed(answer, 77) == made


def test_abort_makes_only_librdkafka_renew_its_identity(tmp_path: Path) -> None:
    for renews in (True, False):
        journal = Journal(tmp_path / f"journal {renews}")
        job = ProtectJob(journal=journal)
        job.on_broker_versions({"broker 1": {api.END_TXN: 5}})
        connection = Connection(1, "c", "b", 0)
        software = named("librdkafka" if renews else "kafka-python", "2.16.0")
        assert job.request(Exchange(connection, api.API_VERSIONS, 3, 1), software) == software
        job.machine.note_init("t", OLD, 1, renews=1 in job._renewing)
        job.request(Exchange(connection, api.ADD_OFFSETS_TO_TXN, 3, 77), encoded(requests(api.ADD_OFFSETS_TO_TXN, 3)))
        request = requests(api.END_TXN, 3)
        request.committed = False
        ends = Exchange(connection, api.END_TXN, 3, 77)
        job.request(ends, encoded(request))
        answer = protocol.EndTxnResponse(
            version=5, throttle_time_ms=0, error_code=0, producer_id=OLD[0], producer_epoch=OLD[1] + 1
        )
        made = job.response(ends, framed(answer, 77))
        response = protocol.EndTxnResponse.decode(made, version=3, header=True, framed=True)
        assert response.error_code == (59 if renews else 0)
        init = Exchange(connection, api.INIT_PRODUCER_ID, 4, 77)
        assert job.request(init, encoded(requests(api.INIT_PRODUCER_ID, 4))) == b""
        assert init.answer is not None
        assert translate.read_init_response(init.answer, 4) == (0, Identity(OLD[0], OLD[1] + 1))
        job.connection_closed(connection)
        assert not job._renewing
        journal.close()


# Protection that begins later.

OFFERS, OFFERS_NOT = {api.END_TXN: 5}, {api.END_TXN: 4}


def asked(job: ProtectJob, key: int, version: int) -> tuple[bytes, bytes | None]:
    exchange = Exchange(Connection(1, "c", "b", 0), key, version, 77)
    frame = job.request(exchange, encoded(requests(key, version)))
    return frame, exchange.answer


def test_missing_protection_is_logged_once_and_queried_again(caplog: pytest.LogCaptureFixture) -> None:
    job = ProtectJob()
    for _ in range(3):
        job.on_broker_versions({"broker 1": OFFERS_NOT, "broker 2": OFFERS})
        assert job.wants_versions_again
    assert len(caplog.records) == 1
    job.on_broker_versions({"broker 1": None, "broker 2": OFFERS})
    assert job.wants_versions_again, "a restarted broker counts as old until it reports newer versions"
    job.on_broker_versions({"broker 1": OFFERS, "broker 2": OFFERS})
    assert not job.wants_versions_again
    job.on_broker_versions({"broker 1": None})
    assert job.active, "protection stays active"


@pytest.mark.parametrize(
    ("key", "version"), [(api.END_TXN, 3), (api.ADD_OFFSETS_TO_TXN, 3), (api.TXN_OFFSET_COMMIT, 3)]
)
def test_identity_issued_before_protection_stays_unchanged_until_init(key: int, version: int) -> None:
    job = ProtectJob()
    job.machine.note_init("t", NEW, 1)  # as restored from a journal, while its client continued without protection
    job.on_broker_versions({"broker 1": None})
    job.on_broker_versions({"broker 1": OFFERS})
    assert asked(job, key, version) == (encoded(requests(key, version)), None)
    exchange = Exchange(Connection(1, "c", "b", 0), api.INIT_PRODUCER_ID, 4, 77)
    frame = encoded(requests(api.INIT_PRODUCER_ID, 4))
    assert job.request(exchange, frame) == frame
    job.response(exchange, translate.init_response(77, 4, Identity(OLD[0], OLD[1] + 1)))
    passed, answer = asked(job, key, version)
    assert (passed, answer is None) == (b"", False), "the previous identity is no longer valid"


def test_required_protection_forwards_nothing_without_it() -> None:
    job = ProtectJob(required=True)
    assert job.not_ready_reason
    job.machine.note_init("t", OLD, 1)
    job.on_broker_versions({"broker 1": OFFERS_NOT})
    assert "EndTxn v5" in str(job.not_ready_reason)
    for key in (api.INIT_PRODUCER_ID, api.ADD_PARTITIONS_TO_TXN, api.ADD_OFFSETS_TO_TXN, api.TXN_OFFSET_COMMIT):
        assert job.wants_request(key, 3)
        passed, answer = asked(job, key, 3)
        assert (passed, answer is None) == (b"", False)
    frame = produce_request(9, "t", {"a": {0: records(5)}})
    produce = translate.read_produce(frame, 9, len(frame))
    assert isinstance(job.decide_produce(Exchange(Connection(1, "c", "b", 0), api.PRODUCE, 9, 77), produce), bytes)
    job.on_broker_versions({"broker 1": OFFERS})
    assert job.not_ready_reason is None
    passed, answer = asked(job, api.ADD_OFFSETS_TO_TXN, 3)
    assert (bool(passed), answer) == (True, None)
