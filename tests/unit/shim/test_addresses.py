"""Rewriting of addresses: in every API and version that has them, only addresses change."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eos.shim.addresses import fetch, layouts
from eos.shim.addresses.book import AddressBook, Endpoint
from eos.shim.addresses.job import WHOLE_FETCH_BYTES, AddressJob, LeakScan
from eos.shim.addresses.layouts import KNOWN, FoundAddresses, rewrite
from eos.shim.errors import Leak, Malformed
from eos.shim.pipeline import Connection, Exchange
from eos.shim.wire import api
from eos.shim.wire.cursor import string
from tests.unit.shim.messages import FUZZ_EXAMPLES, RESPONSES, decoded, framed, frames, with_unknown_tag

pytestmark = pytest.mark.takes(85)

# Use the same examples every time, because each check requires that some of them contain its subject.
FEW = settings(
    max_examples=FUZZ_EXAMPLES or 15,
    derandomize=not FUZZ_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
CASES = [
    pytest.param(key, version, id=f"{api.api_name(key)}-v{version}")
    for key in RESPONSES
    for version in range(KNOWN[key][0], KNOWN[key][1] + 1)
]


def found_in(key: int, version: int, frame: bytes) -> FoundAddresses:
    return fetch.find(frame) if key == api.FETCH else layouts.find(key, version, frame)


def translate(node_id: int, host: str, port: int) -> tuple[str, int]:
    return f"shim-for-{host}-{node_id}", (port + 1) % 65536


def translated(node: Any) -> Any:
    """Return the message that kafka-python should decode from the rewritten frame."""
    if isinstance(node, list):
        return [translated(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {name: translated(value) for name, value in node.items()}
    if node.get("host"):
        number = node.get("node_id", node.get("broker_id"))
        made["host"], made["port"] = translate(number, node["host"], node["port"])
    return made


@pytest.mark.parametrize(("key", "version"), CASES)
def test_rewrite_replaces_addresses_only(key: int, version: int) -> None:
    seen = []

    @FEW
    @given(frames(RESPONSES[key], version))
    def check(frame: bytes) -> None:
        found = found_in(key, version, frame)
        made = rewrite(frame, found, api.is_flexible(key, version), translate)
        assert decoded(RESPONSES[key], version, made) == translated(decoded(RESPONSES[key], version, frame))
        assert int.from_bytes(made[:4], "big") == len(made) - 4
        # An address replaced by itself gives the same bytes, so nothing was re-encoded.
        assert rewrite(frame, found, api.is_flexible(key, version), lambda _, host, port: (host, port)) == frame
        seen.append(len(found.spots))

    check()
    assert max(seen) > 0, "no example had an address"


@pytest.mark.parametrize(("key", "version"), [case for case in CASES if api.is_flexible(*case.values[:2])])
def test_rewrite_keeps_unknown_tagged_fields(key: int, version: int) -> None:
    seen = []

    @FEW
    @given(frames(RESPONSES[key], version))
    def check(frame: bytes) -> None:
        if key in (api.PRODUCE, api.FETCH) and found_in(key, version, frame).spots:
            return  # the last byte belongs to the last endpoint, which the next test covers
        tagged = with_unknown_tag(frame)
        made = rewrite(tagged, found_in(key, version, tagged), True, translate)
        assert made.endswith(b"\x01\x63\x03abc")
        seen.append(made)

    check()
    assert seen


@pytest.mark.parametrize("key", [api.PRODUCE, api.FETCH])
def test_rewrite_keeps_tags_inside_and_after_node_endpoints(key: int) -> None:
    version = KNOWN[key][1]
    message = RESPONSES[key](version=version)
    bare = framed(message)
    host = string("up.example", True)
    endpoint = b"\0\0\0\x02" + host + (9092).to_bytes(4, "big") + b"\0" + b"\x01\x63\x02yz"
    tags = b"\x02" + b"\x00" + bytes([1 + len(endpoint)]) + b"\x02" + endpoint + b"\x05\x01q"
    body = bare[4:-1] + tags
    frame = len(body).to_bytes(4, "big") + body
    made = rewrite(frame, found_in(key, version, frame), True, lambda *_: ("a-much-longer-name.example", 1))
    assert made.endswith(string("a-much-longer-name.example", True) + b"\0\0\0\x01\0\x01\x63\x02yz\x05\x01q")
    assert int.from_bytes(made[:4], "big") == len(made) - 4
    assert [spot[:3] for spot in found_in(key, version, made).spots] == [(2, "a-much-longer-name.example", 1)]


@pytest.mark.parametrize("version", [0, 3, 4, 6])
def test_missing_coordinator_is_not_an_address(version: int) -> None:
    cls = RESPONSES[api.FIND_COORDINATOR]
    nobody = {"node_id": -1, "host": "", "port": -1, "error_code": 15}
    message = (
        cls(version=version, coordinators=[cls.Coordinator(version=version, key="k", **nobody)])
        if version >= 4
        else cls(version=version, **nobody)
    )
    frame = framed(message, 1)
    found = layouts.find(api.FIND_COORDINATOR, version, frame)
    assert len(found.spots) == 1
    assert rewrite(frame, found, version >= 3, translate) == frame


def share_fetch(version: int, records: bytes) -> bytes:
    """kafka-python has no share groups (KIP-932): written by hand from Kafka 4.3.1's schema."""
    head = b"\0\0\0\x09" + b"\0" + b"\0\0\0\0\0\0\0" + (b"\0\0\x75\x30" if version >= 1 else b"")
    leader = b"\0\0\0\x02\0\0\0\x05\0"
    acquired = b"\x02" + bytes(18) + b"\0"
    partition = b"\0\0\0\0\0\x06\0\0\0\0" + leader + bytes([len(records) + 1]) + records + acquired + b"\0"
    topic = bytes(16) + b"\x02" + partition + b"\0"
    body = head + b"\x02" + topic + _share_endpoints()
    return len(body).to_bytes(4, "big") + body


