"""Who a connection says it is in SASL's first message; believed only once the broker accepted the login.

Owns the reading of PLAIN (RFC 4616) and SCRAM (RFC 5802). It must never keep or show anything but the name.
"""

from __future__ import annotations


def name_of(auth_bytes: bytes) -> str | None:
    """None: not a first message of these mechanisms."""
    if auth_bytes[:2] in (b"n,", b"y,", b"p="):  # SCRAM: gs2-header, then n=NAME,r=NONCE
        for part in auth_bytes.decode("utf-8", "replace").split(","):
            if part.startswith("n=") and len(part) > 2:
                return part[2:].replace("=2C", ",").replace("=3D", "=")
        return None
    parts = auth_bytes.split(b"\0")
    if len(parts) == 3 and parts[1]:
        return parts[1].decode("utf-8", "replace")
    return None
