"""Reject requests on the clients' side of protection, so that protection does not count them.

The module owns the error for each rule. It uses authorisation errors because every client treats them as final. It
fails closed: for a topic known only by id it answers UNKNOWN_TOPIC_ID, and the name comes with the Metadata that the
client then requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kafka.protocol.metadata import MetadataResponse
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest

from eos.codes import error_name
from eos.shim.errors import Malformed, ProtocolError
from eos.shim.guard.policy import ANONYMOUS, Policy
from eos.shim.limited_warnings import LimitedWarnings
from eos.shim.pipeline import Connection, Exchange, Job
from eos.shim.trace.decode import topic_names
from eos.shim.wire import api, messages
from eos.shim.wire.batches import all_transactional

TOPIC_AUTHORIZATION_FAILED = 29
GROUP_AUTHORIZATION_FAILED = 30
INVALID_TRANSACTION_TIMEOUT = 50
TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
UNKNOWN_TOPIC_ID = 100
# The error for the other partitions of a rejected Produce. The client then sends these again without the rejected one.
_NOT_LEADER = 6
_WITH_TOPIC_IDS = range(10, MetadataResponse.max_version + 1)  # versions of Metadata; newer ones cannot be read
_BATCHED = 4  # since this version, AddPartitionsToTxn has several transactions
_READ_UNCOMMITTED = 0
_WITH_TRANSACTIONAL_ID = frozenset(
    {
        api.INIT_PRODUCER_ID,
        api.ADD_PARTITIONS_TO_TXN,
        api.ADD_OFFSETS_TO_TXN,
        api.TXN_OFFSET_COMMIT,
        api.END_TXN,
        api.PRODUCE,
    }
)


class _Refused(Exception):
    """Reject a request with one `code`, or with one per partition."""

    def __init__(self, code: int | Callable[[str | bytes, int], int], error: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.error, self.reason = code, error, reason


class GuardJob(Job):
    """Apply a policy to requests, and count rejected ones by error name in `refused`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.refused: Counter[str] = Counter()
        self._warnings = LimitedWarnings("request refused by policy", "more requests refused by policy")
        self._mechanisms: dict[Connection, str] = {}
        self._principals: dict[Connection, str] = {}
        self._topics: dict[bytes, str] = {}

    def wants_request(self, api_key: int, version: int) -> bool:
        policy = self.policy
        wanted = {
            api.PRODUCE: bool(policy.transactional_topics),
            api.FETCH: bool(policy.committed_topics),
            api.OFFSET_COMMIT: bool(policy.transactional_groups),
            api.INIT_PRODUCER_ID: policy.max_timeout_ms is not None,
        }
        named = bool(policy.prefixes) and api_key in _WITH_TRANSACTIONAL_ID
        logs_in = bool(policy.prefixes) and api_key in (api.SASL_HANDSHAKE, api.SASL_AUTHENTICATE)
        return wanted.get(api_key, False) or named or logs_in

    def wants_response(self, api_key: int, version: int) -> bool:
        if api_key == api.METADATA:
            named = self.policy.transactional_topics or self.policy.committed_topics
            return bool(named) and version in _WITH_TOPIC_IDS
        return api_key == api.SASL_AUTHENTICATE and bool(self.policy.prefixes)

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        try:
            return self._request(exchange, frame)
        except ProtocolError:
            raise
        except Exception as error:  # for example a null that the protocol does not allow
            reason = f"{api.api_name(exchange.api_key)} v{exchange.version} cannot be checked ({type(error).__name__})"
            raise Malformed(reason) from error

    def _request(self, exchange: Exchange, frame: bytes) -> bytes:
        key, version = exchange.api_key, exchange.version
        if key == api.SASL_HANDSHAKE:
            self._mechanisms[exchange.connection] = messages.decode(SaslHandshakeRequest, frame, version).mechanism
            return frame
        if key == api.SASL_AUTHENTICATE:
            request = messages.decode(SaslAuthenticateRequest, frame, version)
            mechanism = self._mechanisms.get(exchange.connection)
            exchange.notes[self] = read_user_name(mechanism, bytes(request.auth_bytes))
            return frame
        if not messages.can_read(key, version):
            raise ProtocolError(f"{api.api_name(key)} v{version} is too new for the policy to check")
        request = messages.read_request(frame, key, version)
        try:
            self._check_policy(exchange, request)
        except _Refused as refused:
            self._log_refusal(exchange, refused)
            if key == api.PRODUCE and request.acks == 0:
                raise ProtocolError(f"refused without a response (acks=0): {refused.reason}") from refused
            exchange.answer = messages.error_response(frame, key, version, exchange.correlation_id, refused.code)
            return b""
        return frame

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        if exchange.api_key == api.METADATA:
            self._topics |= topic_names(exchange.version, frame)
            return frame
        name = exchange.notes.pop(self, None)
        if name is not None:
            answer = messages.decode(SaslAuthenticateResponse, frame, exchange.version)
            if not answer.error_code:
                # Keep the first name: brokers do not let a connection change its principal. In SCRAM the client proves
                # its password after this response, and until then the broker answers no other request.
                self._principals.setdefault(exchange.connection, name)
        return frame

    def connection_closed(self, connection: Connection) -> None:
        self._principals.pop(connection, None)
        self._mechanisms.pop(connection, None)

    def shim_stopped(self) -> None:
        self._warnings.flush()

    def _check_policy(self, exchange: Exchange, request: Any) -> None:
        """Raise _Refused for a request that the policy forbids."""
        policy, key = self.policy, exchange.api_key
        name = getattr(request, "transactional_id", None)
        if key == api.ADD_PARTITIONS_TO_TXN:
            if exchange.version >= _BATCHED and policy.prefixes:
                raise ProtocolError("AddPartitionsToTxn for several transactional.ids, which only brokers send")
            name = request.v3_and_below_transactional_id or name
        principal = self._principals.get(exchange.connection, ANONYMOUS)
        if name and not policy.may_use(principal, name):
            code = TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            raise _Refused(code, code, f"{principal} may not use transactional.id {name}")
        if key == api.PRODUCE:
            plain = _non_transactional_topics(request)
            self._check_topics(plain, policy.transactional_only, "records only in transactions", _NOT_LEADER)
        elif key == api.FETCH and getattr(request, "isolation_level", 0) == _READ_UNCOMMITTED:
            # Brokers too read internal topics without an isolation level, but not through a shim.
            topics = (topic for topic, _ in messages.request_partitions(request, key))
            self._check_topics(topics, policy.committed_only, "reading only with read_committed", 0)
        elif key == api.OFFSET_COMMIT and policy.transactional_offsets_only(request.group_id):
            reason = f"group {request.group_id} commits offsets only in transactions"
            raise _Refused(GROUP_AUTHORIZATION_FAILED, GROUP_AUTHORIZATION_FAILED, reason)
        elif key == api.INIT_PRODUCER_ID and name and policy.max_timeout_ms is not None:
            requested_ms = request.transaction_timeout_ms
            if requested_ms > policy.max_timeout_ms:
                reason = f"transaction.timeout.ms {requested_ms} of {name} is above {policy.max_timeout_ms}"
                raise _Refused(INVALID_TRANSACTION_TIMEOUT, INVALID_TRANSACTION_TIMEOUT, reason)

    def _check_topics(
        self, topics: Iterable[str | bytes], guarded: Callable[[str], bool], rule: str, others: int
    ) -> None:
        codes: dict[str | bytes, int] = {}
        for topic in dict.fromkeys(topics):
            name = topic if isinstance(topic, str) else self._topics.get(topic)
            if name is None:
                codes[topic] = UNKNOWN_TOPIC_ID
            elif guarded(name):
                codes[topic] = TOPIC_AUTHORIZATION_FAILED
        if codes:
            names = ", ".join(t if isinstance(t, str) else self._topics.get(t, t.hex()) for t in codes)
            error = max(codes.values(), key=lambda code: code == TOPIC_AUTHORIZATION_FAILED)
            raise _Refused(lambda topic, _: codes.get(topic, others), error, f"topic {names}: {rule}")

    def _log_refusal(self, exchange: Exchange, refused: _Refused) -> None:
        error = error_name(refused.error)
        if refused.error == UNKNOWN_TOPIC_ID:
            return  # not a rejection: the client looks up the topic and tries again
        self.refused[error] += 1
        self._warnings.warn(
            exchange.connection.client,
            refused.reason,
            api=api.api_name(exchange.api_key),
            error=error,
            principal=self._principals.get(exchange.connection, ANONYMOUS),
        )


