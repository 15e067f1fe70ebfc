"""Exactly-once consume-transform-produce over real Kafka.

`App`, `Record`, `Out`: what a user writes; `eos run` runs it. `TransactSession`: for those who own their loop.
`transaction`: a transactional producer without an input.
"""

from eos.app import KEEP, App, Out, Record
from eos.plain import transaction
from eos.session import Transaction, TransactSession
from eos.settings import Settings

__all__ = ["KEEP", "App", "Out", "Record", "Settings", "TransactSession", "Transaction", "transaction"]
