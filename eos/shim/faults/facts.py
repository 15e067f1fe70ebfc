"""Read the facts of a request that rules can match. Pure.

For a request that cannot be read only the API is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from eos.shim.errors import Malformed
from eos.shim.wire import api, messages


@dataclass(frozen=True)
class RequestFacts:
    """Hold the facts of a request.

    `partitions` have the form `topic-0`, without topics that are named only by id. `outcome` is commit or abort.
    """

    api_key: int
    transactional_id: str | None = None
    group: str | None = None
    outcome: str | None = None
    partitions: frozenset[str] = frozenset()


def read_facts(frame: bytes, api_key: int, version: int) -> RequestFacts:
    if not messages.can_read(api_key, version):
        return RequestFacts(api_key)
    try:
        request = messages.read_request(frame, api_key, version)
    except Malformed:
        return RequestFacts(api_key)
    name = getattr(request, "transactional_id", None)
    if api_key == api.ADD_PARTITIONS_TO_TXN:
        name = request.v3_and_below_transactional_id or name
    elif api_key == api.FIND_COORDINATOR and version >= 1 and request.key_type == 1:
        name = next(iter(request.coordinator_keys or ()), None) if version >= 4 else request.key
    outcome = None
    if api_key == api.END_TXN:
        outcome = "commit" if request.committed else "abort"
    partitions = frozenset(
        f"{topic}-{p}" for topic, p in messages.request_partitions(request, api_key) if isinstance(topic, str)
    )
    return RequestFacts(api_key, name, getattr(request, "group_id", None), outcome, partitions)
