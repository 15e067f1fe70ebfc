"""Decide how many records are handled at once, and which belong together."""

from __future__ import annotations

from collections.abc import Iterator

from eos.app.definition import App
from eos.app.routes import Route
from eos.records import Record

Partition = tuple[str, int]

_TARGET_S = 0.005
_LARGEST = 2_000


class SliceSizes:
    """Decides the sizes of the slices in which a worker handles records.

    A batch function gets at most `batch_most` records, and an `async def` runs on at most `concurrent_most` at once.
    Slices of other functions adapt to about 5 ms, so that a slow function still ends its transaction in time."""

    def __init__(self, batch_most: int, concurrent_most: int) -> None:
        self.batch_most, self._concurrent_most = batch_most, concurrent_most
        self._slice_size = 1

    def next_size(self, route: Route | None) -> int:
        """Return the size of the next slice. `route` is None if the records belong to several routes."""
        return self.size_for_route(route, self._slice_size)

    def size_for_route(self, route: Route | None, single: int) -> int:
        """Return how many records of a route run at once. `single`: the number for a function that takes one record at
        a time."""
        if route is not None and route.batch:
            return self.batch_most
        return self._concurrent_most if route is not None and route.concurrent else single

    def adapt(self, took_s: float, size: int) -> None:
        """Adapt the size of the next slices after a slice of `size` records took `took_s`."""
        if took_s < _TARGET_S and size >= self._slice_size:
            self._slice_size = min(_LARGEST, self._slice_size * 2)
        elif took_s > 2 * _TARGET_S:
            self._slice_size = max(1, self._slice_size // 2)


def by_route(app: App, records: list[Record]) -> Iterator[tuple[Route, list[Record]]]:
    """Yield consecutive records of the same route together, in order."""
    run: list[Record] = []
    current: Route | None = None
    for record in records:
        route = app.routes[record.topic]
        if route is not current and run:
            assert current is not None
            yield current, run
            run = []
        current = route
        run.append(record)
    if current is not None:
        yield current, run


def spans_of(records: list[Record]) -> dict[Partition, tuple[int, int]]:
    """Return the first and last offset of each partition."""
    spans: dict[Partition, tuple[int, int]] = {}
    for record in records:
        first, _ = spans.get((record.topic, record.partition), (record.offset, 0))
        spans[record.topic, record.partition] = (first, record.offset)
    return spans
