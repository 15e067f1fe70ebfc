"""State of functions: what is kept of it while transactions come and go, and where it is found again.

The changelog (a compacted topic per function) is the truth: what a function changed is written there in the transaction
that has its outputs and offsets. A worker's session does not know of state: eos/state/keeper.py takes part in its
transactions (eos/session/participants.py).
"""
