"""Define the errors that end one connection. Unavailable and ConfigurationError end the whole shim."""

from __future__ import annotations

from eos.errors import EosError


class ProtocolError(EosError):
    """Report bytes that break the protocol. The connection is closed and the shim continues."""


class Malformed(ProtocolError):
    """Report bytes that do not match their header."""


class Leak(ProtocolError):
    """Report that a response to a client contains the address of an upstream broker."""
