"""A request's bytes on an upstream connection of their own, as a network delivers what nobody waits for any more.

Owns that connection. A cluster that wants a login closes it, and then the rule failed.
"""

from __future__ import annotations

import asyncio
import ssl

from eos.shim.addresses.book import Address

# A bound for a healthy broker; past it the rule failed.
ANSWER_TIMEOUT_S = 30.0


async def exchange(upstream: Address, context: ssl.SSLContext | None, frame: bytes) -> bytes:
    """The answer's frame. Raises OSError or IncompleteReadError when there is none."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*upstream, ssl=context)
        try:
            writer.write(frame)
            await writer.drain()
            size = await reader.readexactly(4)
            return size + await reader.readexactly(int.from_bytes(size, "big"))
        finally:
            writer.close()
