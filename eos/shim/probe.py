"""Query brokers for the shim itself: the other brokers of the cluster at the start, and their API versions.

The module owns these exchanges. They need no login: brokers answer ApiVersions before one. If Metadata needs a login,
the shim learns the brokers from later responses to clients. It must never send a request on a client's connection.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest

from eos.errors import Unavailable
from eos.shim import events
from eos.shim.addresses import layouts
from eos.shim.addresses.book import Address
from eos.shim.errors import Malformed
from eos.shim.wire import api

_METADATA_VERSION = 4  # the newest version that every broker since 1.0 has and that does not create topics
_LARGEST_ANSWER = 16 * 1024 * 1024
_CLIENT_ID = "eos-shim"
_TLS_ALERT = b"\x15\x03"  # the first bytes of a TLS listener's response to plain text


async def discover_brokers(
    addresses: Sequence[Address], context: ssl.SSLContext | None, timeout_s: float
) -> set[tuple[int, str, int]]:
    """Return (node id, host, port) of every broker, or an empty set if the cluster requires a login first.

    Raises Unavailable with a reason per address if none of them answers as Kafka does.
    """
    results = await asyncio.gather(*(_discover_from(address, context, timeout_s) for address in addresses))
    if all(isinstance(result, Exception) for result in results):
        reasons = [f"{host}:{port} ({result})" for (host, port), result in zip(addresses, results, strict=True)]
        raise Unavailable(f"no upstream broker answered: {', '.join(reasons)}")
    found: set[tuple[int, str, int]] = set()
    for (host, port), result in zip(addresses, results, strict=True):
        if isinstance(result, Exception):
            events.warning("broker unreachable", broker=f"{host}:{port}", reason=result)
        else:
            found |= result
    return found


async def fetch_newest_versions(
    addresses: Iterable[Address], context: ssl.SSLContext | None, timeout_s: float, again: bool = False
) -> dict[Address, dict[int, int]]:
    """Return the newest version of every API for each broker that answers.

    Brokers that do not answer are logged as warnings, or with `again` at debug level.
    """

    async def ask(address: Address) -> tuple[Address, dict[int, int] | None]:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(*address, ssl=context)
                try:
                    return address, await _fetch_versions(reader, writer)
                finally:
                    writer.close()
        except (OSError, asyncio.IncompleteReadError, Malformed, ValueError, IndexError) as error:
            log = events.debug if again else events.warning
            log("broker unreachable", broker=f"{address[0]}:{address[1]}", reason=error)
            return address, None

    answers = await asyncio.gather(*map(ask, addresses))
    return {address: offered for address, offered in answers if offered is not None}


async def _discover_from(
    address: Address, context: ssl.SSLContext | None, timeout_s: float
) -> set[tuple[int, str, int]] | Exception:
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(*address, ssl=context)
            try:
                await _fetch_versions(reader, writer)
                return await _metadata(reader, writer)
            finally:
                writer.close()
    except TimeoutError:
        return TimeoutError(f"no answer within {timeout_s:g} s")
    except asyncio.IncompleteReadError:
        return ConnectionError("the broker closed the connection")
    except ssl.SSLError as error:
        return ConnectionError(f"TLS failed: {getattr(error, 'verify_message', '') or error.reason or error}")
    except OSError as error:
        return OSError(os.strerror(error.errno) if error.errno else str(error))
    except (Malformed, ValueError, IndexError) as error:
        return Malformed(f"the response is not Kafka's: {error}")


async def _fetch_versions(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[int, int]:
    answer = await _exchange(reader, writer, ApiVersionsRequest(version=0), 1)
    try:
        response = ApiVersionsResponse.decode(answer, version=0, header=True, framed=True)
    except Exception as error:
        raise Malformed(f"ApiVersions cannot be read: {error!r}") from error
    if response.error_code:
        raise Malformed(f"ApiVersions has error {response.error_code}")
    return {int(each.api_key): int(each.max_version) for each in response.api_keys}


async def _metadata(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> set[tuple[int, str, int]]:
    request = MetadataRequest(version=_METADATA_VERSION, topics=[], allow_auto_topic_creation=False)
    try:
        answer = await _exchange(reader, writer, request, 2)
    except (asyncio.IncompleteReadError, ConnectionError):
        events.info("brokers require login", ports="each broker gets a port when a client asks for it")
        return set()
    found = layouts.find(api.METADATA, _METADATA_VERSION, answer)
    return {(spot.node_id, spot.host, spot.port) for spot in found.spots}


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Any, correlation_id: int
) -> bytes:
    request.with_header(correlation_id=correlation_id, client_id=_CLIENT_ID)
    writer.write(request.encode(header=True, framed=True))
    await writer.drain()
    prefix = await reader.readexactly(4)
    size = int.from_bytes(prefix, "big", signed=True)
    if prefix[:2] == _TLS_ALERT:
        raise ConnectionError("the broker requires TLS")
    if not 4 <= size <= _LARGEST_ANSWER:
        raise Malformed(f"a response of {size} bytes")
    return prefix + await reader.readexactly(size)
