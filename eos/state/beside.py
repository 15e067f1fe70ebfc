"""What a task commits of its state beside the offset of its source: how far its changelog went by then, and what each
store is. So a changelog that is gone and a store of another kind are seen before the first record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from eos.app.routes import Route
from eos.errors import ConfigurationError
from eos.records import Committed, metadata_of, noted

KEY: Final = "state"


class Beside(NamedTuple):
    """`function`: another one's changelog is another topic. `kinds`: of stores, by their names, those that the function
    has no more among them."""

    function: str
    end: int
    kinds: Mapping[str, str]

    def noted(self) -> Mapping[str, object]:
        return {KEY: list(self)}


def beside_of(committed: Committed, route: Route) -> Beside:
    """What is to stand there from now on. Raises ConfigurationError where a store was of another kind."""
    end, before = 0, {}
    match noted(metadata_of(committed)).get(KEY):
        case [route.name, int(found), dict(kinds)]:
            end, before = found, kinds
    now = {store.name: store.shape for store in route.stores}
    for name, shape in now.items():
        if before.get(name, shape) != shape:
            raise ConfigurationError(
                f"the state {name} of {route.name} was a {before[name]} when it was kept, and is a {shape} now",
                remedy="give the new one another name",
            )
    return Beside(route.name, end, {**before, **now})
