"""Configures kafka-python to connect as librdkafka does: addresses, TLS, SASL, and tokens for OAUTHBEARER.

Owns the translation of librdkafka's names. It must never log a value: many are secrets.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import re
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kafka.net.sasl.oauth import AbstractTokenProvider

from eos import log
from eos.errors import ConfigurationError, NotAuthorised, Unavailable, no_broker
from eos.kafka.client.settings import Settings

_SASL = {
    "sasl.mechanism": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "sasl.kerberos.service.name": "sasl_kerberos_service_name",
}
_REFRESH_FRACTION = 0.8  # fraction of a token's lifetime, as in librdkafka
_TOKEN_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_SYSTEM_CA = "probe"  # a CA location that stands for the system's own, which Python's default context uses
_CLIENT_CREDENTIALS = "client_credentials"

# Without a handler Python prints a library's warnings on stderr, between our own messages.
logging.getLogger("kafka").addHandler(logging.NullHandler())


def admin_configuration(settings: Settings, timeout_ms: int) -> dict[str, Any]:
    """Return the arguments of a kafka-python client that connects as the worker's clients do."""
    # kafka-python logs its configuration and the bytes of each request. A login's bytes contain the password or token.
    log.hide_debug_lines("kafka")
    values = settings.connection()
    arguments: dict[str, Any] = {new: values[old] for old, new in _SASL.items() if old in values}
    protocol = str(values.get("security.protocol", "plaintext")).upper()
    arguments["security_protocol"] = protocol
    if protocol.endswith("SSL"):
        arguments["ssl_context"] = _tls_context(values)
        arguments["ssl_check_hostname"] = arguments["ssl_context"].check_hostname
    if protocol.startswith("SASL") and str(values.get("sasl.mechanism", "")).upper() == "OAUTHBEARER":
        arguments["sasl_oauth_token_provider"] = _CachedTokens(_token_source(settings.values))
    if "client.id" in values:
        arguments["client_id"] = values["client.id"]
    return arguments | {
        "bootstrap_servers": [server.strip() for server in str(values["bootstrap.servers"]).split(",")],
        "request_timeout_ms": timeout_ms,
        "bootstrap_timeout_ms": timeout_ms,
        "reconnect_backoff_max_ms": 1_000,
    }


# ---- explaining failed connections -----------------------------------------------------------------------------


def login_refused(settings: Settings, reason: str) -> NotAuthorised:
    """Return the error for a refused login, with the settings to check."""
    tokens = str(settings.get("sasl.mechanism", "")).upper() == "OAUTHBEARER"
    return NotAuthorised(
        f"the login at {settings.bootstrap_servers} was refused: {reason}",
        remedy=f"check sasl.mechanism and {'sasl.oauthbearer.*' if tokens else 'sasl.username, sasl.password'}",
    )


def tls_failed(settings: Settings, reason: str) -> Unavailable:
    """Return the error for a failed TLS handshake, with the settings to check."""
    if (refused := _explain_certificate(settings, reason)) is not None:
        return refused
    return Unavailable(
        f"no TLS connection to {settings.bootstrap_servers}: {reason}",
        remedy="check ssl.ca.location (the CA that signed the brokers' certificates), ssl.certificate.location if the "
        "brokers require one, and that bootstrap.servers names a TLS listener",
    )


# OpenSSL's X509_V_ERR_* codes of a broker's certificate: the reason, and what to change.
_UNTRUSTED = "was signed by a CA that is not trusted here", "set ssl.ca.location to the PEM file of that CA"
_WRONG_HOST = "is for another host", "use a name from the certificate in bootstrap.servers and advertised.listeners"
_CERTIFICATE_ERRORS = {
    9: ("is not valid yet", "check the clocks of this machine and of the broker"),
    10: ("has expired", "renew it on the broker, or check this machine's clock"),
    **dict.fromkeys((18, 19, 20, 21), _UNTRUSTED),
    **dict.fromkeys((62, 64), _WRONG_HOST),
}
_TLS_ADDRESS = re.compile(r"ssl://(\S+?):(\d+)/")


