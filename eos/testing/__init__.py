"""Provides tools for tests of your own Apps, used by eos' own tests too.

`run(app, records)` runs an App's functions without a broker. `sweep` runs an App through every fault at every step of a
transaction. `Session` replaces a TransactSession in tests of your own loop. The rest are modules: the checker,
histories, clusters that tests can break, and the pytest plugin.

Names are imported when first used, because every pytest run loads the plugin where eos is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eos.testing.loop import Session
    from eos.testing.offline import Ran, Sent, run
    from eos.testing.simulated_time import advance
    from eos.testing.sweeping import every_txn_step, sweep

__all__ = ["Ran", "Sent", "Session", "advance", "every_txn_step", "run", "sweep"]

_MODULES = dict.fromkeys(("Ran", "Sent", "run"), "offline") | dict.fromkeys(("every_txn_step", "sweep"), "sweeping")
_MODULES |= {"Session": "loop", "advance": "simulated_time"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'eos.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"eos.testing.{_MODULES[name]}"), name)
