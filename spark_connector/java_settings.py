"""Translates the worker's settings (librdkafka's names) for the Java client inside Spark's Kafka source.

Owns this translation: data and no I/O. The contents of PEM files are passed on (pem.py), so that executors need no
files. It must never drop an unknown security setting: it raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eos.errors import ConfigurationError
from spark_connector.pem import FILES, contents

# Settings with the same name and meaning for a Java consumer. Others (producer and group settings, librdkafka's own
# tuning) have no counterpart in Spark's source.
_SAME = frozenset(
    [
        "client.id",
        "client.rack",
        "fetch.min.bytes",
        "fetch.max.bytes",
        "max.partition.fetch.bytes",
        "check.crcs",
        "metadata.max.age.ms",
        "reconnect.backoff.ms",
        "reconnect.backoff.max.ms",
        "retry.backoff.ms",
        "retry.backoff.max.ms",
        "sasl.mechanism",
        "sasl.kerberos.service.name",
        "ssl.key.password",
    ]
)
_PEM = {
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.pem": "ssl.keystore.key",
}
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_TRANSLATED = frozenset(
    (
        "bootstrap.servers",
        "security.protocol",
        "sasl.username",
        "sasl.password",
        "ssl.endpoint.identification.algorithm",
    )
)


def java_consumer(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a Java consumer, without the prefix `kafka.`; names without a counterpart are left out.

    Raises ConfigurationError for a setting of TLS or SASL that cannot be translated, or a file that cannot be read.
    """
    java = {name: str(value) for name, value in settings.items() if name in _SAME or name == "bootstrap.servers"}
    if protocol := settings.get("security.protocol"):
        java["security.protocol"] = str(protocol).upper()
    java |= _tls(settings)
    java |= _sasl(settings)
    return java


def find_unused(settings: Mapping[str, Any]) -> list[str]:
    """Return the Kafka settings that Spark's source does not use. Raise ConfigurationError for security settings."""
    files = {location for location, text in FILES.items() if text in _PEM}
    known = _SAME | _PEM.keys() | files | _TRANSLATED
    left = sorted(name for name in settings if name not in known and not name.startswith("eos."))
    for name in left:
        if name.startswith(("ssl.", "sasl.")):
            raise ConfigurationError(
                f"{name} cannot be translated for Spark's Kafka source: give the Java client's own setting with "
                "--option kafka.NAME=VALUE (options= in Python) and leave this one out"
            )
    return left


def _tls(settings: Mapping[str, Any]) -> dict[str, str]:
    settings = contents(settings)
    java = {java_name: str(settings[name]) for name, java_name in _PEM.items() if name in settings}
    if "ssl.truststore.certificates" in java:
        java["ssl.truststore.type"] = "PEM"
    if "ssl.keystore.key" in java:
        java["ssl.keystore.type"] = "PEM"
    algorithm = settings.get("ssl.endpoint.identification.algorithm")
    if algorithm is not None:
        java["ssl.endpoint.identification.algorithm"] = "" if str(algorithm).lower() == "none" else str(algorithm)
    return java


def _sasl(settings: Mapping[str, Any]) -> dict[str, str]:
    if "sasl.username" not in settings and "sasl.password" not in settings:
        return {}
    mechanism = str(settings.get("sasl.mechanism", "")).upper()
    module = _LOGIN_MODULES.get(mechanism)
    if module is None:
        raise ConfigurationError(
            f"sasl.username and sasl.password go with sasl.mechanism {', '.join(_LOGIN_MODULES)}, not "
            f"{mechanism or 'none'}"
        )
    user, password = (_quote(str(settings.get(name, ""))) for name in ("sasl.username", "sasl.password"))
    return {"sasl.mechanism": mechanism, "sasl.jaas.config": f"{module} required username={user} password={password};"}


def _quote(text: str) -> str:
    """Return a string in the syntax of a JAAS configuration file."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
