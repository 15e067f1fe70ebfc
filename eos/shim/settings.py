"""What the shim is told at its start, checked.

Owns names, defaults and refusals; opens nothing but certificate files.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from eos.errors import ConfigurationError

Address = tuple[str, int]

# Kafka's own socket.request.max.bytes
LARGEST_FRAME_BYTES = 100 * 1024 * 1024
# Requests other than Produce, where they are read whole. A TxnOffsetCommit of 50,000 partitions, more than are read at
# all, takes 0.9 MB.
CONTROL_BYTES = 2 * 1024 * 1024
# An idle one takes 20 KB here, with TLS up to 280 KB, and two descriptors.
MOST_CONNECTIONS = 2_000
# Until a broker answers what it answers only to whom it lets in. Logins take seconds.
LOGIN_TIMEOUT_S = 30.0
# As on brokers (connections.max.idle.ms); Java clients close theirs after nine minutes.
IDLE_TIMEOUT_S = 600.0


def parse_address(text: str, what: str, default_port: int | None = None) -> Address:
    """`host:port`, `[v6]:port`. Raises ConfigurationError with `what` in its sentence."""
    host, colon, port = text.strip().rpartition(":")
    if not colon and default_port is not None:
        host, port = text.strip(), str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{what} {text}: expected HOST:PORT")
    return host, int(port)


@dataclass(frozen=True)
class ShimSettings:
    """`upstream` the brokers to begin with; `listen` the first local port, the others follow (port 0: free ones).

    `advertise` is what clients are told instead of `listen` (a name, a mapped port: the n-th local port is advertised
    as its port + n). `tls` is for clients, `upstream_tls` for brokers. `largest_frame` bounds requests and answers,
    `largest_control` requests other than Produce where they have to be read whole. `most_of_an_address` is three
    quarters of `most_connections` unless said: the others keep a quarter. Sizes in bytes, times in seconds.
    """

    upstream: tuple[Address, ...]
    listen: Address
    advertise: Address | None = None
    tls: ssl.SSLContext | None = None
    upstream_tls: ssl.SSLContext | None = None
    largest_frame: int = LARGEST_FRAME_BYTES
    largest_control: int = CONTROL_BYTES
    most_connections: int = MOST_CONNECTIONS
    most_of_an_address: int | None = None
    login_timeout_s: float = LOGIN_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    connect_timeout_s: float = 10.0
    drain_timeout_s: float = 10.0
    ask_again_s: float = 5.0  # between two questions to brokers that do not offer what is needed
    inside: bool = False  # between two shims of one process: its ports are nobody's business

    def __post_init__(self) -> None:
        if not self.upstream:
            raise ConfigurationError("upstream: expected HOST:PORT[,HOST:PORT...]")
        if len(set(self.upstream)) != len(self.upstream):
            raise ConfigurationError("upstream names an address twice")
        if any(port == 0 for _, port in self.upstream):
            raise ConfigurationError("upstream: port 0 is no address")
        if self.largest_frame < 1024:
            raise ConfigurationError(f"a largest frame of {self.largest_frame} bytes is too small for Kafka")
        if self.largest_control < 1024:
            raise ConfigurationError(f"a largest request of {self.largest_control} bytes is too small for Kafka")
        if self.most_connections < 1:
            raise ConfigurationError(f"{self.most_connections} connections are not enough for any client")
        if self.most_of_an_address is not None and self.most_of_an_address < 1:
            raise ConfigurationError(f"{self.most_of_an_address} connections of an address are not enough for a client")
        if min(self.login_timeout_s, self.idle_timeout_s) <= 0:
            raise ConfigurationError("a connection needs some time for its login, and may be idle for some")
        told = self.advertise or self.listen
        if told[0] in ("0.0.0.0", "::"):
            raise ConfigurationError(
                f"clients cannot be told the address {told[0]}: "
                "say how they reach the shim, with --advertise HOST[:PORT]"
            )

    @property
    def places_of_an_address(self) -> int:
        return self.most_of_an_address or max(1, self.most_connections * 3 // 4)


def server_tls(certificate: str | None, key: str | None, client_ca: str | None = None) -> ssl.SSLContext | None:
    """TLS for the side of the clients, from PEM files; None for none. With `client_ca` clients must bring a certificate
    that one of these CAs signed. Raises ConfigurationError.
    """
    if certificate is None:
        for given, what in ((key, "a TLS key"), (client_ca, "a CA of clients")):
            if given is not None:
                raise ConfigurationError(f"{what} without a certificate: say --tls-cert too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(_readable(certificate), None if key is None else _readable(key))
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"the TLS certificate {certificate} cannot be used: {error}") from error
    if client_ca is not None:
        try:
            context.load_verify_locations(_readable(client_ca))
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(f"the CA of clients {client_ca} cannot be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def check_relay(upstream_certificate: str | None, client_ca: str | None, trusted: bool) -> None:
    """Brokers take whoever comes through a shim with a certificate for its owner. Raises ConfigurationError."""
    if upstream_certificate is not None and client_ca is None and not trusted:
        raise ConfigurationError(
            "--upstream-cert gives everybody who reaches the shim that certificate's rights: say whose certificates "
            "clients need, with --client-ca FILE, or --trust-clients where all who reach it may have them"
        )


def client_tls(wanted: bool, ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """TLS for the side of the brokers; naming a CA or a client certificate asks for it. Raises ConfigurationError."""
    if not (wanted or ca or certificate):
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else _readable(ca))
        if certificate is not None:
            context.load_cert_chain(_readable(certificate), None if key is None else _readable(key))
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"TLS to the brokers cannot be set up: {error}") from error
    return context


def _readable(path: str) -> str:
    if not Path(path).is_file():
        raise ConfigurationError(f"{path} does not exist")
    return path
