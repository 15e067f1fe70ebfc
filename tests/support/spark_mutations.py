"""Break the sink for tests that show which checks fail: each function breaks one rule in this process."""

from __future__ import annotations

from typing import Any

from spark_connector.attempt import Attempt


def marker_outside_the_transaction() -> None:
    """Write the marker in its own transaction, after the commit of the rows."""
    mark, progress = Attempt._mark, Attempt._progress
    waiting: list[Any] = []

    def later(self: Attempt, new: Any) -> None:
        waiting.append(new)

    def then(self: Attempt, rows: int, results: Any) -> Any:
        self._transaction.init()
        self._transaction.add([("__eos_sinks", self._connection.markers.partition)])
        mark(self, waiting.pop())
        self._transaction.end(commit=True)
        return progress(self, rows, results)

    Attempt._mark = later  # type: ignore[method-assign]
    Attempt._progress = then  # type: ignore[method-assign]
