"""What can go wrong in the shim, each with the exit code its command ends with.

ShimError
├── Unreachable      69   no upstream broker answers, or a local port is taken
├── Misconfigured    78   settings that contradict each other or cannot be read
└── ProtocolError         one connection cannot be understood any more: it is closed, the shim goes on
    ├── Malformed         bytes that are not what their header says
    └── Leak              an upstream address would have reached a client
"""

from __future__ import annotations


class ShimError(Exception):
    exit_code = 70


class Unreachable(ShimError):
    exit_code = 69


class Misconfigured(ShimError):
    exit_code = 78


class ProtocolError(ShimError):
    """Ends one connection, never the shim."""


class Malformed(ProtocolError):
    pass


class Leak(ProtocolError):
    pass
