"""Who a connection says it is in SASL's first message; believed only once the broker accepted the login.

Owns the reading of PLAIN (RFC 4616) and SCRAM (RFC 5802). It must never keep or show anything but the name.
"""

from __future__ import annotations


def name_of(mechanism: str | None, auth_bytes: bytes) -> str | None:
    """None: not a first message of these mechanisms. `mechanism` as SaslHandshake named it: in messages of others, as
    OAUTHBEARER's, a client can write what reads as a name of these.
    """
    if mechanism == "PLAIN":
        parts = auth_bytes.split(b"\0")
        return parts[1].decode("utf-8", "replace") if len(parts) == 3 and parts[1] else None
    if mechanism is None or not mechanism.startswith("SCRAM-"):
        return None
    if auth_bytes[:2] in (b"n,", b"y,", b"p="):  # gs2-header, then n=NAME,r=NONCE
        for part in auth_bytes.decode("utf-8", "replace").split(","):
            if part.startswith("n=") and len(part) > 2:
                return part[2:].replace("=2C", ",").replace("=3D", "=")
    return None
