"""Limit the memory that all connections of a shim hold together, and close the largest ones when it is exceeded.

The sum contains incomplete requests, collected pieces, requests that wait for their responses, and unsent bytes. A
connection is measured again after each event on it, so nothing needs to be released explicitly. A connection that holds
no more than its share must never be closed: an idle consumer waits minutes for a response and is not the cause.
"""

from __future__ import annotations

from collections.abc import Callable

# The memory that connections share beyond the size of the largest frame.
SHARED_BYTES = 32 * 1024 * 1024
# If the limit is exceeded, memory is freed until this many bytes below the limit are free (or an eighth of the limit if
# that is less). So it takes a while until all connections must be measured again.
_FREED_BYTES = SHARED_BYTES // 2


class MemoryBudget:
    """Enforce `limit` bytes for a number of connections.

    Above the limit, connections with more than their share are closed, beginning with the one that has been above it
    longest. The time starts again with each request, so a client that sends without pauses is not affected.
    """

    def __init__(self, limit: int, connections: int) -> None:
        self.limit, self.share = limit, limit // connections
        self._size_after_eviction = limit - min(limit // 8, _FREED_BYTES)
        self.total = 0
        self._accounts: dict[MemoryAccount, None] = {}
        self._large: dict[
            MemoryAccount, None
        ] = {}  # accounts above their share, in the order in which they exceeded it

    @property
    def is_tight(self) -> bool:
        return self.total > self.limit // 4

    def open(self, measure: Callable[[], int], evict: Callable[[], None]) -> MemoryAccount:
        account = MemoryAccount(self, measure, evict)
        self._accounts[account] = None
        return account

    def count(self, account: MemoryAccount) -> None:
        self._set(account, account.measure())
        if self.total > self.limit:
            self._evict_largest()

    def start_request(self, account: MemoryAccount) -> None:
        self._large.pop(account, None)  # the next count adds the account again, as the last one

    def close(self, account: MemoryAccount) -> None:
        self._set(account, 0)
        self._accounts.pop(account, None)

    def _set(self, account: MemoryAccount, held: int) -> None:
        self.total += held - account.held
        account.held = held
        if held > self.share:
            self._large[account] = None
        else:
            self._large.pop(account, None)

    def _evict_largest(self) -> None:
        for account in self._accounts:  # bytes may have been sent since the last count
            self._set(account, account.measure())
        while self.total > self._size_after_eviction and self._large:
            longest = next(iter(self._large))
            longest.close()
            longest.evict()


class MemoryAccount:
    """Track the memory of one connection. `measure` returns its bytes; `evict` closes it, even in mid-transfer."""

    __slots__ = ("_is_open", "_memory", "evict", "held", "measure")

    def __init__(self, memory: MemoryBudget, measure: Callable[[], int], evict: Callable[[], None]) -> None:
        self._memory, self.measure, self.evict = memory, measure, evict
        self._is_open = True
        self.held = 0

    def count(self) -> None:
        if self._is_open:
            self._memory.count(self)

    def start_request(self) -> None:
        """Record that a new request has begun."""
        self._memory.start_request(self)

    def close(self) -> None:
        self._is_open = False
        self._memory.close(self)
