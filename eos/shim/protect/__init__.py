"""Give KIP-890 part 2 (a new epoch per transaction) to clients that do not support it.

machine.py    keeps the state of each transactional.id and decides which requests are forwarded: pure, knows no bytes
translate.py  reads and changes frames: identities in requests, EndTxn as v5, error responses: pure
crc.py        updates the checksum of a record batch whose header changed
journal.py    stores identity pairs in a file, for a restart between transactions: I/O
job.py        connects them to the pipeline
"""

from eos.shim.protect.job import ProtectJob
from eos.shim.protect.journal import Journal

__all__ = ["Journal", "ProtectJob"]
