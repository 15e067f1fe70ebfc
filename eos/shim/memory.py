"""What all connections of a shim together hold, and who goes when it is too much.

Owns that sum: beginnings of requests, pieces that are collected, requests that wait for their answers, and what a side
did not take yet. A connection says how much it is after whatever happened on it; so nothing has to be given back. It
must never end a connection that holds no more than its share: an idle consumer waits for an answer for minutes, and is
not whom memory is short of.
"""

from __future__ import annotations

from collections.abc import Callable

# Beside one frame of the largest size.
BESIDE_A_FRAME_BYTES = 32 * 1024 * 1024
# Looking at all connections has to be worth it: so much is free afterwards, or an eighth if that is less.
_FREED_BYTES = BESIDE_A_FRAME_BYTES // 2


class Memory:
    """`limit` in bytes, for so many connections. Above it those end that hold more than their share of it, who does for
    longest first; a client that sends what it has is done in no time, and counts anew with each request.
    """

    def __init__(self, limit: int, connections: int) -> None:
        self.limit, self.share = limit, limit // connections
        self._enough = limit - min(limit // 8, _FREED_BYTES)
        self.total = 0
        self._accounts: dict[Account, None] = {}
        self._large: dict[Account, None] = {}  # above their share, the longest first

    @property
    def is_tight(self) -> bool:
        return self.total > self.limit // 4

    def open(self, measure: Callable[[], int], evict: Callable[[], None]) -> Account:
        account = Account(self, measure, evict)
        self._accounts[account] = None
        return account

    def count(self, account: Account) -> None:
        self._set(account, account.measure())
        if self.total > self.limit:
            self._make_room()

    def renew(self, account: Account) -> None:
        self._large.pop(account, None)  # its next count puts it behind all others

    def close(self, account: Account) -> None:
        self._set(account, 0)
        self._accounts.pop(account, None)

    def _set(self, account: Account, held: int) -> None:
        self.total += held - account.held
        account.held = held
        if held > self.share:
            self._large[account] = None
        else:
            self._large.pop(account, None)

    def _make_room(self) -> None:
        for account in self._accounts:  # what has gone out since its last count was not told
            self._set(account, account.measure())
        while self.total > self._enough and self._large:
            longest = next(iter(self._large))
            longest.close()
            longest.evict()


class Account:
    """What one connection holds. `measure` says how many bytes; `evict` ends the connection, which may be under way."""

    __slots__ = ("_is_open", "_memory", "evict", "held", "measure")

    def __init__(self, memory: Memory, measure: Callable[[], int], evict: Callable[[], None]) -> None:
        self._memory, self.measure, self.evict = memory, measure, evict
        self._is_open = True
        self.held = 0

    def count(self) -> None:
        if self._is_open:
            self._memory.count(self)

    def renew(self) -> None:
        """What it holds from now on is of a new request."""
        self._memory.renew(self)

    def close(self) -> None:
        self._is_open = False
        self._memory.close(self)
