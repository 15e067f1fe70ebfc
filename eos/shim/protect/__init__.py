"""Protect: gives KIP-890 part 2 (a new epoch per transaction) to clients that do not speak it.

machine.py    what is known of each transactional.id and what may pass: pure, knows no bytes
translate.py  the frames: other identities in requests, EndTxn as v5, refusals: pure
crc.py        the checksum of a record batch whose header changed
journal.py    identity pairs in a file, for a restart between transactions: I/O
job.py        binds them into the pipeline
"""

from eos.shim.protect.job import ProtectJob
from eos.shim.protect.journal import Journal

__all__ = ["Journal", "ProtectJob"]