def share_acknowledge(version: int) -> bytes:
    head = b"\0\0\0\x09" + b"\0" + b"\0\0\0\0\0\0\0" + (b"\0\0\x75\x30" if version >= 2 else b"")
    topic = bytes(16) + b"\x02" + b"\0\0\0\0\0\x06\0" + b"\0\0\0\x02\0\0\0\x05\0" + b"\0" + b"\0"
    body = head + b"\x02" + topic + _share_endpoints()
    return len(body).to_bytes(4, "big") + body


def _share_endpoints() -> bytes:
    return b"\x02" + b"\0\0\0\x02" + string("kafka-2", True) + (9093).to_bytes(4, "big") + b"\0\0" + b"\0"


@pytest.mark.parametrize("version", [0, 1, 2])
def test_share_group_endpoints_are_replaced(version: int) -> None:
    for key, frame in (
        (api.SHARE_FETCH, share_fetch(version, b"r" * 9)),
        (api.SHARE_ACKNOWLEDGE, share_acknowledge(version)),
    ):
        found = layouts.find(key, version, frame)
        assert [spot[:3] for spot in found.spots] == [(2, "kafka-2", 9093)]
        made = rewrite(frame, found, True, lambda *_: ("shim", 1))
        assert made[4:] == frame[4:].replace(
            string("kafka-2", True) + b"\0\0\x23\x85", string("shim", True) + b"\0\0\0\1"
        )


