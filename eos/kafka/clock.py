"""A clock that goes on while the host sleeps, for what is compared with somebody else's clock.

`time.monotonic` stands still while a host is suspended (CLOCK_MONOTONIC on Linux, mach_absolute_time on macOS), and a
transaction's timeout at the broker does not. A virtual machine that is paused has no clock at all that goes on: what is
decided by this one must stay right when it shows too little.
"""

from __future__ import annotations

import time

_BY_NAME = ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC")  # Linux; macOS, whose CLOCK_MONOTONIC counts sleep
_CLOCK: int | None = next((getattr(time, name) for name in _BY_NAME if hasattr(time, name)), None)


def elapsing() -> float:
    """Seconds since some moment, those in which the host was suspended too."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
