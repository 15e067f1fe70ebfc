"""For users' tests and for ours. `run(app, records)` runs an App's functions without a broker, `sweep` runs it through
every fault at every step of a transaction. `Session` stands in place of a TransactSession, for a loop of your own. The
rest are modules: the checker, histories, clusters that tests can break, and the pytest plugin.

Names are imported at their first use: every pytest loads the plugin where eos is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eos.testing.loop import Session
    from eos.testing.offline import Ran, Sent, run
    from eos.testing.sweeping import every_txn_step, sweep

__all__ = ["Ran", "Sent", "Session", "every_txn_step", "run", "sweep"]

_MODULES = dict.fromkeys(("Ran", "Sent", "run"), "offline") | dict.fromkeys(("every_txn_step", "sweep"), "sweeping")
_MODULES["Session"] = "loop"


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'eos.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"eos.testing.{_MODULES[name]}"), name)
