"""Questions to the cluster that confluent-kafka cannot ask: transactions, features, members (kafka-python's admin).

Owns the translation of settings to kafka-python's names. It only reads, but for `remove_member`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kafka import errors as kafka_errors
from kafka.admin import KafkaAdminClient, MemberToRemove

from eos.errors import ConfigurationError, Unavailable
from eos.ownership import Described
from eos.settings import Settings

_TRANSLATED = {
    "client.id": "client_id",
    "security.protocol": "security_protocol",
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "ssl.key.password": "ssl_password",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
}


def _configuration(settings: Settings, timeout_ms: int) -> dict[str, Any]:
    values = settings.connection()
    translated = {new: values[old] for old, new in _TRANSLATED.items() if old in values}
    if "security_protocol" in translated:
        translated["security_protocol"] = str(translated["security_protocol"]).upper()
    if str(values.get("ssl.endpoint.identification.algorithm", "https")).lower() == "none":
        translated["ssl_check_hostname"] = False
    return translated | {
        "bootstrap_servers": str(values["bootstrap.servers"]).split(","),
        "request_timeout_ms": timeout_ms,
        "bootstrap_timeout_ms": timeout_ms,
        "reconnect_backoff_max_ms": 1_000,
    }


class ClusterAdmin:
    """A short-lived admin connection; use as a context manager."""

    def __init__(self, settings: Settings, timeout_ms: int = 10_000) -> None:
        try:
            self._client = KafkaAdminClient(**_configuration(settings, timeout_ms))
        except (kafka_errors.KafkaError, OSError) as error:
            raise Unavailable(f"{settings.bootstrap_servers} cannot be reached: {error}") from error
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the admin client does not accept these settings: {error}") from error

    def __enter__(self) -> ClusterAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def describe(self, transactional_id: str) -> Described | None:
        """The coordinator's view of one transactional.id, None when it knows none (never used, or expired)."""
        with _translated("DescribeTransactions"):
            try:
                found = self._client.describe_transactions([transactional_id])[transactional_id]
            except kafka_errors.TransactionalIdNotFoundError:
                return None
        return Described(
            str(found.state.value), found.producer_id, found.producer_epoch, found.transaction_start_time_ms
        )

    def transaction_version(self) -> int:
        """The finalized transaction.version: 2 from 4.0 on (KIP-890), 0 where the feature is unknown."""
        with _translated("DescribeFeatures"):
            features = self._client.describe_features()
        return int(features.get("transaction.version", {}).get("finalized", (0, 0))[1])

    def members(self, group: str) -> list[dict[str, Any]]:
        """Members of a classic group, as DescribeGroups shows them."""
        with _translated("DescribeGroups"):
            described: dict[str, Any] = self._client.describe_groups([group])[group]
        return list(described["members"])

    def committed_metadata(self, group: str) -> list[str]:
        """What the committers of a group's offsets wrote beside them."""
        with _translated("OffsetFetch"):
            offsets = self._client.list_group_offsets(group)[group]
        return [str(committed.metadata) for committed in offsets.values() if committed.metadata]

    def remove_member(self, group: str, group_instance_id: str) -> None:
        """A static member leaves for good (its close() alone leaves it in the group until the session timeout)."""
        with _translated("LeaveGroup"):
            self._client.remove_group_members(group, [MemberToRemove(group_instance_id=group_instance_id)])


@contextlib.contextmanager
def _translated(request: str) -> Iterator[None]:
    try:
        yield
    except kafka_errors.KafkaError as error:
        raise Unavailable(f"{request} failed: {error}") from error