def _non_transactional_topics(request: Any) -> Iterator[str | bytes]:
    """Yield the topics that a Produce writes outside a transaction.

    A transactional.id is not enough: brokers look at each batch, and append non-transactional ones as such.
    """
    for topic in request.topic_data:
        batches = (partition.records or b"" for partition in topic.partition_data)
        if not request.transactional_id or not all(map(all_transactional, batches)):
            yield messages.topic_name_or_id(topic)


def read_user_name(mechanism: str | None, auth_bytes: bytes) -> str | None:
    """Return the user name in the first message of PLAIN or SCRAM, or None for any other message.

    `mechanism` is the mechanism that SaslHandshake named. It is checked because a client could put a false name into
    the messages of another mechanism, such as OAUTHBEARER.
    """
    if mechanism == "PLAIN":
        parts = auth_bytes.split(b"\0")
        return parts[1].decode("utf-8", "replace") if len(parts) == 3 and parts[1] else None
    if mechanism is None or not mechanism.startswith("SCRAM-"):
        return None
    if auth_bytes[:2] in (b"n,", b"y,", b"p="):  # gs2-header, then n=NAME,r=NONCE
        for part in auth_bytes.decode("utf-8", "replace").split(","):
            if part.startswith("n=") and len(part) > 2:
                return part[2:].replace("=2C", ",").replace("=3D", "=")
    return None
