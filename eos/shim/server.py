"""Run the shim: listen on a port per broker, create a link per connection, and drain them at the end.

The module owns the parts that belong to no single connection: local ports, the address book, and which brokers are
reachable. It must never decide what happens to a frame: jobs do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections import Counter
from collections.abc import Sequence

from eos.errors import Unavailable
from eos.shim import events, probe
from eos.shim.addresses.book import AddressBook, Endpoint
from eos.shim.addresses.job import AddressJob
from eos.shim.limited_warnings import LimitedWarnings
from eos.shim.link import Link, ReadBuffer
from eos.shim.memory import SHARED_BYTES, MemoryBudget
from eos.shim.pipeline import Job, Pipeline, Traffic
from eos.shim.settings import ShimSettings
from eos.shim.versions import VersionsJob

_BACKLOG = 1024
# A new broker takes the next free local port, and at most this many used ports are skipped.
_PORTS_TRIED = 100
# The time between two attempts while no broker can be reached.
_TRY_AGAIN_S = 1.0
# The pause in accepting connections while the process has no descriptor left.
_NO_DESCRIPTOR_WAIT_S = 0.1
_HANDSHAKE_TIMEOUT_S = 10.0


class Shim:
    """Serve from `await start()` until `await stop()`. `jobs` run in this order for requests.

    Raises Unavailable if no upstream answers or a port of `listen` is in use.
    """

    def __init__(self, settings: ShimSettings, jobs: Sequence[Job] = ()) -> None:
        self.settings = settings
        self.connections_made = 0
        self._links: set[Link] = set()
        self._links_without_login: dict[Link, None] = {}  # links without a completed login, the oldest first
        self._addresses: dict[Link, str] = {}  # the addresses of all links, including those in their TLS handshake
        self._connections_by_address: Counter[str] = Counter()  # connections by address
        # Tasks that open a link: TLS handshakes take most of their time.
        self._handshakes: set[asyncio.Task[None]] = set()
        self._warnings = LimitedWarnings("connection closed", "more connections closed")
        self._memory = MemoryBudget(settings.largest_frame + SHARED_BYTES, settings.most_connections)
        self._buffer = ReadBuffer()
        self._sockets: dict[Endpoint, socket.socket] = {}
        self._accepting: dict[asyncio.Task[None], socket.socket] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._unreachable: set[Endpoint] = set()
        self._waiting: asyncio.Task[None] | None = None  # runs while no broker can be reached
        self._version_queries: asyncio.Task[None] | None = (
            None  # runs while the brokers do not offer the versions a job needs
        )
        self._stopping = False
        self._all_links_ended = asyncio.Event()
        self._next_port = settings.listen[1]
        self._starting = True
        try:
            self.address_book = AddressBook(settings.upstream, self._bind)
        except BaseException:
            self._close_sockets()
            raise
        self._starting = False
        ours = (VersionsJob(), AddressJob(self.address_book))
        self._pipeline = Pipeline([*jobs, *ours], settings.largest_frame, settings.largest_control)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return the addresses the shim listens on. The first one is the clients' bootstrap address."""
        return [(self.settings.listen[0], endpoint.local_port) for endpoint in self.address_book.endpoints]

    @property
    def connections(self) -> int:
        return len(self._links)

    @property
    def traffic(self) -> Traffic:
        return self._pipeline.traffic

    @property
    def not_ready_reason(self) -> str | None:
        """Return why a new client would not be served, or None."""
        if self._stopping:
            return "stopping"
        if not self._accepting:
            return "not listening yet"
        if self._none_reachable:
            return "no broker can be reached"
        return self._pipeline.not_ready_reason

    async def start(self) -> None:
        """Discover the brokers and listen. If the cluster requires a login, later responses show the brokers."""
        try:
            brokers = await probe.discover_brokers(
                self.settings.upstream, self.settings.upstream_tls, self.settings.connect_timeout_s
            )
        except BaseException:
            self._close_sockets()
            raise
        for node_id, host, port in sorted(brokers):
            self.address_book.translate(node_id, host, port)
        if self._pipeline.wants_broker_versions:
            self._pipeline.on_broker_versions(await self._newest_versions())
        for endpoint in self.address_book.endpoints:
            await self._serve(endpoint)
        self._version_queries = asyncio.get_running_loop().create_task(self._query_versions_until_complete())

    async def _newest_versions(self, again: bool = False) -> dict[str, dict[int, int] | None]:
        names = {endpoint.upstream: endpoint.name for endpoint in self.address_book.endpoints}
        tls, timeout_s = self.settings.upstream_tls, self.settings.connect_timeout_s
        offered = await probe.fetch_newest_versions(names, tls, timeout_s, again)
        return {name: offered.get(address) for address, name in names.items()}

    async def _query_versions_until_complete(self) -> None:
        """Query the versions until they suffice: brokers may start late, or be upgraded while the shim runs."""
        while self._pipeline.wants_versions_again:
            await asyncio.sleep(self.settings.version_query_interval_s)
            self._pipeline.on_broker_versions(await self._newest_versions(again=True))

    async def stop(self) -> None:
        """Accept no connections and requests, deliver pending responses for `drain_timeout_s`, and close."""
        self._stopping = True
        if self._waiting is not None:
            self._waiting.cancel()
        coming = [*self._accepting, *self._handshakes]
        if self._version_queries is not None:
            coming.append(self._version_queries)
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        self._close_sockets()
        for link in list(self._links):
            link.drain()
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                while self._links:
                    self._all_links_ended.clear()
                    await self._all_links_ended.wait()
        except TimeoutError:
            events.warning("drain timed out", connections=len(self._links))
        for link in list(self._links):
            link.abort()
        # Aborted transports report their end in the next turn of the loop.
        await asyncio.sleep(0)
        self._warnings.flush()
        self._pipeline.shim_stopped()

    def _bind(self, endpoint: Endpoint) -> None:
        """Bind the next local port at once for the address book, and listen as soon as the loop can."""
        host, first = self.settings.listen
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for _ in range(_PORTS_TRIED):
            # asyncio sets TCP_NODELAY only on sockets with IPPROTO_TCP, and accepted sockets inherit it from this one.
            # Without it a second response waits 40 ms for the client's delayed ACK.
            bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = self._next_port
            try:
                bound.bind((host, port))
            except OSError as error:
                bound.close()
                if self._starting or port == 0:
                    raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
                self._next_port += 1
                continue
            endpoint.local_port = bound.getsockname()[1]
            self._next_port = port + 1 if port else 0
            advertised_host, advertised_port = self.settings.advertise or (host, first)
            shift = advertised_port - first if advertised_port and first else 0
            endpoint.advertised = (advertised_host, endpoint.local_port + shift)
            self._sockets[endpoint] = bound
            if not self._starting:
                # The backlog accepts connections from now on, so the client may get the port at once.
                bound.listen(_BACKLOG)
                task = asyncio.get_running_loop().create_task(self._serve(endpoint))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
            return
        raise Unavailable(f"no free port on {host} from {first} on")

    async def _serve(self, endpoint: Endpoint) -> None:
        bound = self._sockets.get(endpoint)
        if bound is None or self._stopping:
            return
        bound = self._sockets.pop(endpoint)
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self._accepting[asyncio.get_running_loop().create_task(self._accept(endpoint, bound))] = bound
        host, port = endpoint.advertised
        log = events.debug if self.settings.is_internal else events.info
        log(
            "internal listener started" if self.settings.is_internal else "listening",
            address=f"{host}:{port}",
            upstream=endpoint.name,
        )

    async def _accept(self, endpoint: Endpoint, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        is_logged = False
        while True:
            try:
                connection, peer = await loop.sock_accept(bound)
            except OSError as error:
                # No descriptor is left, or the client has already disconnected. The loop must continue to accept.
                if not is_logged:
                    events.warning("accept failed", broker=endpoint.name, reason=error)
                is_logged = True
                await asyncio.sleep(_NO_DESCRIPTOR_WAIT_S)
                continue
            is_logged = False
            self.connections_made += 1
            address = counted_address(peer[0])
            reason = self._refusal_reason(address)
            if reason is None:
                task = loop.create_task(self._open_link(endpoint, connection, self.connections_made, address))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
            else:
                self._warn(self.connections_made, _peer(connection), "shim", reason)
                connection.close()
            await asyncio.sleep(0)  # give existing connections a turn

    def _refusal_reason(self, address: str) -> str | None:
        """Return why a new connection must be refused, or None. To accept the new one, an older connection without a
        login may be closed."""
        most, of_one = self.settings.most_connections, self.settings.limit_per_address
        if self._connections_by_address[address] >= of_one and not self._close_oldest_without_login(address):
            return f"{of_one} connections from {address} are open (--max-connections-per-address)"
        if len(self._addresses) >= most and not self._close_oldest_without_login():
            return f"{most} connections are open (--max-connections)"
        return None

    def _close_oldest_without_login(self, address: str | None = None) -> bool:
        """Close the oldest connection without a login that does not wait for its broker. Return whether one exists."""
        for link in self._links_without_login:
            if address in (None, self._addresses[link]) and not link.is_waiting_for_broker:
                link.close_early("another client connected")
                return True
        return False

    async def _open_link(self, endpoint: Endpoint, connection: socket.socket, number: int, address: str) -> None:
        peer, tls = _peer(connection), self.settings.tls
        link = Link(number, endpoint, self._pipeline, self.settings.largest_frame, self, self._buffer, self._memory)
        self._addresses[link] = address
        self._connections_by_address[address] += 1
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: link.client, connection, ssl=tls, ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S if tls else None
            )
        except OSError as error:  # ssl.SSLError and ConnectionAbortedError are OSErrors
            why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error
            self._warn(number, peer, "client", f"TLS handshake failed: {why}")
            self._release_address(link)

    def _release_address(self, link: Link) -> None:
        address = self._addresses.pop(link, None)
        if address is not None:
            self._connections_by_address[address] -= 1
            if not self._connections_by_address[address]:
                del self._connections_by_address[address]

    def _warn(self, connection: int, client: str, by: str, reason: object) -> None:
        self._warnings.warn(client, reason, connection=connection, by=by)

    # Called by links (link.LinkObserver).

    def link_opened(self, link: Link) -> None:
        self._links.add(link)
        self._links_without_login[link] = None
        link.opened_at = link.last_read_at = time.monotonic()
        self._check_timeout(link)

    def link_logged_in(self, link: Link) -> None:
        self._links_without_login.pop(link, None)
        self._check_timeout(link)

    def _check_timeout(self, link: Link) -> None:
        """Close a link that is idle or has not completed its login in time. Otherwise check again when its time limit
        ends."""
        if link.timeout_check is not None:
            link.timeout_check.cancel()
        settings, loop = self.settings, asyncio.get_running_loop()
        limit_s, since = (
            (settings.idle_timeout_s, link.last_read_at)
            if link.is_logged_in
            else (settings.login_timeout_s, link.opened_at)
        )
        left_s = since + limit_s - time.monotonic()
        if left_s > 0 or link.is_waiting_for_broker:
            link.timeout_check = loop.call_later(left_s if left_s > 0 else limit_s, self._check_timeout, link)
        else:
            link.close_early(f"{limit_s:g} s")

    def link_needs_broker(self, link: Link) -> None:
        link.connecting = asyncio.get_running_loop().create_task(self._connect(link))

    def link_failed(self, link: Link, sender: str, error: Exception) -> None:
        self._links_without_login.pop(link, None)
        self._release_address(link)
        self._warn(link.number, link.connection.client, sender, error)

    def link_closed(self, link: Link) -> None:
        self._links_without_login.pop(link, None)
        self._links.discard(link)
        self._release_address(link)
        if not self._links:
            self._all_links_ended.set()

    async def _connect(self, link: Link) -> None:
        error = await link.connect(self.settings.upstream_tls, self.settings.connect_timeout_s)
        endpoint = link.endpoint
        if error is None:
            self._note_reachable(endpoint)
        elif endpoint not in self._unreachable:
            # Clients retry several times a second, so this is logged once until the broker is reachable again.
            self._unreachable.add(endpoint)
            events.warning("broker unreachable", broker=endpoint.name, reason=error)
        if self._none_reachable and not self._stopping and (self._waiting is None or self._waiting.done()):
            self._waiting = asyncio.get_running_loop().create_task(self._wait_for_a_broker())

    def _note_reachable(self, endpoint: Endpoint) -> None:
        if endpoint in self._unreachable:
            self._unreachable.discard(endpoint)
            events.info("broker reachable again", broker=endpoint.name)

    @property
    def _none_reachable(self) -> bool:
        return all(endpoint in self._unreachable for endpoint in self.address_book.endpoints)

    async def _wait_for_a_broker(self) -> None:
        """Try all brokers until one is reachable. A load balancer that reads /readyz may send no clients until then, so
        no client would cause an attempt."""
        while self._none_reachable:
            await asyncio.sleep(_TRY_AGAIN_S)
            await asyncio.gather(*map(self._try_broker, self.address_book.endpoints))

    async def _try_broker(self, endpoint: Endpoint) -> None:
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                _, writer = await asyncio.open_connection(*endpoint.upstream, ssl=self.settings.upstream_tls)
        except OSError:  # TimeoutError and ssl.SSLError are OSErrors
            return
        writer.transport.abort()
        self._note_reachable(endpoint)

    def _close_sockets(self) -> None:
        for bound in (*self._sockets.values(), *self._accepting.values()):
            bound.close()
        self._sockets.clear()
        self._accepting.clear()


def counted_address(host: str) -> str:
    """Return the address that a connection counts for. An IPv6 /64 counts as one, since a client may own all of it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4 or address.ipv4_mapped:
        return host
    return str(ipaddress.ip_network((int(address), 64), strict=False))


def _peer(connection: socket.socket) -> str:
    try:
        host, port, *_ = connection.getpeername()
    except OSError:
        return "already disconnected"
    return f"{host}:{port}"
