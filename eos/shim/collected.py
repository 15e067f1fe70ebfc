"""What all connections of a shim together keep of frames that are not whole yet, and who goes when it is too much.

Owns that sum. Whoever announces a large frame and sends it slowly would else take memory for nothing, a hundred times
over. It must never end a connection for what it does not keep: bytes that pass are not counted.
"""

from __future__ import annotations

from collections.abc import Callable


class Collected:
    """`limit` in bytes. Above it the connections that have kept something for longest end, one after the other."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._accounts: dict[Account, None] = {}  # with something in them, the oldest first

    def add(self, account: Account, count: int) -> None:
        self.total += count
        account.kept += count
        self._accounts[account] = None
        while self.total > self.limit:
            # A client that sends what it has is done in no time: the oldest is who stopped in mid-frame.
            oldest = next(iter(self._accounts))
            self.clear(oldest)
            oldest.evict()

    def clear(self, account: Account) -> None:
        self.total -= account.kept
        account.kept = 0
        self._accounts.pop(account, None)


class Account:
    """What one direction of one connection keeps. `evict` ends that connection; it may raise if it is under way."""

    __slots__ = ("_collected", "evict", "kept")

    def __init__(self, collected: Collected, evict: Callable[[], None]) -> None:
        self._collected, self.evict = collected, evict
        self.kept = 0

    def add(self, count: int) -> None:
        self._collected.add(self, count)

    def clear(self) -> None:
        if self.kept:
            self._collected.clear(self)
