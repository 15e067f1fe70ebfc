"""Exactly-once consume-transform-produce over real Kafka.

`App`, `Record`, `Out`: what a user writes; `eos run` runs it. `stop`, `retry`, `dlq`, `skip`: what becomes of a record
that fails. `TransactSession`: for those who own their loop.
`transaction`: a transactional producer without an input. `Fenced`, `Temporary` and the other errors: eos/errors.py.

Names are imported at their first use: a module that needs none of them (the pytest plugin, the shim, an App on a Spark
executor) does not load the Kafka clients.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eos.app import App
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
    from eos.plain import transaction
    from eos.policies import dlq, retry, skip, stop
    from eos.records import KEEP, Out, Record
    from eos.session import Transaction, TransactSession
    from eos.settings import Settings

_HOMES = {
    "KEEP": "eos.records",
    "App": "eos.app",
    "CommitOutcomeUnknown": "eos.errors",
    "ConfigurationError": "eos.errors",
    "EosError": "eos.errors",
    "Fenced": "eos.errors",
    "IllegalState": "eos.errors",
    "InputGone": "eos.errors",
    "NotAuthorised": "eos.errors",
    "Out": "eos.records",
    "PoisonRecord": "eos.errors",
    "Record": "eos.records",
    "Settings": "eos.settings",
    "Temporary": "eos.errors",
    "TransactSession": "eos.session",
    "Transaction": "eos.session",
    "Unavailable": "eos.errors",
    "dlq": "eos.policies",
    "retry": "eos.policies",
    "skip": "eos.policies",
    "stop": "eos.policies",
    "transaction": "eos.plain",
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
    "NotAuthorised",
    "Out",
    "PoisonRecord",
    "Record",
    "Settings",
    "Temporary",
    "TransactSession",
    "Transaction",
    "Unavailable",
    "dlq",
    "retry",
    "skip",
    "stop",
    "transaction",
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