def _explain_certificate(settings: Settings, reason: str) -> Unavailable | None:
    """Connect with Python's TLS to find why a broker's certificate was refused: librdkafka does not say why.

    Return None if that gives no reason."""
    address = _TLS_ADDRESS.search(reason)
    if address is None or "certificate verify failed" not in reason:
        return None
    host, port = address[1].strip("[]"), int(address[2])
    try:
        context = _tls_context(settings.connection())
        with (
            socket.create_connection((host, port), _CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in _CERTIFICATE_ERRORS:
            return None
        wrong, remedy = _CERTIFICATE_ERRORS[error.verify_code]
        return Unavailable(f"the certificate of {host}:{port} {wrong} ({error.verify_message})", remedy=remedy)
    except OSError:
        return None  # the broker is unreachable, so librdkafka's own message is kept


def unreachable(settings: Settings, reason: str) -> Unavailable:
    """Return the error for a cluster that does not answer, or whose advertised addresses do not answer."""
    servers = settings.bootstrap_servers
    if (broker := _BROKER_ADDRESS.search(reason)) and broker[1] not in _bootstrap_addresses(servers):
        return _unreachable_as_advertised(servers, [f"{broker[1]} ({reason})"])
    return Unavailable(f"{servers} cannot be reached: {reason}", remedy=no_broker(servers))


_BROKER_ADDRESS = re.compile(r"(?:\w+://)?([^\s/(]+:\d+)/\d+: ")
"""Matches a broker known from metadata (`HOST:PORT/NODE_ID`), not one of bootstrap.servers (`HOST:PORT/bootstrap`)."""


def require_reachable(bootstrap_servers: str, metadata: Any) -> None:
    """Raise Unavailable unless at least one advertised address of the brokers accepts a connection.

    Clients use bootstrap.servers only for the first connection, and then wait without an error for the advertised
    addresses (in containers, often `localhost` or a container's name)."""
    advertised = frozenset((broker.host, broker.port) for broker in metadata.brokers.values())
    if not advertised or _bootstrap_addresses(bootstrap_servers) & {f"{host}:{port}" for host, port in advertised}:
        return  # one of the advertised addresses has just answered
    _connect_to_any(bootstrap_servers, advertised)


def _bootstrap_addresses(bootstrap_servers: str) -> set[str]:
    return {server.rpartition("://")[2].strip() for server in bootstrap_servers.split(",")}


@cache
def _connect_to_any(bootstrap_servers: str, advertised: frozenset[tuple[str, int]]) -> None:
    failures = []
    for host, port in sorted(advertised):
        try:
            socket.create_connection((host, port), _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            failures.append(f"{host}:{port} ({error.strerror or error})")
        else:
            return
    raise _unreachable_as_advertised(bootstrap_servers, failures)


def _unreachable_as_advertised(bootstrap_servers: str, failures: list[str]) -> Unavailable:
    return Unavailable(
        f"{bootstrap_servers} answers, but its brokers cannot be reached at the addresses that they advertise: "
        f"{', '.join(failures[:3])}",
        remedy="set advertised.listeners on the brokers to addresses that this machine can reach",
    )


# ---- TLS ------------------------------------------------------------------------------------------------------


def _tls_context(values: Mapping[str, Any]) -> ssl.SSLContext:
    """Return the TLS context. Raise ConfigurationError, naming the setting, for a missing or invalid file."""
    if "ssl.keystore.location" in values:
        raise ConfigurationError(
            "ssl.keystore.location cannot be used here: set ssl.certificate.location and ssl.key.location (PEM) instead"
        )
    context = ssl.create_default_context()
    verified = str(values.get("enable.ssl.certificate.verification", "true")).lower() != "false"
    named = str(values.get("ssl.endpoint.identification.algorithm", "https")).lower() != "none"
    context.check_hostname = verified and named
    context.verify_mode = ssl.CERT_REQUIRED if verified else ssl.CERT_NONE
    with _reading_files_of("ssl.ca.location"):
        path = str(values.get("ssl.ca.location", _SYSTEM_CA))
        if path != _SYSTEM_CA:
            context.load_verify_locations(**{"capath" if os.path.isdir(path) else "cafile": path})
        elif "ssl.ca.pem" in values:
            context.load_verify_locations(cadata=str(values["ssl.ca.pem"]))
    with _reading_files_of("ssl.certificate.location, ssl.key.location"):
        if "ssl.certificate.location" in values:
            context.load_cert_chain(
                values["ssl.certificate.location"],
                values.get("ssl.key.location"),
                lambda: str(values.get("ssl.key.password", "")),
            )
        elif "ssl.certificate.pem" in values:
            _load_pem(context, values)
    return context


def _load_pem(context: ssl.SSLContext, values: Mapping[str, Any]) -> None:
    """Load a certificate from text through a private temporary file: Python only reads certificates from files."""
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(f"{values['ssl.certificate.pem']}\n{values.get('ssl.key.pem', '')}\n")
        file.flush()
        context.load_cert_chain(file.name, None, lambda: str(values.get("ssl.key.password", "")))


@contextlib.contextmanager
def _reading_files_of(what: str) -> Any:
    try:
        yield
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise ConfigurationError(f"{what} cannot be used: {reason}") from error


# ---- OAUTHBEARER ----------------------------------------------------------------------------------------------

Token = tuple[str, float]  # the token, and its expiry in Unix seconds


class _CachedTokens(AbstractTokenProvider):  # type: ignore[misc]
    """Caches one token until 80 % of its lifetime has passed."""

    def __init__(self, fetch: Callable[[], Token]) -> None:
        super().__init__()
        self._fetch = fetch
        self._token = ""
        self._refresh_at = 0.0

    def token(self) -> str:
        now = time.time()
        if now >= self._refresh_at:
            self._token, expires = self._fetch()
            self._refresh_at = now + _REFRESH_FRACTION * max(0.0, expires - now)
        return self._token


def _token_source(values: Mapping[str, Any]) -> Callable[[], Token]:
    """Return a function that fetches a token as librdkafka would with the same settings."""
    text = str(values.get("sasl.oauthbearer.config", ""))
    if "oauth_cb" in values:
        return lambda: _fetch_from_callback(values["oauth_cb"], text)
    if str(values.get("sasl.oauthbearer.method", "default")).lower() == "oidc":
        _require_credentials(values)
        return lambda: _fetch_from_endpoint(values)
    if str(values.get("enable.sasl.oauthbearer.unsecure.jwt", "false")).lower() == "true":
        return lambda: _unsecured_token(text)
    raise ConfigurationError(
        "sasl.mechanism=OAUTHBEARER needs a token: set sasl.oauthbearer.method=oidc with its token endpoint, client id "
        "and secret, or pass oauth_cb"
    )


def _require_credentials(values: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a grant type other than client credentials: the admin client supports no other."""
    wanted = {
        "sasl.oauthbearer.grant.type": _CLIENT_CREDENTIALS,
        "sasl.oauthbearer.metadata.authentication.type": "none",
    }
    for name, only in wanted.items():
        value = str(values.get(name, only))
        if value.lower() != only:
            raise ConfigurationError(
                f"{name}={value} cannot be used here: set sasl.oauthbearer.grant.type={_CLIENT_CREDENTIALS} with a "
                "client's id and secret, or pass oauth_cb"
            )


def _fetch_from_callback(callback: Callable[[str], Any], text: str) -> Token:
    token, expires, *_ = callback(text)
    return str(token), float(expires)


def _fetch_from_endpoint(values: Mapping[str, Any]) -> Token:
    """Fetch a token with client credentials (RFC 6749), sent as HTTP basic authentication as librdkafka does."""
    import urllib.parse  # both import http.client and email, which nothing else needs
    import urllib.request

    url = str(values.get("sasl.oauthbearer.token.endpoint.url", ""))
    name = values.get("sasl.oauthbearer.client.id", values.get("sasl.oauthbearer.client.credentials.client.id", ""))
    secret = values.get(
        "sasl.oauthbearer.client.secret", values.get("sasl.oauthbearer.client.credentials.client.secret", "")
    )
    form = {"grant_type": _CLIENT_CREDENTIALS}
    if scope := values.get("sasl.oauthbearer.scope"):
        form["scope"] = str(scope)
    basic = base64.b64encode(f"{name}:{secret}".encode()).decode()
    try:
        request = urllib.request.Request(
            url,
            urllib.parse.urlencode(form).encode(),
            {"Authorization": f"Basic {basic}", "Accept": "application/json"},
        )
        context = _endpoint_tls(values) if url.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=_TOKEN_TIMEOUT_S, context=context) as answer:
            found = json.load(answer)
        return str(found["access_token"]), time.time() + float(found.get("expires_in", 300))
    except (OSError, ValueError, KeyError) as error:
        raise NotAuthorised(f"sasl.oauthbearer.token.endpoint.url gave no token: {error}") from error


def _endpoint_tls(values: Mapping[str, Any]) -> ssl.SSLContext:
    path = str(values.get("https.ca.location", _SYSTEM_CA))
    if path == _SYSTEM_CA:
        return ssl.create_default_context(cadata=values.get("https.ca.pem"))
    return ssl.create_default_context(cafile=path)


def _unsecured_token(text: str) -> Token:
    """Return an unsecured JWS built from sasl.oauthbearer.config as in librdkafka, for development brokers only."""
    given = dict(part.split("=", 1) for part in text.split() if "=" in part)
    life_s, now = float(given.get("lifeSeconds", 3600)), time.time()
    claims: dict[str, object] = {given.get("principalClaimName", "sub"): given.get("principal", "")}
    claims |= {"iat": now, "exp": now + life_s}
    if "scope" in given:
        claims[given.get("scopeClaimName", "scope")] = given["scope"].split(",")
    return f"{_encode_part({'alg': 'none'})}.{_encode_part(claims)}.", now + life_s


def _encode_part(content: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")
