"""What ends one connection of the shim; what ends the shim is Unavailable or ConfigurationError, as everywhere."""

from __future__ import annotations

from eos.errors import EosError


class ProtocolError(EosError):
    """A connection that cannot be understood any more: it is closed, the shim goes on."""


class Malformed(ProtocolError):
    """Bytes that are not what their header says."""


class Leak(ProtocolError):
    """An upstream address would have reached a client."""