@pytest.mark.parametrize("version", [16, 17, 18])
def test_streamed_fetch_keeps_its_length_and_hides_endpoints(version: int) -> None:
    cls = RESPONSES[api.FETCH]
    hidden = []

    # Use more examples: which ones are drawn depends on the constants of all loaded modules, and few have endpoints.
    @settings(FEW, max_examples=FUZZ_EXAMPLES or 100)
    @given(frames(cls, version), st.data())
    def check(frame: bytes, data: st.DataObject) -> None:
        stream, passed, pos = fetch.HideEndpoints(len(frame)), b"", 0
        longest = data.draw(st.sampled_from([1, max(1, len(frame) // 3)]))  # also byte by byte: between tag and size
        while pos < len(frame):
            step = data.draw(st.integers(1, longest)) if longest > 1 else 1
            passed += stream.feed(frame[pos : pos + step])
            pos += step
        assert len(passed) == len(frame)
        found = fetch.find(frame)
        if found.inside is None:
            assert passed == frame
            return
        hidden.append(len(found.spots))
        # kafka-python keeps unknown tags separately: the known fields are equal, without endpoints.
        expected = decoded(cls, version, frame) | {"node_endpoints": None}
        assert decoded(cls, version, passed) | {"node_endpoints": None} == expected
        assert passed[found.inside.size_at - 1] == 0x7F, "the tag was forwarded before its size was known"
        assert passed[found.inside.value_at : found.inside.end].strip(b"\0") == b""

    check()
    assert hidden, "no example had endpoints"


@pytest.mark.parametrize(("key", "version"), CASES)
def test_damaged_response_is_malformed_or_rewritten(key: int, version: int) -> None:
    refused = []

    @FEW
    @given(frames(RESPONSES[key], version), st.data())
    def check(frame: bytes, data: st.DataObject) -> None:
        cut = frame[: data.draw(st.integers(8, len(frame)))]
        at = data.draw(st.integers(8, max(8, len(frame) - 1)))
        noisy = frame[:at] + data.draw(st.binary(max_size=20)) + frame[at + 1 :]
        for broken in (cut, noisy, frame[:8] + data.draw(st.binary(max_size=60))):
            try:
                rewrite(broken, found_in(key, version, broken), api.is_flexible(key, version), translate)
            except Malformed as error:
                refused.append(error)

    check()
    assert refused


@pytest.mark.parametrize("change", [b"", b"\0", b"more"], ids=["cut", "one-more", "more"])
def test_streamed_fetch_with_wrong_length_is_malformed(change: bytes) -> None:
    message = RESPONSES[api.FETCH](version=17, throttle_time_ms=0, error_code=0, session_id=0, responses=[])
    frame = framed(message, 1)
    assert fetch.HideEndpoints(len(frame)).feed(frame) == frame
    broken = frame + change if change else frame[:-1]
    with pytest.raises(Malformed):
        fetch.HideEndpoints(len(broken)).feed(broken)


def exchange(key: int, version: int) -> Exchange:
    return Exchange(Connection(1, "client", "broker", None), key, version, 1)


def book(*upstream: tuple[str, int]) -> AddressBook:
    ports = iter(range(1001, 2000))

    def opened(endpoint: Endpoint) -> None:
        endpoint.local_port = next(ports)
        endpoint.advertised = ("shim", endpoint.local_port)

    return AddressBook(upstream, opened)


def test_bootstrap_broker_keeps_its_port_when_node_id_is_known() -> None:
    addresses = book(("kafka-a", 9092), ("kafka-b", 9092))
    assert addresses.translate(7, "kafka-b", 9092) == ("shim", 1002)
    assert addresses.translate(8, "kafka-c", 9092) == ("shim", 1003)
    assert addresses.translate(8, "kafka-c", 9092) == ("shim", 1003)
    assert [endpoint.node_id for endpoint in addresses.endpoints] == [None, 7, 8]


def test_moved_broker_keeps_its_port_and_both_addresses_are_watched() -> None:
    addresses = book(("kafka-a", 9092))
    addresses.translate(1, "kafka-a", 9092)
    assert addresses.translate(1, "kafka-z", 9999) == ("shim", 1001)
    assert addresses.endpoints[0].upstream == ("kafka-z", 9999)
    assert set(addresses.search_patterns.values()) == {"kafka-a:9092", "kafka-z:9999"}


def test_address_that_is_already_the_shims_is_unchanged() -> None:
    addresses = book(("kafka-a", 9092))
    assert addresses.translate(1, "shim", 1001) == ("shim", 1001)
    assert len(addresses.endpoints) == 1
    assert set(addresses.search_patterns.values()) == {"kafka-a:9092"}


def test_unknown_version_is_forwarded_unless_it_has_an_address() -> None:
    job = AddressJob(book(("kafka-a", 9092)))
    for key, version in ((api.METADATA, 99), (api.DESCRIBE_CLUSTER, 50), (55, 2), (500, 0)):
        assert job.wants_response(key, version)
        harmless = job.response_stream(exchange(key, version), 10)
        assert harmless is not None
        piece = b"my-kafka-a\0\0\x23\x84 and kafka-a"
        assert harmless.feed(piece) is piece
        for flexible in (True, False):
            for port in (b"\0\0\x23\x84", b"\x23\x84"):
                leaking = job.response_stream(exchange(key, version), 10)
                assert leaking is not None
                with pytest.raises(Leak, match=r"kafka-a:9092 is in a response to .* v\d+"):
                    leaking.feed(b"....\0\0\0\1" + string("kafka-a", flexible) + port + b"...")


def test_address_across_two_pieces_is_found_in_time() -> None:
    search_patterns = book(("kafka-a", 9092)).search_patterns
    leak = b"xxxx" + string("kafka-a", False) + b"\0\0\x23\x84"
    for cut in range(1, len(leak)):
        scan = LeakScan(search_patterns, "a test")
        assert scan.feed(leak[:cut]) == leak[:cut]
        with pytest.raises(Leak):
            scan.feed(leak[cut:])


def test_address_missed_by_a_layout_is_found() -> None:
    # A Metadata response with an upstream address after all fields, where no version has one.
    cls = RESPONSES[api.METADATA]
    message = cls(version=1, brokers=[], controller_id=1, topics=[])
    frame = framed(message, 1) + string("kafka-a", False) + b"\0\0\x23\x84"
    with pytest.raises(Leak):
        AddressJob(book(("kafka-a", 9092))).response(exchange(api.METADATA, 1), frame)


def test_records_that_look_like_an_address_are_forwarded() -> None:
    address = string("kafka-2", True) + b"\0\0\x23\x85"
    job = AddressJob(book(("kafka-2", 9093)))
    made = job.response(exchange(api.SHARE_FETCH, 2), share_fetch(2, address))
    assert address in made
    assert job.response_stream(exchange(api.FETCH, 18), WHOLE_FETCH_BYTES) is None
    assert isinstance(job.response_stream(exchange(api.FETCH, 18), WHOLE_FETCH_BYTES + 1), fetch.HideEndpoints)
