"""Map upstream brokers to local ports.

A broker is identified by its node id. An upstream from the command line is identified by its address until a response
shows its node id. A broker that returns at another address keeps its local port. The book must never forget an address,
because the leak detector searches for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from eos.shim.wire.cursor import string

Address = tuple[str, int]


@dataclass(eq=False)
class Endpoint:
    """Pair a local port with its upstream broker."""

    upstream: Address
    node_id: int | None = None
    local_port: int = 0
    advertised: Address = ("", 0)

    @property
    def name(self) -> str:
        host, port = self.upstream
        return f"{host}:{port}" if self.node_id is None else f"broker {self.node_id} ({host}:{port})"


class AddressBook:
    """Keep the endpoints. `opened` is called with each new one and must set its local port and advertised address."""

    def __init__(self, bootstrap: Iterable[Address], opened: Callable[[Endpoint], None]) -> None:
        self._on_open = opened
        self.endpoints: list[Endpoint] = []
        self._endpoints_by_node: dict[int, Endpoint] = {}
        self._own_addresses: set[Address] = set()
        self._upstream_addresses: set[Address] = set()
        self.search_patterns: dict[bytes, str] = {}  # bytes that must not reach a client -> their address
        for address in bootstrap:
            self._open(Endpoint(address))

    def translate(self, node_id: int, host: str, port: int) -> Address:
        """Return the address for clients of the broker `node_id` at `host:port`. Opens a port for a new broker."""
        address = (host, port)
        endpoint = self._endpoints_by_node.get(node_id)
        if endpoint is not None and endpoint.upstream == address:
            return endpoint.advertised
        if address in self._own_addresses:
            return address  # the broker already advertises the shim
        if endpoint is None:
            endpoint = self._adopt(node_id, address)
        else:
            endpoint.upstream = address
        self._watch(address)
        return endpoint.advertised

    def _adopt(self, node_id: int, address: Address) -> Endpoint:
        for endpoint in self.endpoints:
            if endpoint.node_id is None and endpoint.upstream == address:
                endpoint.node_id = node_id
                break
        else:
            endpoint = self._open(Endpoint(address, node_id))
        self._endpoints_by_node[node_id] = endpoint
        return endpoint

    def _open(self, endpoint: Endpoint) -> Endpoint:
        self._on_open(endpoint)
        self.endpoints.append(endpoint)
        self._own_addresses.add(endpoint.advertised)
        self._watch(endpoint.upstream)
        return endpoint

    def _watch(self, address: Address) -> None:
        if address not in self._upstream_addresses and address not in self._own_addresses:
            self._upstream_addresses.add(address)
            # A new dict each time: a scan in progress keeps the one it began with.
            patterns = dict.fromkeys(_search_patterns(address), f"{address[0]}:{address[1]}")
            self.search_patterns = self.search_patterns | patterns


def _search_patterns(address: Address) -> Iterator[bytes]:
    """Return the encodings of an address in a message: the host's length, the host, and the port.

    With the length, `kafka:9092` is not found in `my-kafka:9092`. The length is compact or not, and the port has 16
    bits in the raft APIs.
    """
    host, port = address
    for flexible in (True, False):
        for size in (4, 2):
            yield string(host, flexible) + port.to_bytes(size, "big")
