"""Define and check the settings of a shim.

The module owns names, defaults and checks. It opens only certificate files.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from eos.errors import ConfigurationError

Address = tuple[str, int]

# The same as Kafka's socket.request.max.bytes.
LARGEST_FRAME_BYTES = 100 * 1024 * 1024
# The limit of requests that are read whole, except Produce. A TxnOffsetCommit of 50,000 partitions, the shim's maximum,
# takes 0.9 MB.
CONTROL_BYTES = 2 * 1024 * 1024
# An idle connection takes two descriptors and 20 KB here, or up to 280 KB with TLS.
MOST_CONNECTIONS = 2_000
# The time until a broker answers a request that needs a login. Logins take seconds.
LOGIN_TIMEOUT_S = 30.0
# Brokers close idle connections after the same time (connections.max.idle.ms). Java clients close theirs after nine
# minutes.
IDLE_TIMEOUT_S = 600.0


def parse_address(text: str, what: str, default_port: int | None = None) -> Address:
    """Parse `host:port` or `[v6]:port`. Raises ConfigurationError, whose message begins with `what`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon and default_port is not None:
        host, port = text.strip(), str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{what} {text}: expected HOST:PORT")
    return host, int(port)


@dataclass(frozen=True)
class ShimSettings:
    """Hold the settings of a shim. Sizes are in bytes, times in seconds.

    `upstream` are the first brokers to connect to. `listen` is the first local port and the others follow it (port 0
    takes free ones). Clients get `advertise` instead of `listen` (a name or a mapped port: the n-th local port is
    advertised as its port + n). `tls` is for clients, and `upstream_tls` is for brokers. `largest_frame` bounds
    requests and responses, and `largest_control` bounds requests other than Produce that are read whole.
    `most_per_address` is three quarters of `most_connections` by default, which leaves a quarter for other addresses.
    """

    upstream: tuple[Address, ...]
    listen: Address
    advertise: Address | None = None
    tls: ssl.SSLContext | None = None
    upstream_tls: ssl.SSLContext | None = None
    largest_frame: int = LARGEST_FRAME_BYTES
    largest_control: int = CONTROL_BYTES
    most_connections: int = MOST_CONNECTIONS
    most_per_address: int | None = None
    login_timeout_s: float = LOGIN_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    connect_timeout_s: float = 10.0
    drain_timeout_s: float = 10.0
    version_query_interval_s: float = 5.0  # time between two queries of brokers that lack a needed version
    is_internal: bool = False  # true for a shim whose only client is another shim of this process

    def __post_init__(self) -> None:
        if not self.upstream:
            raise ConfigurationError("upstream: expected HOST:PORT[,HOST:PORT...]")
        if len(set(self.upstream)) != len(self.upstream):
            raise ConfigurationError("upstream names an address twice")
        if any(port == 0 for _, port in self.upstream):
            raise ConfigurationError("upstream: port 0 is not allowed")
        if self.largest_frame < 1024:
            raise ConfigurationError(f"--max-frame-bytes {self.largest_frame}: Kafka needs at least 1024")
        if self.largest_control < 1024:
            raise ConfigurationError(f"--max-control-bytes {self.largest_control}: Kafka needs at least 1024")
        if self.most_connections < 1:
            raise ConfigurationError(f"--max-connections {self.most_connections}: must be at least 1")
        if self.most_per_address is not None and self.most_per_address < 1:
            raise ConfigurationError(f"--max-connections-per-address {self.most_per_address}: must be at least 1")
        if min(self.login_timeout_s, self.idle_timeout_s) <= 0:
            raise ConfigurationError("--login-timeout and --idle-timeout must be above 0")
        host, _ = self.advertise or self.listen
        if host in ("0.0.0.0", "::"):
            raise ConfigurationError(
                f"clients cannot connect to the address {host}: name one that reaches the shim with "
                "--advertise HOST[:PORT]"
            )

    @property
    def limit_per_address(self) -> int:
        return self.most_per_address or max(1, self.most_connections * 3 // 4)


def server_tls(certificate: str | None, key: str | None, client_ca: str | None = None) -> ssl.SSLContext | None:
    """Return the TLS context for clients from PEM files, or None without a certificate.

    With `client_ca`, clients need a certificate signed by one of these CAs. Raises ConfigurationError.
    """
    if certificate is None:
        for value, option in ((key, "--tls-key"), (client_ca, "--client-ca")):
            if value is not None:
                raise ConfigurationError(f"{option} needs --tls-cert")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(_require_file(certificate), None if key is None else _require_file(key))
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"the TLS certificate {certificate} cannot be used: {error}") from error
    if client_ca is not None:
        try:
            context.load_verify_locations(_require_file(client_ca))
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(f"the client CA {client_ca} cannot be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def check_relay(upstream_certificate: str | None, client_ca: str | None, trusted: bool) -> None:
    """Raise ConfigurationError if any client could use the upstream certificate. Brokers would take every such client
    for the owner of the certificate."""
    if upstream_certificate is not None and client_ca is None and not trusted:
        raise ConfigurationError(
            "--upstream-cert gives every client of the shim that certificate's rights: require certificates of clients "
            "with --client-ca FILE, or allow all clients with --trust-clients"
        )


def client_tls(wanted: bool, ca: str | None, certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context for brokers, or None. A CA or a certificate implies TLS. Raises ConfigurationError."""
    if not (wanted or ca or certificate):
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else _require_file(ca))
        if certificate is not None:
            context.load_cert_chain(_require_file(certificate), None if key is None else _require_file(key))
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"TLS to the brokers cannot be set up: {error}") from error
    return context


def _require_file(path: str) -> str:
    if not Path(path).is_file():
        raise ConfigurationError(f"{path} does not exist")
    return path
