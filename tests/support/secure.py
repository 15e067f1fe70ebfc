"""Start a real broker with TLS, SASL and ACLs, and create the certificates that it accepts.

PLAINTEXT is for the tests themselves: every client is a super user there. The other listeners allow only what an ACL
allows. This module must never import a session.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from eos.broker import LocalKafka
from eos.broker.node import free_ports

PASSWORD = "only-for-this-test"
ALICE = "wonder-9f3c"  # alice's password, which tests search for in all output
_MODULES = "org.apache.kafka.common.security"


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def make_pki(home: Path) -> Path:
    """Create a CA (ca.pem), a certificate for 127.0.0.1 and one for the client "alice".

    The server has server.pem, server.key and server.p12 (for Java), the client has client.pem and client.key. trust.p12
    holds the CA for Java.
    """
    ca, authority = home / "ca.pem", home / "ca.key"
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test CA"),
        *("-keyout", str(authority), "-out", str(ca)),
    )
    (home / "server.names").write_text("subjectAltName=IP:127.0.0.1\n")
    (home / "client.names").write_text("subjectAltName=DNS:alice\n")
    for name, subject in (("server", "/CN=shim"), ("client", "/CN=alice")):
        key, request, certificate = (home / f"{name}.{suffix}" for suffix in ("key", "csr", "pem"))
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", subject), *("-keyout", str(key), "-out", str(request))
        )
        openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(authority), "-CAcreateserial"),
            *("-days", "2", "-extfile", str(home / f"{name}.names"), "-out", str(certificate)),
        )
    openssl(
        *("pkcs12", "-export", "-in", str(home / "server.pem"), "-inkey", str(home / "server.key"), "-name", "broker"),
        *("-out", str(home / "server.p12"), "-passout", f"pass:{PASSWORD}"),
    )
    return home


class SecureKafka:
    """Run the broker; `servers[listener]`: PLAIN_LOGIN, SCRAM and tokens on SASL and, with TLS, on BOTH;
    certificates on TLS."""

    def __init__(self, kafka: LocalKafka, ports: Mapping[str, int]) -> None:
        self.kafka = kafka
        self.servers = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        self.admin = AdminClient({"bootstrap.servers": self.servers["PLAINTEXT"]})

    def allow(self, kind: str, name: str, *operations: str, prefixed: bool = False) -> None:
        pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
        bindings = [
            AclBinding(
                ResourceType[kind], name, pattern, "User:alice", "*", AclOperation[each], AclPermissionType.ALLOW
            )
            for each in operations
        ]
        for future in self.admin.create_acls(bindings).values():
            future.result(30)

    def withdraw(self, kind: str, name: str) -> int:
        """Delete every ACL on exactly this name, and return how many there were."""
        pattern = ResourcePatternType.ANY
        wanted = AclBindingFilter(
            ResourceType[kind], name, pattern, None, None, AclOperation.ANY, AclPermissionType.ANY
        )
        return len(self.admin.delete_acls([wanted])[wanted].result(30))


@contextmanager
def secure_kafka(pki: Path, more: Mapping[str, Any] | None = None) -> Iterator[SecureKafka]:
    """Start the broker; `more`: settings to add or replace."""
    client, controller, sasl, tls, both = free_ports(5)
    ports = {"PLAINTEXT": client, "SASL": sasl, "TLS": tls, "BOTH": both}
    urls = [f"{name}://127.0.0.1:{port}" for name, port in ports.items()]
    config: dict[str, Any] = {
        "listeners": ",".join([*urls, f"CONTROLLER://127.0.0.1:{controller}"]),
        "advertised.listeners": ",".join(urls),
        "controller.quorum.voters": f"0@127.0.0.1:{controller}",
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_PLAINTEXT,TLS:SSL,BOTH:SASL_SSL"
        ),
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "ssl.keystore.location": pki / "server.p12",
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.password": PASSWORD,
        "ssl.key.password": PASSWORD,
        "ssl.truststore.location": pki / "ca.pem",
        "ssl.truststore.type": "PEM",
        "listener.name.tls.ssl.client.auth": "required",
        "listener.name.tls.ssl.principal.mapping.rules": r"RULE:^CN=(.*?)$/$1/",
    }
    plain = f'{_MODULES}.plain.PlainLoginModule required user_alice="{ALICE}";'
    scram = f"{_MODULES}.scram.ScramLoginModule required;"
    tokens = f'{_MODULES}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="admin";'
    for listener in ("sasl", "both"):
        config[f"listener.name.{listener}.plain.sasl.jaas.config"] = plain
        config[f"listener.name.{listener}.scram-sha-256.sasl.jaas.config"] = scram
        config[f"listener.name.{listener}.oauthbearer.sasl.jaas.config"] = tokens
    with LocalKafka(port=client, config=config | dict(more or {})) as broker:
        secure = SecureKafka(broker, ports)
        upsertion = UserScramCredentialUpsertion(
            "alice", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), ALICE.encode()
        )
        for done in secure.admin.alter_user_scram_credentials([upsertion]).values():
            done.result(30)
        yield secure
