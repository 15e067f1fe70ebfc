"""Provides exactly-once consume-transform-produce over real Kafka.

`App`, `Record`, `Out`: the parts of a user's program; `eos run` runs it, or `run` from Python. `stop`, `retry`, `dlq`,
`skip`: the policies for a record that fails. `TransactSession`: transactions for a loop of your own. `transaction`: a
transactional producer without an input. `Fenced`, `Temporary` and the other errors: eos/errors.py.

Names are imported at their first use: a module that needs none of them (the pytest plugin, the shim, an App on a Spark
executor) does not load the Kafka clients.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eos.app.definition import App
    from eos.app.policies import dlq, retry, skip, stop
    from eos.app.state import ListState, MapState, State
    from eos.app.timers import Timer, Timers
    from eos.app.windows import Window, hopping, sessions, tumbling
    from eos.errors import (
        CommitOutcomeUnknown,
        ConfigurationError,
        EosError,
        Fenced,
        IllegalState,
        InputGone,
        NotAuthorised,
        PoisonRecord,
        Temporary,
        Unavailable,
    )
    from eos.kafka.client.settings import Settings
    from eos.plain import transaction
    from eos.records import KEEP, Out, Record
    from eos.session.session import TransactSession
    from eos.session.transaction import Transaction
    from eos.worker.running import run

_HOMES = {
    "KEEP": "eos.records",
    "App": "eos.app.definition",
    "CommitOutcomeUnknown": "eos.errors",
    "ConfigurationError": "eos.errors",
    "EosError": "eos.errors",
    "Fenced": "eos.errors",
    "IllegalState": "eos.errors",
    "InputGone": "eos.errors",
    "ListState": "eos.app.state",
    "MapState": "eos.app.state",
    "NotAuthorised": "eos.errors",
    "Out": "eos.records",
    "PoisonRecord": "eos.errors",
    "Record": "eos.records",
    "Settings": "eos.kafka.client.settings",
    "State": "eos.app.state",
    "Temporary": "eos.errors",
    "Timer": "eos.app.timers",
    "Timers": "eos.app.timers",
    "TransactSession": "eos.session.session",
    "Transaction": "eos.session.transaction",
    "Unavailable": "eos.errors",
    "Window": "eos.app.windows",
    "dlq": "eos.app.policies",
    "hopping": "eos.app.windows",
    "retry": "eos.app.policies",
    "run": "eos.worker.running",
    "sessions": "eos.app.windows",
    "skip": "eos.app.policies",
    "stop": "eos.app.policies",
    "transaction": "eos.plain",
    "tumbling": "eos.app.windows",
}

__all__ = [
    "KEEP",
    "App",
    "CommitOutcomeUnknown",
    "ConfigurationError",
    "EosError",
    "Fenced",
    "IllegalState",
    "InputGone",
    "ListState",
    "MapState",
    "NotAuthorised",
    "Out",
    "PoisonRecord",
    "Record",
    "Settings",
    "State",
    "Temporary",
    "Timer",
    "Timers",
    "TransactSession",
    "Transaction",
    "Unavailable",
    "Window",
    "dlq",
    "hopping",
    "retry",
    "run",
    "sessions",
    "skip",
    "stop",
    "transaction",
    "tumbling",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eos' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
