"""ApiVersions offers the versions that broker and shim both know, also to clients newer than both."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.metadata import ApiVersionsResponse

from eos.shim.addresses import layouts
from eos.shim.pipeline import Connection, Exchange, Pipeline
from eos.shim.versions import VersionsJob, clamp_versions
from eos.shim.wire import api
from tests.unit.shim.messages import framed

NEWEST = api.NEWEST[api.API_VERSIONS]
READ = min(NEWEST, ApiVersionsResponse.max_version)  # version 5 changes only the request
ranges = st.dictionaries(
    st.integers(0, 120), st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=100
)


def offered(version: int, apis: dict[int, Any], error: int = 0, **more: Any) -> bytes:
    kind = ApiVersionsResponse.ApiVersion
    keys = [kind(version=version, api_key=k, min_version=low, max_version=high) for k, (low, high) in apis.items()]
    response = ApiVersionsResponse(version=version, error_code=error, api_keys=keys, throttle_time_ms=7, **more)
    return framed(response, 5)


def decoded_answer(frame: bytes, version: int) -> Any:
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    return ApiVersionsResponse.decode(frame, version=version, header=True, framed=True)


@given(st.integers(0, READ), ranges)
def test_api_versions_offers_only_known_versions(version: int, apis: dict[int, Any]) -> None:
    more: dict[str, Any] = {}
    if version >= 3:
        feature = ApiVersionsResponse.SupportedFeatureKey
        more = {
            "supported_features": [feature(version=version, name="f", min_version=0, max_version=2)],
            "finalized_features_epoch": 9,
        }
    answer = decoded_answer(clamp_versions(offered(version, apis, **more), version), version)
    expected = {
        key: (low, min(high, api.NEWEST[key]))
        for key, (low, high) in apis.items()
        if key in api.NEWEST and low <= api.NEWEST[key]
    }
    assert {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys} == expected
    assert (answer.error_code, answer.throttle_time_ms if version else 7) == (0, 7)
    if version >= 3:
        assert [each.name for each in answer.supported_features] == ["f"]
        assert answer.finalized_features_epoch == 9


def test_api_versions_of_an_older_broker_is_unchanged() -> None:
    apis = {key: (0, newest) for key, newest in api.NEWEST.items()}
    for version in range(READ + 1):
        frame = offered(version, apis)
        assert clamp_versions(frame, version) == frame
        refused = offered(0, {api.API_VERSIONS: (0, 3)}, error=35)
        assert clamp_versions(refused, version) == refused


def test_newer_client_gets_a_usable_api_versions_version() -> None:
    pipeline = Pipeline([VersionsJob()], 1 << 20)
    exchange = Exchange(Connection(1, "c", "b", 0), api.API_VERSIONS, NEWEST + 1, 77)
    handling = pipeline.request(exchange, 30)
    assert callable(handling)
    assert handling(b"any bytes of a layout nobody here knows") == b""
    assert exchange.answer is not None
    answer = decoded_answer(exchange.answer, 0)
    assert answer.error_code == 35
    assert [(each.api_key, each.min_version, each.max_version) for each in answer.api_keys] == [(18, 0, NEWEST)]
    assert exchange.answer[4:8] == (77).to_bytes(4, "big")


def test_offered_versions_have_rewritten_addresses() -> None:
    assert {key: api.NEWEST[key] for key in layouts.KNOWN} == {
        key: newest for key, (_, newest) in layouts.KNOWN.items()
    }
