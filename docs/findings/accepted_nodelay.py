"""CPython's asyncio: TCP_NODELAY is not set on connections that a socket made by socket.create_server() accepts."""

import asyncio
import socket
import sys

seen: dict[str, bool] = {}


class Server(asyncio.Protocol):
    def __init__(self, how: str) -> None:
        self.how = how

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = transport.get_extra_info("socket")
        seen[self.how] = bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


async def accept_one(server: asyncio.Server, how: str) -> None:
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    while how not in seen:
        await asyncio.sleep(0.01)
    writer.close()
    server.close()


async def main() -> None:
    loop = asyncio.get_running_loop()
    by_name = await loop.create_server(lambda: Server("host and port"), "127.0.0.1", 0)
    await accept_one(by_name, "host and port")
    listening = socket.create_server(("127.0.0.1", 0))
    by_socket = await loop.create_server(lambda: Server("sock=create_server()"), sock=listening)
    await accept_one(by_socket, "sock=create_server()")


asyncio.run(asyncio.wait_for(main(), 20))
for how, nodelay in seen.items():
    print(f"TCP_NODELAY of accepted connections, {how}: {nodelay}")
differ = seen["host and port"] and not seen["sock=create_server()"]
print("SEEN: Nagle's algorithm stays on for a given socket" if differ else "not seen: all right")
sys.exit(0 if differ else 1)
